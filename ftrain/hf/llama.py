"""Llama's checkpoints at Hugging Face: LlamaForCausalLM of transformers."""

from ftrain.hf.config import Format

FORMAT = Format(
    architecture="LlamaForCausalLM",
    model_type="llama",
    names={
        "embedding": "model.embed_tokens.weight",
        "layers.*.attention_norm": "model.layers.*.input_layernorm.weight",
        "layers.*.wq": "model.layers.*.self_attn.q_proj.weight",
        "layers.*.wk": "model.layers.*.self_attn.k_proj.weight",
        "layers.*.wv": "model.layers.*.self_attn.v_proj.weight",
        "layers.*.wo": "model.layers.*.self_attn.o_proj.weight",
        "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm.weight",
        "layers.*.w_gate": "model.layers.*.mlp.gate_proj.weight",
        "layers.*.w_up": "model.layers.*.mlp.up_proj.weight",
        "layers.*.w_down": "model.layers.*.mlp.down_proj.weight",
        "norm": "model.norm.weight",
        "output": "lm_head.weight",
    },
    absent={"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False},
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
