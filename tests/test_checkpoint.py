"""One process: what is saved comes back bit for bit, or the error says what does not fit."""

import json
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from ftrain import checkpoint, tree
from ftrain.checkpoint import CheckpointError


class State(NamedTuple):
    """The shape of a training state; any tree will do."""

    step: int
    params: Any
    opt_state: Any
    fp8_state: Any


def make_state(step: int = 3, seed: int = 0, layers: int = 2) -> State:
    """A state with every kind of leaf: nested containers, scalars, empty and odd shapes, many dtypes."""
    g = torch.Generator().manual_seed(seed)
    layer = lambda: {"wq": torch.randn(6, 4, generator=g), "norm": torch.randn(4, generator=g)}  # noqa: E731
    params = {"embedding": torch.randn(7, 4, generator=g), "layers": [layer() for _ in range(layers)]}
    moments = {
        "count": torch.tensor(step),
        "mu": tree.map(torch.square, params),
        "transposed": torch.randn(3, 5, generator=g).t(),
        "none": None,
    }
    history = torch.randn(4, generator=g)
    fp8 = {"amax": history, "data": history.to(torch.float8_e4m3fn), "empty": torch.empty(0, 3), "on": True}
    return State(step, params, (moments, 0.5), fp8 | {"half": history.bfloat16(), "mask": history > 0})


def assert_same(a: Any, b: Any) -> None:
    """Both trees have the same structure and bitwise the same leaves."""
    tree.check_same_structure(a, b)
    for (name, x), y in zip(tree.named_leaves(a), tree.leaves(b), strict=True):
        assert type(x) is type(y), name
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape, name
            x, y = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
            assert torch.equal(x, y), name
        else:
            assert x == y, name


def blank(state: State) -> State:
    """The same structure with other values in it."""
    return tree.map(lambda x: torch.full_like(x, 1) if isinstance(x, torch.Tensor) else type(x)(0), state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_comes_back(tmp_path, asynchronous):
    state = make_state()
    kept = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    arguments = dict(step=3, meta={"seed": 7, "recipe": "a = 1\n"}, keep=2)
    if asynchronous:
        pending = checkpoint.save_async(tmp_path / "new" / "folder", state, **arguments)
        for leaf in tree.leaves(state):  # the state may be donated at once
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
        path = pending.wait()
        assert pending.done()
    else:
        path = checkpoint.save(tmp_path / "new" / "folder", state, **arguments)
    assert path == tmp_path / "new" / "folder" / "step-00000003"
    like = blank(kept)
    before = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, like)
    loaded, meta = checkpoint.load(path, like)
    assert_same(loaded, kept)
    assert_same(like, before)
    assert meta["seed"] == 7 and meta["recipe"] == "a = 1\n" and meta["step"] == 3 and meta["world_size"] == 1
    assert meta["versions"]["torch"] == torch.__version__
    assert checkpoint.read_meta(path) == meta


def test_meta_tensors_are_enough_to_load_into(tmp_path):
    state = make_state()
    path = checkpoint.save(tmp_path, state, step=3, meta={}, keep=1)
    like = tree.map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, state)
    assert_same(checkpoint.load(path, like)[0], state)


def test_leaves_pair_by_name_whatever_the_order(tmp_path):
    path = checkpoint.save(tmp_path, {"wk": torch.zeros(2), "wv": torch.ones(2)}, step=1, meta={}, keep=1)
    loaded, _ = checkpoint.load(path, {"wv": torch.empty(2), "wk": torch.empty(2)})
    assert_same(loaded, {"wk": torch.zeros(2), "wv": torch.ones(2)})


