"""A run that goes on is the run that did not stop: bit for bit, in every layout and into any other."""

import pytest
from runs import LAYOUTS, as_bytes, contents, copy_start, on, records, run_train
from tiny import write_tiny

from ftrain import Run, checkpoint, load_recipe, resume, tree
from ftrain.launch import World
from ftrain.metrics import read_lines
from ftrain.recipe import RecipeError
from ftrain.sharding import full
from ftrain.step import stored
from ftrain.trainer import train

# Micro-batches of one sequence: every layout then scales the same activations together.
FP8 = {
    "none": ("train.micro_batch_size=1",),
    "delayed": ("train.micro_batch_size=1", "fp8.recipe=delayed"),
    "tensorwise": ("train.micro_batch_size=1", "fp8.recipe=tensorwise"),
}


# --- bit for bit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "shard 4"])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_run_that_goes_on_is_the_run_that_did_not_stop(ranks, tmp_path, layout, recipe):
    path, names = write_tiny(tmp_path), ("straight", "stopped")
    on(ranks, layout, run_train, path, tmp_path / "straight", *FP8[recipe])
    copy_start(tmp_path / "straight", tmp_path / "stopped")
    on(ranks, layout, run_train, path, tmp_path / "stopped", *FP8[recipe])
    a, b = (contents(tmp_path / name / "checkpoints" / "step-00000006") for name in names)
    assert a == b and {name.split(".")[0] for name in a} >= {"step", "params", "opt_state"}
    histories = [name for name in a if name.startswith("fp8_state.history")]
    assert len(histories) == (2 * 7 if recipe == "delayed" else 0)
    lines = [records(tmp_path / name) for name in names]
    assert lines[0] == lines[1] and [line["step"] for line in lines[0]] == [1, 2, 3, 4, 5, 6]


def test_the_facts_of_a_checkpoint(ranks, tmp_path):
    path = write_tiny(tmp_path)
    on(ranks, "shard 2 x tensor 2", run_train, path, tmp_path, "train.steps=3", "train.on_nonfinite=skip")
    meta = checkpoint.read_meta(tmp_path / "checkpoints" / "step-00000003")
    assert meta["step"] == 3 and meta["seed"] == 7 and meta["world_size"] == 4
    assert meta["data"] == {"next_step": 3, "sequences": 12} and meta["tokens"] == 3 * 64
    assert meta["layout"] == {"replicate": 1, "shard": 2, "tensor": 2} and meta["skipped"] == 0
    assert meta["versions"].keys() == {"ftrain", "torch", "python"}
    assert load_recipe(write(tmp_path / "saved.toml", meta["recipe"])).model.dim == 16


def write(path, text):
    path.write_text(text)
    return path


# --- into another layout --------------------------------------------------------------------------------


def go_on(rank, world, parallel, path, source, *overrides):
    """Load step 3 in this layout and take three steps. Returns what was loaded whole, and what followed."""
    run = Run(load_recipe(path, (*parallel, *overrides)), World(rank, world))
    said = []
    state, _ = resume.restore(run, source, run.init(), said.append)
    loaded = {name: as_bytes(leaf) for name, leaf in tree.named_leaves(full(stored(state)))}
    weights = state.fp8_state and state.fp8_state.weights
    scales = {name: float(leaf) for name, leaf in tree.named_leaves(weights) if name.endswith("scale")}
    losses, rows = [], []
    while state.step < 6:
        batch = run.batch(state.step)
        rows.append([tuple(row) for row in batch["tokens"].tolist()])
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
    return loaded, scales, losses, rows, run.mesh_shape.data_index(run.mesh.rank)


@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise"])
def test_a_checkpoint_goes_on_in_any_layout(ranks, tmp_path, recipe):
    path = write_tiny(tmp_path)
    on(ranks, "shard 2", run_train, path, tmp_path / "run", *FP8[recipe])
    source = tmp_path / "run" / "checkpoints" / "step-00000003"
    saved, data = contents(source), Run(load_recipe(path)).data.train
    logged = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][3:]
    first_scales = None
    for layout in LAYOUTS:
        results = on(ranks, layout, go_on, path, source, *FP8[recipe])
        first_scales = first_scales or results[0][1]
        assert bool(first_scales) == (recipe != "none")
        for loaded, scales, losses, _, _ in results:
            assert loaded == saved
            assert scales == first_scales
            assert losses == pytest.approx(logged, abs=1e-5 if recipe == "none" else 1e-2)
        for i in range(3):
            slices = {place: rows[i] for _, _, _, rows, place in results}  # tensor peers read the same
            seen = sorted(row for rows in slices.values() for row in rows)
            assert seen == sorted(tuple(row) for row in data.batch(3 + i)["tokens"].tolist())


