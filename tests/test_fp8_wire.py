"""What fp8 weights are on the wire: codes of uneven and empty shards, and bytes and reductions, counted."""

import numpy as np
import pytest
import steps
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import Run, fp8, load_recipe, tree
from ftrain.fp8.linear import linear
from ftrain.fp8.state import WeightState
from ftrain.fsdp import Layer, make_gather
from ftrain.launch import World
from ftrain.param import Param, normal
from ftrain.sharding import MeshShape, chunk, make_mesh, plan

# --- one weight, any number of rows ---


def one_weight(rank, world, rows, how):
    """(codes, scale, output, this rank's weight gradient) of a (rows, 16) weight gathered over `world` ranks.

    how: "inline", "precomputed" and "cached" send codes; "late" sends the weight as it is, cast on arrival.
    """
    mesh = make_mesh(MeshShape(shard=world))
    abstract = {"w": Param((rows, 16), ("mlp", "embed"), normal(1.0))}
    whole = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    whole[-1, 3] = 9.0  # the largest value, in the last row that there is
    start, stop = chunk(rows, world, mesh.coordinate["shard"])
    layer = {"w": whole[start:stop].contiguous()}
    gather = make_gather(
        abstract,
        plan(abstract, mesh.shape, compute=()),
        mesh,
        paths={"w": "w"},
        compute_dtype=torch.float32,
        fp8=lambda path: (fp8.E4M3, how != "late"),
    )
    scale = None if how == "inline" else fp8.scale_from_amax(whole.abs().max(), fp8.E4M3)
    codes = fp8.cast(layer["w"], scale, fp8.E4M3) if how == "cached" else None
    known = Layer(layer, None if scale is None else {"w": WeightState(scale, codes)})
    weights = gather.start(known).wait()
    weight = weights["w"].weight
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    (y,), pull = torch.func.vjp(
        lambda port: linear(x, [weight._replace(port=port)], fp8.RECIPES["tensorwise"]), weight.port
    )
    (d_port,) = pull((torch.ones_like(y),))
    (gradient, *_) = gather.scatter({"w": weights["w"]._replace(weight=weight._replace(port=d_port))}).wait(known)
    assert gradient.shape == layer["w"].shape and gradient.dtype == torch.float32
    return weight.data.view(torch.uint8).numpy(), weight.scale.item(), y.numpy(), gradient.numpy()


