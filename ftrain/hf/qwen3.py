"""Checkpoints of Qwen3's dense models at Hugging Face: Qwen3ForCausalLM of transformers."""

from ftrain.hf import llama
from ftrain.hf.config import Format

FORMAT = Format(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    names=llama.FORMAT.names
    | {
        "layers.*.q_norm": "model.layers.*.self_attn.q_norm.weight",
        "layers.*.k_norm": "model.layers.*.self_attn.k_norm.weight",
        "layers.*.bq": "model.layers.*.self_attn.q_proj.bias",
        "layers.*.bk": "model.layers.*.self_attn.k_proj.bias",
        "layers.*.bv": "model.layers.*.self_attn.v_proj.bias",
        "layers.*.bo": "model.layers.*.self_attn.o_proj.bias",
    },
    absent={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
    keys={"attention_bias": "attention_bias"},
)
