"""The yardstick: a Llama and its training step as one writes them in PyTorch without ftrain.

An `nn.Module`, autograd, `torch.optim.AdamW`, a loop over micro-batches. No trick is left out that an ordinary loop
would use: fused attention, fused or foreach optimizer, one reused gradient buffer, torch.compile of the block.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * cfg.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.wo = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.dim, bias=False)
        self.grouped = cfg.n_heads != cfg.n_kv_heads

    def forward(self, x, cos, sin):
        batch, seq, _ = x.shape
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class Mlp(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w_gate = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w_up = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.w_down = nn.Linear(cfg.ffn_dim, cfg.dim, bias=False)

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attention = Attention(cfg)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = Mlp(cfg)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Final norm, logits and the sum of the token losses."""

    def __init__(self, cfg):
        super().__init__()
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)

    def forward(self, x, targets):
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Llama(nn.Module):
    def __init__(self, cfg, seq_len):
        super().__init__()
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.head = Head(cfg)
        frequencies = cfg.rope_theta ** (-torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim)
        angles = torch.outer(torch.arange(seq_len).float(), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(x, targets)

    def compile_parts(self):
        """Compile the block, once for all layers, and the head."""
        for part in (*self.layers, self.head):
            part.compile(fullgraph=True, dynamic=False)

    def load(self, params):
        """Take ftrain's parameters."""
        names = {"attention_norm": "attention_norm.weight", "mlp_norm": "mlp_norm.weight"}
        names |= {name: f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
        names |= {name: f"mlp.{name}.weight" for name in ("w_gate", "w_up", "w_down")}
        values = {"embedding.weight": params["embedding"], "head.norm.weight": params["norm"]}
        values["head.output.weight"] = params["output"]
        for i, layer in enumerate(params["layers"]):
            values |= {f"layers.{i}.{names[name]}": leaf for name, leaf in layer.items()}
        missing, surplus = self.load_state_dict(values, strict=False)
        assert not surplus and set(missing) == {"cos", "sin"}, (missing, surplus)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def make_step(model, options, *, micro_batches, bf16, optimizer):
    """`step(batch, lr) -> (loss, norm)`. options: a recipe's [optimizer] table; optimizer: "fused" or "foreach"."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, **{optimizer: True})

    def step(batch, lr):
        count, total = batch["targets"].numel(), 0.0
        pieces = zip(*(batch[key].chunk(micro_batches) for key in ("tokens", "targets")), strict=True)
        for tokens, targets in pieces:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(tokens, targets) / count
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        adamw.zero_grad()
        return total, norm

    return step
