"""What data costs: `python -m benchmarks.data [--megabytes N] [--rounds N] [--dir DIR] [--json]`.

- Batches are read from a mapped file of tokens, shuffled, at no less than 50 times what a step of the debug recipe
  consumes.
- Tokenising takes at most 1.2 times as long as the tokenizers library's own `encode_batch` on the same texts, which
  are in its memory beforehand. Ours reads them from a .jsonl, tells held-out documents apart, hashes, and writes tokens
  to a cold cache. The two take turns, and the best of each counts: what else the machine does can only add time.

Exit code 1 where a bar is missed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

BATCH_BAR, TOKENISING_BAR = 50.0, 1.2
BATCHES, STEPS = 2000, 5
VOCABULARY = 4096
LIBRARY_BATCH = 8 << 20  # characters that the library is given at a time: its results take 70 bytes a token


def seconds(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def write_corpus(path: Path, megabytes: int) -> list[str]:
    """Write documents of Python's standard library as JSON lines, as often as it takes, and return the texts."""
    from ftrain.data.documents import read_documents
    from ftrain.data.sources import stdlib_files

    texts, size = [], 0
    library = [document.text for file in stdlib_files() for document in read_documents(file)]
    with open(path, "w") as file:
        for number, text in enumerate(itertools.cycle(library)):
            text = f"# copy {number}\n{text}"
            size += file.write(json.dumps({"text": text}) + "\n")
            texts.append(text)
            if size >= megabytes * 1_000_000:
                return texts


def tokenising(folder: Path, megabytes: int, rounds: int) -> dict:
    """Seconds for the corpus, ours and the library's, each the best over rounds."""
    import tokenizers

    from ftrain.data import tokenizer_of
    from ftrain.data.sources import cut_into_units, find_files
    from ftrain.data.tokenising import Rules, tokenise
    from ftrain.data.tokenizer import TokenizerSpec
    from ftrain.recipe import Data

    corpus = folder / "corpus.jsonl"
    texts = write_corpus(corpus, megabytes)
    data = Data(source="stdlib", tokenizer=f"bpe:{VOCABULARY}", cache=str(folder / "trained"))
    tokenizer = tokenizer_of(data)
    library = tokenizers.Tokenizer.from_str(tokenizer.json)
    rules = Rules(TokenizerSpec(tokenizer.name), "text", 0.05)
    names, counts = itertools.count(), {}

    def ours() -> float:
        cache = folder / f"cache {next(names)}"
        os.sync()

        def run():
            parts = tokenise(cut_into_units(find_files(str(corpus))), rules, tokenizer, cache)
            counts["ours"] = sum(len(array) for part in parts for array in (*part.train, *part.held))

        spent = seconds(run)
        shutil.rmtree(cache)
        return spent

    def plain() -> float:
        spent, n_tokens, batch, size = 0.0, 0, [], 0
        for text in [*texts, None]:
            if text is not None:
                batch.append(text)
                size += len(text)
            if batch and (text is None or size >= LIBRARY_BATCH):
                start = time.perf_counter()
                encodings = library.encode_batch(batch, add_special_tokens=False)
                spent += time.perf_counter() - start
                n_tokens += sum(len(encoding.ids) for encoding in encodings)
                batch, size = [], 0
        counts["library"] = n_tokens
        return spent

    ours_, plain_ = zip(*((ours(), plain()) for _ in range(rounds)), strict=True)
    assert counts["ours"] == counts["library"] + 2 * len(texts), f"not the same tokens: {counts}"
    return {
        "megabytes": megabytes,
        "tokens": counts["library"],
        "seconds": min(ours_),
        "library_seconds": min(plain_),
        "ratio": min(ours_) / min(plain_),
    }


def reading(folder: Path) -> dict:
    """Tokens a second of batches from a mapped file, and of the debug recipe's steps."""
    import ftrain
    from ftrain.data import open_data

    recipe = ftrain.load_recipe("debug")
    run = ftrain.Run(recipe, device="cpu")
    data = open_data(dataclasses.replace(recipe.data, cache=str(folder / "mapped")), vocab_size=272, seed=0)
    state, size = run.init(), recipe.data.global_batch_size * recipe.data.seq_len

    def step():
        nonlocal state
        state, metrics = run.step(state, data.train.batch(state.step))
        float(metrics["loss"])

    step()
    stepping = min(seconds(step) for _ in range(STEPS))
    steps = itertools.count()
    per_batch = seconds(lambda: [data.train.batch(next(steps)) for _ in range(BATCHES)]) / BATCHES
    return {
        "batch_tokens_per_second": size / per_batch,
        "step_tokens_per_second": size / stepping,
        "ratio": stepping / per_batch,
    }


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure; default: the temporary folder's")
    parser.add_argument("--megabytes", type=int, default=60, help="text to tokenise")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        result = {"reading": reading(Path(name))}
        result["tokenising"] = tokenising(Path(name), options.megabytes, options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    fine = result["reading"]["ratio"] >= BATCH_BAR and result["tokenising"]["ratio"] <= TOKENISING_BAR
    return 0 if fine else 1


def show(result: dict) -> None:
    """The numbers as lines, each with its bar."""
    rates, took = result["reading"], result["tokenising"]
    print(
        f"batches: {rates['batch_tokens_per_second'] / 1e6:.1f}M tokens/s; a step of the debug recipe consumes "
        f"{rates['step_tokens_per_second'] / 1e3:.1f}k: {rates['ratio']:.0f} times (at least {BATCH_BAR:.0f})"
    )
    print(
        f"tokenising {took['megabytes']} MB ({took['tokens'] / 1e6:.1f}M tokens): {took['seconds']:.2f} s, "
        f"encode_batch {took['library_seconds']:.2f} s: {took['ratio']:.2f} times (at most {TOKENISING_BAR})"
    )


if __name__ == "__main__":
    sys.exit(main())
