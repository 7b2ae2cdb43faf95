"""The tokenizer that a recipe names: bytes, or a tokenizer.json through the tokenizers library.

Of a tokenizer.json there are two instances: one decodes, as the file says. The other encodes, and there the special
tokens have names that no text spells, in the vocabulary too, so that "</s>" in a document is four characters and not
the end of it.
"""

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError
from .seams import encode_long
from .special import find_bos_eos
from .tokenizer import BYTES, Tokenizer, TokenizerSpec, byte_tokenizer

LONG_CHARS = 1_000_000  # a longer text is encoded in pieces of this, each with about 100 MB in the library


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of a spec: bytes, or the tokenizer.json at (or in the folder) spec.name.

    Raises DataError where it cannot be read or has no end-of-sequence token.
    """
    if spec.name == BYTES:
        return byte_tokenizer()
    path = Path(os.path.expanduser(spec.name))
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f'data.tokenizer = "{spec.name}": expected "bytes", "bpe:SIZE" or the path of a tokenizer.json, and '
            f"{path} cannot be read ({why})"
        ) from error
    return tokenizer_from_json(text, spec, path.parent)


def tokenizer_from_json(text: str, spec: TokenizerSpec, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text. folder: where the files that name its BOS and EOS may lie."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            f"data.tokenizer = \"{spec.name}\" needs tokenizers: pip install 'ftrain[tokenizers]'"
        ) from None
    broken = f'data.tokenizer = "{spec.name}" is no tokenizer.json that the tokenizers library reads'
    try:
        config = json.loads(text)
        decoder = _call(broken, tokenizers.Tokenizer.from_str, text)
        added = {token["content"]: token["id"] for token in config.get("added_tokens") or []}
        vocabulary = decoder.get_vocab(with_added_tokens=True)
        bos, eos = find_bos_eos(spec, config, vocabulary, added, folder)
        special = {token["content"] for token in config.get("added_tokens") or [] if token["special"]}
        renamed = json.dumps(_unspellable(config, special | {bos, eos}))
        encoder = _call(broken, tokenizers.Tokenizer.from_str, renamed)
        if sorted(encoder.get_vocab().values()) != sorted(vocabulary.values()):
            raise DataError(f'data.tokenizer = "{spec.name}": its special tokens and its vocabulary disagree')
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{broken}: {error!r}") from error
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    ids = (vocabulary[bos], vocabulary[eos])

    def encode_some(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = _call(
            "the tokenizers library failed", encoder.encode_batch_fast, list(texts), add_special_tokens=False
        )
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        if max(map(len, texts), default=0) <= LONG_CHARS:
            arrays = encode_some(texts)
        else:
            arrays = [np.concatenate(list(encode_long(text, LONG_CHARS, encode_some))) for text in texts]
        every = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        if ((every == ids[0]) | (every == ids[1])).any():
            raise DataError(f"its text gives {bos} or {eos} as a token, which only mark where it ends")
        return arrays

    def decode_ids(ids: Sequence[int]) -> str:
        return decoder.decode(list(ids), skip_special_tokens=True)

    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    size = max(vocabulary.values()) + 1
    return Tokenizer(spec.name, size, *ids, digest, text, encode_batch, decode_ids)


def _call(doing: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the library. Its errors, and its panics, which `except Exception` lets pass, become DataError."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(f"{doing}: {error}") from error
        raise


def _unspellable(config: dict, special: set[str]) -> dict:
    """The config with every special token renamed, and without the template that adds them."""
    model = dict(config["model"])
    names: dict[str | None, str] = {name: f"\ufdd0{i}\ufdd0special" for i, name in enumerate(sorted(special))}
    # The unknown token is what the model gives for want of a better one, under its own name.
    names.pop(model.get("unk_token"), None)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    added = [
        token | {"content": names.get(token["content"], token["content"])} for token in config.get("added_tokens") or []
    ]
    return config | {"model": model, "added_tokens": added, "post_processor": None}