def test_every_misfit_is_named_and_counted_at_once(tmp_path):
    path = checkpoint.save(tmp_path, make_state(layers=2), step=3, meta={}, keep=1)
    like = make_state(layers=3)
    del like.params["embedding"]
    like.params["layers"][0]["wq"] = torch.zeros(8, 4)
    like.params["layers"][1]["norm"] = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, like._replace(step=3.0))
    lines = str(error.value).splitlines()[1:]
    assert [line.strip().split(":")[0] for line in lines] == [
        "4 missing from the checkpoint",  # parameters and first moments
        "1 in the checkpoint only",
        "1 of another shape",
        "2 of another dtype",
    ]
    assert "params.layers.2.norm, params.layers.2.wq" in lines[0] and "opt_state.0.mu.layers.2.wq" in lines[0]
    assert "params.embedding" in lines[1]
    assert "params.layers.0.wq (checkpoint (6, 4), asked for (8, 4))" in lines[2]
    assert "params.layers.1.norm (checkpoint float32, asked for bfloat16)" in lines[3]
    assert "step (checkpoint int, asked for float)" in lines[3]


def test_only_the_parameters_when_the_rest_is_ignored(tmp_path):
    state = make_state()
    path = checkpoint.save(tmp_path, state, step=3, meta={}, keep=1)
    like = State(0, blank(state).params, None, None)
    with pytest.raises(CheckpointError, match="in the checkpoint only: .*fp8_state.amax"):
        checkpoint.load(path, like, ignore=("opt_state",))
    loaded, _ = checkpoint.load(path, like, ignore=("opt_state", "fp8_state"))
    assert_same(loaded, State(3, state.params, None, None))


def test_schema_lists_what_is_stored(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), step=3, meta={}, keep=1)
    schema = checkpoint.schema(path)
    assert schema["step"] == ("int", ())
    assert schema["params.layers.1.wq"] == ("float32", (6, 4))
    assert schema["fp8_state.data"] == ("float8_e4m3fn", (4,))


@pytest.mark.parametrize(
    "state, step, meta, words",
    [
        ({"a": {"b": "text"}}, 1, {}, "a.b is a str"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, 1, {}, "a has dtype torch.complex64"),
        ({"a": torch.zeros(2, device="meta")}, 1, {}, "a is on the meta device"),
        ({"a": 1}, -1, {}, "step must be an integer"),
        ({"a": 1}, 1, {"loss": float("nan")}, "JSON"),
        ({"a": 1}, 1, {"x": object()}, "not JSON serializable"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, state, step, meta, words):
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(tmp_path / "root", state, step=step, meta=meta, keep=1)
    assert not (tmp_path / "root").exists()


def test_the_manifest_is_readable_and_lists_every_file(tmp_path):
    path = checkpoint.save(tmp_path, make_state(), step=12, meta={"data": {"tokens": 96}}, keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 12 and manifest["meta"]["data"] == {"tokens": 96}
    on_disk = {file.name: file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"}
    assert manifest["files"] == on_disk


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_state_is_saved_in_the_background_and_loaded_onto_the_gpu(tmp_path):
    """DTensors on a CUDA mesh over NCCL, staged to the host, coordinated over gloo."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        group = dist.new_group(backend="gloo")
        whole = torch.randn(8, 4, device="cuda")
        split = lambda x: DTensor.from_local(x, mesh, [Shard(0)], run_check=False)  # noqa: E731
        state = {"split": split(whole.clone()), "plain": whole[0].clone(), "step": 2}
        pending = checkpoint.save_async(tmp_path / "root", state, step=2, meta={}, keep=1, group=group)
        state["split"].to_local().zero_()
        state["plain"].zero_()
        path = pending.wait()
        blank_meta = {"split": split(whole.to("meta")), "plain": state["plain"], "step": 0}
        for like in (state, blank_meta):
            loaded, _ = checkpoint.load(path, like)
            assert loaded["split"].to_local().is_cuda and torch.equal(loaded["split"].to_local(), whole)
            assert loaded["plain"].is_cuda and torch.equal(loaded["plain"], whole[0])
        assert checkpoint.save(tmp_path / "root", loaded, step=3, meta={}, keep=1).name == "step-00000003"
    finally:
        dist.destroy_process_group()
