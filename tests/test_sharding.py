"""Specs, rules and meshes: layouts are data, and DTensor agrees with them."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ftrain import tree
from ftrain.launch import is_lost_peer
from ftrain.models import llama
from ftrain.param import ONES, Param
from ftrain.sharding import (
    AXES,
    COMPUTE_RULES,
    STORED_RULES,
    Mesh,
    MeshShape,
    Rule,
    ShardingError,
    Spec,
    chunk,
    from_local,
    from_placements,
    full,
    initialize,
    like,
    local_shape,
    local_slices,
    make_mesh,
    placements,
    plan,
    to_local,
)

MESHES = [
    MeshShape(),
    MeshShape(shard=3),
    MeshShape(tensor=4),
    MeshShape(shard=4, tensor=2),
    MeshShape(replicate=2, shard=3),
    MeshShape(replicate=2, shard=3, tensor=4),
]
SPECS = [
    Spec(((), ())),
    Spec((("shard",), ())),
    Spec((("tensor", "shard"), ())),
    Spec((("shard",), ("tensor",))),
    Spec((("tensor",), ("shard",))),
]


# --- the mesh ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_a_place_of_its_own_and_tensor_peers_are_neighbours(mesh):
    ranks = mesh.ranks()
    assert ranks.shape == (mesh.replicate, mesh.tensor, mesh.shard)
    assert sorted(ranks.flatten().tolist()) == list(range(mesh.size))
    for rank in range(mesh.size):
        assert ranks[tuple(mesh.coordinate(rank)[axis] for axis in AXES)] == rank
    for replicate, shard in product(range(mesh.replicate), range(mesh.shard)):
        peers = ranks[replicate, :, shard].tolist()
        assert peers == list(range(peers[0], peers[0] + mesh.tensor))
        assert len({mesh.data_index(rank) for rank in peers}) == 1, "tensor peers must read the same sequences"
    assert {mesh.data_index(rank) for rank in range(mesh.size)} == set(range(mesh.data))


def test_axes_of_one_rank_are_left_out():
    assert MeshShape(replicate=2, shard=3).axes == ("replicate", "shard")
    assert MeshShape().axes == ()


@pytest.mark.parametrize("degrees", [{"shard": 0}, {"tensor": -2}])
def test_a_degree_below_one_is_refused(degrees):
    ((axis, value),) = degrees.items()
    with pytest.raises(ShardingError, match=f"parallel.{axis}={value}"):
        MeshShape(**degrees)


def test_a_mesh_of_another_size_than_the_world_is_refused():
    with pytest.raises(ShardingError, match="replicate 1 x shard 2 x tensor 3 = 6 ranks, but the world has 1"):
        make_mesh(MeshShape(shard=2, tensor=3))


def test_one_rank_needs_no_process_group():
    mesh = make_mesh(MeshShape())
    assert mesh.world is None and all(mesh.group(axis) is None for axis in AXES)


# --- specs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_placements_say_what_the_spec_says(spec):
    mesh = MeshShape(replicate=2, shard=3, tensor=4)
    assert from_placements(placements(spec, mesh), mesh, 2) == spec


def test_placements_are_one_for_each_axis_that_splits():
    spec = Spec((("tensor", "shard"), ()))
    assert placements(spec, MeshShape(replicate=2, shard=3, tensor=4)) == [Replicate(), Shard(0), Shard(0)]
    assert placements(spec, MeshShape(shard=3)) == [Shard(0)]
    assert placements(spec, MeshShape()) == []


def test_a_partial_sum_has_no_spec():
    with pytest.raises(ShardingError, match="shard"):
        from_placements([Partial()], MeshShape(shard=2), 1)


def test_a_spec_reads_as_one_would_say_it():
    assert str(Spec((("tensor", "shard"), ()))) == "(tensor+shard, -)"
    assert Spec((("tensor",), ("shard",))).dim_of("shard") == 1
    assert Spec(((), ())).dim_of("shard") is None


@pytest.mark.parametrize("size", [0, 1, 5, 8, 13])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 16])
def test_chunks_cover_every_row_once_in_order(size, parts):
    pieces = [chunk(size, parts, i) for i in range(parts)]
    assert [row for start, stop in pieces for row in range(start, stop)] == list(range(size))
    assert [len(piece) for piece in torch.arange(size).chunk(parts) if len(piece)] == [
        stop - start for start, stop in pieces if stop > start
    ]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(24, 8), (7, 3), (1, 1)])
def test_every_element_is_held_as_often_as_the_spec_says(mesh, spec, shape):
    held = torch.zeros(shape)
    for rank in range(mesh.size):
        slices = local_slices(shape, spec, mesh, rank)
        assert held[slices].shape == local_shape(shape, spec, mesh, rank)
        held[slices] += 1
    split = [getattr(mesh, axis) for axes in spec.dims for axis in axes]
    assert (held == mesh.size // torch.tensor(split or [1]).prod()).all()


def test_a_world_of_thousands_needs_no_device():
    mesh = MeshShape(replicate=4, shard=512, tensor=8)
    spec = Spec((("tensor", "shard"), ()))
    assert local_shape((128256, 16384), spec, mesh, 0) == (32, 16384)
    assert local_shape((128256, 16384), spec, mesh, mesh.size - 1) == (
        0,
        16384,
    )  # 16032 rows, 32 a rank: 501 have any


# --- rules -------------------------------------------------------------------------------------------------

DECLARED = {
    "a": Param((8, 6), ("heads", "embed"), ONES),
    "b": [Param((6, 8), ("embed", "heads"), ONES), Param((5,), ("embed",), ONES)],
}


def test_rules_split_by_logical_name_then_shards_by_row():
    plans = plan(DECLARED, MeshShape(shard=2, tensor=2), (Rule("heads", "tensor"),), STORED_RULES)
    assert plans["a"].compute == Spec((("tensor",), ()))
    assert plans["a"].stored == Spec((("tensor", "shard"), ()))
    assert plans["b"][0].stored == Spec((("shard",), ("tensor",)))
    assert plans["b"][1].compute == Spec(((),)) and plans["b"][1].stored == Spec((("shard",),))
    assert plans["a"].rules == (Rule("heads", "tensor"), Rule(0, "shard"))


def test_a_rule_may_be_for_some_paths_only():
    plans = plan(DECLARED, MeshShape(shard=2), (), (Rule(0, "shard", "b.*"),))
    assert plans["a"].stored == Spec(((), ()))
    assert plans["b"][1].stored == Spec((("shard",),))


@pytest.mark.parametrize(
    "compute,stored,words",
    [
        ((Rule("heads", "model"),), STORED_RULES, ["heads -> model", "'model'", "replicate, tensor, shard"]),
        ((Rule("head", "tensor"),), STORED_RULES, ["head -> tensor", "matches no parameter", "embed, heads"]),
        (
            (Rule("heads", "tensor", "c.*"),),
            STORED_RULES,
            ["heads -> tensor for c.*", "matches no parameter"],
        ),
        ((), (Rule(2, "shard"),), ["2 -> shard", "matches no parameter"]),
        ((), (Rule(0, "shard"), Rule(0, "shard", "a")), ["0 -> shard for a", "shadowed"]),
        ((Rule("heads", "tensor"), Rule("heads", "tensor")), STORED_RULES, ["shadowed"]),
        ((Rule("heads", "tensor"), Rule(0, "tensor")), STORED_RULES, ["a: ", "'tensor'", "both"]),
        ((Rule(0, "tensor"),), STORED_RULES, ["b.1", "(5,)", "5", "parallel.tensor=2"]),
    ],
    ids=lambda x: str(x[0]) if x else "",
)
def test_rules_that_cannot_work_are_refused_with_what_is_there(compute, stored, words):
    with pytest.raises(ShardingError) as error:
        plan(DECLARED, MeshShape(shard=2, tensor=2), compute, stored)
    assert all(word in str(error.value) for word in words), error.value


def test_all_problems_are_told_at_once():
    rules = (Rule("heads", "model"), Rule("nothing", "tensor"), Rule("embed", "tensor"))
    with pytest.raises(ShardingError) as error:
        plan(DECLARED, MeshShape(tensor=4), rules)
    lines = str(error.value).splitlines()
    assert len(lines) == 2 + 3 and len(set(lines)) == len(lines)  # two bad rules; embed is 6, 6 and 5 wide


@pytest.mark.parametrize("field,value", [("n_kv_heads", 2), ("ffn_dim", 50), ("vocab_size", 66)])
def test_what_tensor_does_not_divide_is_named_with_both_numbers(field, value):
    sizes = {"vocab_size": 64, "n_kv_heads": 4, "ffn_dim": 48} | {field: value}
    cfg = llama.Config(dim=16, n_layers=1, n_heads=4, head_dim=1, **sizes)
    with pytest.raises(ShardingError, match=f"{value} is not a multiple of parallel.tensor=4"):
        plan(llama.abstract(cfg), MeshShape(tensor=4), COMPUTE_RULES, STORED_RULES)


# --- live meshes -------------------------------------------------------------------------------------------

SHAPES = [(8, 4), (7, 4), (5, 16), (1, 4), (3, 8)]


def against_dtensor(rank, shape):
    """Problems, as sentences, of layouts on a live mesh: everything is compared with DTensor's own."""
    mesh, wrong = make_mesh(shape), []
    for axis in shape.axes:
        peers = dist.get_process_group_ranks(mesh.group(axis))
        step = {"tensor": 1, "shard": shape.tensor, "replicate": shape.tensor * shape.shard}[axis]
        if peers != list(range(peers[0], peers[0] + step * len(peers), step)) or rank not in peers:
            wrong.append(f"rank {rank}: its peers over {axis} are {peers}")
    for spec, sizes in product(SPECS, SHAPES):
        whole = torch.arange(sizes[0] * sizes[1], dtype=torch.float32).view(sizes)
        slices = local_slices(sizes, spec, shape, rank)
        theirs, offset = compute_local_shape_and_global_offset(sizes, mesh.device_mesh, placements(spec, shape))
        mine = tuple(s.stop - s.start for s in slices)
        if mine != tuple(theirs) or (all(mine) and tuple(s.start for s in slices) != tuple(offset)):
            wrong.append(f"rank {rank}: {sizes} by {spec}: {slices}, DTensor's {theirs} at {offset}")
        placed = from_local(whole[slices].contiguous(), sizes, spec, mesh)
        if not torch.equal(placed.full_tensor(), whole):
            wrong.append(f"rank {rank}: {sizes} by {spec} does not come back in order")
        by_dtensor = distribute_tensor(whole, mesh.device_mesh, placements(spec, shape))
        if not torch.equal(by_dtensor.to_local(), whole[slices]) or by_dtensor.stride() != placed.stride():
            wrong.append(f"rank {rank}: {sizes} by {spec} is not what DTensor would make")
    return wrong


