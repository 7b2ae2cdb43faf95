"""TOML to a checked Recipe and back. All problems are found before any is reported."""

import dataclasses
import datetime
import importlib.resources
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftrain.models import presets
from ftrain.recipe.checks import RecipeError, check, family_keys, model_config, model_family
from ftrain.recipe.strict import field_names, keys, nearest, read_table, show, unknown_table
from ftrain.recipe.tables import TABLES, Model, Recipe


def load_recipe(
    name_or_path: str | os.PathLike, overrides: Sequence[str] = (), *, world_size: int | None = None
) -> Recipe:
    """The checked recipe of a TOML file, or of a shipped name such as "debug".

    overrides: "table.key=value", values TOML or bare strings; checked as the file is, the last one wins.
    world_size: when known, the layout and the batch are checked against it too.
    Raises RecipeError with every problem found.
    """
    raw, problems = _read(name_or_path), []
    for override in overrides:
        problems += _override(raw, override)
    parts: dict[str, dict[str, Any]] = {}
    bad: set[str] = set()
    for name, table in raw.items():
        if name not in TABLES:
            problems.append(unknown_table(name, table, TABLES))
        elif not isinstance(table, dict):
            problems.append(f"{name} = {show(table)}: expected a table, [{name}].")
        else:
            more = family_keys(table) if name == "model" else {}
            values, sentences, wrong = read_table(TABLES[name], name, table, TABLES, more)
            own = {key: values.pop(key) for key in more if key in values}
            parts[name] = values | ({"own": own} if own else {})
            problems, bad = problems + sentences, bad | wrong
    recipe = Recipe(**{name: TABLES[name](**values) for name, values in parts.items()})
    if parts.get("fp8") and "recipe" not in raw["fp8"]:
        keys = ", ".join(f"fp8.{name}" for name in raw["fp8"])
        problems.append(f'{keys}: set, but fp8.recipe is not; name a recipe, or "none" to do without fp8.')
    recipe = _late_defaults(recipe, {f"{name}.{field}" for name in parts for field in raw[name]})
    problems += check(recipe, world_size, bad)
    if problems:
        raise RecipeError(problems)
    return recipe


def dump(recipe: Recipe) -> str:
    """The recipe as TOML, every key written, so that `load_recipe` of the text gives an equal recipe."""
    import tomli_w

    tables = {}
    for table in TABLES:
        values = dataclasses.asdict(getattr(recipe, table))
        values |= values.pop("own", {})
        tables[table] = {name: value for name, value in values.items() if value is not None}
    return tomli_w.dumps({table: values for table, values in tables.items() if values})


def shipped() -> list[str]:
    """The names of the recipes that come with ftrain."""
    folder = importlib.resources.files("ftrain") / "recipes"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml")) if folder.is_dir() else []


def _read(name_or_path: str | os.PathLike) -> dict[str, Any]:
    """The TOML of a path or shipped name. Raises RecipeError at once if it cannot be read."""
    text, names = os.fspath(name_or_path), shipped()
    path = Path(text)
    if isinstance(name_or_path, str) and text in names:
        source: Any = importlib.resources.files("ftrain") / "recipes" / f"{text}.toml"
    elif path.is_file():
        source = path
    else:
        close = nearest(path.stem, names, "{}")
        kind = (
            "is a folder, not a recipe" if path.is_dir() else "there is no such file and no shipped recipe of that name"
        )
        hint = f" ({close})" if close else ""
        raise RecipeError([f"{text}: {kind}{hint}; the shipped recipes are {', '.join(names) or 'missing here'}."])
    try:
        content = source.read_text(encoding="utf-8-sig")
        return tomllib.loads(content)
    except UnicodeDecodeError as error:
        raise RecipeError([f"{text}: a recipe is UTF-8 text; byte {error.start} is not ({error.reason})."]) from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([f"{text}: not valid TOML: {_toml_error(error, content)}"]) from error
    except OSError as error:
        raise RecipeError([f"{text}: cannot be read: {error.strerror}."]) from error


