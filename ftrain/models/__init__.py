"""Model families: one file each, with Config, PRESETS, abstract, product_weights and make_model."""

from importlib import import_module
from importlib.resources import files
from types import ModuleType


def families() -> list[str]:
    """The names of all families: the files of this folder. Imports none of them, and so not torch."""
    names = (file.name for file in files("ftrain.models").iterdir())
    return sorted(name.removesuffix(".py") for name in names if name.endswith(".py") and name[0] != "_")


def family(name: str) -> ModuleType:
    """The module `ftrain.models.<name>`. Raises ValueError for a name that has none."""
    if name not in families():
        raise ValueError(f"model.family={name!r}: there is no file ftrain/models/{name}.py")
    return import_module(f"ftrain.models.{name}")
