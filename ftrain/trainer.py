"""A run from its start to its end: train, validate, export. loop.py has the steps.

These two files are the place for side effects: what is printed, written and saved by a run is decided here.
"""

import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftrain import checkpoint, hf, resume
from ftrain.checkpoint import CheckpointError
from ftrain.data.sources import SYNTHETIC
from ftrain.export import export
from ftrain.launch import World, is_lost_peer, process_group
from ftrain.loop import RunFailed, Stopped, held_out_loss, loop, training_steps
from ftrain.marks import marked, unmarked
from ftrain.metrics import save_loss_plot, sink_problems
from ftrain.progress import Progress, quantity
from ftrain.recipe import Recipe, RecipeError, dump
from ftrain.run import Run, default_device
from ftrain.step import TrainState
from ftrain.throughput import Clock

__all__ = ["RunFailed", "Stopped", "export_hf", "train", "training_steps", "validate"]

SAMPLE_TOKENS = 200
PROFILED = 3  # the step that `profile` takes: the first ones set things up


def train(
    recipe: Recipe,
    *,
    out: Path | str | None = None,
    quiet: bool = False,
    profile: bool = False,
    world: World | None = None,
) -> dict[str, Any]:
    """Train a recipe to its end. Every rank calls it; rank 0 prints and writes.

    out: the folder for recipe.toml, metrics.jsonl, checkpoints/ and loss.png; None writes nothing.
    profile: draw the third step of this run in out/timeline.html, if metrics.profile_steps does not say which.
    Returns step, tokens, loss and validation_loss (nats per token), perplexity, and sample (text, or None).
    Raises RecipeError or another ValueError for what cannot run, before the first step; RunFailed for a step
    that failed; Stopped after a SIGINT or SIGTERM, when the state has been saved.
    """
    world, out = world or World(), Path(out) if out is not None else None
    _check_places(recipe, out, profile, world)
    profile = profile or bool(recipe.metrics.profile_steps)
    progress = Progress(recipe.train.steps, quiet=quiet or world.rank != 0)
    with process_group(world, default_device(world), recipe.parallel.timeout), contextlib.closing(progress):
        mark = marked if profile and world.rank == 0 else unmarked
        run = Run(recipe, world=world, mark=mark, tokenising=progress.tokenising)
        _ = run.data  # opened now: a mistake in it is found before any memory is taken
        announce(run, progress.say)
        start = resume.find(recipe, out, progress.say, world.restarts)
        resume.say_start(run, start, progress.say)
        if out and world.rank == 0:
            write_recipe(recipe, out)
        if out and world.world_size > 1:
            _check_shared(recipe, out)
        state = run.init(pretrained=start is None)
        meta: dict[str, Any] = {}
        if start:
            state, meta = resume.restore(run, start, state, progress.say)
        if state.step >= recipe.train.steps:
            progress.say(f"nothing to train: {state.step} of train.steps={recipe.train.steps} steps are done")
        clock = Clock(run, tokens=meta.get("tokens", 0), skipped=meta.get("skipped", 0))
        profiled = profiled_steps(recipe, state.step, progress.say) if profile else ()
        state, record = loop(run, state, clock, out, progress, profiled)
        summary = {"step": state.step, "tokens": clock.tokens, "loss": None} | record
        if "validation_loss" not in summary:
            summary["validation_loss"] = held_out_loss(run, state)
        if recipe.checkpoint.export_hf and out:
            export(run, state, out / "hf", replace=True)
            progress.say(f"the model is in {out / 'hf'} too, for transformers and what reads its checkpoints")
        return _finish(run, state, summary, progress, out)


def validate(recipe: Recipe, *, checkpoint: Path | str | None = None, world: World | None = None) -> dict[str, Any]:
    """A checkpoint's held-out loss (nats per token), perplexity, tokens, step and checkpoint. Collective.

    checkpoint: its folder, or that of a run, whose newest counts; None takes the recipe's initial values.
    """
    world = world or World()
    with process_group(world, default_device(world), recipe.parallel.timeout):
        # Not where the result will stand: that may be read by a program.
        progress = Progress(1, quiet=world.rank != 0, stream=sys.stderr)
        run = Run(recipe, world=world, tokenising=progress.tokenising)
        state, path = resume.state_to_read(run, checkpoint)
        total, tokens = run.evaluate(state)
        loss = total / tokens if tokens else math.nan
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "tokens": tokens,
            "step": state.step,
            "checkpoint": str(path) if path else None,
        }


