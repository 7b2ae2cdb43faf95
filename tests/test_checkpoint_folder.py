"""Which folder is a checkpoint: broken, forged and hostile ones are passed over, named, and run nothing."""

import json
import os
import pickle
import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch

from ftrain import checkpoint
from ftrain.checkpoint import CheckpointError

STATE = {"w": torch.arange(12.0).view(4, 3), "norm": torch.ones(3), "step": 3}


def save(root: Path, step: int, keep: int = 0) -> Path:
    return checkpoint.save(root, {**STATE, "step": step}, step=step, meta={}, keep=keep)


def load(path: Path):
    return checkpoint.load(path, {"w": torch.zeros(4, 3), "norm": torch.zeros(3), "step": 0})


def no_manifest(path: Path):
    (path / "manifest.json").unlink()


def one_byte_short(path: Path):
    file = path / "rank-00000.bin"
    os.truncate(file, file.stat().st_size - 1)


def no_data(path: Path):
    (path / "rank-00000.bin").unlink()


def empty(path: Path):
    shutil.rmtree(path)
    path.mkdir()


def unfinished(path: Path):
    path.rename(path.with_suffix(".tmp"))


def of_another_step(path: Path):
    other = save(path.parent, 7)
    shutil.rmtree(path)
    other.rename(path)


def cut_manifest(path: Path):
    file = path / "manifest.json"
    os.truncate(file, file.stat().st_size // 2)


def newer_format(path: Path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))


def linked_data(path: Path):
    (path / "rank-00000.bin").rename(path.parent / "elsewhere.bin")
    (path / "rank-00000.bin").symlink_to(path.parent / "elsewhere.bin")


BROKEN = {
    no_manifest: "no manifest.json",
    one_byte_short: "rank-00000.bin has 111 bytes and should have 112",
    no_data: "rank-00000.bin is missing",
    empty: "no manifest.json",
    unfinished: "did not finish",
    of_another_step: "is of step 7",
    cut_manifest: "manifest.json is damaged",
    newer_format: "format 2",
    linked_data: "rank-00000.bin is missing",
}


@pytest.mark.parametrize("damage", BROKEN, ids=lambda fn: fn.__name__)
def test_a_broken_checkpoint_is_passed_over_and_named(tmp_path, damage):
    good = save(tmp_path, 3)
    damage(save(tmp_path, 6))
    path, [(bad, reason)] = checkpoint.latest(tmp_path)
    assert path == good and bad.name.startswith("step-00000006") and BROKEN[damage] in reason
    assert checkpoint.complete(tmp_path) == [(3, good)]
    with pytest.raises(CheckpointError, match="cannot load .*step-00000006"):
        load(bad)


def test_newest_is_by_number(tmp_path):
    for step in (9, 10):
        save(tmp_path, step).rename(tmp_path / f"step-{step}")
    assert checkpoint.latest(tmp_path) == (tmp_path / "step-10", [])
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [9, 10]


def test_no_checkpoint_is_no_error(tmp_path):
    (tmp_path / "notes").mkdir()
    assert checkpoint.latest(tmp_path / "absent") == (None, [])
    assert checkpoint.latest(tmp_path) == (None, [])
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no manifest.json"):
        load(tmp_path / "notes")


def test_retention_counts_complete_checkpoints_only(tmp_path):
    root = tmp_path / "fresh" / "nested"
    save(root, 1, keep=1)
    save(root, 2, keep=2)
    no_manifest(save(root, 3, keep=3))
    one_byte_short(save(root, 4, keep=3))
    assert [step for step, _ in checkpoint.complete(root)] == [1, 2]
    save(root, 5, keep=2)
    assert [step for step, _ in checkpoint.complete(root)] == [2, 5]
    save(root, 6, keep=1)
    assert [step for step, _ in checkpoint.complete(root)] == [6]
    assert (root / "step-00000003").exists() and (root / "step-00000004").exists()


@pytest.mark.parametrize("keep", range(8))
def test_keep_is_how_many_stay(tmp_path, keep):
    for step in range(1, 7):
        save(tmp_path, step, keep=keep)
        kept = [step for step, _ in checkpoint.complete(tmp_path)]
        assert kept == list(range(1, step + 1))[-keep or None :]


def test_the_new_checkpoint_stays_even_when_older_ones_have_higher_steps(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 50, keep=1)
    assert [step for step, _ in checkpoint.complete(tmp_path)] == [50, 100]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3)
    path = checkpoint.save(tmp_path, {**STATE, "norm": torch.zeros(3)}, step=3, meta={}, keep=1)
    assert load(path)[0]["norm"].sum() == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


def test_a_checkpoint_moved_aside_still_counts(tmp_path):
    """Between the two renames of a replacement the old one is found, and the next save puts it back."""
    path = save(tmp_path, 3)
    path.rename(path.with_suffix(".replaced"))
    assert checkpoint.complete(tmp_path) == [(3, path.with_suffix(".replaced"))]
    assert load(checkpoint.latest(tmp_path)[0])[0]["step"] == 3
    save(tmp_path, 4)
    assert [step for step, path in checkpoint.complete(tmp_path)] == [3, 4] and path.exists()


