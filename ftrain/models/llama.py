"""Llama 3 as pure functions over an explicit parameter tree.

    abstract(cfg)            every parameter: shape, logical axes, initialiser
    block(weights, x, ...)   one layer
    make_model(cfg, ex)      loss and logits of the whole model, laid out by an Execution
    decoder(cfg, ex, ...)    the same for any block between this embedding and this head

Shapes: B batch, S sequence, D model dim, H heads, K heads of keys and values, E head dim, F hidden dim, V vocabulary.
Weights of products are (out, in).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange

from ftrain import tree
from ftrain.collectives import reduce_scatter
from ftrain.execution import Execution
from ftrain.fold import fold, sum_over_chunks
from ftrain.fsdp import Layer
from ftrain.linear import Linear
from ftrain.nn import (
    IGNORE,
    attention,
    cross_entropy,
    embed,
    rms_norm,
    rope,
    rope_frequencies,
    rope_table,
    same_document,
    swiglu,
)
from ftrain.param import ONES, Param, normal
from ftrain.sharding import initialize


@dataclass(frozen=True)
class Config:
    """The shape of a Llama. `rope_scaling` is Llama 3.1's table (see nn.rope_frequencies), or None."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: dict | None = None
    tie_embeddings: bool = False


def _scaling(factor: float) -> dict:
    return {
        "type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


PRESETS = {
    "debug": Config(272, 256, 4, 8, 4, 32, 768),
    "llama3-8b": Config(128256, 4096, 32, 32, 8, 128, 14336),
    "llama3-70b": Config(128256, 8192, 80, 64, 8, 128, 28672),
    "llama3-405b": Config(128256, 16384, 126, 128, 8, 128, 53248, rope_scaling=_scaling(8.0)),
    "llama3.2-1b": Config(128256, 2048, 16, 32, 8, 64, 8192, rope_scaling=_scaling(32.0), tie_embeddings=True),
    "llama3.2-3b": Config(128256, 3072, 28, 24, 8, 128, 8192, rope_scaling=_scaling(32.0), tie_embeddings=True),
}


def abstract(cfg: Config) -> dict:
    """The parameter tree of `Param`: "embedding", "layers" (a list of dicts), "norm", and "output" unless tied.

    Weights start normal with std 0.02; those that write to the residual stream with 0.02 / sqrt(2 n_layers), so that
    its variance does not grow with depth (GPT-2, section 2.3).
    """
    D, F, V = cfg.dim, cfg.ffn_dim, cfg.vocab_size
    H, K = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    inner, outer = normal(0.02), normal(0.02 / (2 * cfg.n_layers) ** 0.5)
    layer = {
        "attention_norm": Param((D,), ("embed",), ONES),
        "wq": Param((H, D), ("heads", "embed"), inner),
        "wk": Param((K, D), ("kv_heads", "embed"), inner),
        "wv": Param((K, D), ("kv_heads", "embed"), inner),
        "wo": Param((D, H), ("embed", "heads"), outer),
        "mlp_norm": Param((D,), ("embed",), ONES),
        "w_gate": Param((F, D), ("mlp", "embed"), inner),
        "w_up": Param((F, D), ("mlp", "embed"), inner),
        "w_down": Param((D, F), ("embed", "mlp"), outer),
    }
    params = {
        "embedding": Param((V, D), ("vocab", "embed"), inner),
        "layers": [dict(layer) for _ in range(cfg.n_layers)],
        "norm": Param((D,), ("embed",), ONES),
        "output": Param((V, D), ("vocab", "embed"), inner),
    }
    if cfg.tie_embeddings:
        del params["output"]
    return params


def init(cfg: Config, seed: int = 0, execution: Execution | None = None) -> dict:
    """Initial parameters, float32, laid out as `execution` stores them (default: one rank, plain tensors)."""
    ex = execution or Execution()
    declared = abstract(cfg)
    return initialize(declared, ex.plans(declared), ex.mesh, seed)


def product_weights(cfg: Config) -> tuple[str, ...]:
    """Globs over the parameters that are weights of products, which fp8 may run: all but the norms, and the
    embedding only where it is the output matrix too (it is still looked up in high precision)."""
    return ("layers.*.w*", output_path(cfg))


def flops_per_token(cfg: Config, seq_len: int) -> float:
    """Floating-point operations that the model needs for one token, forward and backward.

    6 per parameter of a product, and 6 * layers * heads * head_dim * seq_len for causal attention, which needs
    half of a full one's (PaLM, appendix B, counts the full one). Recomputation does not count.
    """
    n_params = sum(param.numel for param in tree.leaves(abstract(cfg)))
    products = n_params - (0 if cfg.tie_embeddings else cfg.vocab_size * cfg.dim)
    return 6.0 * products + 6.0 * cfg.n_layers * cfg.n_heads * cfg.head_dim * seq_len


def output_path(cfg: Config) -> str:
    """The path of the output matrix."""
    return "embedding" if cfg.tie_embeddings else "output"


# --- one layer --------------------------------------------------------------------------------------------------


def block(
    weights: dict,
    x_BSD: torch.Tensor,
    table: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cfg: Config,
    linear: Linear,
) -> torch.Tensor:
    """One transformer layer, to the shape of x.

    weights: this layer's parameters, split over `tensor`; x_BSD: (batch, seq / tensor, dim); table: nn.rope_table's;
    mask: nn.same_document's, None for causal attention.
    """
    h_BSD = rms_norm(x_BSD, weights["attention_norm"], cfg.norm_eps)
    x_BSD = x_BSD + attend(weights, h_BSD, table, mask, cfg=cfg, linear=linear)
    h_BSD = rms_norm(x_BSD, weights["mlp_norm"], cfg.norm_eps)
    return x_BSD + mlp(weights, h_BSD, linear=linear)


def attend(
    weights: dict,
    h_BSD: torch.Tensor,
    table: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cfg: Config,
    linear: Linear,
) -> torch.Tensor:
    """Causal self-attention. Each tensor rank has its own heads; q, k and v share one input."""
    q, k, v = linear.column(h_BSD, weights["wq"], weights["wk"], weights["wv"])
    q, k, v = (rearrange(t, "b s (h e) -> b s h e", e=cfg.head_dim) for t in (q, k, v))
    # Turned before heads and sequence change places: what attention reads and writes then lies as products take it.
    q, k, v = (rearrange(t, "b s h e -> b h s e") for t in (rope(q, table), rope(k, table), v))
    out_BHSE = attention(q, k, v, mask)
    return linear.row(rearrange(out_BHSE, "b h s e -> b s (h e)"), weights["wo"])


def mlp(weights: dict, h_BSD: torch.Tensor, *, linear: Linear) -> torch.Tensor:
    """The gated feed-forward layer; gate and up share one input."""
    gate_BSF, up_BSF = linear.column(h_BSD, weights["w_gate"], weights["w_up"])
    return linear.row(swiglu(gate_BSF, up_BSF), weights["w_down"])


# --- the whole model --------------------------------------------------------------------------------------------


def embedding(weights: dict, tokens_BS: torch.Tensor, *, linear: Linear) -> torch.Tensor:
    """Rows of the embedding, (batch, seq / tensor, dim)."""
    return reduce_scatter(embed(weights["embedding"], tokens_BS, linear.group), 1, linear.group)


def head(weights: dict, x_BSD: torch.Tensor, *, cfg: Config, linear: Linear) -> torch.Tensor:
    """Final norm and logits, (batch, seq, vocab / tensor)."""
    h_BSD = rms_norm(x_BSD, weights["norm"], cfg.norm_eps)
    (logits_BSV,) = linear.column(h_BSD, weights["output"])
    return logits_BSV


def head_loss(
    weights: dict, x_BSD: torch.Tensor, targets_BS: torch.Tensor, *, cfg: Config, linear: Linear
) -> torch.Tensor:
    """Sum of the token losses of one chunk of the sequence: fp32 scalar, the same on every tensor peer."""
    logits_BSV = head(weights, x_BSD, cfg=cfg, linear=linear)
    return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), linear.group)


