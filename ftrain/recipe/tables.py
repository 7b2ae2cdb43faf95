"""The keys of a recipe: a table is a frozen dataclass; a key has its type, default and meaning once."""

import dataclasses
import math
from dataclasses import dataclass

from ftrain.recipe.strict import key

DTYPES = ("float32", "bfloat16")
FP8_RECIPES = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise")


@dataclass(frozen=True)
class Model:
    """The model: a preset, or its dimensions, or a preset with some dimensions replaced."""

    family: str | None = key(
        None, "the module of ftrain.models that defines the model; absent: the checkpoint's or the preset's, or llama"
    )
    hf: str | None = key(
        None,
        "the folder of a Hugging Face checkpoint (config.json and .safetensors) to start from; its shape is the "
        "model's, and a dimension below that contradicts it is an error",
    )
    preset: str | None = key(None, "a named set of dimensions, such as llama3-8b; the keys below override it")
    vocab_size: int | None = key(None, "rows of the embedding; every token id is below it", low=1)
    dim: int | None = key(None, "width of the residual stream", low=1)
    n_layers: int | None = key(None, "transformer layers", low=1)
    n_heads: int | None = key(None, "query heads", low=1)
    n_kv_heads: int | None = key(
        None, "key and value heads, a divisor of n_heads; absent: the preset's or n_heads", low=1
    )
    head_dim: int | None = key(None, "width of a head; absent: the preset's or dim / n_heads", low=2)
    ffn_dim: int | None = key(None, "hidden width of the feed-forward layers", low=1)
    norm_eps: float | None = key(None, "epsilon of the RMS norms", above=0)
    rope_theta: float | None = key(None, "base of the rotary frequencies", above=0)
    rope_scaling: dict | None = key(
        None,
        'long-context scaling: {type = "llama3", factor, low_freq_factor, high_freq_factor, '
        "original_max_position_embeddings}",
    )
    tie_embeddings: bool | None = key(None, "use the embedding as the output matrix too")
    own: dict = dataclasses.field(default_factory=dict)  # the keys that this family has alone, and their values


@dataclass(frozen=True)
class Data:
    """Where tokens come from."""

    source: str | tuple[str, ...] = key(
        "stdlib",
        'text to train on: "stdlib" (the installed Python\'s library source), a path or glob of '
        '.txt/.jsonl/.parquet files, "synthetic" (seeded random tokens), or "hf:NAME"; or a list of these',
    )
    weights: tuple[float, ...] = key(
        (), "share of the sequences from each source of the list; empty: all text once an epoch", above=0
    )
    tokenizer: str = key(
        "bytes",
        '"bytes", the path of a tokenizer.json, or "bpe:SIZE" to train one of SIZE ids on the text; absent: '
        'that of model.hf, or "bytes"',
    )
    bos: str | None = key(None, "the token that begins a document; absent: what the tokenizer's files say")
    eos: str | None = key(None, "the token that ends a document; absent: what the tokenizer's files say")
    seq_len: int = key(256, "tokens in a training sequence", low=1)
    global_batch_size: int = key(8, "sequences in an optimizer step, whatever the number of ranks", low=1)
    text_field: str = key("text", "the key of a record, or column, that holds its text")
    held_out: float = key(0.05, "share of the documents kept for validation", low=0, below=1)
    cache: str | None = key(
        None,
        "folder that keeps the tokens of the text between runs; absent: ftrain's in the user's cache folder, "
        'where that saves time; "off": none',
    )
    document_mask: bool = key(False, "tokens attend only within their own document")


