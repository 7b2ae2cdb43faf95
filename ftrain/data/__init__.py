"""Documents -> tokens -> batches, all a function of (seed, step)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import packing
from .batches import Train, Validation
from .documents import Document, is_held_out, read_documents
from .errors import DataError
from .sources import SYNTHETIC, find_files
from .tokenizers import Tokenizer, byte_tokenizer, check_vocabulary, open_tokenizer

__all__ = ["Data", "DataError", "Document", "Tokenizer", "Train", "Validation", "open_data"]

SYNTHETIC_TOKENS = 2**40  # nothing is stored, so there may as well be enough never to repeat
SYNTHETIC_HELD_OUT = 2**20


@dataclass(frozen=True)
class Data:
    """An open corpus. train: shuffled batches by step; validation: held-out windows in order."""

    tokenizer: Tokenizer
    train: Train
    validation: Validation


def open_data(data: Any, *, vocab_size: int, seed: int) -> Data:
    """Open the corpus that a recipe's [data] table names, for a model of `vocab_size` ids.

    Raises DataError (a ValueError): no such file, a record that cannot be read (file and line), fewer tokens
    than one window, or a tokenizer with more ids than the model."""
    if data.source == SYNTHETIC:
        tokenizer = byte_tokenizer()
        train = packing.Random(seed, vocab_size, SYNTHETIC_TOKENS)
        held = packing.Random(seed + 1, vocab_size, SYNTHETIC_HELD_OUT)
    else:
        tokenizer = open_tokenizer(data.tokenizer)
        check_vocabulary(tokenizer, vocab_size)
        train, held = _tokenise(data, tokenizer)
    need = data.seq_len + 1
    if train.n_tokens < need:
        raise DataError(
            f"data.source = {data.source!r}: {train.n_tokens} tokens, need {need} for one window of "
            f"data.seq_len = {data.seq_len}"
        )
    return Data(
        tokenizer,
        Train(train, data.seq_len, data.global_batch_size, seed, vocab_size),
        Validation(held, data.seq_len, vocab_size),
    )


def _tokenise(data: Any, tokenizer: Tokenizer) -> tuple[packing.Stream, packing.Stream]:
    share = getattr(data, "held_out", 0.05)
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for document in _documents(data):
        body = tokenizer.encode_batch([document.text])[0]
        ids = np.empty(len(body) + 2, tokenizer.dtype)
        ids[0], ids[1:-1], ids[-1] = tokenizer.bos, body, tokenizer.eos
        (held if is_held_out(document.key, share) else train).append(ids)
    if not train:  # a handful of documents, all of them held out by chance: nothing is learnt from none
        train, held = held, []
    return split_tail(packing.parts(train), packing.parts(held), share, data.seq_len)


def split_tail(train, held, share: float, seq_len: int):
    """Where no document is held out: the last `share` of the windows, if that is at least one."""
    tail = int(share * packing.n_windows(train, seq_len))
    if held.n_tokens >= 2 or tail == 0:
        return train, held
    cut = (packing.n_windows(train, seq_len) - tail) * seq_len + 1
    return packing.Span(train, 0, cut), packing.Span(train, cut, train.n_tokens - cut)


def _documents(data: Any) -> Iterator[Document]:
    sources = (data.source,) if isinstance(data.source, str) else data.source
    for file in (file for source in sources for file in find_files(source)):
        yield from read_documents(file, getattr(data, "text_field", "text"))
