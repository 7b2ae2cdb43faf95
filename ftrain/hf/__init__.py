"""Hugging Face checkpoints in and out: config.json, .safetensors files, and what lies beside them.

    cfg, params = ftrain.hf.load("path/of/a/checkpoint")
    ftrain.hf.save("path/of/another", params, cfg, like="path/of/a/checkpoint")

What a family's checkpoints look like is data: the file of its name in this folder has the names of its tensors and
the keys of its config.json. Nothing is unpickled, downloaded or run.
"""

from ftrain.hf.config import Format, HfError, read_config, tokenizer_file
from ftrain.hf.loading import Checkpoint, load, open_checkpoint, read_params
from ftrain.hf.saving import save

__all__ = [
    "Checkpoint",
    "Format",
    "HfError",
    "load",
    "open_checkpoint",
    "read_config",
    "read_params",
    "save",
    "tokenizer_file",
]
