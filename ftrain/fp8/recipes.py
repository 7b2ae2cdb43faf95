"""The recipe algebra: what each of a linear layer's three products does, as small frozen values.

A linear layer multiplies three times, and each product contracts one dimension (T tokens, K inputs, N outputs):

    output      (T, N) = x (T, K) . w (N, K)     over K
    grad_input  (T, K) = g (T, N) . w (N, K)     over N
    grad_weight (N, K) = g (T, N) . x (T, K)     over T

A recipe gives every product either ``None`` (high precision) or a `Product` of two fp8 operands; one operand in
fp8 and the other not cannot be written down. A new recipe is a new value of `Recipe`, here or in a user's TOML.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

PRODUCTS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
CONTRACTS = {"output": "K", "grad_input": "N", "grad_weight": "T"}
DIMS = {"x": "TK", "w": "NK", "g": "TN"}
# Which of T, K, N is split over the tensor-parallel group where a tensor is cast, in each form of the layer.
SPLIT = {
    "local": {"x": "", "w": "", "g": ""},
    "column": {"x": "T", "w": "N", "g": "N"},
    "row": {"x": "K", "w": "K", "g": "T"},
}
FORMATS = ("e4m3", "e5m2")
GRANULARITIES = ("tensor", "row", "block")
SCALES = ("now", "history")


@dataclass(frozen=True)
class Operand:
    """How one operand of one product becomes fp8.

    granularity: "tensor", one scale; "row", one scale for each vector that the product contracts; "block", one
    for 128 elements along the contraction (x and g) or for a tile of 128 by 128 (w).
    scale: "now", from this tensor's own amax; "history", from the amaxes of earlier steps.
    power_of_two: the scale is rounded down to a power of two.
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


def parse(value: str | dict[str, Any], path: str = "fp8.recipe") -> Recipe:
    """A recipe from what a user wrote: the name of one, or a table of products.

        [fp8.recipe]
        output      = { x = "e4m3 row power_of_two", w = "e4m3 row power_of_two", fast_accumulation = true }
        grad_input  = { g = "e5m2 tensor", w = "e4m3 tensor" }
        grad_weight = "high"

    An operand is a format (e4m3, e5m2), then optionally a granularity (tensor, row, block), ``history`` and
    ``power_of_two``. ``base`` names a recipe that supplies the products not given; without it they must all be.
    Raises ValueError with every problem, one a line, each beginning with its path.
    """
    if isinstance(value, str):
        if value in RECIPES:
            return RECIPES[value]
        raise ValueError(f"{path}: {value!r} is not a recipe{_near(value, RECIPES)}; there are {_list(RECIPES)}, "
                         f"or a table with {_list(PRODUCTS)}.")
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {value!r} is a {type(value).__name__}; a recipe is a name or a table.")
    problems: list[str] = []
    for key in value:
        if key not in ("name", "base", *PRODUCTS):
            known = ("name", "base", *PRODUCTS)
            problems.append(f"{path}.{key}: unknown key{_near(key, known)}; there are {_list(known)}.")
    name, base = value.get("name", "custom"), value.get("base")
    if not isinstance(name, str):
        problems.append(f"{path}.name: {name!r} is not a string.")
    if base is not None and base not in RECIPES:
        problems.append(f"{path}.base: {base!r} is not a recipe{_near(base, RECIPES)}; there are {_list(RECIPES)}.")
    parsed: dict[str, Product | None] = {}
    for product in PRODUCTS:
        if product in value:
            parsed[product] = _parse_product(value[product], product, f"{path}.{product}", problems)
        elif base in RECIPES:
            parsed[product] = getattr(RECIPES[base], product)
        elif base is None:
            problems.append(f'{path}.{product}: missing; give its operands, "high" for high precision, or a '
                            f"{path}.base to take it from.")
    if not problems:
        recipe = Recipe(name=name, **parsed)
        problems = [f"{path}{problem}" for problem in _cannot_combine(recipe)]
        if not problems:
            return recipe
    raise ValueError("\n".join(problems))


def _parse_product(value: Any, product: str, path: str, problems: list[str]) -> Product | None:
    left, right = PRODUCTS[product]
    if value == "high":
        return None
    if not isinstance(value, dict):
        problems.append(f'{path}: {value!r} is neither "high" nor a table with {left}, {right}.')
        return None
    known = (left, right, "fast_accumulation")
    problems += [f"{path}.{key}: unknown key{_near(key, known)}; there are {_list(known)}."
                 for key in value if key not in known]
    problems += [f'{path}.{which}: missing; both operands of a product are fp8 or neither is (then {path} = "high").'
                 for which in (left, right) if which not in value]
    fast = value.get("fast_accumulation", False)
    if not isinstance(fast, bool):
        problems.append(f"{path}.fast_accumulation: {fast!r} is not true or false.")
    pair = [_parse_operand(value[which], f"{path}.{which}", problems) for which in (left, right) if which in value]
    return Product(*pair, fast_accumulation=bool(fast)) if len(pair) == 2 else None


