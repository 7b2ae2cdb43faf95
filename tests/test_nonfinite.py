"""Steps whose loss or gradient is not finite: all ranks stop, or leave the step out, and save none of it."""

import math
from contextlib import contextmanager

import pytest
import torch
from runs import contents, on, run_train
from tiny import write_tiny

import ftrain.run
from ftrain import Run, checkpoint, load_recipe
from ftrain.checkpoint import CheckpointError
from ftrain.metrics import read_lines
from ftrain.step import make_train_step
from ftrain.trainer import RunFailed, train

SPOIL = {"gradient": lambda total: total * math.nan, "loss": lambda total: total + math.inf}


@contextmanager
def spoilt(what, steps):
    """Within it, in `steps`, the loss of this rank's last micro-batch has an Inf or a gradient of NaN."""
    batch, make, now = Run.batch, make_train_step, {"step": 0, "calls": 0}

    def reader(run, step):
        now.update(step=step + 1, calls=0)
        return batch(run, step)

    def make_spoilt(loss, *args, **kwargs):
        def bad_loss(params, micro, **fp8):
            total, count = loss(params, micro, **fp8)
            now["calls"] += 1
            last = now["calls"] == kwargs["micro_batches"]
            return (SPOIL[what](total) if last and now["step"] in steps else total), count

        return make(bad_loss, *args, **kwargs)

    Run.batch, ftrain.run.make_train_step = reader, make_spoilt
    try:
        yield
    finally:
        Run.batch, ftrain.run.make_train_step = batch, make


def train_spoilt(rank, world, parallel, path, out, what, steps, *overrides):
    """Train with these steps spoilt on the last rank. Returns the error, if any."""
    try:
        with spoilt(what, steps if rank == world - 1 else ()):
            run_train(rank, world, parallel, path, out, *overrides)
    except RunFailed as error:
        return str(error)


EVERY = ("checkpoint.every=1", "checkpoint.keep=9", "validation.every=0")


@pytest.mark.parametrize(
    ("layout", "what", "fp8"),
    [
        ("one rank", "gradient", "none"),
        ("one rank", "loss", "none"),
        ("shard 2", "gradient", "delayed"),
        ("tensor 2", "gradient", "none"),
        ("shard 2", "loss", "tensorwise"),
    ],
)
def test_a_step_that_is_left_out_changes_nothing_and_counts(ranks, tmp_path, layout, what, fp8):
    path, out = write_tiny(tmp_path), tmp_path / "out"
    options = (*EVERY, "train.on_nonfinite=skip", f"fp8.recipe={fp8}", "train.micro_batch_size=1")
    assert not any(on(ranks, layout, train_spoilt, path, out, what, (2, 5), *options))
    lines = read_lines(out / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1, 2, 2]
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [2, 5]
    states = [contents(path) for _, path in checkpoint.complete(out / "checkpoints")]
    for i in range(1, 6):
        before, after = ({k: v for k, v in state.items() if k != "step"} for state in states[i - 1 : i + 1])
        assert (before == after) is (i + 1 in (2, 5))
    assert [state["step"] for state in states] == [1, 2, 3, 4, 5, 6]
    assert [checkpoint.read_meta(p)["skipped"] for _, p in checkpoint.complete(out / "checkpoints")][-1] == 2


def test_the_count_goes_on_with_the_run(tmp_path, capsys):
    path, out = write_tiny(tmp_path), tmp_path / "out"
    with spoilt("gradient", (2, 5)):
        train(load_recipe(path, ("train.on_nonfinite=skip", "train.steps=3")), out=out)
        assert "step 2 is left out: loss is nan and grad_norm is nan; 1 left out so far" in capsys.readouterr().out
        train(load_recipe(path, ("train.on_nonfinite=skip",)), out=out)
    assert [line["skipped"] for line in read_lines(out / "metrics.jsonl")] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("layout", "what"), [("shard 2", "gradient"), ("tensor 2", "loss")])
def test_all_ranks_stop_at_the_step_and_nothing_of_it_is_saved(ranks, tmp_path, layout, what):
    path, out = write_tiny(tmp_path), tmp_path / "out"
    errors = on(ranks, layout, train_spoilt, path, out, what, (3,), *EVERY)
    assert len(set(errors)) == 1 and errors[0].startswith("in step 3: loss is ")
    assert [step for step, _ in checkpoint.complete(out / "checkpoints")] == [1, 2]


@pytest.mark.parametrize("mode", ["false", "true"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_parameters_that_overflowed_are_not_saved(tmp_path, mode, policy):
    """An update may overflow though loss and gradient were fine: only the next step would show it."""
    options = (f"checkpoint.async_save={mode}", f"train.on_nonfinite={policy}", "train.steps=1")
    recipe = load_recipe(write_tiny(tmp_path), (*options, "optimizer.lr=1e39", "schedule.warmup_steps=0"))
    with pytest.raises(RunFailed, match="after step 1: cannot save step 1 in .*not finite: params.embedding"):
        train(recipe, out=tmp_path / "out", quiet=True)
    assert checkpoint.latest(tmp_path / "out" / "checkpoints") == (None, [])


def save_with_one_bad_number(rank, root, dtype, value):
    """Every rank saves; the last one's part has a number that is none. Returns the error."""
    leaf = torch.ones(40).index_fill(0, torch.tensor([37 if rank else 0]), value if rank else 1.0)
    state = {"fine": torch.ones(3), "empty": torch.ones(0), "count": 3, f"of rank {rank}": leaf.to(dtype)}
    try:
        checkpoint.save(root, state, step=1, meta={}, keep=1)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_no_checkpoint_holds_a_number_that_is_none(ranks, tmp_path, dtype, value):
    errors = ranks(2, save_with_one_bad_number, tmp_path / "root", dtype, value)
    assert errors[0] == errors[1] and "rank 1: ValueError: not finite: of rank 1; no run" in errors[0]
    assert not (tmp_path / "root").exists()
    with pytest.raises(CheckpointError, match="not finite: lr"):
        checkpoint.save(tmp_path / "root", {"lr": value}, step=1, meta={}, keep=1)