def test_leftovers_are_cleared_by_the_next_save(tmp_path):
    for name in ("step-00000002.tmp", "step-00000001.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.bin").write_bytes(b"half")
    save(tmp_path, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", ["rank-00000.bin", "index.json", "manifest.json"])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, name):
    path = save(tmp_path, 3)
    original = (path / name).read_bytes()
    data_bytes = set(range(12)) | set(range(64, 112)) if name.endswith("bin") else range(0, len(original), 7)
    unharmed = load(path)
    for at in sorted(data_bytes):
        changed = bytearray(original)
        changed[at] ^= 1
        (path / name).write_bytes(changed)
        try:
            loaded = load(path)
        except CheckpointError:
            continue
        # The manifest is text for people too: a bit there may change a word of it, but never a tensor.
        assert name == "manifest.json" and all(torch.equal(loaded[0][k], unharmed[0][k]) for k in ("w", "norm"))


# --- hostile checkpoints ---------------------------------------------------------------------------


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, target: Path):
        self.target = str(target)

    def __reduce__(self):
        return (open, (self.target, "w"))


EVENTS: list[str] | None = None  # audit events of code that runs or is unpickled, while a test listens


def _listen(event: str, args: tuple) -> None:
    if EVENTS is not None and event in (
        "pickle.find_class",
        "exec",
        "compile",
        "os.system",
        "subprocess.Popen",
    ):
        EVENTS.append(event)


def test_pickles_in_a_checkpoint_are_never_opened(tmp_path):
    """In the place of every file, and as the names torch.distributed.checkpoint uses."""
    global EVENTS
    sys.addaudithook(_listen)
    payload = pickle.dumps(Payload(tmp_path / "harm"))
    good = save(tmp_path, 1)
    load(good)  # whatever is imported late is imported now
    names = (".metadata", "__0_0.distcp", "manifest.json", "index.json", "rank-00000.bin")
    for step, name in enumerate(names, start=2):
        path = save(tmp_path, step)
        size = (path / name).stat().st_size if (path / name).exists() else 0
        (path / name).write_bytes(payload.ljust(size, b"\0"))
        if name in names[:2]:
            (path / "manifest.json").unlink()
        EVENTS = []
        try:
            with pytest.raises(CheckpointError):
                load(path)
            checkpoint.latest(tmp_path)
            heard = EVENTS
        finally:
            EVENTS = None
        assert heard == [] and not (tmp_path / "harm").exists(), name


def forge(path: Path, change) -> None:
    """Apply `change(index)` and make sizes and checksums agree with it, as someone with bad intent would."""
    index = json.loads((path / "index.json").read_text())
    text = change(index)
    data = (text if isinstance(text, str) else json.dumps(index)).encode()
    (path / "index.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["index.json"] = len(data)
    manifest["index_crc"] = zlib.crc32(data)
    (path / "manifest.json").write_text(json.dumps(manifest))


def chunk_of(index: dict) -> list:
    return index["tensors"]["w"]["chunks"][0]


FORGERIES = {
    "another file": lambda index: chunk_of(index).__setitem__(2, "../../etc/passwd"),
    "a file not listed": lambda index: chunk_of(index).__setitem__(2, "rank-00001.bin"),
    "past the end": lambda index: chunk_of(index).__setitem__(3, 1 << 40),
    "before the start": lambda index: chunk_of(index).__setitem__(3, -48),
    "outside the tensor": lambda index: chunk_of(index).__setitem__(0, [1, 0]),
    "wrong rank": lambda index: chunk_of(index).__setitem__(0, [0]),
    "a hole": lambda index: chunk_of(index).__setitem__(1, [3, 3]),
    "no chunk": lambda index: index["tensors"]["w"]["chunks"].clear(),
    "twice the same": lambda index: index["tensors"]["w"].update(
        chunks=[[[0, 0], [2, 3], *chunk_of(index)[2:]], [[1, 0], [2, 3], *chunk_of(index)[2:]]]
    ),
    "an unknown dtype": lambda index: index["tensors"]["w"].update(dtype="__import__"),
    "an enormous shape": lambda index: index["tensors"]["w"].update(shape=[1 << 60, 1 << 60]),
    "a shape of words": lambda index: index["tensors"]["w"].update(shape=["4", 3]),
    "a scalar of another kind": lambda index: index["scalars"].update(step=["int", "rm -rf"]),
    "a scalar of no kind": lambda index: index["scalars"].update(step=["Popen", 3]),
    "no tensors": lambda index: index.pop("tensors"),
    "a list": lambda index: "[1, 2]",
    "deep nesting": lambda index: "[" * 100_000,
    "not text": lambda index: "{",
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_index_is_an_error_and_nothing_else(tmp_path, change):
    path = save(tmp_path, 3)
    forge(path, change)
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].update({"../../etc/passwd": 3}),
        lambda m: m["files"].update({"/etc/passwd": 3}),
        lambda m: m["files"].pop("index.json"),
        lambda m: m["files"].update({"index.json": "9"}),
        lambda m: m.update(step="3"),
        lambda m: m.update(files=[1]),
        lambda m: m.update(meta=3),
        lambda m: m.pop("format"),
    ],
)
def test_a_forged_manifest_is_an_error_and_nothing_else(tmp_path, change):
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        load(path)
    assert checkpoint.latest(tmp_path)[0] is None
