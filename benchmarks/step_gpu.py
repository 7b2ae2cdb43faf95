"""Time the real training step on one GPU, or on several of one host:

    python benchmarks/step_gpu.py NAME [NAME ...] [--layers 8] [--gpus N] [--tensor T] [--profile]

Every NAME is one line of VARIANTS: a shipped recipe's dims with overrides; or peer-NAME, a variant of
peer_torchtitan.py, which --recipe and --set do not reach. Each runs in processes of its own, so that compilers and
allocators start fresh, and is a row of the table as soon as it is known. Each GPU has one sequence, a tensor-parallel
group shares one. Losses are of random tokens: only speed and memory mean anything here.
"""

import argparse
import os
import sys
from pathlib import Path

import ranks
from peer_torchtitan import NAMES as PEERS

BASE = (
    "data.source=synthetic",
    "data.seq_len=8192",
    "train.micro_batch_size=1",
    "train.compile=true",
    "train.steps=1000",
    "schedule.warmup_steps=20",
    "optimizer.clip_norm=1.0",
    "train.remat=none",
)
VARIANTS = {
    "bf16": ("fp8.recipe=none",),
    "fp8": ("fp8.recipe=tensorwise", "fp8.cache_shards=true"),
    "fp8-uncached": ("fp8.recipe=tensorwise",),
    "fp8-output": ("fp8.recipe=tensorwise", "fp8.cache_shards=true", "fp8.skip=[]"),
    "fp8-inline": ("fp8.recipe=tensorwise", "fp8.precompute_scales=false"),
    "fp8-bf16-gather": ("fp8.recipe=tensorwise", "fp8.all_gather=false", "fp8.precompute_scales=false"),
    "delayed": ("fp8.recipe=delayed", "fp8.precompute_scales=false"),
    "rowwise": ("fp8.recipe=rowwise", "fp8.all_gather=false", "fp8.precompute_scales=false"),
    "bf16-remat": ("fp8.recipe=none", "train.remat=full"),
    "fp8-remat": ("fp8.recipe=tensorwise", "fp8.cache_shards=true", "train.remat=full"),
}
PEER = "peer-"


def measure(args: argparse.Namespace) -> dict:
    """Time one variant, on this rank."""
    import torch

    import ftrain
    from ftrain.launch import process_group, world_from_env

    world = world_from_env(os.environ)
    device = torch.device("cuda", world.local_rank) if args.device == "cuda" else torch.device("cpu")
    overrides = (
        f"model.n_layers={args.layers}",
        f"parallel.tensor={args.tensor}",
        f"data.global_batch_size={args.gpus // args.tensor}",
        *args.overrides,
    )
    recipe = ftrain.load_recipe(args.recipe, (*BASE, *VARIANTS[args.one], *overrides))
    with process_group(world, device):
        run = ftrain.Run(recipe, world, device)
        state = run.init()
        batch = run.batch(0)

        def step():
            nonlocal state
            state, metrics = run.step(state, batch)
            return metrics["loss"], metrics["grad_norm"]

        tokens = recipe.data.global_batch_size * recipe.data.seq_len
        return ranks.timed(step, args, device, tokens=tokens, flops_per_token=run.flops_per_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (*VARIANTS, *(PEER + name for name in PEERS))
    parser.add_argument("names", nargs="*", default=list(VARIANTS), metavar="NAME", help=", ".join(known))
    parser.add_argument("--recipe", default="llama3-8b")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    ranks.add_arguments(parser)
    args = parser.parse_args()
    ranks.check(parser, args)
    if args.one:
        ranks.write_result(lambda: measure(args), args)
        return
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: no variant; there are {', '.join(known)}")
    if args.recipe != "llama3-8b" and any(name.startswith(PEER) for name in args.names):
        parser.error(f"--recipe {args.recipe}: peers run the dims of llama3-8b alone; leave them out, or --recipe.")
    ours = ["--recipe", args.recipe, *(word for override in args.overrides for word in ("--set", override))]
    variants = []
    for name in args.names:
        script = "peer_torchtitan.py" if name.startswith(PEER) else Path(__file__).name
        command = [sys.executable, str(Path(__file__).with_name(script)), "--one", name.removeprefix(PEER)]
        variants.append((name, [*command, *ranks.shared(args), *([] if name.startswith(PEER) else ours)]))
    sys.exit(ranks.print_table(variants, args))


if __name__ == "__main__":
    main()