def export_hf(
    recipe: Recipe,
    *,
    checkpoint: Path | str,
    out: Path | str,
    dtype: torch.dtype | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Write a checkpoint's model to the new folder `out`, as a Hugging Face checkpoint. Collective; rank 0 writes.

    checkpoint: its folder, or that of a run, whose newest counts. dtype: of the tensors; None: as they were trained.
    Returns checkpoint, step, out and dtype. Raises RecipeError or HfError for what cannot be.
    """
    world = world or World()
    with process_group(world, default_device(world), recipe.parallel.timeout):
        run = Run(recipe, world=world)
        state, path = resume.state_to_read(run, checkpoint)
        export(run, state, out, dtype=dtype)
        kind = str(dtype or run.dtype).removeprefix("torch.")
        return {"checkpoint": str(path), "step": state.step, "out": str(out), "dtype": kind}


def _check_places(recipe: Recipe, out: Path | None, profile: bool, world: World) -> None:
    """Raises RecipeError for what cannot be written, before any rank waits for another."""
    problems = sink_problems(recipe, out)
    if profile and out is None:
        problems.append("--profile needs a folder to write to: give --out.")
    if recipe.checkpoint.export_hf and out is None:
        problems.append("checkpoint.export_hf=true needs a folder to write to: give --out.")
    if out and world.rank == 0:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            problems.append(f"--out {out}: cannot be written to ({error.strerror}).")
    if problems:
        raise RecipeError(problems)


def _check_shared(recipe: Recipe, out: Path, patience: float = 10.0) -> None:
    """Raises RecipeError on every rank where one does not see what rank 0 has written: the first save would fail.

    patience: seconds that a network's file system may take to show a new file. Collective.
    """

    def look() -> None:
        path, deadline, found = out / "recipe.toml", time.monotonic() + patience, None
        while (found := path.read_text() if path.exists() else None) != text and time.monotonic() < deadline:
            time.sleep(0.1)
        if found is None:
            raise CheckpointError("it does not see there what rank 0 has written")
        if found != text:
            raise CheckpointError("recipe.toml there is not rank 0's: another disk, or another recipe on this machine")

    text, doing = dump(recipe), f"share --out {out} among all ranks"
    try:
        checkpoint.agreed(doing, lambda: None)  # rank 0 has written
        checkpoint.each(doing, look)
    except CheckpointError as error:
        if is_lost_peer(error):
            raise
        raise RecipeError([f"{error}. Give a folder on a disk that all machines share."]) from error


def profiled_steps(recipe: Recipe, done: int, say: Callable[[str], None]) -> tuple[int, ...]:
    """The steps to profile, for a run that goes on after `done` steps; says so where none of them is to come."""
    steps = recipe.metrics.profile_steps or (min(done + PROFILED, recipe.train.steps),)
    if max(steps) <= done or min(steps) > recipe.train.steps:
        say(f"no profile: of steps {min(steps)} to {max(steps)} none is to come; {done} are done")
        return ()
    return steps


def _finish(
    run: Run, state: TrainState, summary: dict[str, Any], progress: Progress, out: Path | None
) -> dict[str, Any]:
    """The last words: the held-out loss, a sample, the picture."""
    loss = summary["validation_loss"]
    summary["perplexity"] = perplexity(loss)
    progress.say(
        f"held-out loss {loss:.4f} nats per token, perplexity {summary['perplexity']:.2f}; "
        f"{state.step} steps, {quantity(summary['tokens'])} tokens"
    )
    summary["sample"] = sample(run, state)
    if summary["sample"] is not None:
        progress.say(f"a sample:\n{summary['sample']}")
    if out and run.world.rank == 0:
        try:
            save_loss_plot(out / "metrics.jsonl", out / "loss.png")
        except ImportError:
            progress.say("no loss.png: it needs matplotlib: pip install 'ftrain[plot]'")
        progress.say(f"all of it is in {out}")
    return summary


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; infinite rather than an overflow."""
    return math.exp(loss) if not loss > 700 else math.inf


def sample(run: Run, state: TrainState) -> str | None:
    """Text that the model writes from the start of a document; None where tokens are not text. Collective."""
    if run.recipe.data.source == SYNTHETIC:
        return None
    tokenizer = run.tokenizer
    ids = run.generate(state, [tokenizer.bos], SAMPLE_TOKENS, temperature=0.8, seed=run.recipe.train.seed)
    return tokenizer.decode(ids)


def announce(run: Run, say: Callable[[str], None]) -> None:
    """What is about to run, and what this machine changed about it."""
    recipe, n = run.recipe, run.world.world_size
    batch = f"{recipe.data.global_batch_size} x {recipe.data.seq_len}"
    where = f"{n} rank{'s' if n > 1 else ''} on {run.device.type}"
    say(f"{quantity(run.n_params)} parameters, {recipe.train.steps} steps of {batch} tokens, {where}")
    for note in [*run.notes, *special_notes(run)]:
        say(note)


def special_notes(run: Run) -> list[str]:
    """Where the tokenizer and the checkpoint of model.hf name different tokens for the ends of a document."""
    source = run.recipe.model.hf
    if source is None or run.recipe.data.source == SYNTHETIC:
        return []
    notes, config = [], hf.read_config(source).raw
    for key, id_ in (("bos_token_id", run.tokenizer.bos), ("eos_token_id", run.tokenizer.eos)):
        said = config.get(key)
        if said is not None and id_ not in (said if isinstance(said, list) else [said]):
            notes.append(f"{key} is {id_} in data.tokenizer and {said} in the config.json of model.hf={source!r}")
    return notes


def write_recipe(recipe: Recipe, out: Path) -> None:
    """DIR/recipe.toml, every key written: `ftrain train DIR/recipe.toml` runs it again."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recipe.toml").write_text(dump(recipe))
    except OSError as error:
        raise RecipeError([f"--out {out}: cannot be written to ({error.strerror})."]) from error
