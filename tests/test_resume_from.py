"""Which checkpoint a run goes on from, and what is said of one that does not fit its recipe."""

import re
import shutil
from dataclasses import replace

import pytest
from runs import on, run_train
from tiny import write_tiny

from ftrain import checkpoint, load_recipe, resume
from ftrain.checkpoint import CheckpointError
from ftrain.launch import World
from ftrain.metrics import read_lines
from ftrain.recipe import RecipeError
from ftrain.trainer import train

# --- a checkpoint of another recipe ---------------------------------------------------------------------

MISFITS = {
    "precision.params=bfloat16": [r"\d+ of another dtype: params.embedding \(checkpoint float32, asked for bfloat16\)"],
    "model.n_layers=3": [r"27 missing from the checkpoint: .*params.layers.2"],
    "model.n_layers=1": [r"27 in the checkpoint only: .*params.layers.1"],
    "model.ffn_dim=64": [r"18 of another shape: .*checkpoint \(48, 16\), asked for \(64, 16\)"],
    "model.tie_embeddings=true": [r"3 in the checkpoint only: params.output"],
    "optimizer.name=sgd": [r"21 in the checkpoint only: .*nu.embedding"],
}


@pytest.mark.parametrize("change", MISFITS)
def test_a_state_that_does_not_fit_is_named_and_counted(tiny, tmp_path, capsys, change):
    train(tiny("train.steps=3"), out=tmp_path, quiet=True)
    with pytest.raises(CheckpointError) as error:
        train(tiny(change), out=tmp_path)
    printed, key = capsys.readouterr().out, change.partition("=")[0]
    assert f"changed since step-00000003 was written: {key}" in printed and "resumed from" not in printed
    message = str(error.value).replace("opt_state", "").replace("\n", " ")
    for pattern in MISFITS[change]:
        assert re.search(pattern, message), message
    assert message.endswith(resume.WAYS_OUT)
    assert [step for step, _ in checkpoint.complete(tmp_path / "checkpoints")] == [3]


@pytest.mark.parametrize("change", ["optimizer.lr=0.005", "optimizer.betas=[0.8,0.9]", "optimizer.weight_decay=0.1"])
def test_other_settings_of_the_optimizer_are_allowed_and_said(tiny, tmp_path, capsys, change):
    train(tiny("train.steps=3"), out=tmp_path, quiet=True)
    assert train(tiny(change), out=tmp_path)["step"] == 6
    key = change.partition("=")[0]
    assert f"changed since step-00000003 was written: {key} was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("none", "tensorwise", "fp8.recipe was 'none' and is 'tensorwise'"),
        (
            "none",
            "delayed",
            "the checkpoint lacks 14 of 14 fp8 histories of this recipe: all of them begin anew",
        ),
        ("delayed", "none", "the checkpoint's fp8 histories are not used"),
        ("delayed", "tensorwise", "the checkpoint's fp8 histories are not used"),
    ],
)
def test_fp8_may_be_switched_between_two_starts(tiny, tmp_path, capsys, before, after, said):
    train(tiny(f"fp8.recipe={before}", "train.steps=3"), out=tmp_path, quiet=True)
    summary = train(tiny(f"fp8.recipe={after}"), out=tmp_path)
    assert said in capsys.readouterr().out
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert summary["step"] == 6 and max(losses[3:]) < losses[0] + 0.1  # a scale of 1 would show


def test_half_of_the_histories_is_none(tiny, tmp_path, capsys):
    train(
        tiny("fp8.recipe=delayed", 'fp8.skip=["output", "layers.1.*"]', "train.steps=3"),
        out=tmp_path,
        quiet=True,
    )
    train(tiny("fp8.recipe=delayed"), out=tmp_path)
    assert "the checkpoint lacks 7 of 14 fp8 histories of this recipe" in capsys.readouterr().out


# --- which checkpoint -----------------------------------------------------------------------------------


def broken(root, damage, step=6):
    """Make a folder for `step` beside the good one of step 3, and damage it."""
    good, bad = root / "step-00000003", root / f"step-{step:08d}"
    shutil.copytree(good, bad)
    if damage == "no manifest":
        (bad / "manifest.json").unlink()
        return "it has no manifest.json: the save was interrupted"
    if damage == "cut by a byte":
        file = bad / "rank-00001.bin"
        file.write_bytes(file.read_bytes()[:-1])
        size = file.stat().st_size
        return f"its file rank-00001.bin has {size} bytes and should have {size + 1}"
    if damage == "empty":
        shutil.rmtree(bad)
        bad.mkdir()
        return "it has no manifest.json"
    if damage == "not finished":
        bad.rename(bad.with_suffix(".tmp"))
        return "its save did not finish"
    assert damage == "a file is gone"
    (bad / "rank-00000.bin").unlink()
    return "its file rank-00000.bin is missing"


DAMAGES = ["no manifest", "cut by a byte", "empty", "not finished", "a file is gone"]


