"""Qwen3, the dense models: Llama's decoder with heads of any width, whose queries and keys are normed one by one.

    abstract(cfg)            every parameter: shape, logical axes, initialiser
    block(weights, x, ...)   one layer
    make_model(cfg, ex)      loss and logits of the whole model, laid out by an Execution

What is not here is Llama's, and llama.py says what its shapes are called. Source: Qwen3 Technical Report,
arXiv:2505.09388, section 2.
"""

from dataclasses import dataclass

import torch
from einops import rearrange

from ftrain.execution import Execution
from ftrain.linear import Linear
from ftrain.models import llama
from ftrain.models.llama import Model
from ftrain.nn import attention, rms_norm, rope
from ftrain.param import ONES, ZEROS, Param
from ftrain.sharding import initialize


@dataclass(frozen=True)
class Config(llama.Config):
    """The shape of a Qwen3. `attention_bias`: q, k, v and the output of attention have biases; no released one has."""

    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    attention_bias: bool = False


PRESETS = {
    "qwen3-debug": Config(272, 256, 4, 8, 4, 64, 768, tie_embeddings=True),
    "qwen3-0.6b": Config(151936, 1024, 28, 16, 8, 128, 3072, tie_embeddings=True),
    "qwen3-1.7b": Config(151936, 2048, 28, 16, 8, 128, 6144, tie_embeddings=True),
    "qwen3-4b": Config(151936, 2560, 36, 32, 8, 128, 9728, tie_embeddings=True),
    "qwen3-8b": Config(151936, 4096, 36, 32, 8, 128, 12288),
    "qwen3-14b": Config(151936, 5120, 40, 40, 8, 128, 17408),
    "qwen3-32b": Config(151936, 5120, 64, 64, 8, 128, 25600),
}


product_weights, flops_per_token = llama.product_weights, llama.flops_per_token  # norms and biases are no products


def abstract(cfg: Config) -> dict:
    """Llama's parameter tree; each layer also has "q_norm" and "k_norm", and "bq", "bk", "bv", "bo" where
    `cfg.attention_bias`."""
    H, K = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    # All heads share a norm, so every tensor rank holds it whole, and the step sums what its heads say of it.
    more = {name: Param((cfg.head_dim,), ("head_dim",), ONES) for name in ("q_norm", "k_norm")}
    if cfg.attention_bias:
        more |= {
            "bq": Param((H,), ("heads",), ZEROS),
            "bk": Param((K,), ("kv_heads",), ZEROS),
            "bv": Param((K,), ("kv_heads",), ZEROS),
            "bo": Param((cfg.dim,), ("embed",), ZEROS),
        }
    params = llama.abstract(cfg)
    return params | {"layers": [layer | more for layer in params["layers"]]}


def init(cfg: Config, seed: int = 0, execution: Execution | None = None) -> dict:
    """Initial parameters, float32, laid out as `execution` stores them (default: one rank, plain tensors)."""
    ex = execution or Execution()
    declared = abstract(cfg)
    return initialize(declared, ex.plans(declared), ex.mesh, seed)


def block(
    weights: dict,
    x_BSD: torch.Tensor,
    table: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cfg: Config,
    linear: Linear,
) -> torch.Tensor:
    """One transformer layer, with the arguments and the result of `llama.block`."""
    h_BSD = rms_norm(x_BSD, weights["attention_norm"], cfg.norm_eps)
    x_BSD = x_BSD + attend(weights, h_BSD, table, mask, cfg=cfg, linear=linear)
    h_BSD = rms_norm(x_BSD, weights["mlp_norm"], cfg.norm_eps)
    return x_BSD + llama.mlp(weights, h_BSD, linear=linear)


def attend(
    weights: dict,
    h_BSD: torch.Tensor,
    table: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cfg: Config,
    linear: Linear,
) -> torch.Tensor:
    """Causal self-attention. Each tensor rank has its own heads; each head of q and k is normed, then turned."""
    q, k, v = linear.column(h_BSD, weights["wq"], weights["wk"], weights["wv"])
    if cfg.attention_bias:
        q, k, v = q + weights["bq"], k + weights["bk"], v + weights["bv"]
    q, k, v = (rearrange(t, "b s (h e) -> b s h e", e=cfg.head_dim) for t in (q, k, v))
    q, k = rms_norm(q, weights["q_norm"], cfg.norm_eps), rms_norm(k, weights["k_norm"], cfg.norm_eps)
    # Turned before heads and sequence change places: what attention reads and writes then lies as products take it.
    q, k, v = (rearrange(t, "b s h e -> b h s e") for t in (rope(q, table), rope(k, table), v))
    out_BHSE = attention(q, k, v, mask)
    out_BSD = linear.row(rearrange(out_BHSE, "b h s e -> b s (h e)"), weights["wo"])
    return out_BSD + weights["bo"] if cfg.attention_bias else out_BSD


def make_model(cfg: Config, execution: Execution | None = None) -> Model:
    """The model of `cfg`, run the way `execution` says (default: one rank, high precision, eager): `loss` and
    `logits` as `llama.make_model` has them. Raises ShardingError for a layout that cannot work."""
    return llama.decoder(cfg, execution or Execution(), abstract(cfg), block)
