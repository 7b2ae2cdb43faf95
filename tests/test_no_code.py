"""Nothing that ftrain reads can run code: not data sets, not tokenizers. (Checkpoints: test_checkpoint_folder.py.)"""

import ast
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ftrain
from ftrain.data import DataError
from ftrain.data.hub import hf_version, load_hf
from ftrain.data.tokenizer import TokenizerSpec
from ftrain.data.tokenizer_json import open_tokenizer

SCRIPT = """
import pathlib
import datasets

pathlib.Path({ran!r}).touch()

class Corpus(datasets.GeneratorBasedBuilder):
    def _info(self):
        return datasets.DatasetInfo(features=datasets.Features({{"text": datasets.Value("string")}}))
    def _split_generators(self, manager):
        return [datasets.SplitGenerator(name="train", gen_kwargs={{}})]
    def _generate_examples(self):
        yield 0, {{"text": "x"}}
"""


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_the_script_of_a_data_set_is_not_run(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    # What an environment variable would set, in the versions that heed it.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_TRUST_REMOTE_CODE", True, raising=False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.py").write_text(SCRIPT.format(ran=str(tmp_path / "ran")))
    for read in (load_hf, hf_version):
        with pytest.raises(DataError, match="corpus"):
            read(f"hf:{tmp_path / 'corpus'}")
    assert not (tmp_path / "ran").exists()


def test_a_library_that_could_is_told_so_in_every_call(monkeypatch):
    calls = []

    def record(*args, trust_remote_code=None, **kwargs):
        calls.append(trust_remote_code)
        return SimpleNamespace(hash="0")

    library = SimpleNamespace(load_dataset=record, load_dataset_builder=record)
    monkeypatch.setitem(sys.modules, "datasets", library)
    load_hf("hf:name:config:split"), hf_version("hf:name")
    assert calls == [False, False]


def test_a_pickle_is_no_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(DataError):
        open_tokenizer(TokenizerSpec(str(tmp_path / "tokenizer.json")))
    assert not (tmp_path / "ran").exists()


MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load"}


def test_no_source_file_unpickles_or_evaluates():
    root = Path(ftrain.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not MODULES & {name.split(".")[0] for name in names}, where
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, where
                for keyword in node.keywords:
                    trusts = keyword.arg in ("allow_pickle", "trust_remote_code")
                    assert not trusts or ast.unparse(keyword.value) == "False", where
