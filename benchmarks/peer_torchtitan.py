"""The peer of step_gpu.py: one train step of torchtitan 0.2.2's Llama 3 with torchao 0.17, on one GPU or several.

    python benchmarks/peer_torchtitan.py [NAME ...] [--layers 8] [--gpus N] [--tensor T]

It is torchtitan's own model, its own apply_tp, apply_ac, apply_compile and apply_fsdp, loss and clipping, and its own
settings of v0.2.2; only the loop around them is here, so that both are timed alike. Needs torchtitan==0.2.2,
torchao==0.17.0 and what they need.
"""

import argparse
import os
import sys
from functools import partial

import ranks

NAMES = ("bf16", "tensorwise", "tensorwise-gather", "rowwise", "bf16-remat")


def measure(args: argparse.Namespace) -> dict:
    """Time one variant, on this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.components.quantization.utils import module_filter_fn
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.distributed.utils import clip_grad_norm_, get_train_context
    from torchtitan.models.llama3 import Transformer, llama3_args
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp, apply_tp

    cuda, name = args.device == "cuda", args.one
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    # FSDP over a single rank where tensor parallelism takes them all, too: it is what casts weights to bf16.
    sizes = (args.gpus // args.tensor, args.tensor)
    mesh = init_device_mesh(args.device, sizes, mesh_dim_names=("fsdp", "tp"))
    model_args = llama3_args[args.model]
    model_args.n_layers, model_args.max_seq_len = args.layers, args.seq_len
    with torch.device("meta"):
        model = Transformer(model_args)
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
    split = args.tensor > 1
    if split:
        # With tensorwise scales torchtitan gathers activations in fp8, with others in bf16.
        apply_tp(model, mesh["tp"], loss_parallel=True, enable_float8_tensorwise_tp=recipe.startswith("tensorwise"))
    if name.endswith("-remat"):
        apply_ac(model, ActivationCheckpoint(mode="full"), model_compile_enabled=cuda)
    loss_fn = cross_entropy_loss
    if cuda:
        apply_compile(model, Compile(enable=True))
        loss_fn = torch.compile(loss_fn)
    apply_fsdp(model, mesh["fsdp"], torch.bfloat16, torch.float32, pp_enabled=False)
    model.to_empty(device=args.device)
    torch.manual_seed(0)  # random values of a DTensor need the same seed on all ranks
    with torch.no_grad():
        model.init_weights(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # A sequence for each tensor-parallel group.
    generator = torch.Generator(device).manual_seed(mesh["fsdp"].get_local_rank())
    tokens = torch.randint(model_args.vocab_size, (1, args.seq_len + 1), device=device, generator=generator)
    total = args.seq_len * sizes[0]
    context = get_train_context(split)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:]) / total
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        if gathers:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        loss = loss.detach()
        # Its own sequence's: the other ranks' parts are not added.
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss) * sizes[0], norm

    result = ranks.timed(step, args, device, tokens=total, flops_per_token=flops_per_token(model_args, args.seq_len))
    dist.destroy_process_group()
    return result


def flops_per_token(model_args, seq_len: int) -> float:
    """As ftrain counts them, so that a TFLOP/s is the same thing in both tables."""
    from ftrain.models import llama

    hidden = int(int(8 * model_args.dim / 3) * (model_args.ffn_dim_multiplier or 1))
    cfg = llama.Config(
        vocab_size=model_args.vocab_size,
        dim=model_args.dim,
        n_layers=model_args.n_layers,
        n_heads=model_args.n_heads,
        n_kv_heads=model_args.n_kv_heads or model_args.n_heads,
        head_dim=model_args.dim // model_args.n_heads,
        ffn_dim=-(-hidden // model_args.multiple_of) * model_args.multiple_of,
    )
    return llama.flops_per_token(cfg, seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--model", default="8B", help="torchtitan's name of the dims")
    parser.add_argument("--seq-len", type=int, default=8192)
    ranks.add_arguments(parser)
    args = parser.parse_args()
    ranks.check(parser, args)
    if args.one:
        ranks.write_result(lambda: measure(args), args)
        return
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: no variant; there are {', '.join(NAMES)}")
    command = [sys.executable, __file__, "--model", args.model, "--seq-len", str(args.seq_len), *ranks.shared(args)]
    sys.exit(ranks.print_table([(name, [*command, "--one", name]) for name in args.names], args))


if __name__ == "__main__":
    main()
