"""Model families: one file each, and nothing outside it that knows of it. A family is a module of this folder, or of
one that has joined it by `ftrain.models.__path__.append(folder)`, with

Config              frozen dataclass with at least the dimensions of recipe.tables.Model, vocab_size to tie_embeddings.
                    Its fields are the keys of [model]; one that Model lacks is a key of this family alone (with
                    `recipe.strict.key(default, "what it means", low=1)` its range is checked)
PRESETS             dict of Config by name; no other family has the same name
abstract            cfg -> the tree of Param; what lies under "layers" is a list, a dict for each layer
product_weights     cfg -> globs over the parameters that are weights of products, which fp8 may run
flops_per_token     cfg, seq_len -> floating-point operations that a token needs, forward and backward
make_model          cfg, Execution -> loss and logits, as llama.Model has them

Its checkpoints at Hugging Face are described by the file of the same name in ftrain/hf: see hf.config.Format.
"""

import pkgutil
from importlib import import_module
from types import ModuleType


def families() -> list[str]:
    """The names of all families: the modules of this folder. Imports none of them, and so not torch."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


def family(name: str) -> ModuleType:
    """The module `ftrain.models.<name>`. Raises ValueError for a name that has none."""
    if name not in families():
        raise ValueError(f"model.family={name!r}: there is no file ftrain/models/{name}.py")
    return import_module(f"ftrain.models.{name}")


def presets() -> dict[str, str]:
    """The name of the family of every preset. Imports all families."""
    return {preset: name for name in families() for preset in family(name).PRESETS}