def _toml_error(error: tomllib.TOMLDecodeError, content: str) -> str:
    """tomllib's message with the line it is about, in plain words where a key or table came twice."""
    message = str(error).removesuffix(".")
    place = message.rpartition(" (at line ")[2]
    line = int(place.split(",")[0]) if place[:1].isdigit() else None
    words = {"Cannot overwrite a value": "a key is given twice", "Cannot declare": "a table is given twice"}
    for start, plain in words.items():
        if message.startswith(start):
            message = f"{plain}: {message}"
    quote = f": {show(content.split(chr(10))[line - 1].strip())}" if line else ""
    return f"{message}{quote}."


def _override(raw: dict[str, Any], override: str) -> list[str]:
    """Write one "table.key=value" into `raw`. Deeper paths reach into tables such as model.rope_scaling."""
    path, equals, text = override.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or len(names) < 2 or not all(names):
        owners = [f"{table}.{names[0]}" for table, cls in TABLES.items() if names[0] in field_names(cls)]
        meant = f"{' or '.join(owners)}={text.strip() or '...'}" if len(names) == 1 and owners else ""
        hint = f" (did you mean {meant}?)" if meant else ", such as train.steps=100"
        return [f"--set {override}: expected table.key=value{hint}."]
    here = raw
    for depth, name in enumerate(names[:-1]):
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            return [f"--set {override}: {'.'.join(names[: depth + 1])} = {show(here)} is not a table."]
    here[names[-1]] = _override_value(text.strip())
    return []


def _override_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: paths and words need no quotes in a shell."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    dated = isinstance(parsed["value"], (datetime.date, datetime.time))
    return text if dated or len(parsed) > 1 else parsed["value"]


def _late_defaults(recipe: Recipe, given: set[str]) -> Recipe:
    """Defaults that depend on other keys, where a key was not given.

    So a short run needs no shorter warm-up by hand, and a recipe with scales by row does not ask for a gather
    that it cannot have.
    """
    if "schedule.warmup_steps" not in given:
        warmup = min(recipe.schedule.warmup_steps, recipe.train.steps // 10)
        recipe = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup_steps=warmup))
    recipe = dataclasses.replace(recipe, model=_resolved(recipe.model))
    if recipe.model.hf is not None and "data.tokenizer" not in given:
        from ftrain.hf.config import tokenizer_file

        if path := tokenizer_file(recipe.model.hf):
            recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, tokenizer=str(path)))
    late: dict[str, Any] = {}
    if recipe.fp8.recipe != "none":
        operand = _wire_operand(recipe.fp8.recipe)
        if "fp8.all_gather" not in given:
            late["all_gather"] = operand is not None
        if "fp8.precompute_scales" not in given:
            travels = late.get("all_gather", recipe.fp8.all_gather)
            late["precompute_scales"] = travels and operand is not None and operand.scale == "now"
        if "fp8.skip" not in given and _is_tied(recipe.model):
            late["skip"] = ("embedding",)
    return dataclasses.replace(recipe, fp8=dataclasses.replace(recipe.fp8, **late))


def _resolved(model: Model) -> Model:
    """The model with its family's name, and with the dimensions of the checkpoint that it starts from.

    So that a recipe.toml says what was trained, whatever becomes of the checkpoint's folder.
    """
    if model.hf is None:
        known = model.preset is None or model.family is not None or model.preset in presets()
        return dataclasses.replace(model, family=model_family(model)) if known else model
    try:
        cfg = dataclasses.asdict(model_config(model))
    except RecipeError:  # reported by the cross checks
        return model
    common = {name: cfg.pop(name) for name in keys(Model) if name in cfg}
    return dataclasses.replace(model, family=model_family(model), **common, own=cfg)


def _wire_operand(value: str | dict[str, Any]) -> Any:
    """The form in which weights of an fp8 recipe can travel (fp8.wire_operand), or None."""
    from ftrain import fp8

    try:
        return fp8.wire_operand(fp8.parse(value))
    except ValueError:  # reported by the cross checks
        return None


def _is_tied(model: Model) -> bool:
    try:
        return bool(model_config(model).tie_embeddings)
    except RecipeError:  # reported by the cross checks
        return False
