"""Strict reading of TOML tables into frozen dataclasses: a field declares check and meaning once.

A field is `name: type = key(default, "what it means", low=1)`. From it come the type check (no coercion: "10"
is no integer, true is no 1; an integer is accepted where a number is asked), the range, the choices, the
sentence for a wrong value and the reference page. A user's mistakes are collected here, never raised.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

_WRONG = object()
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table"}


def key(
    default: Any,
    doc: str,
    *,
    choices: Iterable[str] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its check. `choices` are for strings, the range for numbers and list items."""
    check = {"doc": doc, "choices": tuple(choices), "low": low, "above": above, "high": high, "below": below}
    return dataclasses.field(default=default, metadata=check)


def keys(cls: type) -> dict[str, dataclasses.Field]:
    """The fields of a table that are keys of a recipe: those made by `key`."""
    return {field.name: field for field in dataclasses.fields(cls) if "doc" in field.metadata}


def read_table(
    cls: type, table: str, raw: dict[str, Any], tables: dict[str, type], more: dict[str, tuple[Any, Any]] | None = None
) -> tuple[dict, list[str], set[str]]:
    """Check `raw`, one TOML table, against the dataclass `cls`. `tables` are all of them, for "belongs in".

    more: further keys that the table may have, with the type and the check (`key`'s metadata) of each.
    Returns the good values by field name, a sentence for each problem, and the full keys of the bad values.
    """
    hints = typing.get_type_hints(cls)
    declared = {name: (hints[name], field.metadata) for name, field in keys(cls).items()} | (more or {})
    values, problems, bad = {}, [], set()
    for name, value in raw.items():
        if name not in declared:
            problems.append(f"{table}.{name} = {show(value)}: {_unknown_key(table, name, tables, list(declared))}.")
            continue
        good = _fit(value, *declared[name])
        if good is _WRONG:
            problems.append(f"{table}.{name} = {show(value)}: {_mismatch(value, *declared[name])}.")
            bad.add(f"{table}.{name}")
        else:
            values[name] = good
    return values, problems, bad


def unknown_table(name: str, value: Any, tables: dict[str, type]) -> str:
    """The sentence for a top-level name that is no table: a misspelt table, or a key outside its table."""
    owners = [f"[{table}]" for table, cls in tables.items() if name in field_names(cls)]
    if not isinstance(value, dict):
        hint = f"it belongs in {' or '.join(owners)}" if owners else f"the tables are {_listed(tables)}"
        return f"{name} = {show(value)}: a key outside any table; {hint}."
    close = nearest(name, tables, "[{}]")
    return f"[{name}]: there is no such table" + (f" ({close})." if close else f"; the tables are {_listed(tables)}.")


def nearest(name: str, candidates: typing.Iterable[str], form: str = '"{}"') -> str:
    """'did you mean X?' for the candidate closest to `name`, or "" when none is close."""
    close = difflib.get_close_matches(name.lower(), list(candidates), n=1, cutoff=0.6)
    return f"did you mean {form.format(close[0])}?" if close else ""


def expected(hint: Any, check: typing.Mapping[str, Any]) -> str:
    """What a field accepts, in words: "an integer, at least 1"."""
    words, numeric = [], False
    for kind in _alternatives(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is str and check["choices"]:
            words.append("one of " + ", ".join(json.dumps(c) for c in check["choices"]))
        elif origin is tuple and args[-1] is not Ellipsis:
            words.append(f"a list of {len(args)} numbers")
        elif origin is tuple:
            words.append("a list of " + {str: "strings", int: "integers", float: "numbers"}[args[0]])
        else:
            words.append(_NAMES[kind])
        numeric = numeric or kind in (int, float) or (origin is tuple and args[0] in (int, float))
    bounds = [
        f"{word} {check[bound]:g}"
        for bound, word in (("low", "at least"), ("above", "above"), ("high", "at most"), ("below", "below"))
        if numeric and check[bound] is not None
    ]
    return " or ".join(words) + (", " + " and ".join(bounds) if bounds else "")


def show(value: Any) -> str:
    """A value as a recipe would write it, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = str(value)
    text = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(text, text)
    return text if len(text) <= 80 else text[:77] + "..."


def _fit(value: Any, hint: Any, check: typing.Mapping[str, Any]) -> Any:
    """`value` as the field's type, or _WRONG. Only an integer changes type, where a number is asked."""
    for kind in _alternatives(hint):
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple:
            if not isinstance(value, list):
                continue
            wanted = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
            items = [_fit(item, each, check) for item, each in zip(value, wanted, strict=False)]
            if len(value) == len(wanted) and not any(item is _WRONG for item in items):
                return tuple(items)
        elif kind is bool or isinstance(value, bool):
            if kind is bool and isinstance(value, bool):
                return value
        elif kind is float and isinstance(value, (int, float)):
            if _in_range(value, check):
                return float(value)
        elif kind is int and isinstance(value, int):
            if _in_range(value, check):
                return value
        elif kind is str and isinstance(value, str):
            if not check["choices"] or value in check["choices"]:
                return value
        elif kind is dict and isinstance(value, dict):
            return value
    return _WRONG


def _in_range(value: float, check: typing.Mapping[str, Any]) -> bool:
    if isinstance(value, int):
        finite = -(2**63) <= value < 2**63  # TOML's integers; a larger one would overflow far from here
    else:
        finite = math.isfinite(value)
    return (
        finite
        and (check["low"] is None or value >= check["low"])
        and (check["above"] is None or value > check["above"])
        and (check["high"] is None or value <= check["high"])
        and (check["below"] is None or value < check["below"])
    )


def _mismatch(value: Any, hint: Any, check: typing.Mapping[str, Any]) -> str:
    sentence = f"expected {expected(hint, check)}"
    kinds = {typing.get_origin(kind) or kind for kind in _alternatives(hint)}
    got = tuple if isinstance(value, list) else type(value)
    if isinstance(value, float) and not math.isfinite(value):
        return sentence + ", and finite"
    if isinstance(value, str) and check["choices"]:
        close = nearest(value, check["choices"])
        return sentence + (f" ({close})" if close else "")
    if got in kinds or (got is int and float in kinds):
        return sentence
    return sentence + f", got {'a list' if got is tuple else _NAMES.get(got, 'a ' + got.__name__)}"


def _unknown_key(table: str, name: str, tables: dict[str, type], declared: list[str]) -> str:
    owners = [f"[{other}]" for other, cls in tables.items() if name in field_names(cls)]
    if owners:
        return f"there is no key {name} in [{table}]; it belongs in {' or '.join(owners)}"
    here = nearest(name, declared, table + ".{}")
    if here:
        return f"there is no key {name} in [{table}] ({here})"
    everywhere = {f"{other}.{field}": field for other, cls in tables.items() for field in field_names(cls)}
    close = difflib.get_close_matches(name.lower(), list(everywhere.values()), n=1)
    paths = [path for path, field in everywhere.items() if close and field == close[0]]
    if paths:
        return f"there is no key {name} in [{table}] (did you mean {paths[0]}?)"
    return f"there is no key {name} in [{table}]; its keys are {', '.join(declared)}"


def _alternatives(hint: Any) -> list[Any]:
    """The types a field accepts. `X | None` is X: TOML has no null, an absent key is the None."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return [kind for kind in typing.get_args(hint) if kind is not type(None)] if union else [hint]


def field_names(cls: type) -> list[str]:
    """The keys of a table."""
    return list(keys(cls))


def _listed(tables: typing.Iterable[str]) -> str:
    return " ".join(f"[{table}]" for table in tables)
