"""Where a run starts: from nothing, or from a checkpoint that fits its recipe."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrain import checkpoint, tree
from ftrain.recipe import Recipe, RecipeError, dump
from ftrain.step import TrainState, apply_post, stored

# A batch is a function of these and the step: with other values, the steps that a checkpoint has behind it
# are not the ones that this recipe would have behind it.
DATA_KEYS = ("data", "train.seed")
# Keys that may change between two starts without a word.
FREE_KEYS = ("checkpoint", "metrics", "validation", "parallel", "train.micro_batch_size")


def find(recipe: Recipe, out: Path | None, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, or None to start from nothing. Collective.

    Says which newer ones were passed over, and why. Raises RecipeError where a path has none, and where `out`
    holds checkpoints beyond the start: the new ones would not be the newest there.
    """
    resume = recipe.checkpoint.resume
    path = (
        find_checkpoint(resume, f"checkpoint.resume={resume!r}") if resume not in ("auto", "never") else None
    )
    if out is None:
        return path
    newest, skipped = checkpoint.latest(out / "checkpoints")
    if resume == "auto":
        for folder, reason in skipped:
            say(f"not resumed from {folder}: {reason}")
        return newest
    start = checkpoint.read_meta(path)["step"] if path else 0
    if newest is not None and checkpoint.read_meta(newest)["step"] > start:
        raise RecipeError(
            [
                f"checkpoint.resume={resume!r} starts after step {start}, but {newest} is there already "
                "and would pass for the newest; give another --out, or go on from it with "
                'checkpoint.resume="auto".'
            ]
        )
    return path


def find_checkpoint(path: Path | str, asked: str) -> Path:
    """The checkpoint at `path`: that folder, or the newest whole one in it or its `checkpoints`. Collective.

    asked: what the user wrote, for the message of the RecipeError where there is none.
    """
    path = Path(path)
    if checkpoint.fault(path) is None:
        return path
    passed_over: list[tuple[Path, str]] = []
    for root in (path, path / "checkpoints"):
        newest, skipped = checkpoint.latest(root)
        if newest is not None:
            return newest
        passed_over += skipped
    reasons = [f"{folder.name}: {reason}" for folder, reason in passed_over] or [checkpoint.fault(path)]
    raise RecipeError([f"{asked}: no complete checkpoint there ({'; '.join(reasons)})."])


def restore(
    run: Any, path: Path, like: TrainState, say: Callable[[str], None]
) -> tuple[TrainState, dict[str, Any]]:
    """The state of a checkpoint in the structure and layout of `like`, and its meta. Collective.

    Says what in the recipe is not as it was when the checkpoint was written. Raises RecipeError where that
    would change which batches are read, CheckpointError where the state does not fit.
    """
    problems, changes = compare(checkpoint.read_meta(path).get("recipe"), run.recipe)
    if problems:
        raise RecipeError(
            [f"cannot resume from {path}: {problem}" for problem in problems]
            + ['Put the old values back, or start anew with checkpoint.resume="never" and another --out.']
        )
    say(f"resumed from {path}")
    for change in changes:
        say(f"changed since it was written: {change}")
    known = stored(like)
    if not _has_histories(path, known):
        say("the checkpoint lacks fp8 histories of this recipe: they begin anew")
        known = known._replace(fp8_state=None)
    state, meta = checkpoint.load(path, known, ignore=("fp8_state",))
    return apply_post(state, run.post), meta


def restore_params(run: Any, path: Path) -> tuple[TrainState, dict[str, Any]]:
    """As `restore`, for a state that is only read: no optimizer state, and any recipe will do. Collective."""
    known = stored(run.init())._replace(opt_state=None)
    if not _has_histories(path, known):
        known = known._replace(fp8_state=None)
    state, meta = checkpoint.load(path, known, ignore=("opt_state", "fp8_state"))
    return apply_post(state, run.post), meta


def _has_histories(path: Path, known: TrainState) -> bool:
    """Whether the checkpoint has every fp8 history that the state wants."""
    wanted = {f"fp8_state.{name}" for name in tree.names(known.fp8_state)}
    return wanted <= checkpoint.schema(path).keys()


def compare(saved: str | None, recipe: Recipe) -> tuple[list[str], list[str]]:
    """(what forbids to resume, what is worth saying) between a saved recipe's TOML and the present one."""
    before, now = _flat(tomllib.loads(saved or "")), _flat(tomllib.loads(dump(recipe)))
    if not before:
        return [], []
    problems, changes = [], []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new or _under(name, FREE_KEYS):
            continue
        sentence = f"{name} was {old!r} and is {new!r}"
        (problems if _under(name, DATA_KEYS) else changes).append(sentence)
    return problems, changes


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _under(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(key + ".") for key in keys)