@dataclass(frozen=True)
class Parallel:
    """Ranks along each mesh axis; their product is the world size. One of them may be -1: what is left."""

    replicate: int = key(1, "replicas of the sharded model (HSDP); -1: what is left")
    shard: int = key(-1, "ranks that share parameters, gradients and optimizer state (FSDP, ZeRO-3); -1: what is left")
    tensor: int = key(1, "ranks that split each layer's matrices and sequence (tensor and sequence parallel)")
    reshard_after_forward: bool = key(True, "drop gathered weights after the forward, gather again in the backward")
    timeout: float = key(
        600.0,
        "seconds that a rank waits in one collective for ranks that hang; a rank that died is noticed sooner",
        above=0,
        high=86400,
    )

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks along each mesh axis, by its name."""
        return {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}

    @property
    def fewest(self) -> int:
        """The smallest number of ranks that fits: what is left is one."""
        return math.prod(max(degree, 1) for degree in self.degrees.values())


@dataclass(frozen=True)
class Precision:
    """The dtype of each role."""

    params: str = key("float32", "parameters as stored, and the optimizer's arithmetic", choices=DTYPES)
    compute: str = key("bfloat16", "activations, and the weights that meet them", choices=DTYPES)
    gather: str = key(
        "compute",
        "what travels when weights are gathered and fp8 does not: the compute dtype, or the parameters' own",
        choices=("compute", "params"),
    )
    reduce: str = key("float32", "gradients while they are summed over ranks", choices=DTYPES)
    moments: str = key(
        "float32", "the optimizer's moments as kept between steps; its arithmetic is float32", choices=DTYPES
    )


@dataclass(frozen=True)
class Fp8:
    """Matrix products in 8-bit floating point."""

    recipe: str | dict = key(
        "none", "a named fp8 recipe, or a table of one's own (see the fp8 guide)", choices=FP8_RECIPES
    )
    all_gather: bool = key(
        True, "FSDP gathers weights as fp8; absent: true unless the recipe scales weights by row or block"
    )
    precompute_scales: bool = key(
        True,
        "scales of all weights with one all-reduce after the step; absent: as all_gather, but false where "
        "scales come from a history",
    )
    cache_shards: bool = key(
        False, "keep the fp8 shards between gathers of a step; needs all_gather, and scales known before it"
    )
    skip: tuple[str, ...] = key(
        ("output",),
        "globs over parameter paths that stay in high precision; one that matches nothing is an error; "
        'absent: ["output"], or ["embedding"] where the two are tied',
    )


@dataclass(frozen=True)
class Optimizer:
    """The update rule."""

    name: str = key("adamw", "the rule; sgd uses betas[0] as its momentum", choices=("adamw", "sgd"))
    lr: float = key(3e-4, "the peak learning rate", above=0)
    betas: tuple[float, float] = key((0.9, 0.95), "decay of the first and second moments", low=0, below=1)
    eps: float = key(1e-8, "added to the square root of the second moment", above=0)
    weight_decay: float = key(0.1, "decoupled weight decay, on matrices only (norms are not decayed)", low=0)
    clip_norm: float = key(1.0, "the global gradient norm is clipped to this; 0: no clipping", low=0)


@dataclass(frozen=True)
class Schedule:
    """The learning rate over steps: a linear warm-up, a plateau at the peak, a decay."""

    warmup_steps: int = key(20, "steps of linear warm-up; absent: 20, or train.steps / 10 if that is less", low=0)
    decay: str = key(
        "cosine",
        "the shape of the decay; wsd is a plateau and then a linear decay",
        choices=("cosine", "linear", "wsd", "none"),
    )
    decay_steps: int | None = key(
        None,
        "length of the decay, which ends with the run, after the warm-up; absent: all steps after "
        "the warm-up, or for wsd a fifth of train.steps",
        low=0,
    )
    min_lr_ratio: float = key(0.1, "the lowest learning rate, as a fraction of the peak", low=0, high=1)


@dataclass(frozen=True)
class Train:
    """The run."""

    steps: int = key(200, "optimizer steps", low=1)
    seed: int = key(0, "seed of the initial values and of the order of the data", low=0)
    micro_batch_size: int = key(4, "sequences per rank and forward; gradient accumulation follows from it", low=1)
    remat: str | float = key(
        "none",
        "recompute activations in the backward: none, full, or the fraction of their memory to keep",
        choices=("none", "full"),
        low=0,
        high=1,
    )
    loss_chunks: int = key(
        0, "pieces the sequence is cut in for the loss over the vocabulary; 0: as few as memory allows", low=0
    )
    compile: bool = key(True, "compile the transformer block (torch.compile)")
    on_nonfinite: str = key(
        "stop",
        "a loss or gradient that is not finite: end the run, or skip that update",
        choices=("stop", "skip"),
    )


@dataclass(frozen=True)
class Checkpoint:
    """What is written to DIR/checkpoints."""

    every: int = key(100, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = key(2, "how many checkpoints stay on disk", low=1)
    export_hf: bool = key(False, "write the trained model to DIR/hf as a Hugging Face checkpoint too, at the end")
    resume: str = key("auto", '"auto" (the newest whole checkpoint of --out, if any), "never", or a path')
    async_save: bool = key(False, "write while training goes on")


@dataclass(frozen=True)
class Metrics:
    """Extra sinks beside metrics.jsonl."""

    tensorboard: bool = key(False, "write TensorBoard events (needs the tensorboard package)")
    wandb: bool = key(False, "log to Weights & Biases (needs the wandb package)")
    profile_steps: tuple[int, ...] = key(
        (), "profile from the first of these steps to the last: trace.json, and timeline.html of the last", low=1
    )


@dataclass(frozen=True)
class Validation:
    """Loss on held-out documents."""

    every: int = key(100, "steps between validations; 0: only at the end", low=0)
    sequences: int = key(64, "held-out sequences in a validation", low=1)


@dataclass(frozen=True)
class Recipe:
    """A whole run. Built by `load_recipe`, which checks it; equal recipes give equal runs."""

    model: Model = Model()
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    fp8: Fp8 = Fp8()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    validation: Validation = Validation()


TABLES: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(Recipe)}
