"""Where a run starts: from nothing, or from a checkpoint that fits its recipe."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrain import checkpoint, tree
from ftrain.recipe import Recipe, RecipeError, dump
from ftrain.run import Run
from ftrain.step import TrainState, apply_post, stored

# A batch is a function of these and the step: with other values, the steps that a checkpoint has behind it
# are not the ones that this recipe would have behind it.
DATA_KEYS = ("data", "train.seed")
# Keys that may change between two starts without a word.
FREE_KEYS = ("checkpoint", "metrics", "validation", "parallel", "train.micro_batch_size", "data.cache")

STATE_TABLES = ("model.", "optimizer.", "precision.")  # where a change may change the state's shapes and dtypes
WAYS_OUT = 'Put the old values back, or start anew with checkpoint.resume="never" and another --out.'


def find(recipe: Recipe, out: Path | None, say: Callable[[str], None], restarts: int = 0) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, or None to start from nothing. Collective.

    "auto" is the newest complete one in `out`; a path wins over what is in `out`. Says what was passed over,
    and why. Raises RecipeError where a path has none, and where `out` holds checkpoints beyond the start: the
    new ones would not be the newest there. After a restart by torchrun (`restarts`) these are the run's own,
    and it goes on from the newest.
    """
    resume, own = recipe.checkpoint.resume, out and out / "checkpoints"
    asked = resume if resume not in ("auto", "never") else None
    path = find_checkpoint(asked, f"checkpoint.resume={asked!r}", say) if asked else None
    if own is None:
        return path
    newest, skipped = checkpoint.latest(own)
    if resume == "auto":
        _say_skipped(skipped, say)
        if skipped and newest is None:
            say(f"no complete checkpoint in {own}: the run starts from the beginning")
        return newest
    start = checkpoint.read_meta(path)["step"] if path else 0
    if newest is None or path and newest.resolve() == path.resolve():
        return path
    if checkpoint.read_meta(newest)["step"] > start:
        if restarts:
            return newest
        raise RecipeError(
            [
                f"checkpoint.resume={resume!r} starts after step {start}, but {newest} is there already "
                "and would pass for the newest; give another --out, or go on from it with "
                'checkpoint.resume="auto".'
            ]
        )
    say(f"checkpoint.resume={resume!r} counts, and {newest} is passed over")
    return path


def find_checkpoint(path: Path | str, asked: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """The checkpoint at `path`: that folder, or the newest whole one in it or its `checkpoints`. Collective.

    asked: what the user wrote, for the message of the RecipeError where there is none. Says which newer ones
    were passed over.
    """
    path = Path(path)
    found, skipped, reason = checkpoint.agreed(f"look for a checkpoint at {path}", lambda: _search(path))
    if found is None:
        reasons = [f"{folder.name}: {why}" for folder, why in skipped] or [reason]
        raise RecipeError([f"{asked}: no complete checkpoint there ({'; '.join(reasons)})."])
    _say_skipped(skipped, say)
    return found


def _search(path: Path) -> tuple[Path | None, list[tuple[Path, str]], str | None]:
    """(the checkpoint, what was passed over and why, why `path` itself is none)."""
    reason = checkpoint.fault(path)
    if reason is None:
        return path, [], None
    passed_over: list[tuple[Path, str]] = []
    for root in (path, path / "checkpoints"):
        newest, skipped = checkpoint.newest(root)
        passed_over += skipped
        if newest is not None:
            return newest, passed_over, None
    return None, passed_over, reason


def _say_skipped(skipped: list[tuple[Path, str]], say: Callable[[str], None]) -> None:
    for folder, reason in skipped:
        say(f"not resumed from {folder}: {reason}")


def say_start(run: Run, start: Path | None, say: Callable[[str], None]) -> None:
    """One line on where the parameters come from, for a recipe with model.hf. A checkpoint of training wins over it.

    Collective. Raises HfError for a checkpoint of Hugging Face that does not fit, if it counts.
    """
    source = run.recipe.model.hf
    if source is None:
        return
    if start:
        say(f"the run goes on from {start}; model.hf={source!r} is where it began, and is not read again")
        return
    assert run.pretrained is not None
    narrow = [dtype for dtype in run.pretrained.dtypes if dtype.itemsize > run.dtype.itemsize]
    rounded = f", rounded to {run.recipe.precision.params}" if narrow else ""
    held = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in run.pretrained.dtypes))
    say(f"the run starts from the weights of model.hf={source!r}, {held}{rounded}")


def restore(run: Run, path: Path, like: TrainState, say: Callable[[str], None]) -> tuple[TrainState, dict[str, Any]]:
    """The state of a checkpoint in the structure and layout of `like`, and its meta. Collective.

    Says what in the recipe is not as it was when the checkpoint was written. Raises RecipeError where that
    would change which batches are read, CheckpointError where the state does not fit.
    """
    problems, changes = compare(checkpoint.read_meta(path).get("recipe"), run.recipe)
    if problems:
        raise RecipeError([*(f"cannot resume from {path}: {problem}" for problem in problems), WAYS_OUT])
    for change in changes:
        say(f"changed since {path.name} was written: {change}")
    known, notes = _histories(path, stored(like))
    try:
        state, meta = checkpoint.load(path, known, ignore=("fp8_state",))
    except checkpoint.CheckpointError as error:
        if any(change.startswith(STATE_TABLES) for change in changes):
            raise checkpoint.CheckpointError(f"{error}\n{WAYS_OUT}") from error
        raise
    say(f"resumed from {path}, after step {state.step}")
    for note in notes:
        say(note)
    return apply_post(state, run.post), meta


def state_to_read(run: Run, place: Path | str | None) -> tuple[TrainState, Path | None]:
    """A state without the optimizer's, in the layout of `run`, and its checkpoint. Collective.

    place: a checkpoint's folder, or that of a run, whose newest counts; None: the initial values, and the checkpoint of
    model.hf that they come from, if any.
    Unlike `restore` it takes any recipe of the same model. Raises RecipeError where there is no checkpoint,
    CheckpointError where its parameters do not fit.
    """
    if place is None:
        return _of_params(run), None if run.pretrained is None else run.pretrained.folder
    path = find_checkpoint(place, f"--checkpoint {place}")
    known, _ = _histories(path, stored(_of_params(run, pretrained=False)))
    state, _ = checkpoint.load(path, known, ignore=("opt_state", "fp8_state"))
    return apply_post(state, run.post), path


def _of_params(run: Run, pretrained: bool = True) -> TrainState:
    return apply_post(TrainState(0, run.params(pretrained), None), run.post)


def _histories(path: Path, known: TrainState) -> tuple[TrainState, list[str]]:
    """What to load of the fp8 state, and what to say: all its histories or, where any is missing, none."""
    has = {name for name in checkpoint.schema(path) if name.startswith("fp8_state.")}
    wants = {f"fp8_state.{name}" for name in tree.names(known.fp8_state)}
    if wants <= has:
        return known, ["the checkpoint's fp8 histories are not used"] if has and not wants else []
    missing = f"{len(wants - has)} of {len(wants)} fp8 histories of this recipe"
    return known._replace(fp8_state=None), [f"the checkpoint lacks {missing}: all of them begin anew"]


def compare(saved: str | None, recipe: Recipe) -> tuple[list[str], list[str]]:
    """(what forbids to resume, what is worth saying) between a saved recipe's TOML and the present one."""
    before, now = _flat(tomllib.loads(saved or "")), _flat(tomllib.loads(dump(recipe)))
    if not before:
        return [], []
    problems: list[str] = []
    changes: list[str] = []
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
