"""The law of layouts: the same seed and batch give the same loss and gradients on every mesh."""

import pytest
import torch
from torch.func import grad_and_value

from ftrain import tree
from ftrain.execution import Execution
from ftrain.models import llama
from ftrain.sharding import MeshShape, full, initialize, like, make_mesh, to_local
from ftrain.step import make_global_norm, sum_over_tensor

TINY = llama.Config(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=4, ffn_dim=48)
ODD = llama.Config(vocab_size=60, dim=18, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=6, ffn_dim=44)


def batch_of(cfg, sequences=4, seq_len=16):
    """Sequences with ragged targets, so that ranks count different numbers of tokens."""
    tokens = torch.randint(0, cfg.vocab_size, (sequences, seq_len + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    for row, valid in enumerate([1, 16, 7, 3][:sequences]):
        targets[row, valid:] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def gradients(rank, shape, cfg, options):
    """(initial params, loss, grads, norm) as whole tensors, computed on the mesh `shape`."""
    mesh = make_mesh(shape)
    execution = Execution(mesh=mesh, **options)
    declared = llama.abstract(cfg)
    plans = execution.plans(declared)
    params = initialize(declared, plans, mesh, seed=7)
    batch = batch_of(cfg)
    mine = shape.data_index(mesh.rank)
    each = len(batch["tokens"]) // shape.data
    batch = {key: value[mine * each : (mine + 1) * each] for key, value in batch.items()}
    loss = llama.make_model(cfg, execution).loss
    grads, (value, _) = grad_and_value(lambda p: loss(p, batch), has_aux=True)(to_local(params))
    if shape.tensor > 1:
        grads = sum_over_tensor(grads, plans, mesh)
    norm = make_global_norm(mesh, plans)(grads)
    if shape.data > 1:
        value = value.clone()
        torch.distributed.all_reduce(value)
        value /= shape.tensor
    arrays = [[leaf.numpy() for leaf in tree.leaves(full(t))] for t in (params, like(grads, params))]
    return arrays[0], value.item(), arrays[1], norm.item()


def check_same(got, expected):
    params, loss, grads, norm = got
    for a, b in zip(params, expected[0], strict=True):
        assert (a == b).all(), "initial parameters differ"
    assert abs(loss - expected[1]) <= 1e-5 * abs(expected[1])
    for a, b in zip(grads, expected[2], strict=True):
        a, b = torch.from_numpy(a), torch.from_numpy(b)
        assert (a - b).norm() <= 1e-5 * b.norm(), ((a - b).norm(), b.norm())
        assert b.abs().max() > 0, "a gradient is all zero: the test proves nothing"
    assert abs(norm - expected[3]) <= 1e-5 * expected[3]


LAYOUTS = {
    "shard 2": MeshShape(shard=2),
    "shard 4": MeshShape(shard=4),
    "replicate 2 x shard 2": MeshShape(replicate=2, shard=2),
    "tensor 2": MeshShape(tensor=2),
    "tensor 4": MeshShape(tensor=4),
    "shard 2 x tensor 2": MeshShape(shard=2, tensor=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cfg", [TINY, ODD], ids=["even", "uneven"])
def test_every_layout_computes_the_gradients_of_one_rank(ranks, name, cfg):
    shape = LAYOUTS[name]
    expected = gradients(0, MeshShape(), cfg, {})
    results = ranks(shape.size, gradients, shape, cfg, {})
    for result in results:
        check_same(result, expected)
