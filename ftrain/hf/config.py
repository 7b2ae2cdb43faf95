"""config.json to a family's Config and back, and what it says that ftrain cannot do, by name."""

import dataclasses
import json
import math
import pkgutil
import re
import typing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.errors import FtrainError
from ftrain.models import families, family

CONFIG = "config.json"
MAX_CONFIG = 1 << 24  # bytes; a config.json has a few thousand
# Keys of every family, by the Config's fields. The rotary embedding's lie in one of three places: see `_rope`.
KEYS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Of another model's config.json these are not carried along: they say what made the file, or how to run its code, or
# something of each layer, of which another model may have more or fewer.
_NOT_CARRIED = (
    "transformers_version",
    "_name_or_path",
    "auto_map",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
)


class HfError(FtrainError, ValueError):
    """A checkpoint that cannot be read or written; the message has a sentence a line, with file, key and value."""


@dataclass(frozen=True)
class Format:
    """What a family's checkpoints look like.

    architecture, model_type: how its config.json names it. names: path of a parameter -> name of its tensor, "*" for
    the layer's number in both; a parameter that not every Config has may be there too. keys: fields that the Config
    has beyond the common ones -> keys of config.json. absent: what transformers takes for a key that is not there (a
    key with neither value must be). fixed: what the family's code does not offer to change -> the value it has.
    ignored: tensors that old files hold and no model needs, "*" for any layer.
    """

    architecture: str
    model_type: str
    names: dict[str, str]
    absent: dict[str, Any]
    fixed: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def tensor(self, path: str) -> str:
        """The name of the tensor that holds the parameter at `path`."""
        number = re.search(r"\.(\d+)\.", path)
        name = self.names[re.sub(r"\.\d+\.", ".*.", path)]
        return name if number is None else name.replace("*", number[1])

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of a file is to be passed over."""
        return re.sub(r"\.\d+\.", ".*.", tensor) in self.ignored


class HfConfig(NamedTuple):
    """A config.json: the family's name, its Config, and everything that the file says."""

    family: str
    cfg: Any
    raw: dict[str, Any]


def formats() -> dict[str, Format]:
    """The format of each family that has one."""
    there = {module.name for module in pkgutil.iter_modules(import_module("ftrain.hf").__path__)}
    return {name: import_module(f"ftrain.hf.{name}").FORMAT for name in families() if name in there}


def family_of(cfg: Any) -> str:
    """The name of the family whose Config `cfg` is. Raises HfError for one without a format."""
    name = type(cfg).__module__.rpartition(".")[2]
    if name not in formats():
        raise HfError(f"the family {name} has no format: there is no ftrain/hf/{name}.py")
    return name


def tokenizer_file(folder: Path | str) -> Path | None:
    """The tokenizer.json of a checkpoint, or None."""
    path = Path(folder).expanduser() / "tokenizer.json"
    return path if path.is_file() else None


def read_config(folder: Path | str) -> HfConfig:
    """The config.json in `folder`. Raises HfError with every reason why ftrain cannot run that model."""
    folder = Path(folder).expanduser()
    raw = _read_json(folder)
    name = _family(raw, folder / CONFIG)
    cfg, problems = _config(raw, name)
    if problems:
        raise HfError("\n".join(f"{folder / CONFIG}: {problem}." for problem in problems))
    return HfConfig(name, cfg, raw)


