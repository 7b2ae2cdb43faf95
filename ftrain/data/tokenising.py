"""Units of text -> parts of tokens: in memory, or once for all runs in the cache, in parallel.

The processes are started as `python -m ftrain.data.worker` and spoken to in lines of JSON, one unit a line.
They inherit nothing: no fork of a process with threads and GPUs, and no second import of the user's script.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import cache
from .documents import Document, is_held_out, read_documents
from .errors import DataError
from .sources import Unit
from .tokenizer import Tokenizer, TokenizerSpec

VERSION = 1  # of what a document becomes; part of every key
BATCH_CHARS = 1 << 20
ALONE_BYTES = 8 << 20  # less than this is tokenised faster here than processes start

Progress = Callable[[int, int], None]
Batch = tuple[np.ndarray, np.ndarray, int]  # training tokens, held-out tokens, documents


class Rules(NamedTuple):
    """What decides a document's tokens besides its text: the tokenizer, the text's field, the held-out share."""

    tokenizer: TokenizerSpec
    field: str
    held_out: float


def tokenise(
    units: Sequence[Unit],
    rules: Rules,
    tokenizer: Tokenizer,
    folder: Path | None,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[cache.Part]:
    """The tokens of each unit, from `folder` where it has them; what it lacks is tokenised and put there.

    folder None: in memory. processes: at most (default: one a core). progress: called with the bytes of text
    done and to do."""
    report = progress or (lambda done, total: None)
    if folder is None:
        return _in_memory(units, rules, tokenizer, report)
    settings = (VERSION, tokenizer.digest, tokenizer.bos, tokenizer.eos, rules.field, rules.held_out)
    with ThreadPoolExecutor() as pool:  # hashing lets go of the interpreter's lock
        keys = list(pool.map(lambda unit: cache.unit_key(unit, settings, folder), units))
    paths = [cache.part_path(folder, key) for key in keys]
    parts = [cache.read_part(path) for path in paths]
    if None in parts:
        corpus = blake2b("".join(keys).encode(), digest_size=8).hexdigest()
        with cache.locked(folder, corpus):  # ranks of one host: the first to come works, the others wait
            cache.remove_unfinished(folder)
            parts = [part or cache.read_part(path) for part, path in zip(parts, paths, strict=True)]
            work = [(paths[i], units[i]) for i, part in enumerate(parts) if part is None]
            _write(work, rules, tokenizer, folder, processes, report)
        parts = [part or cache.read_part(path) for part, path in zip(parts, paths, strict=True)]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        raise DataError(f"{paths[parts.index(None)]} was written and is gone: is the cache being cleared?")
    return whole


def encode_unit(unit: Unit, rules: Rules, tokenizer: Tokenizer) -> Iterator[Batch]:
    """The unit's documents as tokens, each between BOS and EOS, in batches of about a million characters."""
    batch: list[Document] = []
    size = 0
    for slice_ in unit:
        for document in read_documents(slice_, rules.field):
            batch.append(document)
            size += len(document.text)
            if size >= BATCH_CHARS:
                yield _encode(batch, rules, tokenizer)
                batch, size = [], 0
    if batch:
        yield _encode(batch, rules, tokenizer)


def _encode(documents: list[Document], rules: Rules, tokenizer: Tokenizer) -> Batch:
    try:
        bodies = tokenizer.encode_batch([document.text for document in documents])
    except DataError:
        bodies = [_encode_alone(document, tokenizer) for document in documents]
    sides: tuple[list, list] = ([], [])
    bos, eos = (np.array([token], tokenizer.dtype) for token in (tokenizer.bos, tokenizer.eos))
    for document, body in zip(documents, bodies, strict=True):
        sides[is_held_out(document.key, rules.held_out)].extend((bos, body, eos))
    train, held = (_joined(side, tokenizer.dtype) for side in sides)
    return train, held, len(documents)


def _joined(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate(arrays or [np.zeros(0, dtype)], dtype=dtype, casting="unsafe")


def _encode_alone(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    try:
        return tokenizer.encode_batch([document.text])[0]
    except DataError as error:
        raise DataError(f"{document.origin} ({len(document.text)} characters): {error}") from error


def _in_memory(units: Sequence[Unit], rules: Rules, tokenizer: Tokenizer, report: Progress) -> list[cache.Part]:
    total, done, parts = _n_bytes(units), 0, []
    for unit in units:
        batches = list(encode_unit(unit, rules, tokenizer))
        trains, helds = tuple(batch[0] for batch in batches), tuple(batch[1] for batch in batches)
        parts.append(cache.Part(trains, helds, sum(batch[2] for batch in batches)))
        done += _n_bytes([unit])
        report(done, total)
    return parts


def _write(
    work: list[tuple[Path, Unit]],
    rules: Rules,
    tokenizer: Tokenizer,
    folder: Path,
    processes: int | None,
    report: Progress,
) -> None:
    total, done = _n_bytes([unit for _, unit in work]), 0
    n = min(len(work), processes or len(os.sched_getaffinity(0)))
    if n < 2 or total < ALONE_BYTES:
        for path, unit in work:
            cache.write_part(path, encode_unit(unit, rules, tokenizer), tokenizer.dtype)
            done += _n_bytes([unit])
            report(done, total)
        return
    workers = [_start_worker(rules) for _ in range(n)]
    idle = list(workers)

    def run(path: Path, unit: Unit) -> int:
        worker = idle.pop()  # as many threads as workers, so there is one
        _ask(worker, path, unit)
        idle.append(worker)
        return _n_bytes([unit])

    pool = ThreadPoolExecutor(n)
    try:
        for size in pool.map(lambda item: run(*item), work):
            done += size
            report(done, total)
    finally:
        for worker in workers:  # on an error or an interrupt, units in work are dropped; finished ones stay
            worker.kill()
            worker.wait()
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            for pipe in (worker.stdout, worker.stdin):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        cache.remove_unfinished(folder, tuple(worker.pid for worker in workers))


def _start_worker(rules: Rules) -> subprocess.Popen:
    # One thread a process: the tokenizers library would start one a core in each.
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "ftrain.data.worker", json.dumps(rules)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _ask(worker: subprocess.Popen, path: Path, unit: Unit) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps([str(path), unit]) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except (OSError, ValueError):
        answer = ""
    if not answer:
        files = unit[0].path if len(unit) == 1 else f"{unit[0].path} ... {unit[-1].path}"
        raise DataError(f"{files}: the process tokenising it ended (exit {worker.poll()}): out of memory?")
    if error := json.loads(answer).get("error"):
        raise DataError(error)


def _n_bytes(units: Sequence[Unit]) -> int:
    return sum(slice_.n_bytes for unit in units for slice_ in unit)
