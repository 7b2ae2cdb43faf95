"""What concerns two keys of a recipe at once, or a key and the number of ranks: one function for each."""

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from ftrain.errors import FtrainError
from ftrain.models import families, family, presets
from ftrain.recipe.strict import key, keys, nearest, show
from ftrain.recipe.tables import Model, Parallel, Recipe

_ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RecipeError(FtrainError, ValueError):
    """A recipe that cannot be run. `problems` has a sentence for each mistake; `str()` puts one on a line."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        super().__init__(self.problems)  # as it came, so that the error survives pickling between processes

    def __str__(self) -> str:
        return "\n".join(self.problems)


def model_family(model: Model) -> str:
    """The name of the model's family: as the recipe says, or that of its checkpoint or preset, or llama.

    Raises RecipeError for a checkpoint that cannot be read, or has none of ours.
    """
    if model.family is not None:
        return model.family
    if model.hf is not None:
        return _of_hf(model).family
    return "llama" if model.preset is None else presets().get(model.preset, "llama")


def family_keys(table: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of [model] that its family has alone, with type and check. `table`: as the recipe's file has it.

    Imports the family's module (and so torch), but not for a table that has common keys only.
    """
    if table.keys() <= keys(Model).keys():
        return {}
    chosen = {name: table[name] for name in ("family", "preset", "hf") if isinstance(table.get(name), str)}
    try:
        name = model_family(Model(**chosen))
    except RecipeError:  # reported by the cross checks
        return {}
    if name not in families():
        return {}
    config, common = family(name).Config, keys(Model)
    hints, anything = typing.get_type_hints(config), key(None, "").metadata
    own = [field for field in dataclasses.fields(config) if field.name not in common]
    return {field.name: (hints[field.name], anything | field.metadata) for field in own}


def model_config(model: Model) -> Any:
    """The family's Config: the checkpoint's, or the preset with the recipe's keys over it, or the keys alone.

    Imports the family's module (and so torch). Raises RecipeError.
    """
    name = model_family(model)
    if name not in families():
        raise RecipeError([f"model.family = {show(name)}: {_one_of(name, families())}"])
    module = family(name)
    not_config = ("family", "hf", "preset", "own")
    given = {k: v for k, v in vars(model).items() if v is not None and k not in not_config} | model.own
    known = {field.name: field for field in dataclasses.fields(module.Config)}
    problems = [f"model.{key}: the family {name} has no such dimension." for key in given if key not in known]
    if model.preset is not None and model.preset not in module.PRESETS:
        there = presets() if model.family is None else module.PRESETS
        problems.append(f"model.preset = {show(model.preset)}: {_one_of(model.preset, there)}")
    if model.hf is not None:
        problems += _hf_problems(model, given)
    elif model.preset is None:
        if "n_heads" in given:
            given.setdefault("n_kv_heads", given["n_heads"])
            if "dim" in given and "head_dim" not in given:
                if given["dim"] % given["n_heads"]:
                    problems.append(
                        f"model.dim={given['dim']} does not divide by model.n_heads={given['n_heads']}; "
                        "give model.head_dim, or another number of heads."
                    )
                given["head_dim"] = max(2, given["dim"] // given["n_heads"])
        required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in given]
        if missing:
            what = " and ".join(f"model.{name}" for name in missing)
            problems.append(
                f"[model] has no preset and lacks {what}; give them, or model.preset (one of "
                f"{_quoted(module.PRESETS)})."
            )
    if problems:
        raise RecipeError(problems)
    if model.hf is not None:
        return _of_hf(model).cfg
    try:
        return dataclasses.replace(module.PRESETS[model.preset], **given) if model.preset else module.Config(**given)
    except ValueError as error:
        raise RecipeError([f"[model]: {error}"]) from error


def _of_hf(model: Model) -> Any:
    """What the config.json of model.hf says (hf.config.HfConfig). Raises RecipeError."""
    from ftrain.hf.config import HfError, read_config

    assert model.hf is not None
    try:
        return read_config(model.hf)
    except HfError as error:
        raise RecipeError([f"model.hf = {show(model.hf)}: {line}" for line in str(error).splitlines()]) from error