@pytest.mark.parametrize(
    "shape",
    [MeshShape(shard=4), MeshShape(tensor=4), MeshShape(shard=2, tensor=2), MeshShape(replicate=2, shard=2)],
    ids=str,
)
def test_layouts_are_dtensors_own_even_uneven_and_empty(ranks, shape):
    assert sum(ranks(4, against_dtensor, shape), []) == []


def tree_of_dtensors(rank):
    shape = MeshShape(shard=2)
    mesh = make_mesh(shape)
    plans = plan(DECLARED, shape, (), STORED_RULES)
    params = initialize(DECLARED, plans, mesh, 0)
    state = {"step": 3, "params": params}
    local = to_local(state)
    again = like(local, state)
    assert all(isinstance(leaf, DTensor) for leaf in tree.leaves(params))
    assert not any(isinstance(leaf, DTensor) for leaf in tree.leaves(local))
    assert local["params"]["b"][1].data_ptr() == params["b"][1].to_local().data_ptr(), "to_local copied"
    for a, b in zip(tree.leaves(again["params"]), tree.leaves(params), strict=True):
        assert a.placements == b.placements and a.shape == b.shape and a.stride() == b.stride()
    assert local["step"] == again["step"] == full(again)["step"] == 3
    return [tuple(leaf.shape) for leaf in tree.leaves(full(params))]


