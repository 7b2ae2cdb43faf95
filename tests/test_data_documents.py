"""Reading: what a file holds comes out as it is, and what cannot be read is named with its line."""

import gzip
import json

import pytest

from ftrain.data import DataError
from ftrain.data.documents import read_documents
from ftrain.data.sources import cut_into_units, find_files


def texts(path, field="text"):
    return [doc.text for file in find_files(str(path)) for doc in read_documents(file, field)]


def jsonl(tmp_path, *lines, name="a.jsonl"):
    (tmp_path / name).write_bytes(b"\n".join(lines))
    return tmp_path / name


GOOD = b'{"text": "one"}'


def test_only_line_feeds_end_a_record(tmp_path):
    odd = "two\u2028still two\u0085and\rstill"
    second = json.dumps({"text": odd}, ensure_ascii=False).encode()
    path = jsonl(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r", second + b"\r", b"", b'{"text": "three"}')
    assert texts(path) == ["one", odd, "three"]


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"text": "a\xe6A"}', "not UTF-8: bytes e6 41"),
        (b'{"text": "cut', "not a JSON value"),
        (b'{"texts": "a"}', 'no "text"; it has texts'),
        (b"{}", 'no "text"'),
        (b'{"text": null}', "must be a string, got null"),
        (b'{"text": 7}', "must be a string, got 7"),
        (b'["a"]', "expected an object"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line, said):
    path = jsonl(tmp_path, GOOD, line, GOOD)
    with pytest.raises(DataError) as caught:
        texts(path)
    assert said in str(caught.value) and f"{path}, line 2" in str(caught.value)


def test_blank_lines_count_in_line_numbers(tmp_path):
    with pytest.raises(DataError, match="line 4"):
        texts(jsonl(tmp_path, GOOD, b"", b"  ", b"{"))


def test_a_line_longer_than_a_read_is_one_record(tmp_path):
    long = "x" * 3_000_000
    assert texts(jsonl(tmp_path, GOOD, json.dumps({"text": long}).encode(), GOOD)) == ["one", long, "one"]


def test_another_field_may_hold_the_text(tmp_path):
    assert texts(jsonl(tmp_path, b'{"content": "a"}'), "content") == ["a"]


def test_text_files_are_one_document_each_in_order_of_name(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "B\r\n"), ("a.txt", "\ufeffA"), ("sub/c.txt", "C"), ("empty.txt", "")):
        (tmp_path / name).write_bytes(text.encode())
    assert texts(tmp_path / "**" / "*.txt") == ["A", "B\r\n", "C"]
    (tmp_path / "b.txt").write_bytes(b"ok\nbad \xff")
    with pytest.raises(DataError, match=r"b\.txt, line 2: not UTF-8"):
        texts(tmp_path / "*.txt")


def test_the_key_of_a_document_does_not_depend_on_where_the_corpus_lies(tmp_path):
    keys = []
    for root in ("here", "there/deeper"):
        (tmp_path / root / "x").mkdir(parents=True)
        jsonl(tmp_path / root / "x", GOOD, GOOD)
        (file,) = find_files(str(tmp_path / root / "*" / "*.jsonl"))
        keys.append([doc.key for doc in read_documents(file)])
    assert keys[0] == keys[1] and len(set(keys[0])) == 2


def test_gzip_is_read_and_a_cut_one_is_an_error(tmp_path):
    packed = gzip.compress(b"\n".join([GOOD] * 1000))
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    assert texts(tmp_path / "a.jsonl.gz") == ["one"] * 1000
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match="a.jsonl.gz: cannot be read"):
        texts(tmp_path / "a.jsonl.gz")


def test_zst_is_read_and_a_cut_one_is_an_error(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.compress(b"\n".join([GOOD] * 1000) + b"\n")
    (tmp_path / "a.jsonl.zst").write_bytes(frame + frame)
    assert texts(tmp_path / "a.jsonl.zst") == ["one"] * 2000
    (tmp_path / "a.jsonl.zst").write_bytes(frame + frame[:-5])
    with pytest.raises(DataError, match="cut short"):
        texts(tmp_path / "a.jsonl.zst")
    (tmp_path / "a.jsonl.zst").write_bytes(b"not zst at all")
    with pytest.raises(DataError, match="not readable as zst"):
        texts(tmp_path / "a.jsonl.zst")


def test_parquet_is_read_by_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}\u2028" for i in range(3000)]
    parquet.write_table(pyarrow.table({"id": list(range(3000)), "text": rows}), tmp_path / "a.parquet")
    assert texts(tmp_path / "*.parquet") == rows
    with pytest.raises(DataError, match='no column "body"; it has id, text'):
        texts(tmp_path / "a.parquet", "body")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2.*got null"):
        texts(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="a.parquet"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "source, said",
    [
        ("none.jsonl", "no file none.jsonl"),
        ("*.jsonl", "no file matches"),
        ("folder", "is a folder"),
        ("a.bin", "of no kind"),
    ],
)
def test_a_source_that_names_nothing_readable_is_an_error(tmp_path, monkeypatch, source, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=said) as caught:
        find_files(source)
    assert source in str(caught.value)


def test_a_datasets_folder_is_read_by_shard_and_split(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(3):
        jsonl(folder, b'{"text": "one of %d"}' % i, b'{"text": "two of %d"}' % i, name=f"train-{i}.jsonl")
    jsonl(folder, b'{"text": "apart"}', name="test-0.jsonl")
    units = cut_into_units(find_files(f"hf:{folder}"))
    documents = [doc for unit in units for slice_ in unit for doc in read_documents(slice_)]
    assert len(units) == 3 and len({doc.key for doc in documents}) == 6
    assert {doc.text for doc in documents} == {f"{n} of {i}" for n in ("one", "two") for i in range(3)}
    assert texts(f"hf:{folder}::test") == ["apart"]
    before = units[0][0].version
    jsonl(folder, GOOD, name="train-0.jsonl")
    (again,) = find_files(f"hf:{folder}")
    assert again.version != before
    with pytest.raises(DataError, match="hf:.*/nowhere"):
        find_files(f"hf:{folder}/nowhere")


def test_parquet_is_cut_at_its_row_groups(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i} {'x' * (i % 50)}" for i in range(1000)]
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", row_group_size=64)
    (file,) = find_files(str(tmp_path / "a.parquet"))
    units = cut_into_units([file], file.n_bytes // 5)
    cut = [doc for unit in units for slice_ in unit for doc in read_documents(slice_)]
    assert len(units) > 3 and [doc.text for doc in cut] == rows
    assert [(d.key, str(d.origin)) for d in cut] == [(d.key, str(d.origin)) for d in read_documents(file)]