def _hf_problems(model: Model, given: dict[str, Any]) -> Iterator[str]:
    """Where a recipe and the checkpoint that it starts from contradict each other."""
    try:
        found = _of_hf(model)
    except RecipeError as error:
        yield from error.problems
        return
    says = f"the config.json of model.hf = {show(model.hf)} says"
    if model.preset is not None:
        yield f"model.preset = {show(model.preset)}, and {says} what the dimensions are: give one of the two."
    if model.family not in (None, found.family):
        yield f"model.family = {show(model.family)}, but {says} {found.family}."
        return
    for name, value in given.items():
        there = getattr(found.cfg, name, None)
        if value != there:
            yield f"model.{name} = {show(value)}, but {says} {'none' if there is None else show(there)}."


def resolve_parallel(parallel: Parallel, world_size: int) -> Parallel:
    """`parallel` for a number of ranks, its -1 replaced. Raises RecipeError if they do not fit."""
    problems = list(_layout_problems(parallel, world_size))
    if problems:
        raise RecipeError(problems)
    known = math.prod(degree for degree in parallel.degrees.values() if degree != -1)
    left: dict[str, Any] = {axis: world_size // known for axis, degree in parallel.degrees.items() if degree == -1}
    return dataclasses.replace(parallel, **left)


def accumulation(recipe: Recipe, dp: int) -> int:
    """Micro-batches per step on each of `dp` data-parallel ranks. Raises RecipeError if it is not whole."""
    total, micro = recipe.data.global_batch_size, recipe.train.micro_batch_size
    if total % (micro * dp):
        fits = [m for m in range(micro, 0, -1) if total % (m * dp) == 0]
        advice = f"train.micro_batch_size={fits[0]} would" if fits else f"a multiple of {micro * dp} sequences would"
        raise RecipeError(
            [
                f"data.global_batch_size={total} does not divide by train.micro_batch_size={micro} x {dp} "
                f"data-parallel rank{'s' if dp > 1 else ''} = {micro * dp}; {advice}."
            ]
        )
    return total // (micro * dp)


def _warmup_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    if warmup > steps:
        yield (
            f"schedule.warmup_steps={warmup} is more than train.steps={steps}: the peak is never reached; "
            f"at most {steps} works."
        )


def _layout_problems(parallel: Parallel, world_size: int | None) -> Iterator[str]:
    """At most one line: the three degrees, the world size where it is known, and what is wrong with them."""
    degrees = parallel.degrees
    line = "parallel: " + " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    line += "" if world_size is None else f" on a world size of {world_size}"
    wrong = [f"{name}={degree}" for name, degree in degrees.items() if degree < 1 and degree != -1]
    left = [name for name, degree in degrees.items() if degree == -1]
    known = math.prod(degree for degree in degrees.values() if degree > 0)
    if wrong:
        yield f"{line}: {' and '.join(wrong)} cannot be; expected at least 1, or -1 for what is left."
    elif len(left) > 1:
        yield f"{line}: {' and '.join(left)} are both -1; only one of them can be what is left."
    elif world_size is None:
        return
    elif left and world_size % known:
        yield f"{line}: {left[0]} would be {world_size}/{known}, which is not whole."
    elif not left and known != world_size:
        yield f"{line}: their product is {known}, not {world_size}."


def _model_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    scaling = recipe.model.rope_scaling
    if scaling is not None:
        wrong = list(_rope_scaling_problems(scaling))
        yield from wrong
        if wrong:
            return
    try:
        config = model_config(recipe.model)
    except RecipeError as error:
        yield from error.problems
        return
    if config.n_heads % config.n_kv_heads:
        yield (
            f"model.n_heads={config.n_heads} does not divide by model.n_kv_heads={config.n_kv_heads}: "
            "each key and value head serves a whole number of query heads."
        )
    if config.head_dim % 2:
        yield f"model.head_dim={config.head_dim} is odd: rotary embeddings turn pairs, an even number works."


def _tensor_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    """What tensor parallelism splits must divide. Quiet about a bad model: another check names it."""
    if any(_layout_problems(recipe.parallel, world_size)) or any(_model_problems(recipe, world_size)):
        return
    config, tensor = model_config(recipe.model), recipe.parallel.tensor
    if tensor == -1:
        if world_size is None:
            return
        tensor = resolve_parallel(recipe.parallel, world_size).tensor
    sizes = {f"model.{name}": getattr(config, name) for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")}
    for name, size in {**sizes, "data.seq_len": recipe.data.seq_len}.items():
        if size % tensor:
            fits = [str(degree) for degree in range(1, tensor) if size % degree == 0]
            yield f"{name}={size} does not divide by parallel.tensor={tensor}; {', '.join(fits[-4:])} would."


def _rope_scaling_problems(scaling: dict[str, Any]) -> Iterator[str]:
    allowed = ("type", *_ROPE_SCALING)
    for name, value in scaling.items():
        if name not in allowed:
            close = nearest(name, allowed)
            yield (
                f"model.rope_scaling.{name} = {show(value)}: there is no such key"
                + (f" ({close})." if close else f"; the keys are {', '.join(allowed)}.")
            )
        elif name == "type" and value != "llama3":
            yield f'model.rope_scaling.type = {show(value)}: expected "llama3", the one scaling there is.'
        elif name != "type" and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12
        ):
            yield f"model.rope_scaling.{name} = {show(value)}: expected a number, above 0."
    missing = [name for name in allowed if name not in scaling]
    if missing:
        yield f"model.rope_scaling lacks {', '.join(missing)}."


def _batch_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    dp = 1
    if world_size is not None:
        if any(_layout_problems(recipe.parallel, world_size)):
            return
        parallel = resolve_parallel(recipe.parallel, world_size)
        dp = parallel.replicate * parallel.shard
    try:
        accumulation(recipe, dp)
    except RecipeError as error:
        yield from error.problems


def _fp8_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    """What can be told without a device. Quiet about a bad model or layout: another check names it."""
    if recipe.fp8.recipe == "none" or any(_model_problems(recipe, world_size)):
        return
    from ftrain import fp8, tree

    module, config = family(model_family(recipe.model)), model_config(recipe.model)
    try:
        in_fp8 = fp8.use(recipe.fp8, module.product_weights(config))
    except ValueError as error:
        yield from str(error).splitlines()
        return
    tensor = recipe.parallel.tensor
    if tensor == -1 and world_size is not None and not any(_layout_problems(recipe.parallel, world_size)):
        tensor = resolve_parallel(recipe.parallel, world_size).tensor
    yield from in_fp8.problems(tree.names(module.abstract(config)), tensor=tensor)


def _moments_problems(recipe: Recipe, world_size: int | None) -> Iterator[str]:
    """As optim does, which would import torch: bfloat16 rounds a slower decay away."""
    slowest = max(recipe.optimizer.betas[: 1 if recipe.optimizer.name == "sgd" else 2])
    if recipe.precision.moments == "bfloat16" and slowest > 1 - 2**-8:
        yield (
            f'optimizer.betas = {show(recipe.optimizer.betas)} with precision.moments = "bfloat16": a moment that '
            f"decays by {1 - slowest:.2g} a step is rounded back to what it was; use betas up to {1 - 2**-8:g}, or "
            'precision.moments = "float32".'
        )


_Check = Callable[[Recipe, int | None], Iterator[str]]
_CROSS_CHECKS: tuple[tuple[tuple[str, ...], _Check], ...] = (
    (("schedule.warmup_steps", "train.steps"), _warmup_problems),
    (("parallel",), lambda recipe, world_size: _layout_problems(recipe.parallel, world_size)),
    (("model",), _model_problems),
    (("model", "parallel", "data.seq_len"), _tensor_problems),
    (("data.global_batch_size", "train.micro_batch_size", "parallel"), _batch_problems),
    (("fp8", "model", "parallel"), _fp8_problems),
    (("optimizer.betas", "optimizer.name", "precision.moments"), _moments_problems),
)


def check(recipe: Recipe, world_size: int | None = None, bad: Collection[str] = ()) -> list[str]:
    """A sentence for each problem between keys, or between keys and a number of ranks; empty when it can run.

    bad: keys already known to be wrong; a check that reads one of them is left out.
    """
    problems: list[str] = []
    for reads, find in _CROSS_CHECKS:
        if not any(path == read or path.startswith(read + ".") for path in bad for read in reads):
            problems += find(recipe, world_size)
    return problems


def _one_of(name: str, there: Iterable[str]) -> str:
    close = nearest(name, there)
    return f"expected one of {_quoted(there)}" + (f" ({close})." if close else ".")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name) for name in names)
