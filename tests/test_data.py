"""Laws of the data: every token a target once an epoch, a batch a function of (seed, step)."""

import numpy as np
import pytest
import torch

from ftrain import nn, recipe
from ftrain.data import DataError, batches, open_data, packing, shuffle

E = 256  # the byte tokenizer's end of document


def settings(source, **changed):
    source = source if isinstance(source, tuple) else str(source)
    defaults = dict(source=source, tokenizer="bytes", seq_len=16, global_batch_size=4, held_out=0.0)
    return recipe.Data(**(defaults | changed))


def opened(source, *, vocab_size=272, seed=0, **changed):
    return open_data(settings(source, **changed), vocab_size=vocab_size, seed=seed)


def text_of(tmp_path, n_tokens, name="a.txt"):
    """A file that makes exactly n_tokens tokens: its bytes and two boundaries, all different from their neighbours."""
    path = tmp_path / name
    path.write_text("".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(n_tokens - 2)))
    return path


def tokens_of(side):
    (stream,) = side.windows.streams
    return stream.read(0, stream.n_tokens)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 24, 64, 1000, 4097])
def test_permute_is_a_bijection_for_every_size(n):
    for seed in range(3):
        assert sorted(shuffle.permute(np.arange(n), n, shuffle.key(seed, 0)).tolist()) == list(range(n))


def test_permute_is_computed_pointwise():
    n, key = 1000, shuffle.key(5, 1)
    whole = shuffle.permute(np.arange(n), n, key)
    assert shuffle.permute(np.array([17, 999, 17]), n, key).tolist() == whole[[17, 999, 17]].tolist()


def test_permute_puts_everything_everywhere_equally_often():
    n, draws = 5, 1000
    seen = np.zeros((n, n))
    for epoch in range(draws):
        seen[np.arange(n), shuffle.permute(np.arange(n), n, shuffle.key(0, epoch))] += 1
    expected = draws / n
    chi_squared = ((seen - expected) ** 2 / expected).sum()
    assert chi_squared < 45  # 16 degrees of freedom: 1 in 10,000 is 44


def test_permute_of_a_huge_range_needs_no_memory():
    n = 10**15
    out = shuffle.permute(np.arange(1000), n, 3)
    assert len(set(out.tolist())) == 1000 and 0 <= out.min() and out.max() < n


def test_what_the_data_leaves_out_of_the_loss_the_loss_leaves_out():
    assert packing.IGNORE == nn.IGNORE


