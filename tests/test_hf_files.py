"""The files of a checkpoint: which are read and how much of them, what is wrong with them, and that all or none is
written."""

import json
import os
import resource
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hf_models import edit, logits_of, reopened, write_llama
from safetensors.torch import load_file, save_file

from ftrain import hf, tree
from ftrain.checkpoint import CheckpointError
from ftrain.execution import Execution
from ftrain.hf import files
from ftrain.models import llama
from ftrain.sharding import Mesh, MeshShape, from_local, local_slices, make_mesh

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
INDEX = "model.safetensors.index.json"


def in_files(source, folder, n=3):
    """Write a checkpoint anew, in n files and with the first layer's wq a transposed view. Returns Config, params."""
    cfg, params = hf.load(source)
    wq = params["layers"][0]["wq"]
    params["layers"][0]["wq"] = wq.t().contiguous().t()
    assert not params["layers"][0]["wq"].is_contiguous()
    for nbytes in range(1000, 40000, 500):
        target = folder / str(nbytes)
        hf.save(target, params, cfg, shard_bytes=nbytes, like=source)
        if len(list(target.glob("*.safetensors"))) == n:
            return target
    raise AssertionError(f"no size gives {n} files")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_file_or_three(tmp_path, n, dtype):
    model = write_llama(tmp_path / "a", dtype)
    folder = in_files(tmp_path / "a", tmp_path, n)
    assert torch.equal(logits_of(reopened(folder), TOKENS), logits_of(reopened(tmp_path / "a"), TOKENS))
    held = Counter(name for file in folder.glob("*.safetensors") for name in load_file(file))
    assert set(held.values()) == {1} and held.keys() == model.state_dict().keys()
    assert (folder / INDEX).exists() == (n > 1)
    if n > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == 8272 * dtype.itemsize
        assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())
        assert index["weight_map"].keys() == held.keys()


def test_a_transposed_view_is_written_as_it_reads(tmp_path):
    write_llama(tmp_path / "a")
    folder = in_files(tmp_path / "a", tmp_path, 1)
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = (load_file(path / "model.safetensors")[name] for path in (tmp_path / "a", folder))
    assert torch.equal(a, b)


# --- what is wrong with files ----------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    """A checkpoint in three files."""
    write_llama(tmp_path / "source")
    return in_files(tmp_path / "source", tmp_path)


def refused(folder) -> str:
    with pytest.raises(hf.HfError) as caught:
        hf.load(folder)
    return str(caught.value)


def change_index(folder, **places):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= places
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_file_is_named(three):
    (three / "model-00002-of-00003.safetensors").unlink()
    assert f"{INDEX} names model-00002-of-00003.safetensors, and there is no such file" in refused(three)


def test_a_stray_file_is_passed_over(three):
    before = hf.load(three)
    save_file({"model.norm.weight": torch.zeros(16), "x": torch.zeros(3)}, three / "model-00004-of-00004.safetensors")
    save_file({"model.norm.weight": torch.zeros(16)}, three / "adapter.safetensors")
    (three / "pytorch_model.bin").write_bytes(b"not read")
    after = hf.load(three)
    assert all(map(torch.equal, tree.leaves(before.params), tree.leaves(after.params)))


def test_an_index_that_names_what_no_file_has(three):
    change_index(three, **{"model.norm.weight": "model-00001-of-00003.safetensors"})
    assert "model.norm.weight is in model-00001-of-00003.safetensors, and it is not" in refused(three)


@pytest.mark.parametrize("place", ["../source/model.safetensors", "/etc/passwd", "model.bin", "", 3, None])
def test_an_index_that_points_elsewhere(three, place):
    change_index(three, **{"model.norm.weight": place})
    assert "expected a .safetensors file beside it" in refused(three)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none(three, text):
    (three / INDEX).write_text(text)
    assert f"{INDEX} cannot be read" in refused(three)


def test_without_config_json(three):
    (three / "config.json").unlink()
    assert f"{three} has no config.json, which says the model's shape" in refused(three)


@pytest.mark.parametrize("left", [-1, 40, 8, 3, 0])
def test_a_file_cut_short_is_named(three, left):
    path = three / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    assert f"{path} cannot be read: is it cut short?" in refused(three)


def test_without_any_weights(three, tmp_path):
    (three / INDEX).unlink()
    assert "which would say what is in model-00001-of-00003" in refused(three)
    for path in three.glob("*.safetensors"):
        path.unlink()
    assert refused(three) == f"{three} has neither model.safetensors nor {INDEX}"


