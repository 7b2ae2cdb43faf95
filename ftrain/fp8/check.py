"""What a recipe cannot do together with the other settings, or on this machine."""

from __future__ import annotations

from .recipes import Recipe, operands, wire_operand


def check(
    recipe: Recipe,
    all_gather: bool,
    precompute_scales: bool,
    device: str | None = None,
    capability: tuple[int, int] | None = None,
    tensor: int = 1,
) -> list[str]:
    """What cannot work, as sentences that name the settings; an empty list if all can.

    device: "cpu" or "cuda", None where it is not known yet. capability: the GPU's compute capability, None where
    no GPU is at hand. What depends on what is not known is not checked. tensor: the degree of tensor parallelism.
    """
    if not recipe.is_fp8:
        return []
    problems = []
    asked = f"fp8.recipe = {recipe.name!r}"
    weight = [(name, operand) for name, _, operand in operands(recipe, "w")]
    uses = " and ".join(f"as {operand} in {name}" for name, operand in weight) or "in high precision"
    if all_gather and wire_operand(recipe) is None:
        problems.append(
            f"fp8.all_gather = true with {asked}: a weight travels as one set of fp8 codes with one scale, "
            f"and this recipe takes weights (w) {uses}. Set fp8.all_gather = false, or use a recipe that takes them as "
            "the same fp8 with one scale in output and in grad_input (tensorwise, delayed)."
        )
    operand = wire_operand(recipe)
    if precompute_scales and (operand is None or operand.scale == "history"):
        problems.append(
            f"fp8.precompute_scales = true with {asked}: there is nothing to precompute, this recipe takes weights (w) "
            f"{uses}. Set fp8.precompute_scales = false, or use a recipe whose weights have one scale each, made from "
            "the weight itself (tensorwise)."
        )
    if device not in ("cpu", "cuda", None):
        problems.append(f'{asked} on {device!r}: fp8 products need cpu or cuda. Set fp8.recipe = "none".')
    elif device == "cuda" and capability is not None and capability < (8, 9):
        problems.append(
            f"{asked} on a GPU of compute capability {capability[0]}.{capability[1]}: fp8 products need 8.9 "
            'or newer (Ada, Hopper, Blackwell). Set fp8.recipe = "none".'
        )
    if any(operand.granularity == "block" for _, _, operand in operands(recipe)):
        problems += _check_block(asked, device, capability, tensor)
    return problems


def _check_block(asked: str, device: str | None, capability: tuple[int, int] | None, tensor: int) -> list[str]:
    problems = []
    if device not in ("cuda", None):
        problems.append(f"{asked} on {device!r}: torch multiplies with block scales on CUDA only. Use rowwise here.")
    elif capability is not None and capability[0] != 9:
        problems.append(
            f"{asked} on a GPU of compute capability {capability[0]}.{capability[1]}: torch multiplies with "
            "1x128 and 128x128 scales on 9.0 (Hopper) only. Use rowwise here."
        )
    if tensor > 1:
        problems.append(
            f"{asked} with parallel.tensor = {tensor}: a block of 128 would lie on two ranks. Use rowwise or "
            "tensorwise, or set parallel.tensor = 1."
        )
    return problems
