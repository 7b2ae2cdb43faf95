"""fp8 numerics: formats and scales, the recipe algebra, products, and what a weight's scale is known from.

formats.py     the cast and its scale              recipes.py    which product does what, as values
casts.py       from a recipe to codes              parse.py      a user's own recipe
matmul.py      the product of two fp8 matrices     check.py      what cannot be combined
linear.py      the differentiable layer, and its   sequence.py   what tensor parallelism moves
               tensor-parallel forms               delayed.py    scales from earlier steps' amaxes
product.py     its products, a primitive           measure.py    what a cast loses
state.py       what is known of a weight, and      use.py        which weights of a model run in fp8
               where a linear layer meets it       post.py       what runs after the optimizer
"""

from .check import check
from .formats import E4M3, E5M2, FORMATS, MAX, Scaled, amax, cast, dequantise, scale_from_amax
from .linear import History, column, row, scaled_weight
from .matmul import scaled_mm
from .parse import parse
from .post import Fp8State, make_post
from .recipes import NONE, RECIPES, Operand, Product, Recipe, describe, uses_history, wire_operand
from .state import Fp8Weight, WeightState
from .use import Fp8, use

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "Fp8",
    "Fp8State",
    "Fp8Weight",
    "History",
    "MAX",
    "NONE",
    "Operand",
    "Product",
    "RECIPES",
    "Recipe",
    "Scaled",
    "WeightState",
    "amax",
    "cast",
    "check",
    "column",
    "dequantise",
    "describe",
    "make_post",
    "parse",
    "row",
    "scale_from_amax",
    "scaled_mm",
    "scaled_weight",
    "use",
    "uses_history",
    "wire_operand",
]
