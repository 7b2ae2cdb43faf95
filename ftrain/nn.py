"""The functions a Llama is made of: rms_norm, rotary embedding, attention, swiglu, embedding, cross entropy.

Shapes: B batch, S sequence, D model dim, H heads, K heads of keys and values, E head dim, F hidden dim, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F

from ftrain.collectives import Group, all_reduce, all_reduce_max

IGNORE = -100  # a target that counts in no loss


def rms_norm(x_BSD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 (Zhang & Sennrich 2019)."""
    return F.rms_norm(x_BSD, weight_D.shape, weight_D, eps)


def rope_frequencies(head_dim: int, theta: float, scaling: dict | None = None) -> torch.Tensor:
    """Inverse frequencies of the rotary embedding, float32 (head_dim / 2,), in radians per position.

    theta^(-2i/head_dim) (Su et al. 2021, section 3.4.2). `scaling` is Llama 3.1's: wavelengths longer than the
    original context over low_freq_factor are stretched by `factor`, those shorter than it over high_freq_factor
    are kept, and between the two the frequencies are interpolated.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling:
        context = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = context * inverse / (2 * math.pi)  # how often each frequency turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        inverse = keep * inverse + (1 - keep) * inverse / scaling["factor"]
    return inverse.float()


def rope_table(seq_len: int, frequencies: torch.Tensor) -> torch.Tensor:
    """cos and sin of every position's angles, float32 (2, S, E / 2)."""
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=frequencies.device), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rope(x_BSHE: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + E/2]) by their position's angles, in at least fp32. `table`: `rope_table`'s.

    This pairing is Hugging Face's; Meta's own files pair neighbours, which is the same up to the order of rows of
    wq and wk.
    """
    cos, sin = table[0].unsqueeze(1), table[1].unsqueeze(1)
    a, b = at_least_fp32(x_BSHE).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BSHE.dtype)


def attention(
    q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention, (B, H, S, E), with H / K query heads to each key head (GQA). Scores are divided by sqrt(E).

    mask: bool (B, 1, S, S), which positions each may attend to, in place of causality.
    """
    if q_BHSE.is_meta:
        # Shapes without values (a rehearsal, see report/) have no device to choose a kernel for. torch would plan the
        # unfused one, whose S x S weights no device keeps.
        mask = mask if mask is None else mask.to(q_BHSE.dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q_BHSE, k_BKSE, v_BKSE, 0.0, mask is None, attn_mask=mask)[0]
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=mask is None, enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1]
    )


def same_document(segments_BS: torch.Tensor) -> torch.Tensor:
    """bool (B, 1, S, S): which earlier-or-same positions of the same segment each position may attend to."""
    same = segments_BS.unsqueeze(-1) == segments_BS.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def swiglu(gate_BSF: torch.Tensor, up_BSF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return F.silu(gate_BSF) * up_BSF


def embed(weight_VD: torch.Tensor, tokens_BS: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Rows of the embedding, (B, S, D). Over a group each rank holds a slice of the vocabulary, and the result is a
    partial sum: rows of other ranks' tokens are zero."""
    if group is None:
        return F.embedding(tokens_BS, weight_VD)
    local = tokens_BS - group.rank() * weight_VD.shape[0]
    mine = (local >= 0) & (local < weight_VD.shape[0])
    return F.embedding(local.where(mine, 0), weight_VD) * mine.unsqueeze(-1).to(weight_VD.dtype)


def cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum of -log softmax(logits)[target] in at least fp32 over the targets that are not IGNORE, as a scalar.

    Over a group each rank holds a slice of the vocabulary; the sum is the same on every rank.
    """
    logits_NV = at_least_fp32(logits_NV)
    if group is None:
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    size = logits_NV.shape[-1]
    local = targets_N - group.rank() * size
    mine = (local >= 0) & (local < size)
    top_N = all_reduce_max(logits_NV.amax(dim=-1), group)
    exp_N = all_reduce((logits_NV - top_N.unsqueeze(-1)).exp().sum(dim=-1), group)
    target_N = logits_NV.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    target_N = all_reduce(target_N.where(mine, 0.0), group)
    counts = targets_N != IGNORE
    # The difference first: of two large logits it is exact, while a log added to one of them is rounded away.
    return (exp_N.log() + (top_N - target_N)).where(counts, 0.0).sum()


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32; an fp64 tensor as it is, so that gradients can be checked against differences of losses."""
    return x if x.dtype == torch.float64 else x.float()
