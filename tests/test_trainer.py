"""The loop: what it writes, how it goes on, how it fails."""

import gc
import json
import math
import shutil
import sys

import pytest
import torch
from runs import records, without_times
from tiny import write_tiny

from ftrain import Run, load_recipe
from ftrain.checkpoint import complete
from ftrain.launch import World
from ftrain.metrics import finite, jsonl, read_lines
from ftrain.progress import Progress
from ftrain.recipe import RecipeError
from ftrain.resume import compare
from ftrain.throughput import peak_flops
from ftrain.trainer import RunFailed, train, training_steps, validate


def test_a_run_leaves_everything_that_is_promised(tiny, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    summary = train(tiny(), out=out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    for line in lines:
        numbers = {key: line[key] for key in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second")}
        assert all(type(value) in (int, float) and value > 0 for value in numbers.values())
    assert load_recipe(out / "recipe.toml") == tiny()
    assert [step for step, _ in complete(out / "checkpoints")] == [3, 6]
    assert summary["step"] == 6 and summary["tokens"] == 6 * 64
    assert summary["validation_loss"] == lines[-1]["validation_loss"]
    assert summary["perplexity"] == math.exp(summary["validation_loss"])
    printed = capsys.readouterr().out
    assert "6/6  loss" in printed and "held-out loss" in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if "tok/s" in line)


def test_validate_gives_the_loss_that_the_run_ended_with(tiny, tmp_path):
    summary = train(tiny(), out=tmp_path / "out", quiet=True)
    for place in ("out", "out/checkpoints", "out/checkpoints/step-00000006"):
        result = validate(tiny(), checkpoint=tmp_path / place)
        assert result["loss"] == summary["validation_loss"]
    assert result["tokens"] == 5 * 16 and result["step"] == 6
    other_batch = validate(tiny("train.micro_batch_size=4"), checkpoint=tmp_path / "out")
    assert other_batch["loss"] == pytest.approx(result["loss"], abs=1e-6)


def test_quiet_is_silent(tiny, capsys):
    train(tiny("train.steps=2"), quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("mode", ["false", "true"])
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tiny, tmp_path, mode):
    recipe = tiny(f"checkpoint.async_save={mode}")
    straight = train(recipe, out=tmp_path / "out", quiet=True)
    before = records(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    again = train(recipe, out=tmp_path / "out", quiet=True)
    after = records(tmp_path / "out")
    assert after == before
    assert without_times(again) == without_times(straight)


def test_a_finished_run_trains_no_more(tiny, tmp_path, capsys):
    first = train(tiny(), out=tmp_path / "out", quiet=True)
    again = train(tiny(), out=tmp_path / "out")
    assert "nothing to train: 6 of train.steps=6" in capsys.readouterr().out
    assert again["validation_loss"] == first["validation_loss"]
    assert len(read_lines(tmp_path / "out" / "metrics.jsonl")) == 6


def test_what_may_change_between_starts(tiny, tmp_path, capsys):
    train(tiny("train.steps=3"), out=tmp_path / "out", quiet=True)
    train(tiny("optimizer.lr=0.005"), out=tmp_path / "out")
    printed = capsys.readouterr().out
    assert "resumed from" in printed and "step-00000003" in printed
    assert "optimizer.lr was 0.01 and is 0.005" in printed
    with pytest.raises(RecipeError, match="data.global_batch_size was 4 and is 8"):
        train(tiny("data.global_batch_size=8"), out=tmp_path / "out")


def test_a_start_that_older_checkpoints_would_outlive_is_refused(tiny, tmp_path):
    train(tiny(), out=tmp_path / "out", quiet=True)
    for resume in ("never", str(tmp_path / "out" / "checkpoints" / "step-00000003")):
        with pytest.raises(RecipeError, match="would pass for the newest"):
            train(tiny(f"checkpoint.resume={resume}"), out=tmp_path / "out")
    kept = train(tiny(f"checkpoint.resume={resume}"), out=tmp_path / "other", quiet=True)
    assert kept["step"] == 6
    assert [line["step"] for line in read_lines(tmp_path / "other" / "metrics.jsonl")] == [4, 5, 6]


def test_a_checkpoint_that_is_not_there_is_named(tiny, tmp_path):
    with pytest.raises(RecipeError, match="checkpoint.resume='/nowhere': no complete checkpoint"):
        train(tiny("checkpoint.resume=/nowhere"), out=tmp_path / "out")
    with pytest.raises(RecipeError, match="--checkpoint /nowhere: no complete checkpoint"):
        validate(tiny(), checkpoint="/nowhere")


def test_the_step_that_fails_is_named_and_nothing_is_saved_after_it(tiny, tmp_path, monkeypatch):
    batch = Run.batch

    def reader(run, step):
        if step == 3:
            raise OSError("the disk is gone")
        return batch(run, step)

    monkeypatch.setattr(Run, "batch", reader)
    with pytest.raises(RunFailed, match="in step 4: OSError: the disk is gone"):
        train(tiny(), out=tmp_path / "out", quiet=True)
    assert [line["step"] for line in read_lines(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]
    assert [step for step, _ in complete(tmp_path / "out" / "checkpoints")] == [3]


def train_apart(rank, path, folder, change=()):
    """Two ranks whose --out is the same words and not the same folder, or whose recipes are not alike."""
    recipe = load_recipe(path, change if rank else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftrain.trainer._check_shared.__defaults__", (0.2,))
        with pytest.raises(RecipeError) as error:
            train(recipe, out=folder / ("out" if change else str(rank)), quiet=True, world=World(rank, 2))
    return str(error.value)


def test_a_folder_that_ranks_do_not_share_is_said_before_the_first_step(ranks, tmp_path):
    path = write_tiny(tmp_path)
    said = ranks(2, train_apart, path, tmp_path)
    assert said[0].startswith(f"cannot share --out {tmp_path}/0 among all ranks: rank 1: it does not see there what")
    assert "rank 1: it does not see there what rank 0 has written. Give a folder" in said[1]
    said = ranks(2, train_apart, path, tmp_path, ("optimizer.lr=0.5",))
    assert len(set(said)) == 1 and "rank 1: recipe.toml there is not rank 0's" in said[0]
    assert not list(tmp_path.glob("*/checkpoints"))


def test_numbers_that_are_none_end_the_run(tiny, tmp_path):
    with pytest.raises(RunFailed, match="in step [0-9]: .*is (nan|inf)"):
        train(tiny("optimizer.lr=1e30", "optimizer.clip_norm=0"), out=tmp_path / "out", quiet=True)
    assert all(step < 3 for step, _ in complete(tmp_path / "out" / "checkpoints"))


def test_sinks_that_need_something_say_so(tiny, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="metrics.tensorboard=true needs a folder") as error:
        train(tiny("metrics.tensorboard=true", "metrics.profile_steps=[2]"), quiet=True)
    assert len(error.value.problems) == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RecipeError, match="metrics.wandb=true needs wandb: pip install"):
        train(tiny("metrics.wandb=true"), out=tmp_path, quiet=True)


def test_the_picture(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    train(tiny(), out=tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_notebook_gets_the_same_steps(tiny, tmp_path):
    train(tiny(), out=tmp_path / "out", quiet=True)
    logged = [line["loss"] for line in read_lines(tmp_path / "out" / "metrics.jsonl")]
    run = Run(tiny())
    losses = [float(metrics["loss"]) for _, metrics in training_steps(run, run.init())]
    assert losses == logged
    assert len(list(training_steps(run, run.init(), steps=2))) == 2


def test_memory_does_not_grow(tiny, tmp_path):
    counts = []

    class Counting(Progress):
        def update(self, record, seconds_left):
            if record["step"] in (20, 60):
                gc.collect()
                counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ftrain.trainer.Progress", Counting)
        train(tiny("train.steps=61", "validation.every=10", "checkpoint.every=0"), out=tmp_path, quiet=True)
    assert counts[0] == counts[1]


def test_the_peak_of_known_devices():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some CPU") is None


def test_metrics_survive_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    sink = jsonl(path, 2)
    sink.write({"step": 3, "loss": float("nan")})
    sink.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None}]
    assert finite({"a": math.inf, "b": 1}) == {"a": None, "b": 1}


def test_only_what_matters_is_said_about_changed_recipes(tiny):
    from ftrain.recipe import dump

    saved = dump(tiny())
    assert compare(saved, tiny()) == ([], [])
    assert compare(saved, tiny("checkpoint.every=1", "train.micro_batch_size=1")) == ([], [])
    problems, changes = compare(saved, tiny("train.seed=1", "optimizer.eps=1e-6"))
    assert problems == ["train.seed was 7 and is 1"]
    assert changes == ["optimizer.eps was 1e-08 and is 1e-06"]