@pytest.mark.parametrize("n_tokens", [17, 18, 33, 100, 385])
def test_every_token_is_a_target_once_an_epoch(tmp_path, n_tokens):
    data = opened(text_of(tmp_path, n_tokens), global_batch_size=1)
    n = data.train.windows.n_windows
    assert n == -(-(n_tokens - 1) // 16) and data.train.windows.n_tokens == n_tokens
    stream = tokens_of(data.train)
    for epoch in range(2):
        steps = range(epoch * n, (epoch + 1) * n)
        ids = [data.train.ids(step)[0] for step in steps]
        assert sorted(ids) == list(range(n))
        rows = {window: data.train.batch(step) for window, step in zip(ids, steps, strict=True)}
        targets = torch.cat([rows[i]["targets"][0] for i in range(n)])
        tokens = torch.cat([rows[i]["tokens"][0] for i in range(n)])
        counted = targets != packing.IGNORE
        assert targets[counted].tolist() == stream[1:].tolist()
        assert tokens[counted].tolist() == stream[:-1].tolist()


def test_an_epoch_has_a_new_order_and_each_window_once(tmp_path):
    train = opened(text_of(tmp_path, 24 * 16 + 1)).train
    epochs = [sum((train.ids(step) for step in range(6 * e, 6 * e + 6)), []) for e in range(3)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_larger_than_the_corpus_wraps(tmp_path):
    train = opened(text_of(tmp_path, 5 * 16 + 1), global_batch_size=8).train
    order = sum((train.ids(step) for step in range(5)), [])
    for epoch in range(8):
        assert sorted(order[5 * epoch : 5 * epoch + 5]) == list(range(5))


def test_ranks_read_their_rows_of_the_same_global_batch(tmp_path):
    train = opened(text_of(tmp_path, 12 * 16 + 1)).train
    for step in (0, 7):
        whole = train.batch(step)
        for n_ranks in (1, 2, 4):
            size = 4 // n_ranks
            parts = [train.batch(step, slice(r * size, (r + 1) * size)) for r in range(n_ranks)]
            for name in ("tokens", "targets"):
                assert whole[name].dtype == torch.int64 and whole[name].shape == (4, 16)
                assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_steps_may_be_asked_for_in_any_order_and_again(tmp_path):
    path = text_of(tmp_path, 300)
    first, second = opened(path).train, opened(path).train
    forward = [first.batch(step)["tokens"] for step in range(9)]
    for step in (8, 3, 3, 0):
        assert torch.equal(second.batch(step)["tokens"], forward[step])


def test_two_seeds_differ_in_order_and_not_in_windows(tmp_path):
    path = text_of(tmp_path, 24 * 16 + 1)
    a, b = opened(path, seed=1, global_batch_size=24).train, opened(path, seed=2, global_batch_size=24).train
    assert a.ids(0) != b.ids(0) and sorted(a.ids(0)) == sorted(b.ids(0))


def test_the_order_of_a_seed_never_changes():
    assert shuffle.permute(np.arange(10), 10, shuffle.key(7, 0)).tolist() == ORDER_OF_SEED_7


ORDER_OF_SEED_7 = [6, 3, 0, 5, 9, 1, 2, 4, 7, 8]


def test_the_split_of_files_does_not_matter(tmp_path):
    """Three files or one: the same windows, so any number of ranks has data."""
    texts = ["first document", "the second", "and a third, longer than both"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    (tmp_path / "all.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    three, one = opened(tmp_path / "[0-9].jsonl").train, opened(tmp_path / "all.jsonl").train
    assert three.ids(0) == one.ids(0)
    assert torch.equal(three.batch(0)["tokens"], one.batch(0)["tokens"])


def test_documents_lie_between_boundaries(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "ab"}\n{"text": "   "}\n')
    data = opened(tmp_path / "a.jsonl", seq_len=4)
    assert tokens_of(data.train).tolist() == [E, 97, 98, E, E, 32, 32, 32, E]


def test_one_token_short_of_a_window_is_an_error_and_a_whole_one_is_not(tmp_path):
    with pytest.raises(DataError, match="16 tokens, need 17"):
        opened(text_of(tmp_path, 16))
    assert opened(text_of(tmp_path, 17)).train.windows.n_windows == 1


def test_only_empty_documents_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match="0 tokens, need 17"):
        opened(tmp_path / "a.jsonl")


def test_the_model_must_know_every_id(tmp_path):
    with pytest.raises(DataError, match="257 ids.* 64"):
        opened(text_of(tmp_path, 40), vocab_size=64)
    data = opened(text_of(tmp_path, 40))
    with pytest.raises(DataError, match="token 0 of window 0 has id 256.* vocabulary of 100"):
        data.train.windows._replace(vocab_size=100).read([0])


def test_ids_above_65535_are_kept():
    stream = packing.parts([np.array([1, 128000, 2], np.int32)])
    assert stream.read(0, 3).tolist() == [1, 128000, 2]


def test_held_out_documents_and_training_documents_make_the_corpus(tmp_path):
    lines = [f'{{"text": "document {i:03d}"}}\n' for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = opened(tmp_path / "a.jsonl", held_out=0.2)
    sides = []
    for side in (data.train, data.validation):
        text = bytes(t % 256 for t in tokens_of(side)).decode()
        sides.append({piece for piece in text.split("\0") if piece})
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {f"document {i:03d}" for i in range(200)}
    assert 20 <= len(sides[1]) <= 60
    (tmp_path / "a.jsonl").write_text("".join(lines + ['{"text": "one more"}\n']))
    grown = opened(tmp_path / "a.jsonl", held_out=0.2, seed=9).validation
    n = data.validation.windows.n_tokens
    assert tokens_of(grown)[:n].tolist() == tokens_of(data.validation).tolist()


def test_one_document_gives_its_last_windows_as_held_out(tmp_path):
    data = opened(text_of(tmp_path, 100 * 16 + 1), held_out=0.05)
    assert data.train.windows.n_windows == 95 and data.validation.windows.n_windows == 5
    assert opened(text_of(tmp_path, 17), held_out=0.05).validation.windows.n_windows == 0


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_validation_covers_the_held_out_tokens_whatever_the_batch(tmp_path, size):
    validation = opened(text_of(tmp_path, 1000), held_out=0.2).validation
    n = validation.windows.n_windows
    ids = sum((validation.ids(start, start + size) for start in range(0, n, size)), [])
    batches_ = [validation.batch(start, start + size)["targets"] for start in range(0, n, size)]
    assert sorted(ids) == list(range(n)) != ids
    targets = torch.cat(batches_)[np.argsort(ids)].flatten()
    assert validation.batch(n, n + 4)["targets"].shape == (0, 16)
    held_out = tokens_of(validation)[1:]
    assert targets[targets != packing.IGNORE].tolist() == held_out.tolist()


def test_synthetic_tokens_are_seeded_and_cover_the_vocabulary():
    a, again, b = (opened("synthetic", vocab_size=64, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.train.batch(3)["tokens"], again.train.batch(3)["tokens"])
    assert not torch.equal(a.train.batch(3)["tokens"], b.train.batch(3)["tokens"])
    seen = torch.cat([a.train.batch(step)["tokens"].flatten() for step in range(40)])
    counts = torch.bincount(seen, minlength=64)
    assert len(counts) == 64 and counts.min() > 10
    assert not torch.equal(a.train.batch(0)["tokens"], a.validation.batch(0, 4)["tokens"])


def test_the_standard_library_is_real_text_in_a_fixed_order():
    data = opened("stdlib", held_out=0.05)
    assert data.train.windows.n_tokens > 5_000_000 and data.validation.windows.n_tokens > 100_000
    assert "import" in data.tokenizer.decode(tokens_of(data.validation)[:20_000])


def test_weighted_sources_are_drawn_by_their_weights_and_each_keeps_its_epochs(tmp_path):
    text_of(tmp_path, 10 * 16 + 1, "a.txt")
    text_of(tmp_path, 40 * 16 + 1, "b.txt")
    source = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    train = opened(source, weights=(3, 1)).train
    order = sum((train.ids(step) for step in range(512)), [])  # two blocks of 1024
    from_a = [window for window in order if window < 10]
    from_b = [window for window in order if window >= 10]
    assert len(from_a) == 1536 and len(from_b) == 512
    for windows, n in ((from_a, 10), (from_b, 40)):
        for epoch in range(len(windows) // n):
            assert len(set(windows[epoch * n : (epoch + 1) * n])) == n
    assert torch.equal(train.batch(300, slice(1, 3))["tokens"], train.batch(300)["tokens"][1:3])


@pytest.mark.parametrize("weights", [(1,), (1, 1), (0.7, 0.2, 0.1), (1, 1e-9), (1e9, 1, 1)])
def test_shares_are_whole_and_near_the_weights(weights):
    counts = batches.shares(weights)
    assert sum(counts) == batches.BLOCK and min(counts) >= 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - batches.BLOCK * weight / sum(weights)) <= len(weights)


@pytest.mark.parametrize(
    "weights, said", [((1,), "1 numbers for 2 sources"), ((1, 0), "above 0"), ((1, float("nan")), "above 0")]
)
def test_wrong_weights_are_an_error(tmp_path, weights, said):
    source = tuple(str(text_of(tmp_path, 40, name)) for name in ("a.txt", "b.txt"))
    with pytest.raises(DataError, match=said):
        opened(source, weights=weights)


def test_a_list_without_weights_is_one_corpus_and_holds_each_file_once(tmp_path):
    names = [str(text_of(tmp_path, 40, name)) for name in ("a.txt", "b.txt")]
    both = opened((names[0], str(tmp_path / "*.txt"))).train
    assert tokens_of(both).tolist() == tokens_of(opened(tmp_path / "*.txt").train).tolist()
    with pytest.raises(DataError, match="in two weighted sources"):
        opened((names[0], str(tmp_path / "*.txt")), weights=(1, 1))


def test_segments_number_the_documents_of_a_window(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n{"text": "defgh"}\n')
    data = opened(tmp_path / "a.jsonl", seq_len=4, document_mask=True, global_batch_size=4)
    batch = data.train.windows.read(range(4))
    tokens, segments = batch["tokens"].tolist(), batch["segments"].tolist()
    # E a b E | E c E E | d e f g | h . . .
    assert tokens == [[E, 97, 98, E], [E, 99, E, E], [100, 101, 102, 103], [104, 0, 0, 0]]
    assert [[s - row[0] for s in row] for row in segments] == [[0] * 4, [0, 0, 0, 1], [0] * 4, [0, 1, 1, 1]]
    whole = data.train.batch(0)["segments"]
    assert whole.dtype == torch.int64 and torch.equal(data.train.batch(0, slice(2, 4))["segments"], whole[2:])
    assert "segments" not in opened(tmp_path / "a.jsonl", seq_len=4).train.batch(0)


def test_segments_where_bos_and_eos_differ():
    tokens = np.array([9, 1, 5, 5, 2, 1, 6, 2, 1, 7])
    assert packing.segments(tokens, 1, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
