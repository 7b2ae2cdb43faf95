"""The recipe algebra: what each of a linear layer's three products does, as small frozen values.

A linear layer multiplies three times, and each product contracts one dimension (T tokens, K inputs, N outputs):

    output      (T, N) = x (T, K) . w (N, K)     over K
    grad_input  (T, K) = g (T, N) . w (N, K)     over N
    grad_weight (N, K) = g (T, N) . x (T, K)     over T

A recipe gives every product either ``None`` (high precision) or a `Product` of two fp8 operands; one operand
in fp8 and the other not cannot be written down. A new recipe is a new value of `Recipe`, here or in a user's TOML.
"""

from __future__ import annotations

from dataclasses import dataclass

PRODUCTS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
CONTRACTS = {"output": "K", "grad_input": "N", "grad_weight": "T"}
DIMS = {"x": "TK", "w": "NK", "g": "TN"}
# Which of T, K, N is split over the tensor-parallel group where a tensor is cast, in each form of the layer.
SPLIT = {
    "local": {"x": "", "w": "", "g": ""},
    "column": {"x": "T", "w": "N", "g": "N"},
    "row": {"x": "K", "w": "K", "g": "T"},
}
GRANULARITIES = ("tensor", "row", "block")


@dataclass(frozen=True)
class Operand:
    """How one operand of one product becomes fp8.

    granularity: "tensor", one scale; "row", one scale for each vector that the product contracts; "block",
    one for 128 elements along the contraction (x and g) or for a tile of 128 by 128 (w). scale: "now", from
    this tensor's own amax; "history", from the amaxes of earlier steps. power_of_two: the scale is rounded
    down to a power of two.
    """

    format: str = "e4m3"
    granularity: str = "tensor"
    scale: str = "now"
    power_of_two: bool = False

    def __str__(self) -> str:
        words = [self.format, self.granularity]
        words += ["history"] if self.scale == "history" else []
        words += ["power_of_two"] if self.power_of_two else []
        return " ".join(words)


@dataclass(frozen=True)
class Product:
    """An fp8 product. left, right: its operands, in the order of `PRODUCTS`.

    fast_accumulation: partial sums stay in the tensor cores' own, narrower, registers (CUDA only).
    """

    left: Operand
    right: Operand
    fast_accumulation: bool = False


@dataclass(frozen=True)
class Recipe:
    """What the three products of a linear layer do; None is a product in high precision."""

    name: str
    output: Product | None = None
    grad_input: Product | None = None
    grad_weight: Product | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether any product is in fp8."""
        return any(product is not None for _, product in products(self))


def products(recipe: Recipe) -> list[tuple[str, Product | None]]:
    """The three products with their names, in the order in which they run."""
    return [(name, getattr(recipe, name)) for name in PRODUCTS]


def operands(recipe: Recipe, tensor: str | None = None) -> list[tuple[str, str, Operand]]:
    """(product, tensor, operand) for all fp8 operands, or for those of one tensor: "x", "w" or "g"."""
    found = []
    for name, product in products(recipe):
        if product is not None:
            pairs = zip(PRODUCTS[name], (product.left, product.right), strict=True)
            found += [(name, which, operand) for which, operand in pairs if tensor in (None, which)]
    return found


def left(recipe: Recipe, product: str) -> Operand | None:
    """The left operand of a product, None where it is in high precision."""
    found = getattr(recipe, product)
    return None if found is None else found.left


def right(recipe: Recipe, product: str) -> Operand | None:
    """The right operand of a product, None where it is in high precision."""
    found = getattr(recipe, product)
    return None if found is None else found.right


def wire_operand(recipe: Recipe) -> Operand | None:
    """The one fp8 form in which a weight can travel and be used, or None where the recipe has no such form.

    It exists if both products that use the weight take the same codes: one format, one scale for the tensor.
    """
    uses = {operand for _, _, operand in operands(recipe, "w")}
    both = recipe.output is not None and recipe.grad_input is not None
    return next(iter(uses)) if both and len(uses) == 1 and next(iter(uses)).granularity == "tensor" else None


def uses_history(recipe: Recipe) -> bool:
    """Whether any scale comes from the amaxes of earlier steps, so that the step carries fp8 state."""
    return any(operand.scale == "history" for _, _, operand in operands(recipe))


_TENSOR = Operand()
_TENSOR_G = Operand("e5m2")
_ROW = Operand("e4m3", "row", power_of_two=True)
_PAST = Operand(scale="history")
_PAST_G = Operand("e5m2", scale="history")
_BLOCK = Operand("e4m3", "block")

NONE = Recipe("none")
TENSORWISE = Recipe(
    "tensorwise",
    output=Product(_TENSOR, _TENSOR, fast_accumulation=True),
    grad_input=Product(_TENSOR_G, _TENSOR),
    grad_weight=Product(_TENSOR_G, _TENSOR),
)
ROWWISE = Recipe(
    "rowwise",
    output=Product(_ROW, _ROW, fast_accumulation=True),
    grad_input=Product(_ROW, _ROW),
    grad_weight=Product(_ROW, _ROW),
)
ROWWISE_WITH_GW_HP = Recipe(
    "rowwise_with_gw_hp",
    output=Product(_ROW, _ROW, fast_accumulation=True),
    grad_input=Product(_ROW, Operand(power_of_two=True)),
    grad_weight=None,
)
DELAYED = Recipe(
    "delayed",
    output=Product(_PAST, _PAST, fast_accumulation=True),
    grad_input=Product(_PAST_G, _PAST),
    grad_weight=Product(_PAST_G, _PAST),
)
BLOCKWISE = Recipe(
    "blockwise",
    output=Product(_BLOCK, _BLOCK),
    grad_input=Product(_BLOCK, _BLOCK),
    grad_weight=Product(_BLOCK, _BLOCK),
)
RECIPES = {r.name: r for r in (NONE, TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP, DELAYED, BLOCKWISE)}


def describe(recipe: Recipe) -> list[str]:
    """One line for each product: what its operands are cast to, or that it stays in high precision."""
    lines = []
    for name, product in products(recipe):
        left, right = PRODUCTS[name]
        line = f"{name} = {left} . {right}: "
        if product is None:
            line += "high precision"
        else:
            line += f"{left} {product.left}, {right} {product.right}"
            line += ", fast accumulation" if product.fast_accumulation else ""
        lines.append(line)
    return lines
