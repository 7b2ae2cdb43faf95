"""Where a run's numbers go: metrics.jsonl always, TensorBoard and W&B where asked, and a picture of the loss.

A sink takes one record a step, a dict of plain numbers, and knows nothing else about the run.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.recipe import Recipe

SINKS = ("tensorboard", "wandb")  # besides metrics.jsonl; each is a package and an extra of its own


class Sink(NamedTuple):
    """A place for records. write: one step's record; close: no more will come."""

    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


def sink_problems(recipe: Recipe, out: Path | None) -> list[str]:
    """Why the sinks that a recipe asks for cannot be opened, a sentence each: no folder `out`, or no such package."""
    asked = [name for name in SINKS if getattr(recipe.metrics, name)]
    if out is None:
        keys = [f"{name}=true" for name in asked]
        keys += [f"profile_steps={list(recipe.metrics.profile_steps)}"] if recipe.metrics.profile_steps else []
        return [f"metrics.{key} needs a folder to write to: give --out." for key in keys]
    missing = [name for name in asked if importlib.util.find_spec(name) is None]
    return [f"metrics.{name}=true needs {name}: pip install 'ftrain[{name}]'" for name in missing]


def open_sinks(recipe: Recipe, out: Path | None, step: int, quiet: bool = False) -> list[Sink]:
    """The sinks that a recipe asks for, in the folder `out`, for a run that goes on after `step` steps.

    None without `out`. `sink_problems` says beforehand what would not open. quiet: they print nothing themselves.
    """
    if out is None:
        return []
    sinks = [jsonl(out / "metrics.jsonl", step)]
    if recipe.metrics.tensorboard:
        sinks.append(_tensorboard(out, step))
    if recipe.metrics.wandb:
        sinks.append(_wandb(recipe, out, quiet))
    return sinks


def jsonl(path: Path, step: int) -> Sink:
    """One JSON object a line. Lines of steps after `step`, which will be taken again, are dropped first."""
    keep = [line for line in read_lines(path) if line["step"] <= step] if step else []
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in keep))
    os.replace(temporary, path)  # an interrupt leaves the old file or the new one
    file = path.open("a", buffering=1)  # by line: what was measured is on disk when a run is killed

    def write(record: dict[str, Any]) -> None:
        file.write(json.dumps(finite(record)) + "\n")

    return Sink(write, file.close)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order; none without such a file. A line cut short is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if isinstance(record, dict) and "step" in record]


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """A record that JSON can hold: what is not finite becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def save_loss_plot(metrics: Path, png: Path) -> None:
    """Draw the training and the held-out loss of a metrics.jsonl. Needs matplotlib; raises ImportError."""
    from matplotlib.figure import Figure

    lines = [line for line in read_lines(metrics) if line.get("loss") is not None]
    held_out = [line for line in lines if line.get("validation_loss") is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], label="train", linewidth=1)
    axes.plot(
        [line["step"] for line in held_out],
        [line["validation_loss"] for line in held_out],
        label="held out",
        marker="o",
        markersize=4,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)


@contextlib.contextmanager
def tracing(
    steps: tuple[int, ...], out: Path | None, done: int, then: Callable[[Path], None]
) -> Iterator[Callable[[], None]]:
    """A torch.profiler trace from the first to the last of `steps`, in out/trace.json: open it in Perfetto.

    Call what it yields after each step; `done` steps were taken before. `then` is called with the trace's path when it
    is written. Without steps to come, or without `out`, it does nothing.
    """
    if not steps or out is None or max(steps) <= done:
        yield lambda: None
        return
    import torch.profiler

    def write(profile: Any) -> None:
        path = out / "trace.json"
        profile.export_chrome_trace(str(path))
        then(path)

    first = max(min(steps), done + 1)
    before = first - done - 1
    warm = min(before, 1)  # a step that is profiled and forgotten: the profiler's own start takes time
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=before - warm, warmup=warm, active=max(steps) - first + 1, repeat=1),
        on_trace_ready=write,
    ) as profile:
        yield profile.step


def _tensorboard(out: Path, step: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])

    return Sink(write, writer.close)


def _wandb(recipe: Recipe, out: Path, quiet: bool) -> Sink:
    import wandb

    run = wandb.init(
        project="ftrain",
        name=out.resolve().name,
        dir=str(out),
        config=dataclasses.asdict(recipe),
        settings=wandb.Settings(silent=quiet),
    )
    return Sink(lambda record: run.log(record, step=record["step"]), run.finish)
