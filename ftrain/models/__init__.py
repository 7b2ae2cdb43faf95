"""Model families: one file each, with Config, PRESETS, abstract and make_model."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def family(name: str) -> ModuleType:
    """The module `ftrain.models.<name>`. Raises ValueError for a name that has none."""
    if not name.isidentifier() or find_spec(f"ftrain.models.{name}") is None:
        raise ValueError(f"model.family={name!r}: there is no file ftrain/models/{name}.py")
    return import_module(f"ftrain.models.{name}")
