"""Data sets of the Hugging Face hub (or of a folder) through the datasets library, streaming.

A source is "hf:NAME", "hf:NAME:CONFIG" or "hf:NAME:CONFIG:SPLIT"; the split is "train" if not given.
"""

import inspect
from typing import Any

from .errors import DataError

HF = "hf:"


def load_hf(source: str) -> Any:
    """The rows of a source, as a streaming dataset."""
    name, config, split = _parts(source)
    return _call("load_dataset", source, name, config or None, split=split, streaming=True)


def hf_version(source: str) -> str:
    """What changes when the rows do: the library's hash of the data set's files and revision, and the split."""
    name, config, split = _parts(source)
    return f"{_call('load_dataset_builder', source, name, config or None).hash}:{split}"


def _parts(source: str) -> tuple[str, str, str]:
    name, config, split = (source.removeprefix(HF).split(":") + ["", ""])[:3]
    return name, config, split or "train"


def _call(function: str, source: str, *args: Any, **kwargs: Any) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"data.source: {source} needs datasets: pip install 'ftrain[data]'") from None
    call = getattr(datasets, function)
    # Before version 4 the library runs a data set's own Python if the environment or, at a prompt, a user agrees.
    if "trust_remote_code" in inspect.signature(call).parameters:
        kwargs["trust_remote_code"] = False
    try:
        return call(*args, **kwargs)
    except Exception as error:  # the library raises a dozen kinds, its own and others'
        raise DataError(f"data.source: {source}: {type(error).__name__}: {error}") from error
