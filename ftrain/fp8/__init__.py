"""fp8 numerics: formats and scales, the recipe algebra, products, and what a weight's scale is known from.

    formats.py     the cast and its scale                  recipes.py   which product does what, as values
    matmul.py      the product of two fp8 matrices         linear.py    the differentiable layer, and its parallel forms
    state.py       what is known of a weight, and where a linear layer meets it
"""

from .formats import E4M3, E5M2, FORMATS, MAX, Scaled, amax, cast, dequantise, scale_from_amax
from .linear import History, column, row, scaled_weight
from .matmul import scaled_mm
from .recipes import NONE, RECIPES, Operand, Product, Recipe, check, describe, parse, uses_history, wire_operand
from .state import Fp8Weight, WeightState

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
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
    "parse",
    "row",
    "scale_from_amax",
    "scaled_mm",
    "scaled_weight",
    "uses_history",
    "wire_operand",
]
