"""Tokenised once: the same tokens from memory and cache, in slices and in processes; nothing half done."""

import contextlib
import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ftrain import recipe
from ftrain.data import DataError, cache, open_data, sources, tokenising
from ftrain.data.documents import read_documents
from ftrain.data.tokenizer import TokenizerSpec, byte_tokenizer

RULES = tokenising.Rules(TokenizerSpec("bytes"), "text", 0.2)


def write_corpus(path, n=2000, start=0):
    lines = [json.dumps({"text": f"document {i} " + "x" * (i * 37 % 200)}) for i in range(start, start + n)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tokens(parts, side):
    return np.concatenate([array for part in parts for array in getattr(part, side)] or [[]]).tolist()


def units_of(path, unit_bytes=sources.UNIT_BYTES):
    return sources.cut_into_units(sources.find_files(str(path)), unit_bytes)


def files_in(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("unit_bytes", [1, 1000, 7919, 10**9])
def test_slices_of_a_file_hold_its_documents_once_and_in_order(tmp_path, unit_bytes):
    path = write_corpus(tmp_path / "a.jsonl", n=300)
    (file,) = sources.find_files(str(path))
    whole = list(read_documents(file))
    units = units_of(path, unit_bytes)
    assert len(units) > 1 or unit_bytes == 10**9
    cut = [document for unit in units for slice_ in unit for document in read_documents(slice_)]
    assert [(d.text, d.key, str(d.origin)) for d in cut] == [(d.text, d.key, str(d.origin)) for d in whole]
    assert str(cut[-1].origin) == f"{path}, line 300"


def test_small_files_share_a_unit(tmp_path):
    for i in range(30):
        write_corpus(tmp_path / f"{i:02d}.jsonl", n=1, start=i)
    assert len(units_of(tmp_path / "*.jsonl")) == 1
    units = units_of(tmp_path / "*.jsonl", 100)
    assert 1 < len(units) < 30
    assert [slice_.name for unit in units for slice_ in unit] == [f"{i:02d}.jsonl" for i in range(30)]


def test_memory_cache_slices_and_processes_give_the_same_tokens(tmp_path):
    path = write_corpus(tmp_path / "a.jsonl")
    tokenizer = byte_tokenizer()
    expected = tokenising.tokenise(units_of(path), RULES, tokenizer, None)
    seen = []
    for name, unit_bytes, alone in (("a", 10**9, 10**9), ("b", 50_000, 10**9), ("c", 50_000, 0)):
        folder = tmp_path / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenising, "ALONE_BYTES", alone)
            report = (lambda done, total: seen.append((done, total))) if name == "c" else None
            tokenising.tokenise(units_of(path, unit_bytes), RULES, tokenizer, folder, processes=2, progress=report)
        again = tokenising.tokenise(units_of(path, unit_bytes), RULES, tokenizer, folder)
        for side in ("train", "held"):
            assert tokens(again, side) == tokens(expected, side)
        assert not any(name.endswith(".tmp") for name in files_in(folder))
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


def test_a_second_run_reads_no_text(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "a.jsonl")
    os.utime(path, (1, 1))
    monkeypatch.setattr(cache, "SETTLED_NS", -(10**18))
    first = tokenising.tokenise(units_of(path), RULES, byte_tokenizer(), tmp_path / "cache")
    for module, name in ((cache, "read_range"), (tokenising, "read_documents")):
        monkeypatch.setattr(module, name, None)
    second = tokenising.tokenise(units_of(path), RULES, byte_tokenizer(), tmp_path / "cache")
    assert tokens(first, "train") == tokens(second, "train")


def test_changed_text_or_rules_give_new_tokens_and_appended_text_only_its_own(tmp_path):
    path, folder, tokenizer = write_corpus(tmp_path / "a.jsonl"), tmp_path / "cache", byte_tokenizer()

    def run(rules=RULES):
        before = set(files_in(folder)) if folder.exists() else set()
        parts = tokenising.tokenise(units_of(path, 50_000), rules, tokenizer, folder)
        new = [name for name in files_in(folder) if name.endswith(".tokens") and name not in before]
        return parts, len(new)

    parts, n_new = run()
    assert n_new == len(parts) > 3 and run()[1] == 0
    path.write_text(path.read_text().replace("document 0 ", "document X "))  # same size, same second
    parts, n_new = run()
    assert n_new == 1 and b"document X" in bytes(t % 256 for t in tokens(parts, "train") + tokens(parts, "held"))
    with open(path, "a") as file:
        file.write(json.dumps({"text": "the last"}) + "\n")
    assert run()[1] <= 2
    parts, n_new = run(RULES._replace(held_out=0.0))
    assert n_new == len(parts) and not tokens(parts, "held")


@pytest.mark.parametrize("damage", [b"", b"ftrain01", b"x" * 1000])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    path, folder = write_corpus(tmp_path / "a.jsonl"), tmp_path / "cache"
    first = tokens(tokenising.tokenise(units_of(path), RULES, byte_tokenizer(), folder), "train")
    (stored,) = folder.rglob("*.tokens")
    whole = stored.read_bytes()
    for content in (damage, whole[:-1], whole + b"x"):
        stored.unlink()
        stored.write_bytes(content)
        assert tokens(tokenising.tokenise(units_of(path), RULES, byte_tokenizer(), folder), "train") == first


def test_an_error_in_a_process_names_the_line_and_leaves_what_was_done(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "ALONE_BYTES", 0)
    path, folder = write_corpus(tmp_path / "a.jsonl"), tmp_path / "cache"
    with open(path, "a") as file:
        file.write('{"text": 3}\n')
    units = units_of(path, 50_000)
    with pytest.raises(DataError, match="line 2001.*got 3"):
        tokenising.tokenise(units, RULES, byte_tokenizer(), folder, processes=2)
    done = [name for name in files_in(folder) if name.endswith(".tokens")]
    assert 0 < len(done) < len(units)
    assert not [name for name in files_in(folder) if name.endswith(".tmp")]


SCRIPT = """
import sys
from pathlib import Path
from ftrain.data import sources, tokenising
from ftrain.data.tokenizer import TokenizerSpec, byte_tokenizer
tokenising.ALONE_BYTES = 0
units = sources.cut_into_units(sources.find_files(sys.argv[1]), 50_000)
rules = tokenising.Rules(TokenizerSpec("bytes"), "text", 0.2)
parts = tokenising.tokenise(units, rules, byte_tokenizer(), Path(sys.argv[2]), processes=2)
print(sum(len(array) for part in parts for array in part.train))
"""


def start_run(path, folder):
    command = [sys.executable, "-c", SCRIPT, str(path), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_runs_at_once_and_runs_that_are_ended_do_no_harm(tmp_path):
    path, folder = write_corpus(tmp_path / "a.jsonl", n=20_000), tmp_path / "cache"
    expected = len(tokens(tokenising.tokenise(units_of(path), RULES, byte_tokenizer(), None), "train"))
    for ending in (signal.SIGKILL, signal.SIGINT):
        run = start_run(path, folder)
        deadline = time.monotonic() + 30
        while not list(folder.rglob("*.tokens")) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            run.send_signal(ending)
        run.communicate(timeout=30)
    runs = [start_run(path, folder) for _ in range(2)]
    for run in runs:
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0, err
        assert int(out) == expected


def test_the_cache_is_used_where_it_pays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = write_corpus(tmp_path / "a.jsonl")
    data = recipe.Data(source=str(path), tokenizer="bytes", seq_len=16, global_batch_size=4)
    in_memory = open_data(data, vocab_size=272, seed=0)
    assert not (tmp_path / "xdg").exists()  # a little text, and bytes
    mapped = open_data(dataclasses.replace(data, cache=str(tmp_path / "cache")), vocab_size=272, seed=0)
    assert list((tmp_path / "cache").rglob("*.tokens"))
    for step in (0, 5):
        assert in_memory.train.batch(step)["tokens"].equal(mapped.train.batch(step)["tokens"])
    monkeypatch.setattr(sys.modules["ftrain.data"], "SMALL_BYTES", 0)
    open_data(data, vocab_size=272, seed=0)
    assert list((tmp_path / "xdg" / "ftrain").rglob("*.tokens"))
    with pytest.raises(DataError, match="/dev/null/nowhere.*data.cache"):
        open_data(dataclasses.replace(data, cache="/dev/null/nowhere"), vocab_size=272, seed=0)


def test_ids_above_65535_come_back_from_the_cache(tmp_path):
    path = tmp_path / "ab" / "x.tokens"
    ids = np.array([1, 128000, 2])
    cache.write_part(path, [(ids, ids[:1], 1), (ids[1:], ids[:0], 1)], np.dtype(np.int32))
    part = cache.read_part(path)
    assert part.train[0].tolist() == [1, 128000, 2, 128000, 2] and part.held[0].tolist() == [1]
    assert part.n_documents == 2


def test_a_compressed_file_has_the_tokens_and_split_of_its_text(tmp_path):
    path = write_corpus(tmp_path / "a.jsonl", n=100)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    sides = []
    for name in ("a.jsonl", "b.jsonl.gz"):
        parts = tokenising.tokenise(units_of(tmp_path / name), RULES, byte_tokenizer(), tmp_path / "cache")
        sides.append(sorted(tokens(parts, "train") + tokens(parts, "held")))
    assert sides[0] == sides[1]
