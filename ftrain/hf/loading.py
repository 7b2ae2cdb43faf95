"""A Hugging Face checkpoint read into any layout: names and shapes are checked first, then each rank reads its slices.

Memory on the host stays near a rank's part of one tensor, beyond the parameters themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftrain import tree
from ftrain.checkpoint import agreed, each
from ftrain.checkpoint.agree import joined
from ftrain.execution import Execution
from ftrain.hf.config import Format, HfError, formats, read_config
from ftrain.hf.files import Stored, find_tensors, read_slices
from ftrain.models import family
from ftrain.param import Param
from ftrain.sharding import Mesh, Plan, from_local, local_slices

SHOWN = 4  # names of one kind that an error lists


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of which headers alone are read, and found whole. raw: its config.json."""

    folder: Path
    family: str
    cfg: Any
    raw: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of its tensors."""
        return {stored.dtype for stored in self.tensors.values()}


class Loaded(NamedTuple):
    """A model's Config and its parameters."""

    cfg: Any
    params: Any


def load(path: Path | str, execution: Execution | None = None, *, dtype: torch.dtype | None = None) -> Loaded:
    """The Config and parameters of the checkpoint in the folder `path`. Collective.

    execution: whose layout they are stored in (default: one rank, plain tensors). dtype: of the parameters; None: each
    tensor's own. Raises HfError, on every rank, for a model that ftrain does not know, and for what is missing, left
    over, of another shape, or cut short.
    """
    ex = execution or Execution()
    checkpoint = open_checkpoint(path)
    declared = family(checkpoint.family).abstract(checkpoint.cfg)
    return Loaded(checkpoint.cfg, read_params(checkpoint, declared, ex.plans(declared), ex.mesh, dtype))


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint in the folder `path`, checked against its config.json. Collective. Raises HfError."""

    def read() -> Checkpoint:
        config = read_config(path)
        folder = Path(path).expanduser()
        declared = family(config.family).abstract(config.cfg)
        tensors = _checked(folder, find_tensors(folder), formats()[config.family], declared, config.cfg)
        return Checkpoint(folder, config.family, config.cfg, config.raw, tensors)

    return together(f"read {path}", read)


def read_params(checkpoint: Checkpoint, abstract: Any, plans: Any, mesh: Mesh, dtype: torch.dtype | None = None) -> Any:
    """The parameters in their stored layout: plain tensors on one rank, DTensors on a mesh. Collective.

    abstract, plans: the declared parameters and their layout. dtype: as of `load`. Raises HfError, where the output
    matrix of a tied model is there and is not its embedding too.
    """
    form, cfg = formats()[checkpoint.family], checkpoint.cfg

    def one(path: str, param: Param, plan: Plan) -> torch.Tensor:
        name = form.tensor(path)
        slices = local_slices(param.shape, plan.stored, mesh.shape, mesh.rank)
        local = read_slices(name, checkpoint.tensors[name], slices)
        twin = form.tensor("output")
        if path == "embedding" and cfg.tie_embeddings and twin in checkpoint.tensors:
            if not torch.equal(local, read_slices(twin, checkpoint.tensors[twin], slices)):
                raise HfError(
                    f"{checkpoint.folder}: tie_word_embeddings is true, but {twin} differs from {name}; "
                    f"set it to false to train both, or remove {twin}"
                )
        return from_local(local.to(mesh.device, dtype), param.shape, plan.stored, mesh)

    return together(f"read {checkpoint.folder}", lambda: tree.map_named(one, abstract, plans))


def _checked(folder: Path, tensors: dict[str, Stored], form: Format, declared: Any, cfg: Any) -> dict[str, Stored]:
    """The tensors that the model takes. Raises HfError for any that it lacks, or has no place for."""
    wanted = {form.tensor(path): param.shape for path, param in tree.named_leaves(declared)}
    known = {*wanted, form.tensor("output")} if cfg.tie_embeddings else set(wanted)
    problems = []
    if missing := [name for name in wanted if name not in tensors]:
        problems.append(f"{folder} lacks {_some(missing)}")
    if left := [name for name in tensors if name not in known and not form.ignores(name)]:
        problems.append(f"{folder} has {_some(left)}, for which this model has no place")
    shapes = wanted | {form.tensor("output"): wanted[form.tensor("embedding")]}
    for name in sorted(known & tensors.keys()):
        if tensors[name].shape != shapes[name]:
            problems.append(
                f"{tensors[name].file}: {name} has shape {tensors[name].shape}, and config.json says {shapes[name]}"
            )
    if problems:
        raise HfError("\n".join(problems[:8]))
    return {name: stored for name, stored in tensors.items() if name in known}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def together(doing: str, fn: Callable[[], Any]) -> Any:
    """What `fn` returns here. Collective. `doing` completes the sentence "cannot ...".

    Raises HfError on every rank, in the same words, where one raised it; CheckpointError where one had another error.
    """
    kept: list[Any] = []

    def run() -> str | None:
        try:
            kept.append(fn())
        except HfError as error:
            return str(error)
        return None

    sentences = each(doing, run)
    if sentence := agreed(doing, lambda: joined(sentences)):
        raise HfError(sentence)
    return kept[0]
