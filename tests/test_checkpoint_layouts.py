"""Several ranks: a checkpoint of any layout loads into any other bit for bit, uneven and empty shards too."""

import torch
import torch.distributed as dist

from ftrain import checkpoint, sharding, tree
from ftrain.sharding import MeshShape, Spec

# name -> shape, dtype, axes that split each dim. 10 rows over 4 ranks are uneven; 3 and 1 leave some empty.
LEAVES = {
    "both": ((10, 6), torch.float32, Spec((("tensor", "shard"), ()))),
    "crossed": ((7, 5), torch.float32, Spec((("shard",), ("tensor",)))),
    "few": ((3,), torch.bfloat16, Spec((("tensor", "shard"),))),
    "one": ((1, 5), torch.float8_e4m3fn, Spec((("tensor", "shard"), ()))),
    "whole": ((4,), torch.float32, Spec(((),))),
    "scalar": ((), torch.int64, Spec(())),
}
LAYOUTS = {
    "single": MeshShape(),
    "shard 2": MeshShape(shard=2),
    "tensor 2": MeshShape(tensor=2),
    "shard 4": MeshShape(shard=4),
    "tensor 4": MeshShape(tensor=4),
    "tensor 2 shard 2": MeshShape(tensor=2, shard=2),
    "replicate 2 shard 2": MeshShape(replicate=2, shard=2),
    "replicate 2 tensor 2": MeshShape(replicate=2, tensor=2),
}


def whole_state() -> dict:
    """The full tensors, the same in every process."""
    g = torch.Generator().manual_seed(5)
    state = {name: torch.randn(shape, generator=g).mul(9).to(dtype) for name, (shape, dtype, _) in LEAVES.items()}
    return {"params": state, "plain": torch.arange(6.0), "step": 4}


def laid_out(whole: dict, shape: MeshShape) -> dict:
    """This rank's part of `whole` as DTensors."""
    mesh = sharding.make_mesh(shape)
    params = {}
    for name, (full_shape, _, spec) in LEAVES.items():
        part = sharding.local_slices(full_shape, spec, shape, mesh.rank)
        params[name] = sharding.from_local(whole["params"][name][part].contiguous(), full_shape, spec, mesh)
    return {**whole, "params": params}


def as_bytes(state: dict) -> dict:
    """This rank's part of every leaf, as bytes: gloo cannot gather every dtype."""
    local = tree.named_leaves(sharding.to_local(state))
    return {
        name: leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(leaf) else leaf
        for name, leaf in local
    }


def save_in(rank: int, root, layouts: list[str]) -> None:
    for layout in layouts:
        checkpoint.save(root / layout, laid_out(whole_state(), LAYOUTS[layout]), step=4, meta={}, keep=1)


def load_in(rank: int, root, layouts: list[str]) -> list[str]:
    """Load every checkpoint under `root` into each of `layouts`. Returns the pairs that came out wrong."""
    wrong = []
    whole = whole_state()
    zeros = {**tree.map(lambda x: torch.zeros_like(x), {**whole, "step": torch.zeros(())}), "step": 0}
    for source in sorted(path.name for path in root.iterdir()):
        for layout in layouts:
            like = laid_out(zeros, LAYOUTS[layout])
            path, skipped = checkpoint.latest(root / source)
            loaded, _ = checkpoint.load(path, like)
            same_layout = all(
                getattr(a, "placements", None) == getattr(b, "placements", None)
                for a, b in zip(tree.leaves(loaded), tree.leaves(like), strict=True)
            )
            if as_bytes(loaded) != as_bytes(laid_out(whole, LAYOUTS[layout])) or not same_layout or skipped:
                wrong.append(f"{source} -> {layout}")
    return wrong


def test_any_layout_loads_into_any_other(ranks, tmp_path):
    sizes = {size: [name for name, shape in LAYOUTS.items() if shape.size == size] for size in (1, 2, 4)}
    save_in(0, tmp_path, sizes[1])
    for size in (2, 4):
        ranks(size, save_in, tmp_path, sizes[size])
    assert load_in(0, tmp_path, sizes[1]) == []
    for size in (2, 4):
        assert ranks(size, load_in, tmp_path, sizes[size]) == [[]] * size