def _parse_operand(value: Any, path: str, problems: list[str]) -> Operand:
    if not isinstance(value, str) or not value.split():
        problems.append(f'{path}: {value!r} is not an operand; write, for example, "e4m3 row".')
        return Operand()
    words = value.split()
    if words[0] not in FORMATS:
        problems.append(f"{path}: {value!r} must begin with a format ({_list(FORMATS)}); "
                        'a whole product in high precision is written "high".')
    flags = ("history", "power_of_two")
    for word in words[1:]:
        if word not in (*GRANULARITIES, *flags):
            known = (*GRANULARITIES, *flags)
            problems.append(f"{path}: unknown word {word!r}{_near(word, known)}; there are {_list(known)}.")
    granularities = [word for word in words[1:] if word in GRANULARITIES]
    if len(granularities) > 1 or len(set(words)) < len(words):
        problems.append(f"{path}: {value!r} says the same thing twice.")
    return Operand(
        format=words[0],
        granularity=granularities[0] if granularities else "tensor",
        scale="history" if "history" in words else "now",
        power_of_two="power_of_two" in words,
    )


def _cannot_combine(recipe: Recipe) -> list[str]:
    """What no kernel or no definition covers, as sentences that begin with the product's path."""
    problems = []
    for name, product in products(recipe):
        if product is None:
            continue
        left, right = product.left, product.right
        if left.format == right.format == "e5m2":
            problems.append(f".{name}: both operands are e5m2; the hardware multiplies e4m3 by e4m3 or by e5m2.")
        if (left.granularity == "block") != (right.granularity == "block"):
            problems.append(f".{name}: {left.granularity} and {right.granularity} scales do not combine; "
                            "block goes with block only.")
        if "block" in (left.granularity, right.granularity) and (
            "e5m2" in (left.format, right.format) or product.fast_accumulation
        ):
            problems.append(f".{name}: block scales need e4m3 operands and no fast_accumulation.")
        for which, operand in zip(PRODUCTS[name], (left, right), strict=True):
            if operand.scale == "history" and operand.granularity != "tensor":
                problems.append(f".{name}.{which}: a history is kept for one scale a tensor, "
                                f"not for {operand.granularity} scales.")
    for tensor in ("x", "w", "g"):
        uses = [(name, operand) for name, _, operand in operands(recipe, tensor)]
        if len({(operand.scale, operand.format) for _, operand in uses if operand.scale == "history"}) > 1 or (
            len({operand.scale for _, operand in uses}) > 1
        ):
            problems.append(f": {tensor} is scaled {' and '.join(f'{o} in {n}' for n, o in uses)}; "
                            "a tensor with a history has one format and takes its scale from it in every product.")
    if uses_history(recipe) and any(o.scale == "history" for _, _, o in operands(recipe, "w")):
        if wire_operand(recipe) is None:
            problems.append(": w has a history, so it is cast once and both output and grad_input must use "
                            "the same codes: give w the same operand in both.")
    return problems


def check(
    recipe: Recipe,
    all_gather: bool,
    precompute_scales: bool,
    device: str,
    capability: tuple[int, int] | None = None,
    tensor: int = 1,
    shards: int = 1,
) -> list[str]:
    """What in this combination of settings cannot work, as sentences; an empty list if nothing.

    device: "cpu" or "cuda". capability: the CUDA compute capability, None where no GPU is at hand (then only what
    does not depend on it is checked). tensor, shards: degrees of tensor parallelism and FSDP.
    """
    if not recipe.is_fp8:
        return []
    problems = []
    named = f"fp8.recipe = {recipe.name!r}"
    weight = [(name, operand) for name, _, operand in operands(recipe, "w")]
    uses = " and ".join(f"{operand} in {name}" for name, operand in weight) or "high precision"
    if all_gather and wire_operand(recipe) is None and shards > 1:
        problems.append(
            f"fp8.all_gather = true with {named}: a weight travels as one set of fp8 codes with one scale, and this "
            f"recipe uses it as {uses}. Set fp8.all_gather = false, or use a recipe whose w is "
            "tensor-scaled in both output and grad_input (tensorwise, delayed)."
        )
    if precompute_scales and not any(o.scale == "now" and o.granularity == "tensor" for _, o in weight):
        problems.append(
            f"fp8.precompute_scales = true with {named}: there is no scale to precompute, w is {uses}. "
            "Set fp8.precompute_scales = false, or use a recipe whose w has one dynamic scale a tensor (tensorwise)."
        )
    if device == "cuda" and capability is not None and capability < (8, 9):
        problems.append(
            f"{named} on a GPU of compute capability {capability[0]}.{capability[1]}: fp8 products need 8.9 or "
            'newer (Ada, Hopper, Blackwell). Set fp8.recipe = "none".'
        )
    if device not in ("cpu", "cuda"):
        problems.append(f'{named} on {device!r}: fp8 products exist on cpu and cuda. Set fp8.recipe = "none".')
    if any(operand.granularity == "block" for _, _, operand in operands(recipe)):
        problems += _check_block(named, device, capability, tensor)
    return problems


def _check_block(named: str, device: str, capability: tuple[int, int] | None, tensor: int) -> list[str]:
    problems = []
    if device != "cuda":
        problems.append(f"{named} on {device!r}: torch has block-scaled products for CUDA only. Use rowwise here.")
    elif capability is not None and capability[0] != 9:
        problems.append(f"{named} on a GPU of compute capability {capability[0]}.{capability[1]}: torch has "
                        "products with 1x128 and 128x128 scales for 9.0 (Hopper) only. Use rowwise here.")
    if tensor > 1:
        problems.append(f"{named} with parallel.tensor = {tensor}: a block of 128 may not lie on two ranks. "
                        "Use rowwise or tensorwise, or parallel.tensor = 1.")
    return problems


def _near(word: Any, known: Any) -> str:
    close = get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _list(words: Any) -> str:
    return ", ".join(words)