class Model(NamedTuple):
    """The two functions of a model laid out by one `Execution`. Both take this rank's shards of the parameters."""

    loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    logits: Callable[..., torch.Tensor]


def make_model(cfg: Config, execution: Execution | None = None) -> Model:
    """The model of `cfg`, run the way `execution` says (default: one rank, high precision, eager).

    loss(params, batch, fp8=None) -> (sum of the token losses, fp32 scalar; number of tokens counted, int64 scalar).
        batch: "tokens" and "targets", int64 (B, S), targets of IGNORE not counted; with "segments", int64 (B, S),
        tokens attend only to tokens of their own segment.
    logits(params, tokens, fp8=None) -> (B, S, V / tensor) in the compute dtype.
    fp8: what is known of the weights beforehand, a tree like params of fp8.WeightState or None; None: nothing.
    Both are differentiable once in params, by torch.func or plain autograd. Raises ShardingError for a layout that
    cannot work.
    """
    return decoder(cfg, execution or Execution(), abstract(cfg), block)


def decoder(cfg: Config, ex: Execution, declared: dict, block: Callable[..., torch.Tensor]) -> Model:
    """The model of any block with this one's arguments, between this file's embedding and head: see `make_model`.

    cfg: a Config, or one with the same fields and more; declared: its abstract tree.
    """
    linear = ex.linear
    output = output_path(cfg)
    trees = declared, ex.plans(declared), tree.map_named(lambda path, _: path, declared)
    embed_gather = ex.gather(*({"embedding": t["embedding"]} for t in trees), products=False)
    layer_gathers = [ex.gather(*parts) for parts in zip(*(t["layers"] for t in trees), strict=True)]
    head_gather = ex.gather(*({"norm": t["norm"], "output": t[output]} for t in trees))
    run_embedding = partial(embedding, linear=linear)
    run_block = ex.jit(partial(block, cfg=cfg, linear=linear))
    run_head = partial(head, cfg=cfg, linear=linear)
    run_head_loss = ex.jit(partial(head_loss, cfg=cfg, linear=linear))
    frequencies = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling).to(ex.mesh.device)

    def hidden(params: dict, tokens_BS: torch.Tensor, segments_BS: torch.Tensor | None, fp8: Any) -> torch.Tensor:
        table = rope_table(tokens_BS.shape[1], frequencies)
        mask = None if segments_BS is None else same_document(segments_BS)
        x_BSD = fold(run_embedding, [Layer({"embedding": params["embedding"]})], tokens_BS, gathers=[embed_gather])
        states = [None] * cfg.n_layers if fp8 is None else fp8["layers"]
        layers = [Layer(*parts) for parts in zip(params["layers"], states, strict=True)]
        return fold(run_block, layers, x_BSD, table, mask, gathers=layer_gathers, remat=ex.remat)

    def head_layer(params: dict, fp8: Any) -> Layer:
        states = None if fp8 is None else {"norm": fp8["norm"], "output": fp8[output]}
        return Layer({"norm": params["norm"], "output": params[output]}, states)

    def loss(params: dict, batch: dict, fp8: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        x_BSD = hidden(params, batch["tokens"], batch.get("segments"), fp8)
        # A tensor peer holds a slice of the sequence; its chunk's targets are that chunk of every peer's slice.
        targets_BTS = rearrange(batch["targets"], "b (t s) -> b t s", s=x_BSD.shape[1])
        size = ex.loss_chunk(x_BSD, cfg.vocab_size)
        targets = [rearrange(t, "b t s -> b (t s)") for t in targets_BTS.split(size, dim=2)]
        pieces, consts = x_BSD.split(size, dim=1), [(t,) for t in targets]
        total = sum_over_chunks(run_head_loss, head_layer(params, fp8), pieces, consts, gather=head_gather)
        return total, (batch["targets"] != IGNORE).sum()

    def logits(params: dict, tokens_BS: torch.Tensor, fp8: Any = None) -> torch.Tensor:
        x_BSD = hidden(params, tokens_BS, None, fp8)
        return fold(run_head, [head_layer(params, fp8)], x_BSD, gathers=[head_gather])

    return Model(loss, logits)