def test_a_replicated_tensor_is_written_once(ranks, tmp_path):
    ranks(4, save_in, tmp_path, ["replicate 2 shard 2"])
    chunks = checkpoint.storage.decode_index(
        (tmp_path / "replicate 2 shard 2" / "step-00000004" / "index.json").read_text(),
        {f"rank-{rank:05d}.bin": 1 << 20 for rank in range(4)},
    )[0]
    full = sum(leaf.numel() * leaf.itemsize for leaf in tree.leaves(whole_state()) if torch.is_tensor(leaf))
    files = (tmp_path / "replicate 2 shard 2" / "step-00000004").glob("*.bin")
    n_chunks = sum(len(leaf.chunks) for leaf in chunks.values())
    assert full <= sum(file.stat().st_size for file in files) <= full + n_chunks * checkpoint.storage.ALIGN


def load_meta(rank: int, path) -> bool:
    state = laid_out(whole_state(), LAYOUTS["tensor 2 shard 2"])
    like = tree.map(lambda x: torch.empty_like(x, device="meta") if torch.is_tensor(x) else x, state)
    loaded, _ = checkpoint.load(path, like)
    return as_bytes(loaded) == as_bytes(state)


def test_meta_dtensors_are_enough_to_load_into(ranks, tmp_path):
    ranks(4, save_in, tmp_path, ["shard 4"])
    assert ranks(4, load_meta, tmp_path / "shard 4" / "step-00000004") == [True] * 4


def save_while_training(rank: int, root) -> tuple[bool, str]:
    """Collectives of the training loop go on in the main thread, on another group than the save's."""
    state = laid_out(whole_state(), LAYOUTS["tensor 2 shard 2"])
    want = as_bytes(state)
    try:
        checkpoint.save_async(root, state, step=1, meta={}, keep=1)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    group = dist.new_group(backend="gloo")
    for step in range(1, 4):
        pending = checkpoint.save_async(root, state, step=step, meta={}, keep=1, group=group)
        for leaf in tree.leaves(sharding.to_local(state["params"])):
            leaf.zero_()
        sums = [torch.full((64,), float(i)) for i in range(50)]
        for i, value in enumerate(sums):
            dist.all_reduce(value)
            assert value[0] == 4 * i
        pending.wait()
        state = laid_out(whole_state(), LAYOUTS["tensor 2 shard 2"])
    loaded, _ = checkpoint.load(root / "step-00000003", state)
    dist.destroy_process_group(group)
    return as_bytes(loaded) == want, refusal


def test_a_background_save_does_not_mix_with_training(ranks, tmp_path):
    for same, refusal in ranks(4, save_while_training, tmp_path):
        assert same and "new_group" in refusal
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [3]


def save_disagreeing(rank: int, root) -> list[str]:
    """Mistakes that only one rank makes; every rank must hear of them."""
    mesh = sharding.make_mesh(MeshShape(shard=2)).device_mesh
    partial = torch.distributed.tensor.Partial()
    summands = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [partial], run_check=False)
    messages = []
    for state in (
        {"step": rank},
        {"x": torch.zeros(2) if rank == 0 else "text"},
        {"x": summands},
    ):
        try:
            checkpoint.save(root, state, step=1, meta={}, keep=1)
        except checkpoint.CheckpointError as error:
            messages.append(str(error))
    return messages


def test_ranks_that_disagree_all_hear_of_it(ranks, tmp_path):
    first, second = ranks(2, save_disagreeing, tmp_path)
    assert first == second
    assert "step is 0 on rank 0 and 1 on rank 1" in first[0]
    assert "rank 1: TypeError: x is a str" in first[1] and "rank 0" not in first[1]
    assert "a partial sum must be reduced" in first[2]
    assert checkpoint.complete(tmp_path) == []


def test_every_rank_refuses_a_checkpoint_that_does_not_fit(ranks, tmp_path):
    save_in(0, tmp_path, ["single"])
    messages = ranks(2, load_wrong, tmp_path / "single" / "step-00000004")
    assert len(set(messages)) == 1 and "6 in the checkpoint only" in messages[0]


def load_wrong(rank: int, path) -> str:
    try:
        checkpoint.load(path, {"plain": torch.zeros(6), "step": 0})
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""
