"""The places where people look at a run: TensorBoard, Weights & Biases and Perfetto have what metrics.jsonl has."""

import json
import shutil

import pytest

from ftrain.metrics import read_lines
from ftrain.trainer import train


def test_tensorboard_has_every_number_of_every_step_once(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = tiny("metrics.tensorboard=true")
    train(recipe, out=tmp_path, quiet=True)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    train(recipe, out=tmp_path, quiet=True)  # steps 4 to 6 are taken again, and what was written of them does not count
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert set(events.Tags()["scalars"]) == {name for line in lines for name in line} - {"step"}
    for name in ("loss", "lr", "grad_norm", "tokens", "validation_loss"):
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        logged = [(line["step"], line[name]) for line in lines if name in line]
        assert [step for step, _ in scalars] == [step for step, _ in logged]
        assert [value for _, value in scalars] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_weights_and_biases_has_them_without_a_network(tiny, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(tiny("metrics.wandb=true"), out=tmp_path / "named", quiet=True)
    assert "wandb" not in capfd.readouterr().err
    (folder,) = (tmp_path / "named" / "wandb").glob("offline-run-*")
    (path,) = folder.glob("run-*.wandb")
    written = path.read_bytes()  # records of protobuf, uncompressed: names and numbers lie in it as JSON
    assert len(written) < 1 << 15  # beyond which a number may be cut in two
    for line in read_lines(tmp_path / "named" / "metrics.jsonl"):
        for name in ("loss", "lr", "grad_norm"):
            assert json.dumps(line[name]).encode() in written, (line["step"], name)
    assert b"named" in written and b"validation_loss" in written and b"weight_decay" in written


def test_a_trace_is_of_the_steps_asked_for_and_perfetto_reads_it(tiny, tmp_path):
    recipe = tiny("metrics.profile_steps=[2,3]", "train.steps=5", "checkpoint.every=0", "validation.every=0")
    train(recipe, out=tmp_path, quiet=True)
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    # What Chrome's trace event format, which Perfetto reads, asks of each kind of event.
    assert all({"ph", "name", "pid"} <= event.keys() for event in events if event["ph"] != "E")
    assert all(type(event["ts"]) in (int, float) for event in events if event["ph"] != "M")
    whole = [event for event in events if event["ph"] == "X"]
    assert all(type(event["dur"]) in (int, float) and event["dur"] >= 0 and "tid" in event for event in whole)
    steps = [event for event in whole if event["name"].startswith("ProfilerStep#")]
    assert [step["name"] for step in steps] == ["ProfilerStep#1", "ProfilerStep#2"]  # it counts from 0
    assert steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"] + 1
    for step in steps:
        names = [
            event["name"]
            for event in whole
            if step["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
        ]
        forward = [name for name in names if "scaled_dot_product" in name]
        assert forward and "aten::mm" in names and any("log_softmax" in name for name in names)
    assert (tmp_path / "timeline.html").exists()