def test_scales_are_made_from_the_parameters_that_were_loaded(tiny, tmp_path):
    """Not from those of the initial values, which the state that is loaded into had."""
    recipe = tiny("fp8.recipe=tensorwise", "train.steps=3")
    train(recipe, out=tmp_path, quiet=True)
    run = Run(recipe)
    fresh = run.init()
    state, _ = resume.restore(run, tmp_path / "checkpoints" / "step-00000003", fresh, lambda text: None)
    old, new = (
        fresh.fp8_state.weights["layers"][0]["wq"].scale,
        state.fp8_state.weights["layers"][0]["wq"].scale,
    )
    assert new != old
    assert new == 448.0 / state.params["layers"][0]["wq"].abs().amax()


# --- the data goes on where it was ----------------------------------------------------------------------


@pytest.fixture
def epochs(tmp_path, monkeypatch):
    """A recipe over 24 sequences, two micro-batches a step, an epoch of six steps; and what is read."""
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(24 * 16 + 1 - 2)))
    path, read = write_tiny(tmp_path), []
    base = (f"data.source={text}", "data.held_out=0.0", "train.steps=9", "checkpoint.keep=9")
    batch = Run.batch

    def recorded(run, step):
        assert run.micro_batches == 2 and run.data.train.windows.n_windows == 24
        read.append((step + 1, run.data.train.ids(step)))
        return batch(run, step)

    monkeypatch.setattr(Run, "batch", recorded)
    return lambda *overrides: load_recipe(path, (*base, *overrides)), read


def test_sequences_go_on_in_their_order_over_the_end_of_an_epoch(epochs, tmp_path, monkeypatch):
    recipe, read = epochs
    train(recipe(), out=tmp_path / "straight", quiet=True)
    straight = dict(read)
    first = [id_ for step in range(1, 7) for id_ in straight[step]]
    assert sorted(first) == list(range(24))
    assert len({id_ for step in range(7, 10) for id_ in straight[step]}) == 12
    assert [id_ for step in range(7, 10) for id_ in straight[step]] != first[:12]

    copy_start(tmp_path / "straight", tmp_path / "stopped")
    read.clear()
    train(recipe(), out=tmp_path / "stopped", quiet=True)
    assert dict(read) == {step: straight[step] for step in range(4, 10)}

    # Killed in step 5: the two steps after the checkpoint are taken again, from the same sequences.
    counted = Run.batch

    def killed(run, step):
        if step == 4:
            raise KeyboardInterrupt
        return counted(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "batch", killed)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), out=tmp_path / "killed", quiet=True)
    assert [line["step"] for line in read_lines(tmp_path / "killed" / "metrics.jsonl")] == [1, 2, 3, 4]
    read.clear()
    train(recipe(), out=tmp_path / "killed", quiet=True)
    assert dict(read) == {step: straight[step] for step in range(4, 10)}
    lines = [records(tmp_path / name) for name in ("straight", "stopped", "killed")]
    assert lines[0] == lines[1] == lines[2]
    assert [(line["step"], line["tokens"]) for line in lines[2]] == [(step, 64 * step) for step in range(1, 10)]


def test_another_batch_size_or_other_data_is_refused(epochs, tmp_path):
    recipe, _ = epochs
    train(recipe("train.steps=3"), out=tmp_path, quiet=True)
    with pytest.raises(RecipeError, match="data.global_batch_size was 4 and is 8") as error:
        train(recipe("data.global_batch_size=8", "data.seq_len=8"), out=tmp_path, quiet=True)
    assert "data.seq_len was 16 and is 8" in str(error.value) and "Put the old values back" in str(error.value)
    train(recipe("data.cache=off", "train.steps=4"), out=tmp_path, quiet=True)  # which changes no batch
