"""One BOS and one EOS a document whatever the tokenizer, and text that spells a special token stays text."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from ftrain import recipe
from ftrain.data import DataError, open_data
from ftrain.data.seams import encode_long
from ftrain.data.tokenizer import TokenizerSpec, byte_tokenizer
from ftrain.data.tokenizer_json import open_tokenizer

TEXTS = [
    "a",
    "x</s>y",
    "</s>",
    "<s><s>",
    " two  spaces ",
    "naïve 漢字 🙂",
    "line\r\nline\u2028",
    "<|endoftext|>",
]


def test_bytes_there_and_back():
    tokenizer = byte_tokenizer()
    for text in [*TEXTS, ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([256, 104, 105, 0xFF, 256]) == "hi\ufffd"


def byte_level(path, special, post=None, model="bpe"):
    """Write a byte-level tokenizer.json with `special` tokens; post: (before, after) of its template."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat and the hat sat </s> on the mat. ^^^^ aaaa"] * 9, trainer)
    if post:
        before, after = post
        template = ([before] if before else []) + ["$A"] + ([after] if after else [])
        ids = [(token, tokenizer.token_to_id(token)) for token in set(post) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(path))
    return str(path)


def stream_of(tmp_path, tokenizer, texts, **changed):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = dict(source=str(path), tokenizer=tokenizer, seq_len=1, global_batch_size=1, held_out=0.0, cache="off")
    data = open_data(recipe.Data(**(data | changed)), vocab_size=512, seed=0)
    (stream,) = data.train.windows.streams
    return data.tokenizer, stream.read(0, stream.n_tokens).tolist()