@pytest.mark.parametrize("rows, world", [(5, 3), (5, 4), (1, 4), (6, 2)])
@pytest.mark.parametrize("how", ["inline", "precomputed", "cached", "late"])
def test_uneven_and_empty_shards_give_the_codes_of_one_rank(ranks, rows, world, how):
    codes, scale, y, gradient = one_weight(0, 1, rows, "inline")
    assert np.float32(scale) == np.float32(448 / 9)
    results = ranks(world, one_weight, world, rows, how)
    for got_codes, got_scale, got_y, _ in results:
        assert np.array_equal(got_codes, codes) and got_scale == scale and np.array_equal(got_y, y)
    assert np.allclose(np.concatenate([result[3] for result in results]), world * gradient, rtol=1e-6)
    height = -(-rows // world)
    assert [len(result[3]) for result in results] == [
        max(0, min(height, rows - height * rank)) for rank in range(world)
    ]


# --- a whole step, counted ---

# Multiples of 16 on every rank, so that nothing is padded and bytes are exact.
EVEN = (
    *(f"model.{key}={value}" for key, value in {**steps.TINY, "vocab_size": 64, "dim": 32, "head_dim": 8}.items()),
    "model.ffn_dim=64",
    "precision.compute=bfloat16",
)
GATHERED = {"_allgather_base_", "all_gather_into_tensor"}
REDUCED = {"allreduce_", "all_reduce", "all_reduce_"}


class Count(TorchDispatchMode):
    """Every collective that runs inside: (name, largest tensor's bytes, whether a maximum)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            largest = any(arg == "max" for arg in args if isinstance(arg, str)) or "MAX" in str(args[2:3])
            self.calls.append((name, max((t.nbytes for t in tensors), default=0), largest))
        return func(*args, **(kwargs or {}))

    def gathered(self):
        """Bytes of each all-gather's result."""
        return [size for name, size, _ in self.calls if name in GATHERED]

    def maxima(self):
        return sum(largest for name, _, largest in self.calls if name in REDUCED)


def counted(rank, world, overrides):
    """Of the second step: (bytes of all gathers, number of maxima, number of gathers)."""
    run = Run(load_recipe("debug", (*steps.BASE, *EVEN, *overrides)), World(rank, world), "cpu")
    state = run.init()
    state, _ = run.step(state, run.batch(0))
    with Count() as step:
        run.step(state, run.batch(1))
    return sum(step.gathered()), step.maxima(), len(step.gathered())


def test_codes_are_half_the_bytes_of_bfloat16_and_everything_else_is_the_same(ranks):
    def bytes_of(*overrides):
        return ranks(2, counted, 2, ("parallel.shard=2", "train.micro_batch_size=2", *overrides))[0]

    plain, gathers = (bytes_of("fp8.recipe=none")[i] for i in (0, 2))
    run = Run(load_recipe("debug", (*steps.BASE, *EVEN)), World(), "cpu")
    numel = {path: param.numel for path, param in tree.named_leaves(run.abstract)}
    # A layer is gathered in the forward and in the backward; the head and the embedding once.
    times = {path: 2 if path.startswith("layers.") else 1 for path in numel}
    assert plain == sum(2 * times[path] * n for path, n in numel.items())
    products = sum(times[path] * n for path, n in numel.items() if run.execution.fp8.runs(path))
    for options in (
        (),
        ("fp8.cache_shards=true",),
        ("fp8.precompute_scales=false",),
        ("fp8.recipe=delayed",),
    ):
        fp8_bytes, _, fp8_gathers = bytes_of(*options)
        assert fp8_gathers == gathers == 2 * 2 + 2
        assert plain - fp8_bytes == products and fp8_bytes < 0.6 * plain
    assert bytes_of("fp8.all_gather=false")[0] == plain
    kept = bytes_of("parallel.reshard_after_forward=false")
    assert kept[2] == 2 + 2


@pytest.mark.parametrize("layout", ["shard 2", "replicate 2 x shard 2"])
def test_one_all_reduce_of_amaxes_a_step(ranks, layout):
    def maxima(*overrides):
        return steps.on(ranks, layout, counted, *overrides)[0][1]

    assert maxima("fp8.recipe=none") == 0
    assert maxima() == 1
    assert maxima("fp8.cache_shards=true") == 1
    assert maxima("fp8.recipe=delayed") == 1
    layers, micro_batches = 2, 4 // (2 if layout == "shard 2" else 4)
    # Without, every gather of a layer and of the head asks for the scales of its weights.
    assert maxima("fp8.precompute_scales=false") == micro_batches * (2 * layers + 1)


def test_with_histories_tensor_parallel_layers_reduce_no_amax_at_all(ranks):
    def maxima(*overrides):
        return steps.on(ranks, "tensor 2", counted, "train.micro_batch_size=4", *overrides)[0][1]

    softmax = maxima("fp8.recipe=none")
    assert softmax == 1
    assert maxima("fp8.recipe=delayed") == softmax + 1
    # Dynamic scales span ranks: of 4 inputs and 7 output gradients of a layer, 1 and 1 of the head. Those of
    # weights take one more, for the whole step.
    assert maxima() == softmax + 2 * (4 + 7) + 2 + 1


def test_tensor_parallel_inputs_travel_as_codes(ranks):
    """Forward, the input of a column layer; backward, the output gradient of a row layer."""
    options = ("train.micro_batch_size=4", "parallel.tensor=2")
    plain, in_fp8 = (ranks(2, counted, 2, (*options, f"fp8.recipe={n}"))[0][0] for n in ("none", "tensorwise"))
    sent = 4 * 16 // 2 * 32  # elements of a rank's half of the sequences: these gathers are counted as sent
    # Of a layer: the inputs of q, k and v and of gate and up, the output gradients of wo and of down; and the
    # head's input. The gradient of the embedding's rows stays in bfloat16.
    assert plain == 2 * sent * (2 * 4 + 1 + 1)
    assert in_fp8 == sent * (2 * 4 + 1) + 2 * sent
