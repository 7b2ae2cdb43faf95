"""From a corpus to what ranks compute: nobody waits, nobody reads another's windows, no document sees its neighbour."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from tiny import write_tiny

from ftrain import Run, load_recipe
from ftrain.data import DataError, open_data, packing
from ftrain.data.cache import read_part
from ftrain.launch import World
from ftrain.nn import IGNORE
from ftrain.recipe import Data
from ftrain.sharding import to_local
from ftrain.trainer import train

LAYOUTS = {"shard": ("parallel.shard=2",), "tensor": ("parallel.tensor=2",)}


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


# --- every rank says what is wrong ---------------------------------------------------------------------------------


def refusals(rank, path, variants):
    """What each set of overrides ends with, on this rank."""
    said = []
    for overrides in variants:
        try:
            train(load_recipe(path, ["parallel.shard=2", *overrides]), quiet=True, world=World(rank, 2))
            said.append("trained")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_corpus_that_cannot_be_read_is_an_error_on_every_rank(ranks, tmp_path):
    path = write_tiny(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "16.txt").write_text("x" * 14)  # between two boundaries
    (tmp_path / "17.txt").write_text("x" * 15)
    write_jsonl(tmp_path / "blank.jsonl", [""] * 3)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    (tmp_path / "five.txt").write_text("x" * (5 * 16 - 1))
    wanted = {
        "blank.jsonl": "0 tokens, need 17 for one window",
        "empty.txt": "0 tokens, need 17 for one window",
        "16.txt": "16 tokens, need 17 for one window",
        "absent.txt": "absent.txt",
        "bad.jsonl": f'{tmp_path / "bad.jsonl"}, line 2: "text" must be a string, got 3',
        "17.txt": "trained",
        "five.txt": "trained",  # 5 windows, and batches of 8 go on in the next epoch
    }
    variants = [[f"data.source={tmp_path / name}", "data.global_batch_size=8"] for name in wanted]
    first, second = ranks(2, refusals, path, variants)
    assert first == second
    for found, words in zip(first, wanted.values(), strict=True):
        assert words in found, found


def meet_an_unknown_id(rank, path, layout):
    run = Run(load_recipe(path, ["model.vocab_size=64", *layout]), World(rank, 2))
    stream = packing.parts([np.array([3] * 100 + [64] + [3] * 100, np.uint16)])
    windows = run.data.train.windows._replace(streams=(stream,))
    run.data = dataclasses.replace(run.data, train=dataclasses.replace(run.data.train, windows=windows))
    try:
        return [run.batch(step)["tokens"].max().item() for step in range(20)]
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_that_the_model_does_not_have_stops_every_layout(ranks, tmp_path, layout):
    for said in ranks(2, meet_an_unknown_id, write_tiny(tmp_path), LAYOUTS[layout]):
        assert "token 4 of window 6 has id 64" in said or "token 16 of window 5 has id 64" in said, said
        assert "outside the model's vocabulary of 64" in said


# --- every rank has its own ----------------------------------------------------------------------------------------


def read(rank, path, overrides):
    run = Run(load_recipe(path, overrides), World(rank, 4))
    return run.batch(0)["tokens"].numpy()


def test_one_file_or_three_on_four_ranks(ranks, tmp_path):
    """Each rank has 3 windows that no other has, and all of them are the corpus, whatever the files."""
    path = write_tiny(tmp_path)
    text = "".join(f"{i:03d} is a number" for i in range(20))
    documents = [text[:60], text[60:120], text[120:187]]  # with their boundaries 12 x 16 + 1 tokens
    write_jsonl(tmp_path / "one.jsonl", documents)
    for i, document in enumerate(documents):
        (tmp_path / f"part{i}.txt").write_text(document)
    seen = {}
    for name in ("one.jsonl", "part*.txt"):
        overrides = (
            f"data.source={tmp_path / name}",
            "data.global_batch_size=12",
            "train.micro_batch_size=3",
            "parallel.shard=4",
            "data.held_out=0",
        )
        seen[name] = ranks(4, read, path, overrides)
        assert all(batch.shape == (3, 16) for batch in seen[name])
        rows = {tuple(row) for batch in seen[name] for row in batch.tolist()}
        assert len(rows) == 12
    for one, three in zip(*seen.values(), strict=True):
        np.testing.assert_array_equal(one, three)


# --- documents in one window ---------------------------------------------------------------------------------------


def test_a_document_has_the_loss_that_it_has_alone(tiny, tmp_path):
    texts = ["the cat sat", "on a mat", "and the hat", "is flat"]
    source = f"data.source={write_jsonl(tmp_path / 'a.jsonl', texts)}"
    layout = ("data.seq_len=44", "data.global_batch_size=1", "train.micro_batch_size=1", "data.held_out=0")
    run = Run(tiny(source, *layout, "data.document_mask=true"))
    params, batch = to_local(run.init().params), run.batch(0)
    total, count = run.model.loss(params, batch)
    alone = 0.0
    for segment in batch["segments"].unique():
        here = (batch["segments"] == segment) & (batch["targets"] != IGNORE)
        if here.any():
            piece = {name: batch[name][here].unsqueeze(0) for name in ("tokens", "targets")}
            alone += run.model.loss(params, piece)[0]
    torch.testing.assert_close(total, alone, rtol=1e-6, atol=1e-4)
    assert count == sum(len(text) + 2 for text in texts) - 1
    mixed, _ = Run(tiny(source, *layout)).model.loss(params, {key: batch[key] for key in ("tokens", "targets")})
    assert abs(mixed - total) > 1e-3


# --- what is held --------------------------------------------------------------------------------------------------


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> int:
    """The most memory of this process since `reset_peak`, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


on_linux = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from /proc")


@on_linux
def test_documents_are_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr("ftrain.data.tokenising.ALONE_BYTES", 1 << 40)  # here, not in processes of their own
    line = json.dumps({"text": "x" * 300}) + "\n"
    with open(tmp_path / "a.jsonl", "w") as file:
        for _ in range(200):
            file.write(line * 1000)
    table = Data(source=str(tmp_path / "a.jsonl"), seq_len=16, cache=str(tmp_path / "cache"), held_out=0.1)
    reset_peak()
    before = peak()
    data = open_data(table, vocab_size=272, seed=0)
    data.train.batch(0)
    assert data.train.windows.n_tokens + data.validation.windows.n_tokens == 200_000 * 302
    grown, size = peak() - before, (tmp_path / "a.jsonl").stat().st_size
    assert size > 60_000_000 and grown < 24 << 20, grown
    assert sum(read_part(path).n_documents for path in (tmp_path / "cache").rglob("*.tokens")) == 200_000


@on_linux
def test_a_long_document_takes_little_memory(tmp_path):
    from test_data_tokenizers import byte_level, stream_of

    path = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    stream_of(tmp_path, path, ["the cat"])
    reset_peak()
    before = peak()
    stream_of(tmp_path, path, ["^" * 1_000_000, "a" * 1_000_000, "the cat"])
    assert peak() - before < 1 << 30