def rewritten(folder, remove=(), **tensors):
    """Change the tensors of a checkpoint of one file."""
    held = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name not in remove}
    save_file(held | tensors, folder / "model.safetensors")


def test_tensors_that_are_missing_or_left_over_or_of_another_shape(tmp_path):
    write_llama(tmp_path)
    bias, norm = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.input_layernorm.weight"
    rewritten(tmp_path, remove=(norm,), **{bias: torch.zeros(16), "model.norm.weight": torch.zeros(17)})
    found = refused(tmp_path).splitlines()
    assert found[0].endswith(f"lacks {norm}")
    assert f"has {bias}, for which this model has no place" in found[1]
    assert "model.norm.weight has shape (17,), and config.json says (16,)" in found[2]
    edit(tmp_path, num_hidden_layers=1)
    found = refused(tmp_path)
    assert f"has {bias}, model.layers.1.mlp.down_proj.weight, " in found and " and 5 more, for which" in found


def test_a_dtype_that_is_no_number_of_ours(tmp_path):
    write_llama(tmp_path)
    rewritten(tmp_path, **{"model.norm.weight": torch.zeros(16).to(torch.float8_e4m3fn)})
    assert "model.norm.weight has dtype F8_E4M3; ftrain reads F32, BF16, F16" in refused(tmp_path)


def test_frequencies_that_old_files_hold_are_passed_over(tmp_path):
    write_llama(tmp_path)
    rewritten(tmp_path, **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)})
    assert len(hf.load(tmp_path).params["layers"]) == 2