def write_config(cfg: Any, dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Config. dtype: the tensors'. more: further keys, such as another config.json's."""
    form, config = formats()[family_of(cfg)], dataclasses.asdict(cfg)
    ours = {key: config[name] for name, key in (KEYS | form.keys).items()}
    scaling = config["rope_scaling"]
    rope = {"rope_type": "default"} if scaling is None else {"rope_type": scaling["type"]}
    rope |= {name: scaling[name] for name in LLAMA3} if scaling else {}
    context = scaling["original_max_position_embeddings"] * scaling["factor"] if scaling else 0
    carried = {key: value for key, value in more.items() if key not in _NOT_CARRIED}
    return (
        {"max_position_embeddings": int(context) or 2048, "bos_token_id": None, "eos_token_id": None}
        | carried
        | {"architectures": [form.architecture], "model_type": form.model_type}
        | ours
        | form.fixed
        # transformers 5 and later read rope_parameters and dtype, earlier ones and other programs the rest.
        | {"rope_theta": config["rope_theta"], "rope_scaling": rope if scaling else None}
        | {"rope_parameters": rope | {"rope_theta": config["rope_theta"]}}
        | {"dtype": dtype, "torch_dtype": dtype}
    )


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        hub = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.exists()
        hint = f": a model of the Hugging Face hub is first downloaded: hf download {folder} --local-dir DIR"
        raise HfError(f"{folder}: there is no such folder{hint if hub else ''}")
    path = folder / CONFIG
    if not path.is_file():
        raise HfError(f"{folder} has no {CONFIG}, which says the model's shape")
    if path.stat().st_size > MAX_CONFIG:
        raise HfError(f"{path} has {path.stat().st_size} bytes, more than {MAX_CONFIG}: is it a config.json?")
    try:
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError, OSError) as error:
        raise HfError(f"{path} cannot be read: {error}") from error
    return raw


def _family(raw: dict[str, Any], path: Path) -> str:
    """The family that a config.json names. Raises HfError where it names none of ours, or two."""
    known = formats()
    kind = raw.get("model_type")
    stated = raw.get("architectures") or [form.architecture for form in known.values() if form.model_type == kind]
    names = [name for name, form in known.items() if [form.architecture] == stated]
    if not names:
        key = "architectures" if raw.get("architectures") else "model_type"
        there = ", ".join(form.architecture if key == "architectures" else form.model_type for form in known.values())
        raise HfError(f"{path}: {key} = {json.dumps(raw.get(key))}: expected one of {there}")
    if kind not in (None, known[names[0]].model_type):
        raise HfError(f"{path}: architectures = {json.dumps(stated)}, but model_type = {json.dumps(kind)}")
    return names[0]


def _config(raw: dict[str, Any], name: str) -> tuple[Any, list[str]]:
    """(the family's Config, []) or (None, what is wrong)."""
    form, config = formats()[name], family(name).Config
    problems = [
        f"{key} = {json.dumps(raw[key])}: ftrain's {name} has {json.dumps(value)} there and nothing else"
        for key, value in form.fixed.items()
        if raw.get(key, value) != value
    ]
    if raw.get("quantization_config") is not None:
        problems.append("quantization_config: ftrain reads weights in float32, bfloat16 or float16")
    hints, values = typing.get_type_hints(config), {}
    for name_, key in (KEYS | form.keys).items():
        value = raw.get(key)
        if value is None:
            value = form.absent.get(key, _derived(key, raw))
        if value is None:
            problems.append(f"it has no {key}")
        elif wrong := _mismatch(value, hints[name_]):
            problems.append(f"{key} = {json.dumps(value)}: expected {wrong}")
        else:
            values[name_] = value
    theta, scaling, more = _rope(raw, form.absent["rope_theta"])
    problems += more
    if problems:
        return None, problems
    return config(**values, rope_theta=float(theta), rope_scaling=scaling), []


def _derived(key: str, raw: dict[str, Any]) -> int | None:
    """What follows from other keys, where a key is absent or null."""
    heads, dim = raw.get("num_attention_heads"), raw.get("hidden_size")
    if key == "num_key_value_heads":
        return heads
    if key == "head_dim" and type(heads) is int and type(dim) is int and heads > 0:
        return dim // heads
    return None


def _mismatch(value: Any, hint: Any) -> str | None:
    """What was expected, where a value does not fit a field of the Config; None where it does."""
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        return None if type(value) is int and 0 < value < 2**31 else "a whole number above 0"
    return None if _is_positive(value) else "a number above 0"


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _rope(raw: dict[str, Any], absent: float) -> tuple[Any, dict[str, Any] | None, list[str]]:
    """(theta, Config.rope_scaling, problems). Older files have rope_theta and rope_scaling, newer rope_parameters."""
    theta, scaling, problems = raw.get("rope_theta"), None, []
    for place in ("rope_scaling", "rope_parameters"):
        said = raw.get(place)
        if said is None:
            continue
        if not isinstance(said, dict):
            problems.append(f"{place} = {json.dumps(said)}: expected an object")
            continue
        kind = said.get("rope_type", said.get("type", "default"))
        own = said.get("rope_theta", theta)
        if theta is not None and own != theta:
            problems.append(f"{place}.rope_theta = {json.dumps(own)}, but rope_theta = {json.dumps(theta)}")
        theta = own
        rest = {k: v for k, v in said.items() if k not in ("rope_type", "type", "rope_theta")}
        if rest.get("partial_rotary_factor") == 1.0:
            del rest["partial_rotary_factor"]
        wanted = LLAMA3 if kind == "llama3" else ()
        if kind not in ("default", "llama3"):
            problems.append(f'{place}.rope_type = {json.dumps(kind)}: expected "default" or "llama3"')
            continue
        for key in (*wanted, *(key for key in rest if key not in wanted)):
            if key not in rest:
                problems.append(f"{place} has no {key}")
            elif key not in wanted:
                problems.append(f"{place}.{key} = {json.dumps(rest[key])}: there is no such key for {kind}")
            elif not _is_positive(rest[key]):
                problems.append(f"{place}.{key} = {json.dumps(rest[key])}: expected a number above 0")
        found = {"type": kind} | rest if wanted else None
        if place == "rope_parameters" and raw.get("rope_scaling") is not None and found != scaling:
            problems.append("rope_scaling and rope_parameters say different things")
        scaling = found
    theta = absent if theta is None else theta
    if not _is_positive(theta):
        problems.append(f"rope_theta = {json.dumps(theta)}: expected a number above 0")
    return theta, scaling, problems