def start_beside_ruins(rank, world, parallel, path, out, resume_from):
    """A start with this checkpoint.resume: what it finds and says, and its error."""
    recipe = load_recipe(path, (*parallel, f"checkpoint.resume={resume_from}"))
    said, found, error = [], None, None
    try:
        found = resume.find(recipe, out, said.append)
    except RecipeError as refused:
        error = str(refused)
    return found and found.name, said, error


@pytest.fixture
def good_at_3(ranks, tmp_path):
    """A run's folder with a good checkpoint of step 3, written by two ranks."""
    path = write_tiny(tmp_path)
    on(ranks, "shard 2", run_train, path, tmp_path / "out", "train.steps=3")
    return path, tmp_path / "out"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_one_is_passed_over_with_its_name_and_the_reason(ranks, good_at_3, damage):
    path, out = good_at_3
    reason = broken(out / "checkpoints", damage)
    results = on(ranks, "shard 2", start_beside_ruins, path, out, "auto")
    assert results[0] == results[1] and results[0][0] == "step-00000003" and results[0][2] is None
    (said,) = results[0][1]
    assert "step-00000006" in said and reason in said
    bad = out / "checkpoints" / ("step-00000006.tmp" if damage == "not finished" else "step-00000006")
    for _, said, error in on(ranks, "shard 2", start_beside_ruins, path, out, bad):
        assert said == [] and f"checkpoint.resume='{bad}': no complete checkpoint there ({reason}" in error


def test_the_run_goes_on_beside_ruins_and_keep_counts_good_ones(good_at_3, capsys):
    path, out = good_at_3
    reason = broken(out / "checkpoints", "cut by a byte", step=9)
    train(load_recipe(path, ("checkpoint.keep=1",)), out=out)
    printed = capsys.readouterr().out
    assert "step-00000009" in printed and reason in printed and "resumed from" in printed
    assert sorted(entry.name for entry in (out / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000009",
    ]
    assert checkpoint.latest(out / "checkpoints")[0].name == "step-00000006"


def test_a_start_from_nothing_beside_ruins_alone_is_said(good_at_3, capsys):
    path, out = good_at_3
    (out / "checkpoints" / "step-00000003" / "index.json").unlink()
    train(load_recipe(path), out=out)
    printed = capsys.readouterr().out
    assert "step-00000003: its file index.json is missing" in printed
    assert f"no complete checkpoint in {out / 'checkpoints'}: the run starts from the beginning" in printed


def test_a_fresh_nested_folder_and_one_checkpoint(tiny, tmp_path):
    train(tiny("checkpoint.keep=1"), out=tmp_path / "new" / "nested" / "out", quiet=True)
    assert [step for step, _ in checkpoint.complete(tmp_path / "new" / "nested" / "out" / "checkpoints")] == [6]


def test_steps_are_numbers(tiny, tmp_path, capsys):
    train(tiny("checkpoint.every=1", "checkpoint.keep=9", "train.steps=10"), out=tmp_path, quiet=True)
    train(tiny("train.steps=11"), out=tmp_path)
    assert "step-00000010, after step 10" in capsys.readouterr().out


def test_a_path_wins_over_what_is_in_out_and_says_so(tiny, tmp_path, capsys):
    train(tiny("train.steps=2"), out=tmp_path / "out", quiet=True)
    train(tiny(), out=tmp_path / "other", quiet=True)
    asked = tmp_path / "other" / "checkpoints" / "step-00000003"
    train(tiny(f"checkpoint.resume={asked}"), out=tmp_path / "out")
    printed = capsys.readouterr().out
    passed_over = tmp_path / "out" / "checkpoints" / "step-00000002"
    assert f"checkpoint.resume='{asked}' counts, and {passed_over} is passed over" in printed
    assert f"resumed from {asked}" in printed


def test_the_newest_of_a_run_that_is_named_and_what_was_passed_over(good_at_3, tmp_path, capsys):
    path, out = good_at_3
    reason = broken(out / "checkpoints", "empty")
    train(load_recipe(path, (f"checkpoint.resume={out}",)), out=tmp_path / "new")
    printed = capsys.readouterr().out
    assert f"not resumed from {out / 'checkpoints' / 'step-00000006'}: {reason}" in printed
    assert "step-00000003, after step 3" in printed


@pytest.mark.parametrize("asked", ["never", "path"])
def test_a_restart_goes_on_from_the_runs_own_checkpoints(tiny, tmp_path, asked):
    """torchrun starts the same command again: what lies in --out beyond its start is then its own."""
    train(tiny("train.steps=2"), out=tmp_path / "first", quiet=True)
    if asked == "path":
        asked = tmp_path / "first" / "checkpoints" / "step-00000002"
    recipe = tiny(f"checkpoint.resume={asked}", "train.steps=3")
    train(recipe, out=tmp_path / "out", quiet=True)
    with pytest.raises(RecipeError, match="would pass for the newest"):
        train(recipe, out=tmp_path / "out", quiet=True)
    again = train(replace(recipe, train=tiny().train), out=tmp_path / "out", quiet=True, world=World(restarts=1))
    assert again["step"] == 6
