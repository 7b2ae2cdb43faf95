"""The loop: steps, and what happens between them. The notebook's loop with files, a progress line and a way to stop:

for state, metrics in training_steps(run, run.init()):
    ...
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ftrain import timeline
from ftrain.checkpoint import CheckpointError
from ftrain.errors import FtrainError
from ftrain.interrupt import stop_requests
from ftrain.launch import LOST_PEER, is_lost_peer
from ftrain.metrics import open_sinks, tracing
from ftrain.page import writing
from ftrain.progress import Progress
from ftrain.recipe import Recipe, RecipeError, model_family
from ftrain.run import Run
from ftrain.saving import saver
from ftrain.step import TrainState
from ftrain.throughput import Clock


class RunFailed(FtrainError, RuntimeError):
    """A run that failed in or after a step, which it names. `__cause__` has the error behind it, if any.

    lost_peer: nothing was wrong here; another rank went away.
    """

    opening = "the run failed "

    def __init__(self, message: str, *, lost_peer: bool = False, unexpected: Exception | None = None):
        self.lost_peer, self.unexpected = lost_peer, unexpected
        self.exit_code = LOST_PEER if lost_peer else 1
        super().__init__(message)


class Stopped(FtrainError, RuntimeError):
    """A run that ended early, in good order, since it was asked to by the signal `signum`."""

    by_rank_0 = True

    def __init__(self, signum: int, message: str):
        self.signum, self.exit_code = signum, 128 + signum
        super().__init__(message)


def training_steps(run: Run, state: TrainState, steps: int | None = None) -> Iterator[tuple[TrainState, dict]]:
    """(state, metrics) after each step, from where `state` is up to `steps` (None: the recipe's).

    With a donating step the state of one iteration is used up by the next. metrics: see step.make_train_step.
    """
    while state.step < (run.recipe.train.steps if steps is None else steps):
        state, metrics = run.step(state, run.batch(state.step))
        yield state, metrics


def loop(
    run: Run, state: TrainState, clock: Clock, out: Path | None, progress: Progress, profiled: tuple[int, ...]
) -> tuple[TrainState, dict[str, Any]]:
    """All steps, with what happens between them. Returns the last state and the last step's record. Collective.

    out: the run's folder; None writes nothing. profiled: the steps to profile. Raises RunFailed for a step that failed,
    Stopped when the run was asked to stop and the state has been saved.
    """
    recipe, record, done = run.recipe, {}, state.step
    clock.restart()
    # A step's numbers are read while the next one runs: asking at once would leave a GPU idle. A CPU is not.
    lag = 1 if run.device.type == "cuda" else 0
    waiting: deque[tuple[int, dict]] = deque()
    writes = run.world.rank == 0

    def show(trace: Path) -> None:
        save_timeline(run, trace, done, progress.say)
        clock.restart()

    with _failing(done) as at, contextlib.ExitStack() as opened:
        write = opened.enter_context(_writer(recipe, out if writes else None, done, progress, clock))
        save = opened.enter_context(saver(run, out))
        asked_to_stop = opened.enter_context(stop_requests(run.world.world_size))
        tick = opened.enter_context(tracing(profiled, out if writes else None, done, show))
        steps = training_steps(run, state)
        for state, metrics in steps:
            at.step, at.is_over = state.step, True
            waiting.append((state.step, metrics))
            after = _after(recipe, state.step, asked_to_stop())
            while len(waiting) > (0 if after.validates or after.saves else lag):
                record = clock.read(*waiting.popleft())
                _check_finite(recipe, record, progress.say)
                if after.validates and not waiting:
                    record["validation_loss"] = held_out_loss(run, state)
                write(record)
            if after.validates and not after.ends:
                progress.say(f"step {state.step}: held-out loss {record['validation_loss']:.4f} nats per token")
            if after.saves:
                save(state, record, wait=bool(after.signum) or after.ends)
            if after.signum:
                what = "the checkpoint is saved" if out else "nothing is saved without --out"
                raise Stopped(after.signum, f"stopped after step {state.step}, as asked; {what}.")
            if after.validates or after.saves:
                clock.restart()
            tick()
            at.step, at.is_over = state.step + 1, False
    return state, record


class _After(NamedTuple):
    """What follows a step. signum: the signal that asks the run to stop, or 0; ends: it was the last step."""

    signum: int
    ends: bool
    validates: bool
    saves: bool


def _after(recipe: Recipe, step: int, signum: int) -> _After:
    ends = step == recipe.train.steps
    validates = not signum and (ends or due(step, recipe.validation.every))
    return _After(signum, ends, validates, bool(signum) or ends or due(step, recipe.checkpoint.every))


@contextlib.contextmanager
def _writer(
    recipe: Recipe, out: Path | None, done: int, progress: Progress, clock: Clock
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """`write(record)`, to every sink of the run and to its line of progress. out: None where nothing is written."""
    with contextlib.ExitStack() as opened:
        sinks = open_sinks(recipe, out, done, progress.quiet)
        for sink in sinks:
            opened.callback(sink.close)

        def write(record: dict[str, Any]) -> None:
            for sink in sinks:
                sink.write(record)
            progress.update(record, clock.seconds_left(record["step"]))

        yield write


@dataclass
class _Place:
    """Where a run is: in a step, or after it."""

    step: int
    is_over: bool = False


@contextlib.contextmanager
def _failing(done: int) -> Iterator[_Place]:
    """Within it, errors become RunFailed, which says where the run was; it keeps what it yields up to date."""
    at = _Place(done + 1)
    try:
        yield at
    except (RecipeError, Stopped, RunFailed):
        raise
    except Exception as error:
        where = f"{'after' if at.is_over else 'in'} step {at.step}"
        if is_lost_peer(error):
            raise RunFailed(f"{where}: another rank was lost", lost_peer=True) from error
        what = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        unexpected = None if isinstance(error, FtrainError) else error
        raise RunFailed(f"{where}: {what}{error}", unexpected=unexpected) from error


def _check_finite(recipe: Recipe, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """End a run whose numbers are no longer numbers, or say that the step was left out. All ranks agree."""
    bad = [name for name in ("loss", "grad_norm") if not math.isfinite(record[name])]
    if not bad:
        return
    what = " and ".join(f"{name} is {record[name]}" for name in bad)
    if recipe.train.on_nonfinite == "skip":
        say(f"step {record['step']} is left out: {what}; {record['skipped']} left out so far")
        return
    raise RunFailed(
        f"in step {record['step']}: {what}. Lower optimizer.lr or set optimizer.clip_norm; "
        'train.on_nonfinite="skip" leaves such steps out.',
    )


def save_timeline(run: Run, trace: Path, done: int, say: Callable[[str], None]) -> None:
    """Draw the last step of a trace beside it, in timeline.html, and say its numbers."""
    found, file = timeline.read(trace, done), trace.with_name("timeline.html")
    with writing(file, "--out") as write:
        write(timeline.as_html(found, run.recipe.model.preset or model_family(run.recipe.model), run.world.world_size))
    say(f"{timeline.text(found)}\n  the picture is {file}; {trace.name} beside it is for ui.perfetto.dev")


def held_out_loss(run: Run, state: TrainState) -> float:
    """Nats per token on the held-out text. Collective."""
    total, tokens = run.evaluate(state)
    return total / tokens if tokens else math.nan


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after this one; 0 is never."""
    return every > 0 and step % every == 0
