"""The peer of step_gpu.py: one train step of torchtitan 0.2.2's Llama 3 with torchao 0.17, on one GPU.

    python benchmarks/peer_torchtitan.py bf16 tensorwise tensorwise-gather rowwise bf16-remat [--layers 8]

It is torchtitan's own model, its own apply_compile, apply_fsdp and apply_ac, and its own settings of v0.2.2; only the
loop around them is here, so that both are timed alike. Needs torchtitan==0.2.2, torchao==0.17.0 and what they need.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial


def measure(name: str, layers: int, seq_len: int, steps: int) -> dict:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.components.quantization.utils import module_filter_fn
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3 import Transformer, llama3_args
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
    args = llama3_args["8B"]
    args.n_layers, args.max_seq_len = layers, seq_len
    with torch.device("meta"):
        model = Transformer(args)
    recipe, gathers = name.removesuffix("-remat"), name.startswith("tensorwise-gather")
    if recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if recipe == "rowwise":
            torch._inductor.config.emulate_precision_casts = True  # as torchtitan sets it
            config = Float8LinearConfig.from_recipe_name("rowwise")
        else:
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
        convert_to_float8_training(
            model, config=config, module_filter_fn=partial(module_filter_fn, filter_fqns=["output"])
        )
    if name.endswith("-remat"):
        apply_ac(model, ActivationCheckpoint(mode="full"), model_compile_enabled=True)
    apply_compile(model, Compile(enable=True))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(torch.device("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(args.vocab_size, (1, seq_len + 1), device="cuda")
    loss_fn = torch.compile(lambda x, y: F.cross_entropy(x.flatten(0, 1).float(), y.flatten(0, 1)))

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        if gathers:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        return loss

    for _ in range(5):
        loss = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # From one step's start to the next one's, without waiting in between, as in training.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        loss = step()
    marks[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    ms = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30
    dist.destroy_process_group()
    return {"name": name, "ms": ms, "min": min(times), "max": max(times), "peak_gib": peak, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", default=["bf16", "tensorwise", "tensorwise-gather", "rowwise", "bf16-remat"]
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        result = measure(args.one, args.layers, args.seq_len, args.steps)
        print("RESULT", json.dumps(result), flush=True)
        return
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    rows = []
    for name in args.names:
        command = [sys.executable, __file__, "--one", name, "--layers", str(args.layers)]
        command += ["--seq-len", str(args.seq_len), "--steps", str(args.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **world})
        last = (done.stdout.strip().splitlines() or [""])[-1]
        rows.append(json.loads(last.removeprefix("RESULT ")) if last.startswith("RESULT") else {"name": name})
    print(f"{'torchtitan':18s} {'ms':>8s} {'min':>8s} {'max':>8s} {'GiB':>6s} {'loss':>8s}")
    for r in rows:
        done = "ms" in r
        print(
            f"{r['name']:18s} "
            + (
                f"{r['ms']:8.1f} {r['min']:8.1f} {r['max']:8.1f} {r['peak_gib']:6.1f} {r['loss']:8.4f}"
                if done
                else "failed"
            )
        )


if __name__ == "__main__":
    main()
