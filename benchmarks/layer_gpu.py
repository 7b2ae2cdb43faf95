"""Time one layer of Llama 3 8B, forward and backward, on one GPU: `python benchmarks/layer_gpu.py [NAME ...]`.

The peer is the ordinary nn.Module of plain_llama.py, converted by torchao 0.17 where the name says so, and compiled.
Both run LAYERS layers one after another on 8192 positions with bf16 parameters; the time is that of all, divided. Each
name runs in a process of its own and is one line of the table.
"""

import argparse
import json
import statistics
import subprocess
import sys

LAYERS, POSITIONS = 4, 8192
OURS = {
    "bf16": ("fp8.recipe=none",),
    "fp8": ("fp8.recipe=tensorwise", "fp8.cache_shards=true"),
    "fp8-inline": ("fp8.recipe=tensorwise", "fp8.precompute_scales=false"),
    "delayed": ("fp8.recipe=delayed", "fp8.precompute_scales=false"),
    "rowwise": ("fp8.recipe=rowwise", "fp8.all_gather=false", "fp8.precompute_scales=false"),
}
PEERS = {"peer-bf16": None, "peer-tensorwise": "tensorwise", "peer-rowwise": "rowwise"}
NAMES = tuple(name for pair in zip(OURS, (*PEERS, None, None), strict=True) for name in pair if name)


def ftrain_layers(overrides):
    """A function that runs all layers forward and backward once."""
    import torch

    import ftrain
    from ftrain import fp8
    from ftrain.execution import Execution
    from ftrain.fold import fold
    from ftrain.fsdp import Layer
    from ftrain.models import llama
    from ftrain.nn import rope_frequencies, rope_table
    from ftrain.recipe import load_recipe, model_config
    from ftrain.sharding import Mesh

    recipe = load_recipe("llama3-8b", (f"model.n_layers={LAYERS}", "model.vocab_size=256", *overrides))
    cfg = model_config(recipe.model)
    declared = llama.abstract(cfg)
    execution = Execution(
        mesh=Mesh(device=torch.device("cuda")),
        compute_dtype=torch.bfloat16,
        compile=True,
        fp8=fp8.use(recipe.fp8, llama.product_weights(cfg)),
    )
    params = ftrain.tree.map(lambda p: p.to("cuda", torch.bfloat16), llama.init(cfg, seed=0))
    # Scales and shards of the weights are made once a step, after the optimizer; here as in a run not by the layer.
    state = ftrain.init_state(params, ftrain.optim.sgd(0.1), post=execution.post(declared))
    known = state.fp8_state.weights["layers"] if state.fp8_state else [None] * LAYERS
    paths = ftrain.tree.map_named(lambda path, _: path, declared)["layers"]
    plans = execution.plans(declared)["layers"]
    gathers = [execution.gather(*parts) for parts in zip(declared["layers"], plans, paths, strict=True)]
    block = execution.jit(lambda *args: llama.block(*args, cfg=cfg, linear=execution.linear))
    table = rope_table(POSITIONS, rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling).to("cuda"))

    def run(weights, x):
        layers = [Layer(*pair) for pair in zip(weights, known, strict=True)]
        return fold(block, layers, x, table, None, gathers=gathers)

    def both_ways(x, grad):
        _, pullback = torch.func.vjp(run, params["layers"], x)
        pullback(grad)

    return both_ways, cfg.dim


def peer_layers(recipe):
    """The same of ordinary modules."""
    import torch
    from plain_llama import Llama

    from ftrain.recipe import load_recipe, model_config

    cfg = model_config(load_recipe("llama3-8b", (f"model.n_layers={LAYERS}",)).model)
    model = Llama(cfg, POSITIONS)
    layers = model.layers.to("cuda", torch.bfloat16)
    cos, sin = model.cos.cuda(), model.sin.cuda()
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(recipe))
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False)

    def both_ways(x, grad):
        y = x.detach().requires_grad_()
        for layer in layers:
            y = layer(y, cos, sin)
        y.backward(grad)
        for p in layers.parameters():
            p.grad = None

    return both_ways, cfg.dim


def measure(name: str, repeats: int) -> dict:
    import torch

    both_ways, dim = ftrain_layers(OURS[name]) if name in OURS else peer_layers(PEERS[name])
    torch.manual_seed(0)
    x, grad = torch.randn(2, 1, POSITIONS, dim, device="cuda", dtype=torch.bfloat16).unbind()
    for _ in range(5):
        both_ways(x, grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        both_ways(x, grad)
    marks[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / LAYERS for a, b in zip(marks, marks[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"name": name, "ms": statistics.median(times), "min": min(times), "max": max(times), "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT", json.dumps(measure(args.one, args.repeats)), flush=True)
        return
    print(f"{'one layer of ' + str(LAYERS):18s} {'ms':>8s} {'min':>8s} {'max':>8s} {'GiB of all':>11s}")
    for name in args.names:
        command = [sys.executable, __file__, "--one", name, "--repeats", str(args.repeats)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        r = json.loads(last.removeprefix("RESULT ")) if last.startswith("RESULT") else {}
        numbers = f"{r['ms']:8.2f} {r['min']:8.2f} {r['max']:8.2f} {r['peak_gib']:11.1f}" if r else "failed"
        print(f"{name:18s} {numbers}", flush=True)


if __name__ == "__main__":
    main()
