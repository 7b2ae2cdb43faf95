"""Tiny models of transformers, written as checkpoints: what the tests of ftrain.hf compare with."""

import json
from pathlib import Path

import torch
import transformers

# The shape of the recipe T0: 8272 parameters, or 7248 if tied.
T0 = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_llama(folder: Path | str, dtype=torch.float32, seed: int = 0, **changes) -> transformers.LlamaForCausalLM:
    """Write a random T0 with changed keys of its config as transformers does, and return it."""
    torch.manual_seed(seed)
    return _write(transformers.LlamaForCausalLM(transformers.LlamaConfig(**T0 | changes)), folder, dtype)


def write_qwen3(folder: Path | str, dtype=torch.float32, seed: int = 0, **changes) -> transformers.Qwen3ForCausalLM:
    """The same for a T0 of Qwen3, whose heads are wider than hidden_size / num_attention_heads."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**T0 | {"head_dim": 8} | changes)
    return _write(transformers.Qwen3ForCausalLM(config), folder, dtype)


def _write(model: transformers.PreTrainedModel, folder: Path | str, dtype: torch.dtype):
    for parameter in model.parameters():  # as far from zero and from each other as a trained model's
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.eval().to(dtype).save_pretrained(folder)
    return model


def edit(folder: Path, remove: tuple[str, ...] = (), **changes) -> None:
    """Change keys of the config.json of a checkpoint, and remove some."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def reopened(folder: Path | str) -> transformers.PreTrainedModel:
    """The checkpoint as transformers reads it, which must find all that it looks for and nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits_of(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """What a model of transformers says at every position."""
    with torch.no_grad():
        return model(tokens).logits
