"""A run's model as a Hugging Face checkpoint: its parameters, and the tokenizer that its text went through."""

import json
from pathlib import Path
from typing import Any

import torch

from ftrain import hf
from ftrain.data import Tokenizer
from ftrain.data.sources import SYNTHETIC
from ftrain.hf.saving import GENERATION_FILE, TOKENIZER_FILES, files_of
from ftrain.run import Run
from ftrain.step import TrainState


def export(
    run: Run, state: TrainState, path: Path | str, *, dtype: torch.dtype | None = None, replace: bool = False
) -> None:
    """Write the parameters of `state` to the folder `path`, as transformers reads them. Collective; rank 0 writes.

    dtype: of the tensors on disk; None: as the run stores them. replace: what is at `path` may go. Raises as hf.save.
    """
    source = run.recipe.model.hf
    config: dict[str, Any] = {"max_position_embeddings": run.recipe.data.seq_len}
    if run.cfg.rope_scaling:
        del config["max_position_embeddings"]  # what the scaling is made for: hf.config knows
    if source is not None:
        config = hf.read_config(source).raw
    tokenizer = None if run.recipe.data.source == SYNTHETIC else run.tokenizer
    files: dict[str, Path | str] = {}
    if tokenizer is None or _is_of(source, run.recipe.data.tokenizer):
        files = files_of(source, (*TOKENIZER_FILES, GENERATION_FILE)) if source is not None else {}
    else:
        ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        config |= ids
        files = tokenizer_files(tokenizer) | {GENERATION_FILE: json.dumps(ids) + "\n"}
    hf.save(path, state.params, run.cfg, dtype=dtype, config=config, files=files, replace=replace)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, Path | str]:
    """The files of a tokenizer by name, each a Path or its text; none for bytes, which are no tokenizer.json.

    A tokenizer.json that nothing beside it describes gets a tokenizer_config.json.
    """
    if not tokenizer.json:
        return {}
    place = Path(tokenizer.name).expanduser()
    files: dict[str, Path | str] = dict(files_of(place if place.is_dir() else place.parent, TOKENIZER_FILES))
    if "tokenizer_config.json" not in files:
        import tokenizers

        spelled = tokenizers.Tokenizer.from_str(tokenizer.json).id_to_token
        words = {"bos_token": spelled(tokenizer.bos), "eos_token": spelled(tokenizer.eos)}
        files["tokenizer_config.json"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | words) + "\n"
    return files | {"tokenizer.json": tokenizer.json}


def _is_of(source: str | None, tokenizer: str) -> bool:
    """Whether a recipe's tokenizer is that of the checkpoint it started from."""
    own = None if source is None else hf.tokenizer_file(source)
    place = Path(tokenizer).expanduser()
    return own is not None and own.resolve() in (place.resolve(), (place / "tokenizer.json").resolve())