@pytest.mark.parametrize(
    "special, post",
    [
        (["<|endoftext|>"], None),
        (["<s>", "</s>"], None),
        (["<s>", "</s>"], ("<s>", None)),
        (["<s>", "</s>"], ("<s>", "</s>")),
        (["<s>", "</s>"], (None, "</s>")),
        (["<one>", "<two>", "<three>"], ("<two>", "<three>")),
    ],
)
def test_a_document_has_one_bos_and_one_eos(tmp_path, special, post):
    texts = ["a", f"x{special[-1]}y", "the cat", special[0]]
    tokenizer, stream = stream_of(tmp_path, byte_level(tmp_path / "tokenizer.json", special, post), texts)
    bos, eos = tokenizer.bos, tokenizer.eos
    assert (bos == eos) == (len(special) == 1)
    expected = [[bos, *tokenizer.encode(text), eos] for text in texts]
    assert stream == sum(expected, [])
    assert stream.count(bos) == stream.count(eos) == len(texts) * (2 if bos == eos else 1)
    for text in [*texts, *TEXTS, "far more than eight tokens of text, so truncation would show"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([bos, *tokenizer.encode("the cat"), eos]) == "the cat"


@pytest.mark.parametrize(
    "name, said",
    [
        ("tokenizer_config.json", {"bos_token": "<b>", "eos_token": {"content": "<e>"}}),
        ("tokenizer_config.json", {"bos_token": None, "eos_token": "<e>"}),
        ("special_tokens_map.json", {"bos_token": "<b>", "eos_token": "<e>"}),
        ("config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]}),
    ],
)
def test_files_beside_the_tokenizer_say_what_bos_and_eos_are(tmp_path, name, said):
    byte_level(tmp_path / "tokenizer.json", ["<unk>", "<b>", "<e>", "</s>"])
    (tmp_path / name).write_text(json.dumps(said))
    tokenizer = open_tokenizer(TokenizerSpec(str(tmp_path)))
    assert tokenizer.eos == 2 and tokenizer.bos == (2 if said.get("bos_token", "") is None else 1)
    assert open_tokenizer(TokenizerSpec(str(tmp_path), bos="<unk>", eos="</s>")).bos == 0


def test_no_eos_and_unknown_ones_are_errors(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["<one>", "<two>"])
    with pytest.raises(DataError, match="set data.eos to one of its special tokens .<one>, <two>"):
        open_tokenizer(TokenizerSpec(path))
    assert open_tokenizer(TokenizerSpec(path, eos="<two>")).bos == 1
    with pytest.raises(DataError, match='data.bos = "<three>" is no token'):
        open_tokenizer(TokenizerSpec(path, bos="<three>"))


def test_a_vocabulary_that_holds_the_special_tokens_does_not_give_them_for_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "cat", "▁cat", "▁", "<", "/", "s", ">", "x", "y"]
    word_level = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unigram = tokenizers.Tokenizer(models.Unigram([(w, 0.0 if w == "</s>" else -2.0) for w in words], unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    for tokenizer in (word_level, unigram):
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        opened = open_tokenizer(TokenizerSpec(str(tmp_path / "tokenizer.json")))
        assert (opened.bos, opened.eos, opened.vocab_size) == (1, 2, 12)
        assert not {1, 2} & set(opened.encode("cat </s> x</s>y <s>"))
    assert opened.decode(opened.encode("cat x</s>y")) == "cat x</s>y"


def test_a_tokenizer_larger_than_the_model_is_an_error_with_both_numbers(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    size = open_tokenizer(TokenizerSpec(path)).vocab_size
    (tmp_path / "a.txt").write_text("the cat sat")
    data = recipe.Data(source=str(tmp_path / "a.txt"), tokenizer=path, seq_len=2, global_batch_size=1)
    with pytest.raises(DataError, match=f"has {size} ids, the model a vocabulary of 64"):
        open_data(data, vocab_size=64, seed=0)


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}', "[]"])
def test_what_is_no_tokenizer_is_an_error_with_its_path(tmp_path, content):
    pytest.importorskip("tokenizers")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="data.tokenizer = .*tokenizer.json"):
        open_tokenizer(TokenizerSpec(str(tmp_path / "tokenizer.json")))


def test_a_million_characters_without_a_space_are_tokenised_and_the_next_document_read(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    texts = ["^" * 1_000_000, "a" * 1_000_000, "the cat"]
    start = time.monotonic()
    tokenizer, stream = stream_of(tmp_path, path, texts)
    assert time.monotonic() - start < 60
    ends = [i for i, token in enumerate(stream) if token == tokenizer.eos]
    assert [tokenizer.decode(stream[a:b]) for a, b in zip(ends[::2], ends[1::2], strict=True)] == texts


@pytest.mark.parametrize("prefix", [False, True])
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, prefix):
    pytest.importorskip("tokenizers")
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    path = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if prefix:  # a space before every text, as sentencepiece models have it
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()

    def encode(texts):
        return [np.array(tokenizer.encode(text, add_special_tokens=False).ids, int) for text in texts]

    for text in ("the cat sat on  the mat.\n\n" * 200, "^" * 5000, "a" * 3000 + " the" * 500):
        cut = list(encode_long(text, 700, encode))
        assert len(cut) > 1 or prefix
        assert np.concatenate(cut).tolist() == encode([text])[0].tolist()


def test_a_trained_tokenizer_has_its_size_and_is_kept(tmp_path):
    pytest.importorskip("tokenizers")
    lines = [f"def function_{i}(argument): return argument + {i}" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    settings = dict(source=str(tmp_path / "a.jsonl"), tokenizer="bpe:300", seq_len=8, global_batch_size=2)
    data = recipe.Data(**settings, cache=str(tmp_path / "cache"), held_out=0.1)
    first = open_data(data, vocab_size=300, seed=0)
    assert first.tokenizer.vocab_size == 300 and first.tokenizer.bos == first.tokenizer.eos
    assert len(first.tokenizer.encode(lines[7])) < len(lines[7]) / 2
    for text in [*TEXTS, lines[0], "<|end_of_text|>"]:
        assert first.tokenizer.decode(first.tokenizer.encode(text)) == text
    kept = list((tmp_path / "cache" / "tokenizers").iterdir())
    assert len(kept) == 1 and kept[0].read_text() == first.tokenizer.json
    second = open_data(data, vocab_size=300, seed=0)
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == kept
    assert first.train.batch(3)["tokens"].equal(second.train.batch(3)["tokens"])
    kept[0].unlink()
    assert open_data(data, vocab_size=300, seed=0).tokenizer.json == first.tokenizer.json  # same text, same pairs
    for name, said in (("bpe:12", "257 or more"), ("bpe:x", "bpe:SIZE"), ("bpe:200000", "no more than")):
        with pytest.raises(DataError, match=said):
            open_data(replace(data, tokenizer=name), vocab_size=10**6, seed=0)


def test_a_tokenizer_works_in_processes_as_it_does_here(tmp_path, monkeypatch):
    from ftrain.data import tokenising

    tokenizer = byte_level(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    _, here = stream_of(tmp_path, tokenizer, [f"the cat {i}" for i in range(100)])
    monkeypatch.setattr(tokenising, "ALONE_BYTES", 0)
    monkeypatch.setattr(sys.modules["ftrain.data"], "cut_into_units", cut_small)
    texts = [f"the cat {i}" for i in range(100)]
    assert stream_of(tmp_path, tokenizer, texts, cache=str(tmp_path / "cache"))[1] == here
    assert len(list((tmp_path / "cache").rglob("*.tokens"))) > 3


def cut_small(files):
    from ftrain.data import sources

    return sources.cut_into_units(files, 500)


def test_ctrl_c_ends_a_long_tokenisation(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["</s>"])
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "the cat sat on the mat. " * 400}) + "\n") * 20_000)
    script = (
        "from ftrain.recipe import Data; from ftrain.data import open_data; print('on', flush=True)\n"
        f"open_data(Data(source={str(tmp_path / 'a.jsonl')!r}, tokenizer={path!r}, seq_len=8, "
        f"global_batch_size=1, cache={str(tmp_path / 'cache')!r}), vocab_size=512, seed=0)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert run.stdout.readline() == "on\n"
    time.sleep(1.5)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode != 0 and "KeyboardInterrupt" in err
    assert not list((tmp_path / "cache").rglob("*.tmp"))
