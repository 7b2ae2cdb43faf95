"""Recipes: TOML in, frozen dataclasses out, strictly.

A recipe is one value that says everything about a run. `tables.py` declares each key once, with type, range
and meaning; `strict.py` reads TOML against such declarations; `checks.py` has what concerns two keys at once;
`load.py` goes from a file to a checked Recipe and back. A `RecipeError` has one sentence for each mistake.
"""

from ftrain.recipe.checks import RecipeError, accumulation, check, model_config, model_family, resolve_parallel
from ftrain.recipe.load import dump, load_recipe, shipped
from ftrain.recipe.tables import (
    TABLES,
    Checkpoint,
    Data,
    Fp8,
    Metrics,
    Model,
    Optimizer,
    Parallel,
    Precision,
    Recipe,
    Schedule,
    Train,
    Validation,
)

__all__ = [
    "TABLES",
    "Checkpoint",
    "Data",
    "Fp8",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "Recipe",
    "RecipeError",
    "Schedule",
    "Train",
    "Validation",
    "accumulation",
    "check",
    "dump",
    "load_recipe",
    "model_config",
    "model_family",
    "resolve_parallel",
    "shipped",
]
