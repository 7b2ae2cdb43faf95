"""A byte-pair tokenizer of a given size, trained on the corpus's own training documents."""

from collections.abc import Iterator, Sequence

from .documents import is_held_out, read_documents
from .errors import DataError
from .sources import Unit

PREFIX = "bpe:"
VERSION = 1  # of how it is trained; part of the key of a trained tokenizer
END = "<|end_of_text|>"
SAMPLE_BYTES = 256 << 20  # of text at most: byte pairs of more do not differ, and their counts live in memory
PIECE_CHARS = 10_000  # a "word" of a million characters would be one entry of the counts
SMALLEST = 257  # the bytes, and the end of a document


def bpe_size(name: str) -> int:
    """The number of ids that "bpe:SIZE" asks for."""
    size = name.removeprefix(PREFIX)
    if not size.isdecimal() or int(size) < SMALLEST:
        raise DataError(
            f'data.tokenizer = "{name}": expected bpe:SIZE with a SIZE of {SMALLEST} or more '
            "(the 256 bytes, the end of a document, and the merged pairs)"
        )
    return int(size)


def train_bpe(units: Sequence[Unit], size: int, field: str, held_out: float) -> str:
    """The tokenizer.json of `size` ids, trained on the documents of `units` that are not held out.

    Of more than SAMPLE_BYTES, a sample of documents by the hash of their keys. Deterministic. Raises
    DataError where the text has too few pairs to merge."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise DataError(
            f"data.tokenizer = \"{PREFIX}{size}\" needs tokenizers: pip install 'ftrain[tokenizers]'"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(units, field, held_out), trainer)
    if tokenizer.get_vocab_size() < size:
        raise DataError(
            f'data.tokenizer = "{PREFIX}{size}": the training text has byte pairs for no more than '
            f"{tokenizer.get_vocab_size()} ids"
        )
    return tokenizer.to_str()


def _sample(units: Sequence[Unit], field: str, held_out: float) -> Iterator[str]:
    n_bytes = sum(slice_.n_bytes for unit in units for slice_ in unit)
    share = min(1.0, SAMPLE_BYTES / max(1, n_bytes))
    room = SAMPLE_BYTES  # a compressed corpus is larger than its files
    for slice_ in (slice_ for unit in units for slice_ in unit):
        for document in read_documents(slice_, field):
            if is_held_out(document.key, held_out) or not is_held_out(f"bpe:{document.key}", share):
                continue
            for start in range(0, len(document.text), PIECE_CHARS):
                yield document.text[start : start + PIECE_CHARS]
            room -= len(document.text)
            if room <= 0:
                return
