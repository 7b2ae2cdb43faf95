"""A user's own recipe: from a TOML table to a value of `Recipe`, strictly."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from .formats import FORMATS
from .recipes import (
    GRANULARITIES,
    PRODUCTS,
    RECIPES,
    Operand,
    Product,
    Recipe,
    operands,
    products,
    wire_operand,
)

FLAGS = ("history", "power_of_two")


def parse(value: str | dict[str, Any], path: str = "fp8.recipe") -> Recipe:
    """A recipe from what a user wrote: the name of one, or a table of products.

        [fp8.recipe]
        output      = { x = "e4m3 row power_of_two", w = "e4m3 row power_of_two", fast_accumulation = true }
        grad_input  = { g = "e5m2 tensor", w = "e4m3 tensor" }
        grad_weight = "high"

    An operand is a format (e4m3, e5m2), then optionally a granularity (tensor, row, block), ``history`` and
    ``power_of_two``. ``base`` names a recipe that supplies the products not given; without it all three must
    be. Raises ValueError with every problem found, one a line, each beginning with its path.
    """
    if isinstance(value, str):
        if value in RECIPES:
            return RECIPES[value]
        raise ValueError(
            f"{path}: {value!r} is not a recipe{_near(value, RECIPES)}; there are {_list(RECIPES)}, "
            f"or a table with {_list(PRODUCTS)}."
        )
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{path}: {value!r} is of type {kind}; a recipe is a name or a table.")
    problems = _unknown(value, ("name", "base", *PRODUCTS), path)
    name, base = value.get("name", "custom"), value.get("base")
    if not isinstance(name, str):
        problems.append(f"{path}.name: {name!r} is not a string.")
    if base is not None and base not in RECIPES:
        problems.append(f"{path}.base: {base!r} is not a recipe{_near(base, RECIPES)}; there are {_list(RECIPES)}.")
    parsed: dict[str, Product | None] = {}
    for product in PRODUCTS:
        if product in value:
            parsed[product] = _parse_product(value[product], product, f"{path}.{product}", problems)
        elif base is None:
            problems.append(
                f'{path}.{product}: missing; give its operands, "high" for high precision, or a {path}.base '
                "to take it from."
            )
        elif base in RECIPES:
            parsed[product] = getattr(RECIPES[base], product)
    if not problems:
        recipe = Recipe(name=name, **parsed)
        problems = [f"{path}{problem}" for problem in _cannot_combine(recipe)]
        if not problems:
            return recipe
    raise ValueError("\n".join(problems))


def _parse_product(value: Any, product: str, path: str, problems: list[str]) -> Product | None:
    names = PRODUCTS[product]
    if value == "high":
        return None
    if not isinstance(value, dict):
        problems.append(f'{path}: {value!r} is neither "high" nor a table with {_list(names)}.')
        return None
    problems += _unknown(value, (*names, "fast_accumulation"), path)
    problems += [
        f'{path}.{name}: missing; both operands of a product are fp8, or neither is: then {path} = "high".'
        for name in names
        if name not in value
    ]
    fast = value.get("fast_accumulation", False)
    if not isinstance(fast, bool):
        problems.append(f"{path}.fast_accumulation: {fast!r} is not true or false.")
    found = [_parse_operand(value[name], f"{path}.{name}", problems) for name in names if name in value]
    if len(found) < len(names):
        return None
    left, right = found
    return Product(left, right, fast_accumulation=bool(fast))


def _parse_operand(value: Any, path: str, problems: list[str]) -> Operand:
    if not isinstance(value, str) or not value.split():
        problems.append(f'{path}: {value!r} is not an operand; write, for example, "e4m3 row".')
        return Operand()
    first, *words = value.split()
    if first not in FORMATS:
        problems.append(
            f"{path}: {value!r} must begin with a format ({_list(FORMATS)}); a whole product in high "
            'precision is written "high".'
        )
    known = (*GRANULARITIES, *FLAGS)
    problems += [
        f"{path}: unknown word {word!r}{_near(word, known)}; there are {_list(known)}."
        for word in words
        if word not in known
    ]
    granularities = [word for word in words if word in GRANULARITIES]
    if len(granularities) > 1 or len(set(words)) < len(words):
        problems.append(f"{path}: {value!r} says one thing twice.")
    return Operand(
        format=first,
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
        pair = (product.left, product.right)
        granularities = [operand.granularity for operand in pair]
        formats = [operand.format for operand in pair]
        if formats == ["e5m2", "e5m2"]:
            problems.append(f".{name}: both operands are e5m2; the hardware multiplies e4m3 by e4m3 or e5m2.")
        if granularities.count("block") == 1:
            problems.append(
                f".{name}: {' and '.join(granularities)} scales do not combine; block goes with block only."
            )
        if "block" in granularities and ("e5m2" in formats or product.fast_accumulation):
            problems.append(f".{name}: block scales need e4m3 operands and no fast_accumulation.")
        problems += [
            f".{name}.{which}: a history is of one scale a tensor; {operand.granularity} scales have none."
            for which, operand in zip(PRODUCTS[name], pair, strict=True)
            if operand.scale == "history" and operand.granularity != "tensor"
        ]
    for tensor in ("x", "w", "g"):
        uses = [(name, operand) for name, _, operand in operands(recipe, tensor)]
        by_history = [operand.scale == "history" for _, operand in uses]
        if any(by_history) and (len({operand for _, operand in uses}) > 1):
            problems.append(
                f": {tensor} is {' and '.join(f'{o} in {n}' for n, o in uses)}; a tensor that has a history "
                "is cast once, so it must be the same in every product."
            )
        if tensor == "w" and any(by_history) and wire_operand(recipe) is None and len(uses) < 2:
            problems.append(
                ": w has a history, so it is cast once, and both output and grad_input must be fp8 to use it."
            )
    return problems


def _unknown(table: dict[str, Any], known: Iterable[str], path: str) -> list[str]:
    return [
        f"{path}.{key}: unknown key{_near(key, known)}; there are {_list(known)}." for key in table if key not in known
    ]


def _near(word: Any, known: Iterable[str]) -> str:
    close = get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _list(words: Iterable[str]) -> str:
    return ", ".join(words)