def test_trees_go_to_local_tensors_and_back(ranks):
    for shapes in ranks(2, tree_of_dtensors):
        assert shapes == [(8, 6), (6, 8), (5,)]


def test_on_one_rank_nothing_is_a_dtensor():
    mesh = Mesh()
    params = initialize(DECLARED, plan(DECLARED, mesh.shape, (), STORED_RULES), mesh, 0)
    assert not any(isinstance(leaf, DTensor) for leaf in tree.leaves(params))
    assert to_local(params)["a"] is params["a"] is like(params, params)["a"] is full(params)["a"]


# --- timeouts -------------------------------------------------------------------------------------------------------


def wait_for_a_rank_that_hangs(rank):
    mesh = make_mesh(MeshShape(replicate=2, shard=2), timeout=1.0)
    outcome = "went on"
    if rank != 3:
        try:
            dist.all_reduce(torch.ones(1), group=mesh.group("shard"))
        except RuntimeError as error:
            outcome = "lost a peer" if is_lost_peer(error) else str(error)
    dist.barrier()  # the world's own patience is longer
    return outcome


def test_a_rank_that_hangs_is_noticed_along_every_axis_after_the_timeout(ranks):
    assert ranks(4, wait_for_a_rank_that_hangs) == ["went on", "went on", "lost a peer", "went on"]
