"""A recipe whose steps take milliseconds: 15k parameters, random tokens."""

from pathlib import Path

TINY = """
[model]
vocab_size = 272
dim = 16
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
[data]
source = "synthetic"
seq_len = 16
global_batch_size = 4
[precision]
compute = "float32"
[optimizer]
lr = 1e-2
weight_decay = 0.0
[train]
steps = 6
seed = 7
micro_batch_size = 2
compile = false
[checkpoint]
every = 3
[validation]
every = 3
sequences = 5
"""


def write_tiny(folder: Path) -> str:
    """Write the recipe into a folder. Returns its path."""
    path = folder / "tiny.toml"
    path.write_text(TINY)
    return str(path)
