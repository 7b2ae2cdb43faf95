"""Text <-> token ids: what a tokenizer is, and the one that needs no file, bytes.

A document becomes BOS, its text, EOS: exactly one of each, whatever the tokenizer's own template would add,
also where one token serves as both. Text that spells a special token is ordinary text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .errors import DataError

BYTES = "bytes"
END_OF_DOCUMENT = 256


class TokenizerSpec(NamedTuple):
    """Which tokenizer: "bytes" or a path, and its BOS and EOS if they are not to be found out."""

    name: str
    bos: str | None = None
    eos: str | None = None


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as data and two functions.

    vocab_size: its largest id + 1. bos, eos: the ids around a document. digest: equal for tokenizers that
    agree. json: the tokenizer.json ("" for bytes). encode_batch: texts -> an integer array each, without BOS
    and EOS; decode_ids: ids -> text, special ids left out."""

    name: str
    vocab_size: int
    bos: int
    eos: int
    digest: str
    json: str
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    decode_ids: Callable[[Sequence[int]], str]

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint16 and int32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.int32)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS."""
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; BOS, EOS and other special ids give none. Bytes that are not UTF-8 give U+FFFD."""
        return self.decode_ids([int(token) for token in ids])


def byte_tokenizer() -> Tokenizer:
    """A token is a byte of UTF-8; 256 begins and ends a document."""

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode_ids(ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < END_OF_DOCUMENT).decode(errors="replace")

    return Tokenizer(BYTES, 257, END_OF_DOCUMENT, END_OF_DOCUMENT, BYTES, "", encode_batch, decode_ids)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """DataError unless every id of the tokenizer is one of the model's."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f'data.tokenizer = "{tokenizer.name}" has {tokenizer.vocab_size} ids, the model a vocabulary of '
            f"{vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
