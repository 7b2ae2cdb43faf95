"""Which tokens of a tokenizer.json begin and end a document: the file itself does not say."""

import json
from pathlib import Path
from typing import Any

from .errors import DataError
from .tokenizer import TokenizerSpec

BOS = "<|begin_of_text|> <｜begin▁of▁sentence｜> <s> <bos> <BOS> <|bos|> [BOS] <|startoftext|>".split()
EOS = "<|end_of_text|> <｜end▁of▁sentence｜> </s> <eos> <EOS> <|eos|> [EOS] <|endoftext|>".split()


def find_bos_eos(
    spec: TokenizerSpec, config: dict, vocabulary: dict[str, int], added: dict[str, int], folder: Path | None
) -> tuple[str, str]:
    """The contents of (BOS, EOS). In order of precedence: the recipe, the files beside tokenizer.json, the
    tokenizer's template, and the names that tokenizers in use have. A tokenizer without BOS has its EOS do both.

    Raises DataError where there is no EOS, or where the recipe names a token that is not there.
    """
    for key, token in (("bos", spec.bos), ("eos", spec.eos)):
        if token and token not in vocabulary:
            raise DataError(f'data.{key} = "{token}" is no token of data.tokenizer = "{spec.name}"')
    told = _told(folder, vocabulary) if folder else {}
    template = _template(config.get("post_processor"))
    bos = _first(vocabulary, spec.bos, told.get("bos"), template[0], *(name for name in BOS if name in added))
    eos = _first(vocabulary, spec.eos, told.get("eos"), template[1], *(name for name in EOS if name in added))
    if not eos:
        known = ", ".join(added) or "none"
        raise DataError(
            f'data.tokenizer = "{spec.name}" does not say which token ends a sequence: set data.eos to one '
            f"of its special tokens ({known})"
        )
    return bos or eos, eos


def _first(vocabulary: dict[str, int], *candidates: str | None) -> str | None:
    return next((token for token in candidates if token in vocabulary), None)


def _told(folder: Path, vocabulary: dict[str, int]) -> dict[str, str]:
    """What the files that are kept beside a tokenizer.json say, the tokenizer's own before the model's."""
    names = {id_: token for token, id_ in vocabulary.items()}
    told: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        said = _read_json(folder / file)
        for key in ("bos", "eos"):
            token = said.get(f"{key}_token")
            token = token.get("content") if isinstance(token, dict) else token
            id_ = said.get(f"{key}_token_id")
            id_ = id_[0] if isinstance(id_, list) and id_ else id_
            token = token or (names.get(id_) if isinstance(id_, int) else None)
            if token in vocabulary:
                told.setdefault(key, token)
    return told


def _read_json(path: Path) -> dict:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}, beside the tokenizer, cannot be read: {error}") from error
    return said if isinstance(said, dict) else {}


def _template(processor: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """The special tokens that the post-processor puts before and after a text."""
    processor = processor or {}
    kind = processor.get("type")
    if kind == "Sequence":
        found = [_template(inner) for inner in processor["processors"]]
        return next((a for a, _ in found if a), None), next((b for _, b in found if b), None)
    if kind in ("BertProcessing", "RobertaProcessing"):
        return processor["cls"][0], processor["sep"][0]
    if kind != "TemplateProcessing":
        return None, None
    single = processor["single"]
    text = next((i for i, item in enumerate(single) if "Sequence" in item), len(single))
    before = [item["SpecialToken"]["id"] for item in single[:text] if "SpecialToken" in item]
    after = [item["SpecialToken"]["id"] for item in single[text:] if "SpecialToken" in item]
    return before[0] if before else None, after[-1] if after else None
