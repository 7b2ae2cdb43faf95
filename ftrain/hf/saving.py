"""A model written as a Hugging Face checkpoint, from any layout, a tensor at a time, whole or not at all."""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftrain import tree
from ftrain.checkpoint.agree import rank_and_size
from ftrain.checkpoint.storage import sync
from ftrain.hf.config import CONFIG, HfError, family_of, formats, read_config, write_config
from ftrain.hf.files import INDEX, ToWrite, cut, index, write_file
from ftrain.hf.loading import together
from ftrain.models import family

SHARD_BYTES = 5_000_000_000  # as transformers cuts them
# What lies beside the weights and describes the tokenizer or how to sample: carried along as it is.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION_FILE = "generation_config.json"


def save(
    path: Path | str,
    params: Any,
    cfg: Any,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | str] | None = None,
    replace: bool = False,
) -> None:
    """Write the folder `path` as transformers reads it. Collective; rank 0 writes.

    params: tensors or DTensors of any layout; cfg: their Config. dtype: of the tensors on disk; None: their own.
    shard_bytes: the most that one file holds, unless one tensor is larger. like: another checkpoint, whose tokenizer
    files, generation_config.json and further keys of config.json are carried along. config: further keys of
    config.json. files: further files by name, each the Path of one to copy or its text. replace: what is at `path` may
    go, once the new one is whole.

    Raises HfError on every rank: `path` is there already, parameters are not those of cfg, or the disk refuses.
    """
    path = Path(path).expanduser()
    leaves, parts = _cut(params, cfg, dtype, shard_bytes)
    writes, temporary = rank_and_size()[0] == 0, path.with_name(path.name + ".tmp")
    doing = f"write {path}"

    def begin() -> None:
        if writes:
            if path.exists() and not replace and (not path.is_dir() or any(path.iterdir())):
                raise HfError(f"{path} is there already: give the name of a new folder")
            texts = {CONFIG: _config(cfg, parts, like, config)} | ({INDEX: index(parts)} if len(parts) > 1 else {})
            carried = {} if like is None else files_of(like, (*TOKENIZER_FILES, GENERATION_FILE))
            _start(temporary, texts, carried | dict(files or {}))

    try:
        together(doing, begin)
        for file, part in parts.items():
            values = (_whole(leaves[tensor.name], tensor.dtype) for tensor in part)  # gathered as they are taken
            together(doing, partial(_write, temporary / file if writes else None, part, values))
        together(doing, lambda: _put_in_place(temporary, path) if writes else None)
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


def _cut(
    params: Any, cfg: Any, dtype: torch.dtype | None, shard_bytes: int
) -> tuple[dict[str, torch.Tensor], dict[str, list[ToWrite]]]:
    """The parameters by their tensors' names, and what each file is to hold. Raises HfError for another Config's."""
    name = family_of(cfg)
    form, declared = formats()[name], family(name).abstract(cfg)
    tree.check_same_structure(declared, params)
    leaves = {form.tensor(place): leaf for place, leaf in tree.named_leaves(params)}
    shapes = {form.tensor(place): param.shape for place, param in tree.named_leaves(declared)}
    for tensor, leaf in leaves.items():
        if tuple(leaf.shape) != shapes[tensor]:
            raise HfError(f"{tensor} has shape {tuple(leaf.shape)}, and its Config says {shapes[tensor]}")
    return leaves, cut(
        [ToWrite(tensor, shapes[tensor], dtype or leaf.dtype) for tensor, leaf in leaves.items()], shard_bytes
    )


def _start(temporary: Path, texts: Mapping[str, Any], carried: Mapping[str, Path | str]) -> None:
    """A fresh folder with all but the tensors. texts: JSON values; carried: Paths of files to copy, or texts."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file, content in carried.items():
        (temporary / file).write_bytes(content.read_bytes() if isinstance(content, Path) else content.encode())
    for file, value in texts.items():
        (temporary / file).write_text(json.dumps(value, indent=2) + "\n")


def _write(file: Path | None, part: list[ToWrite], values: Iterator[torch.Tensor]) -> None:
    """Write one file of tensors; without a name, take part in gathering them."""
    try:
        if file is not None:
            write_file(file, part, values)
    finally:
        for _ in values:  # the other ranks gather all of them, whatever happened here
            pass


def _put_in_place(temporary: Path, path: Path) -> None:
    """Make the new folder durable, and give it its name; the old one goes last."""
    sync(*temporary.iterdir(), temporary)
    aside = path.with_name(path.name + ".replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    temporary.rename(path)
    sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def files_of(folder: Path | str, names: tuple[str, ...]) -> dict[str, Path | str]:
    """Those of these files that lie in `folder`, by name."""
    paths = {name: Path(folder).expanduser() / name for name in names}
    return {name: path for name, path in paths.items() if path.is_file()}


def _whole(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a tensor that lies in any layout. Collective."""
    leaf = leaf.detach().to(dtype)  # first, so that less travels
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def _config(
    cfg: Any, parts: dict[str, list[ToWrite]], like: Path | str | None, more: Mapping[str, Any] | None
) -> dict[str, Any]:
    dtypes = {str(tensor.dtype).removeprefix("torch.") for part in parts.values() for tensor in part}
    carried: dict[str, Any] = {}
    if like is not None:
        other = read_config(like)
        if other.family != family_of(cfg):
            raise HfError(f"{like} is a model of the family {other.family}, not {family_of(cfg)}")
        carried = other.raw
    return write_config(cfg, dtypes.pop() if len(dtypes) == 1 else "float32", carried | dict(more or {}))