def test_a_tied_models_output_matrix(tmp_path):
    model = write_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    without = hf.load(tmp_path)
    rewritten(tmp_path, **{"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert all(map(torch.equal, tree.leaves(hf.load(tmp_path).params), tree.leaves(without.params)))
    other = model.lm_head.weight.detach().clone()
    other[63, 15] += 1
    rewritten(tmp_path, **{"lm_head.weight": other})
    assert "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight" in refused(tmp_path)
    rewritten(tmp_path, **{"lm_head.weight": other[:32]})
    assert "lm_head.weight has shape (32, 16)" in refused(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    rewritten(tmp_path, remove=("lm_head.weight",))
    assert "lacks lm_head.weight" in refused(tmp_path)


def test_a_tied_export_has_one_matrix(tmp_path):
    model = write_llama(tmp_path / "a", tie_word_embeddings=True)
    folder = in_files(tmp_path / "a", tmp_path, 3)
    index = json.loads((folder / INDEX).read_text())
    assert "lm_head.weight" not in index["weight_map"] and index["metadata"]["total_size"] == 7248 * 4
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert torch.equal(logits_of(reopened(folder), TOKENS), logits_of(model, TOKENS))


# --- how much is read and held ---------------------------------------------------------------------------------------


def test_a_rank_asks_for_its_slices_alone(tmp_path, monkeypatch):
    write_llama(tmp_path)
    asked = []
    real = files.read_slices

    def counted(name, stored, slices):
        part = real(name, stored, slices)
        asked.append((name, part.numel()))
        assert part.untyped_storage().nbytes() == part.nbytes  # memory of its own, not a view of a whole file
        return part

    monkeypatch.setattr("ftrain.hf.loading.read_slices", counted)
    seen: Counter = Counter()
    shape = MeshShape(shard=5, tensor=2)
    for rank in range(shape.size):
        asked.clear()
        hf.load(tmp_path, Execution(mesh=Mesh(shape, rank)))
        assert sum(n for _, n in asked) < 8272 / 10 * 1.3
        seen.update(dict(asked))
    norms = {name: 16 for name in seen if "norm" in name}  # which tensor peers share
    assert sum(seen.values()) == 8272 + sum(norms.values())


HELD = """
import sys, torch
from ftrain import hf
from ftrain.execution import Execution
from ftrain.sharding import Mesh, MeshShape, from_local, local_slices, make_mesh

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

hf.load(sys.argv[1])  # what is set up once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = peak()
loaded = hf.load(sys.argv[2], Execution(mesh=Mesh(MeshShape(shard=8), 3)), dtype=torch.bfloat16)
print(peak() - before)
before = peak()
hf.save(sys.argv[3], hf.load(sys.argv[2]).params, loaded.cfg, dtype=torch.bfloat16)
print(peak() - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc")
def test_memory_stays_near_one_tensor(tmp_path):
    big = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}  # 16 MiB in a matrix of a layer
    write_llama(tmp_path / "small")
    write_llama(tmp_path / "big", **big)
    size = sum(path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors"))
    arguments = [str(tmp_path / name) for name in ("small", "big", "out")]
    ran = subprocess.run([sys.executable, "-c", HELD, *arguments], capture_output=True, text=True, check=True)
    reading, writing = map(int, ran.stdout.split())
    mib = 1 << 20
    assert size > 110 * mib
    # An eighth of the parameters in bfloat16, and an eighth of a matrix in float32 as it is read and as it is cast.
    assert reading < size / 16 + 2 * 16 / 8 * mib + 8 * mib, reading / mib
    # All parameters as they are read, and of those that are written one at a time.
    assert writing < size + 2 * 16 * mib + 8 * mib, writing / mib


# --- all or nothing ---------------------------------------------------------------------------------------------------


def parameters():
    cfg = llama.Config(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, ffn_dim=48)
    return llama.init(cfg, 0), cfg


def test_what_is_there_already_stays_unless_it_may_go(tmp_path):
    params, cfg = parameters()
    (tmp_path / "out").mkdir()
    hf.save(tmp_path / "out", params, cfg)  # an empty folder is as good as none
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(hf.HfError, match="out is there already: give the name of a new folder"):
        hf.save(tmp_path / "out", params, cfg)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    hf.save(tmp_path / "out", params, cfg, replace=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def write_in_a_little_space(rank, world, out):
    """Write anew where no file may have more than 4 kB. Returns what was said."""
    params, cfg = parameters()
    mesh = make_mesh(MeshShape(shard=world))
    plans = Execution(mesh=mesh).plans(llama.abstract(cfg))
    params = tree.map(
        lambda leaf, plan: from_local(
            leaf[local_slices(leaf.shape, plan.stored, mesh.shape, rank)] + 1, leaf.shape, plan.stored, mesh
        ),
        params,
        plans,
    )
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
    try:
        hf.save(out, params, cfg, replace=True)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


@pytest.mark.parametrize("world", [1, 2])
def test_a_write_that_fails_leaves_what_was_there(ranks, tmp_path, world):
    params, cfg = parameters()
    hf.save(tmp_path / "out", params, cfg)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    arguments = (world, tmp_path / "out")
    said = ranks(2, write_in_a_little_space, *arguments) if world > 1 else [write_in_a_little_space(0, *arguments)]
    assert len(set(said)) == 1
    assert f"cannot write {tmp_path / 'out'}: " in said[0] and "OSError: [Errno 27] File too large" in said[0]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["out"]


def test_what_an_interrupted_write_left_is_cleared(tmp_path):
    params, cfg = parameters()
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model.safetensors").write_bytes(b"half")
    hf.save(tmp_path / "out", params, cfg)
    assert os.listdir(tmp_path) == ["out"] and hf.load(tmp_path / "out").cfg == cfg


def test_parameters_that_are_not_the_configs(tmp_path):
    params, cfg = parameters()
    with pytest.raises(hf.HfError, match=r"model.norm.weight has shape \(3,\), and its Config says \(16,\)"):
        hf.save(tmp_path / "out", params | {"norm": torch.zeros(3)}, cfg)
    with pytest.raises(ValueError, match="lacks output"):
        hf.save(tmp_path / "out", {key: value for key, value in params.items() if key != "output"}, cfg)
    assert not (tmp_path / "out").exists()


def test_tokenizer_and_generation_are_carried_along(tmp_path):
    write_llama(tmp_path / "a")
    carried = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "generation_config.json": '{"top_p": 0.5}'}
    for name, text in carried.items():
        (tmp_path / "a" / name).write_text(text)
    (tmp_path / "a" / "modeling.py").write_text("raise SystemExit")
    edit(tmp_path / "a", eos_token_id=[3, 4], auto_map={"AutoModel": "modeling.Model"})
    cfg, params = hf.load(tmp_path / "a")
    hf.save(tmp_path / "b", params, cfg, like=tmp_path / "a")
    assert {name: (tmp_path / "b" / name).read_text() for name in carried} == carried
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["eos_token_id"] == [3, 4] and "auto_map" not in config
    assert not (tmp_path / "b" / "modeling.py").exists()


def test_without_safetensors(tmp_path, monkeypatch):
    write_llama(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert refused(tmp_path) == "checkpoints of Hugging Face need safetensors: pip install 'ftrain[hf]'"


def test_a_pickle_is_not_read(tmp_path):
    model = write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "has neither model.safetensors" in refused(tmp_path)
