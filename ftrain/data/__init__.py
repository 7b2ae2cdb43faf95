"""Documents -> tokens -> batches, all a function of (seed, step).

sources (which files) -> documents -> tokenising, through cache -> packing (windows) -> batches.
"""

from dataclasses import dataclass
from pathlib import Path

from ftrain import recipe

from . import bpe, cache, packing
from .batches import Train, Validation
from .errors import DataError
from .sources import SYNTHETIC, Unit, cut_into_units, find_files
from .tokenising import Progress, Rules, tokenise
from .tokenizer import BYTES, Tokenizer, TokenizerSpec, byte_tokenizer, check_vocabulary
from .tokenizer_json import open_tokenizer

__all__ = ["Data", "DataError", "Progress", "Tokenizer", "Train", "Validation", "open_data", "tokenizer_of"]

SYNTHETIC_TOKENS = 2**40  # nothing is stored, so there may as well be enough never to repeat
SYNTHETIC_HELD_OUT = 2**20
# Bytes of less than this are read again by each run and rank, in a second, and kept nowhere.
SMALL_BYTES = 64 << 20


@dataclass(frozen=True)
class Data:
    """An open corpus. train: shuffled batches by step; validation: held-out windows in order."""

    tokenizer: Tokenizer
    train: Train
    validation: Validation


def open_data(data: recipe.Data, *, vocab_size: int, seed: int, progress: Progress | None = None) -> Data:
    """Open the corpus of a recipe's [data] table for a model of `vocab_size` ids.

    Tokenises what the cache does not have, in parallel; progress is called with the bytes of text done and to
    do. Raises DataError (a ValueError): no such file, a record that cannot be read (file and line), fewer
    tokens than one window, or a tokenizer with more ids than the model.
    """
    weights = _weights(data)
    if data.source == SYNTHETIC:
        tokenizer = byte_tokenizer()
        streams = [packing.Random(seed, vocab_size, SYNTHETIC_TOKENS)]
        held = [packing.Random(seed + 1, vocab_size, SYNTHETIC_HELD_OUT)]
    else:
        groups = [cut_into_units(files) for files in _groups(data, bool(weights))]
        tokenizer, streams, held = _tokenised(data, groups, vocab_size, progress)
    need = data.seq_len + 1
    for stream, source in zip(streams, _sources(data) if weights else [data.source], strict=True):
        if stream.n_tokens < need:
            raise DataError(
                f"data.source = {source!r}: {stream.n_tokens} tokens, need {need} for one window of "
                f"data.seq_len = {data.seq_len}"
            )
    boundary = (tokenizer.bos, tokenizer.eos) if data.document_mask else None
    windows = packing.Windows(tuple(streams), data.seq_len, vocab_size, boundary)
    return Data(
        tokenizer,
        Train(windows, weights, data.global_batch_size, seed),
        Validation(windows._replace(streams=tuple(held))),
    )


def _tokenised(data: recipe.Data, groups: list[list[Unit]], vocab_size: int, progress: Progress | None) -> tuple:
    """(tokenizer, training streams, held-out streams), a stream a group."""
    share, field = data.held_out, data.text_field
    units = [unit for group in groups for unit in group]
    folder = _folder(data, units)
    spec = _spec(data, units, folder)
    tokenizer = open_tokenizer(spec)
    check_vocabulary(tokenizer, vocab_size)
    parts = tokenise(units, Rules(spec, field, share), tokenizer, folder, progress=progress)
    streams, held = [], []
    for group in groups:
        mine, parts = parts[: len(group)], parts[len(group) :]
        train: packing.Stream = packing.parts([array for part in mine for array in part.train])
        kept: packing.Stream = packing.parts([array for part in mine for array in part.held])
        if not train.n_tokens:  # a handful of documents, all held out by chance: nothing is learnt from none
            train, kept = kept, train
        train, kept = packing.split_tail(train, kept, share, data.seq_len)
        streams.append(train)
        held.append(kept)
    return tokenizer, streams, held


def tokenizer_of(data: recipe.Data) -> Tokenizer:
    """The tokenizer of a recipe's [data] table, without the text, unless it is trained on that. Raises DataError."""
    if data.source == SYNTHETIC:
        return byte_tokenizer()
    units: list[Unit] = []
    if data.tokenizer.startswith(bpe.PREFIX):
        units = [unit for files in _groups(data, bool(_weights(data))) for unit in cut_into_units(files)]
    return open_tokenizer(_spec(data, units, _folder(data, units)))


def _spec(data: recipe.Data, units: list[Unit], folder: Path | None) -> TokenizerSpec:
    if data.tokenizer.startswith(bpe.PREFIX):
        return _trained(data.tokenizer, units, data.text_field, data.held_out, folder)
    return TokenizerSpec(data.tokenizer, data.bos, data.eos)


def _trained(name: str, units: list[Unit], field: str, share: float, folder: Path | None) -> TokenizerSpec:
    """The spec of the byte-pair tokenizer that `name` asks for, trained now if the cache does not have it."""
    size = bpe.bpe_size(name)
    assert folder is not None, "a trained tokenizer is kept"
    path = cache.tokenizer_path(folder, units, (bpe.VERSION, size, field, share))
    if not path.exists():
        with cache.locked(folder, path.name):
            if not path.exists():
                text = bpe.train_bpe(units, size, field, share)
                with cache.writing(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
    return TokenizerSpec(str(path), bpe.END, bpe.END)


def _folder(data: recipe.Data, units: list[Unit]) -> Path | None:
    """Where tokens are kept, or None for memory."""
    if data.cache == "off":
        if data.tokenizer.startswith(bpe.PREFIX):
            raise DataError(f'data.tokenizer = "{data.tokenizer}" is kept in data.cache, which is "off"')
        return None
    if data.cache:
        return Path(data.cache).expanduser()
    n_bytes = sum(slice_.n_bytes for unit in units for slice_ in unit)
    plain = all(slice_.kind != "hf" for unit in units for slice_ in unit)
    return None if data.tokenizer == BYTES and plain and n_bytes < SMALL_BYTES else cache.default_folder()


def _sources(data: recipe.Data) -> tuple[str, ...]:
    return (data.source,) if isinstance(data.source, str) else data.source


def _groups(data: recipe.Data, apart: bool) -> list[list]:
    """The files of each source, or of all together; a file that two patterns match is in the corpus once."""
    groups: list[list] = [[]]
    seen: dict[str, str] = {}
    for i, source in enumerate(_sources(data)):
        if source == SYNTHETIC:
            raise DataError('data.source: "synthetic" stands alone, not in a list')
        if apart and i:
            groups.append([])
        for file in find_files(source):
            other = seen.setdefault(file.path, source)
            if other == source:
                groups[-1].append(file)
            elif apart:
                raise DataError(f"data.source: {file.path} is in two weighted sources, {other} and {source}")
    return groups


def _weights(data: recipe.Data) -> tuple[float, ...]:
    weights, n = data.weights, len(_sources(data))
    if weights and len(weights) != n:
        raise DataError(f"data.weights has {len(weights)} numbers for {n} sources in data.source")
    if any(not 0 < weight < float("inf") for weight in weights):
        raise DataError(f"data.weights = {list(weights)}: every weight must be a number above 0")
    return weights
