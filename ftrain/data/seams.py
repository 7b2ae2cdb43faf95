"""Encode a long text in pieces that give the tokens of the whole.

A document may be a gigabyte, and a tokenizer holds some 70 bytes for each of its tokens. Cut anywhere, a
token would be torn, and a tokenizer that begins each text with a space would add one. So each cut is tried
before it is used.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

AROUND = 200  # characters on each side of a cut that are encoded to try it
TRIES = 64
FULL_TRIES = 3

Encode = Callable[[Sequence[str]], list[np.ndarray]]


def encode_long(text: str, size: int, encode: Encode) -> Iterator[np.ndarray]:
    """The tokens of `text` in order, from pieces of `size` characters; longer where no cut near is right."""
    start, end = 0, size
    while end < len(text):
        found = _cut(text, start, end, encode)
        if found:
            tokens, start = found
            yield tokens
            end = start + size
        else:
            end += size
    yield encode([text[start:]])[0]


def _cut(text: str, start: int, end: int, encode: Encode) -> tuple[np.ndarray, int] | None:
    """(tokens of the piece from `start`, where the next starts), or None if no cut before `end` is right."""
    near = range(end - 1, max(start, end - 4 * TRIES), -1)
    spaces = [i for i in near if text[i].isspace() and not text[i - 1].isspace()]
    full_tries = 0
    for i in [*spaces, *near][:TRIES]:
        for next_ in (i, i + 1) if text[i] == " " else (i,):  # the tokenizer may put that space there itself
            rest = text[next_ : i + AROUND]
            if not rest or not _joins(text[max(start, i - AROUND) : i], text[i : i + AROUND], rest, encode):
                continue
            # The stretch says yes. In a long run of one character only the piece says how tokens align.
            piece, rest_tokens, whole = encode([text[start:i], rest, text[start : i + AROUND]])
            if np.array_equal(whole, np.concatenate([piece, rest_tokens])):
                return piece, next_
            full_tries += 1
            if full_tries == FULL_TRIES:
                return None
    return None


def _joins(left: str, right: str, rest: str, encode: Encode) -> bool:
    whole, first, second = encode([left + right, left, rest])
    return np.array_equal(whole, np.concatenate([first, second]))
