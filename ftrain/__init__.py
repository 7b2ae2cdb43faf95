"""ftrain: train Llama-family language models as pure functions, with fp8 where it pays.

Names are loaded when they are first used, so that `import ftrain` costs nothing and imports no optional package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import collectives, fp8, hf, optim, sharding, tree
    from .errors import FtrainError
    from .models import llama
    from .recipe import Recipe, RecipeError, load_recipe
    from .run import Run
    from .sampling import generate
    from .step import TrainState, init_state, make_eval_step, make_train_step

# name -> (module, attribute); an attribute of None is the module itself.
_WHERE = {
    "collectives": ("ftrain.collectives", None),
    "fp8": ("ftrain.fp8", None),
    "hf": ("ftrain.hf", None),
    "optim": ("ftrain.optim", None),
    "sharding": ("ftrain.sharding", None),
    "tree": ("ftrain.tree", None),
    "llama": ("ftrain.models.llama", None),
    "FtrainError": ("ftrain.errors", "FtrainError"),
    "Recipe": ("ftrain.recipe", "Recipe"),
    "RecipeError": ("ftrain.recipe", "RecipeError"),
    "load_recipe": ("ftrain.recipe", "load_recipe"),
    "Run": ("ftrain.run", "Run"),
    "generate": ("ftrain.sampling", "generate"),
    "TrainState": ("ftrain.step", "TrainState"),
    "init_state": ("ftrain.step", "init_state"),
    "make_eval_step": ("ftrain.step", "make_eval_step"),
    "make_train_step": ("ftrain.step", "make_train_step"),
}

__all__ = [
    "FtrainError",
    "Recipe",
    "RecipeError",
    "Run",
    "TrainState",
    "collectives",
    "fp8",
    "generate",
    "hf",
    "init_state",
    "llama",
    "load_recipe",
    "make_eval_step",
    "make_train_step",
    "optim",
    "sharding",
    "tree",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ftrain' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    value = import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
