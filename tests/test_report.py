"""inspect-sharding: what it says of layouts and collectives is what a run does; problems are all said at once."""

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import steps
from click.testing import CliRunner

import ftrain
from ftrain import tree
from ftrain.cli import main
from ftrain.recipe import RecipeError, shipped
from ftrain.report import as_json, inspect, rehearsal, render, traffic
from ftrain.report.inspection import checked
from ftrain.report.layout import split_of
from ftrain.report.ledger import Ledger
from ftrain.report.rehearsal import rehearse
from ftrain.report.render import table
from ftrain.report.traffic import moved
from ftrain.sharding import MeshShape, Spec, local_shape, to_local

GOLDEN = Path(__file__).parent / "golden"
# Where each shipped recipe is meant to run.
WORLDS = {
    "debug": 4,
    "llama3-405b": 512,
    "llama3-70b": 128,
    "llama3-8b": 8,
    "llama3.2-1b": 8,
    "llama3.2-3b": 8,
    "qwen3-0.6b": 8,
    "qwen3-8b": 8,
    "qwen3-debug": 4,
}


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [MeshShape(shard=3), MeshShape(2, 2, 2), MeshShape(tensor=4, shard=5)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 8, 12, 20, 64])
def test_the_first_rank_holds_the_most_and_the_last_the_least(mesh, rows):
    spec = Spec((("tensor", "shard"), ()))
    shapes = [local_shape((rows, 6), spec, mesh, rank) for rank in range(mesh.size)]
    assert shapes[0] == max(shapes) and shapes[-1] == min(shapes)
    pieces, holders = split_of((rows, 6), spec, mesh)
    assert pieces == mesh.tensor * mesh.shard
    assert holders * mesh.replicate == sum(shape[0] > 0 for shape in shapes)


def state_bytes(rank, world, overrides):
    """Bytes of each parameter, and of its optimizer state, that this rank holds in a real run."""
    state = steps.start(steps.make_run(rank, world, overrides))
    sizes = {}
    for path, leaf in tree.named_leaves(state.params):
        moments = [m for p, m in tree.named_leaves(state.opt_state) if p.endswith(f".{path}")]
        sizes[path] = [sum(to_local(t).nbytes for t in tensors) for tensors in ([leaf], moments)]
    return sizes


@pytest.mark.parametrize("layout", ["shard 2", "shard 4", "shard 2 x tensor 2"])
def test_each_rank_holds_the_bytes_that_it_was_told(ranks, layout):
    world, parallel = steps.LAYOUTS[layout]
    for rank, held in enumerate(steps.on(ranks, layout, state_bytes)):
        told = inspect("debug", (*steps.BASE, *parallel), world_size=world, rank=rank).rows
        assert {row.path: [row.parameter_bytes, row.optimizer_bytes] for row in told} == held


def test_the_parts_of_all_ranks_are_the_whole():
    overrides = (*steps.BASE, "parallel.tensor=2", "parallel.replicate=2", "data.global_batch_size=6")
    parts = [inspect("debug", overrides, world_size=12, rank=rank).rows for rank in range(12)]
    for rows in zip(*parts, strict=True):
        copies = 12 // rows[0].pieces
        assert sum(math.prod(row.local) for row in rows) == copies * rows[0].numel
        empty = sum(math.prod(row.local) == 0 for row in rows)
        assert empty == copies * (rows[0].pieces - rows[0].holders)
        assert (rows[0].split == "EMPTY") == (empty > 0)


# --- collectives ----------------------------------------------------------------------------------------------------


def calls_made(rank, world, overrides):
    """(operation, dtype, makers) -> (calls, bytes) of a real step over gloo."""
    run = steps.make_run(rank, world, overrides)
    state = steps.start(run)
    state, _ = run.step(state, run.batch(0))  # with delayed scaling the first step is not as the others
    state = state._replace(fp8_state=None)
    state = steps.apply_post(state, run.post)
    with Ledger() as ledger:
        run.step(state, run.batch(0))
    made = {}
    for call in ledger.calls:
        key = call.op, str(call.dtype), tuple(name for name in call.makers if not name.startswith("steps."))
        count, sent = made.get(key, (0, 0))
        made[key] = count + 1, sent + call.nbytes
    return made


PLAIN = ("fp8.recipe=none",)
KEPT = ("fp8.recipe=none", "train.remat=full", "parallel.reshard_after_forward=false")
FP8 = ("fp8.recipe=tensorwise", "train.remat=0.5", "train.loss_chunks=3")
SCALES_IN_THE_STEP = ("fp8.recipe=tensorwise", "fp8.precompute_scales=false", "precision.gather=params")
ROWWISE = ("fp8.recipe=rowwise", "fp8.all_gather=false", "fp8.precompute_scales=false")


@pytest.mark.parametrize(
    "layout, overrides",
    [
        ("shard 2", FP8),
        ("shard 4", PLAIN),
        ("replicate 2 x shard 2", KEPT),
        ("tensor 2", ROWWISE),
        ("shard 2 x tensor 2", KEPT),
        ("shard 2 x tensor 2", FP8),
        ("shard 2 x tensor 2", SCALES_IN_THE_STEP),
    ],
    ids=str,
)
def test_a_step_makes_the_calls_that_were_counted(ranks, layout, overrides):
    world, parallel = steps.LAYOUTS[layout]
    made = steps.on(ranks, layout, calls_made, *overrides)[0]
    recipe, run = checked("debug", (*steps.BASE, *parallel, *overrides), world)
    rehearsal, told = rehearse(recipe, run.mesh_shape), {}
    for site, count in rehearsal.counts.items():
        key = site.op, str(site.dtype), site.makers
        before = told.get(key, (0, 0))
        told[key] = before[0] + count, before[1] + rehearsal.sent[site]
    assert told == made


def test_every_function_that_a_purpose_or_a_kind_is_read_off_is_there():
    """They are named in strings: a function that is renamed would be taken for something else, in silence."""
    root = Path(ftrain.__file__).parent
    names = []
    for file in root.rglob("*.py"):
        tree_ = ast.parse(file.read_text())
        functions = [tree_.body, *(node.body for node in tree_.body if isinstance(node, ast.ClassDef))]
        prefixes = ["", *(f"{node.name}." for node in tree_.body if isinstance(node, ast.ClassDef))]
        for prefix, body in zip(prefixes, functions, strict=True):
            defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            names += [f"{file.stem}.{prefix}{name}" for name in defined]
    starts = [start for start, _ in (*rehearsal._KINDS, *traffic._PURPOSES)]
    for start in (*starts, *traffic._BACKWARD, *traffic._FORWARD):
        assert any(name.startswith(start) for name in names), start


def test_bytes_in_a_ring_are_those_of_the_textbook():
    assert moved("all_gather", 10, 4) == 30
    assert moved("reduce_scatter", 40, 4) == 30
    assert moved("all_reduce", 40, 4) == 60
    assert all(moved(op, 40, 1) == 0 for op in ("all_gather", "reduce_scatter", "all_reduce"))


def test_fp8_halves_what_gathers_of_bf16_move_and_leaves_gradients_alone():
    found = inspect("llama3-8b", ("fp8.skip=[]", "model.n_layers=2"), world_size=8)
    by_purpose = [
        {(line.purpose, line.phase): line.sent for line in lines if line.axis == "shard"}
        for lines in (found.high_precision, found.fp8)
    ]
    high, low = by_purpose
    assert high["gradients", "backward"] == low["gradients", "backward"]
    assert 0.49 < low["weights", "backward"] / high["weights", "backward"] < 0.51
    scales = [line for line in found.fp8 if line.purpose == "scales of weights"]
    assert [(line.op, line.axis, line.count) for line in scales] == [("all_reduce", "world", 1)]


# --- problems -------------------------------------------------------------------------------------------------------


def test_every_problem_is_said_at_once():
    overrides = ("train.stepz=3", "parallel.tensor=3", "fp8.recipe=tensorwise", 'fp8.skip=["lm_head"]')
    with pytest.raises(RecipeError) as caught:
        inspect("debug", overrides[1:], world_size=4)
    text = str(caught.value)
    assert "4/3" in text and "lm_head" in text
    with pytest.raises(RecipeError, match="stepz"):
        inspect("debug", overrides, world_size=4)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.n_heads=8", "model.n_kv_heads=2", "parallel.tensor=4"),
        ("model.n_heads=6", "model.n_kv_heads=6", "parallel.tensor=4"),
        ("data.seq_len=30", "parallel.tensor=4"),
        ("model.ffn_dim=50", "parallel.tensor=4"),
        ("parallel.shard=3",),
        ("parallel.shard=-1", "parallel.replicate=-1"),
        ("parallel.shard=0",),
    ],
    ids=str,
)
def test_train_and_inspect_say_the_same_of_a_layout_that_cannot_work(overrides, monkeypatch):
    sets = [word for override in overrides for word in ("--set", override)]
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "0 4 0 localhost 1".split(), strict=True
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)
    results = [
        CliRunner().invoke(main, command)
        for command in (
            ["train", "debug", *sets],
            ["inspect-sharding", "debug", "--world-size", "4", *sets],
        )
    ]
    assert [result.exit_code for result in results] == [2, 2]
    assert results[0].output == results[1].output != ""


def test_problems_are_json_too():
    result = CliRunner().invoke(main, ["inspect-sharding", "debug", "--world-size", "2", "--rank", "2", "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problems"] == ["--rank 2 is none of 2 ranks: expected 0 to 1."]


# --- what is printed ------------------------------------------------------------------------------------------------


def test_json_has_every_parameter_and_text_folds_layers():
    result = CliRunner().invoke(main, ["inspect-sharding", "debug", "--world-size", "3", "--json",
                                       "--set", "data.global_batch_size=12"])  # fmt: skip
    found = json.loads(result.stdout)
    paths = [row["path"] for row in found["parameters"]]
    assert len(paths) == 4 * 9 + 3 and "layers.3.wq" in paths
    assert found["mesh"] == {"shard": 3} and found["problems"] == []
    assert found["totals"]["parameters"] == found["model"]["parameters"] == 3287296
    one = CliRunner().invoke(main, ["inspect-sharding", "debug", "--group", "layers.*.wk"])
    assert re.search(r"layers.0-3, each\n +wk +128 x 256 ", one.stdout)
    assert "wq" not in one.stdout and "one rank" in one.stdout


def test_a_group_that_matches_nothing_is_an_error():
    for form in ([], ["--json"]):
        result = CliRunner().invoke(main, ["inspect-sharding", "debug", "--group", "layers.9.*", *form])
        assert result.exit_code == 2
        assert "--group 'layers.9.*' matches no parameter; there are embedding, layers.*." in result.output


def test_a_table_for_people():
    overrides = ("model.vocab_size=290", "fp8.recipe=tensorwise", "fp8.skip=[]", "parallel.tensor=2")
    text = render(inspect("debug", overrides, world_size=4))
    assert "tensor 2 x shard 2" in text and "replicate" not in text.partition("Memory")[0]
    assert re.search(r"^uneven +embedding, output: 73x256 to 72x256$", text, re.M)
    assert re.search(r"^  output +290:ts x 256 +73x256 +292.0 KiB +18.2 KiB e4m3$", text, re.M)
    assert "fp8 pads output from (145, 256) on a rank to (160, 256)" in " ".join(text.split())
    assert "grad_input = g . w: g e5m2 tensor, w e4m3 tensor" in text
    assert text.count("\n  over tensor\n") == 1
    assert re.search(r"^EMPTY [^:]*: on 1 of 4$", render(inspect("debug", steps.BASE, world_size=4)), re.M)


@pytest.mark.parametrize("name", ["llama3-405b", "llama3.2-1b"])
def test_it_fits_a_terminal(name):
    overrides = ("parallel.tensor=8", "parallel.replicate=2", "data.global_batch_size=2048", "fp8.recipe=tensorwise")
    text = render(inspect(name, overrides, world_size=16384, rank=12345))
    assert max(map(len, text.splitlines())) <= 80
    assert "r, t, s" not in text and "t, s: split over tensor, shard" in " ".join(text.split())


def test_a_table_that_is_too_wide_gives_long_names_a_line_of_their_own():
    lines = table([["name", "a", "b"], ["x" * 50, "1" * 20, "22"], ["short", "", "3" * 30]], left=(0,))
    assert max(map(len, lines)) <= 80
    assert lines[1] == "  " + "x" * 50 and lines[2].split() == ["1" * 20, "22"]
    assert lines[3].split() == ["short", "3" * 30]


# --- the size of it -------------------------------------------------------------------------------------------------

BIG = """
import resource, sys, time
begun = time.process_time()
from ftrain.cli import main
try:
    main(["inspect-sharding", "llama3-405b", "--world-size", "16384", "--set", "parallel.tensor=8", "--json"])
except SystemExit as end:
    assert not end.code, end.code
import torch
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
usage = resource.getrusage(resource.RUSAGE_SELF)
print(f"{time.process_time() - begun} {usage.ru_maxrss}", file=sys.stderr)
"""


def test_16384_ranks_are_no_more_work_than_four():
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    seconds, kib = done.stderr.split()[-2:]
    # It is under 4 s, half of it for importing torch; twice that is for a machine that does other things as well.
    assert float(seconds) < 8 and int(kib) < 1 << 20
    found = json.loads(done.stdout)
    assert found["world_size"] == 16384 and len(found["parameters"]) == 126 * 9 + 3
    wk = next(row for row in found["parameters"] if row["path"] == "layers.125.wk")
    assert (wk["split"], wk["pieces"], wk["holders"]) == ("EMPTY", 16384, 1024)


# --- golden ---------------------------------------------------------------------------------------------------------


def by_line(found):
    """JSON with a line for each parameter and each kind of collective, so that a diff shows what changed."""
    parts = []
    for key, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.mark.parametrize("name", shipped())
def test_shipped_layouts_are_as_they_were(name, request):
    """`python -m pytest tests/test_report.py --update-golden` writes the files anew; the diff is for review."""
    found = by_line(as_json(inspect(name, world_size=WORLDS[name]), fold=True, exact_only=True))
    file = GOLDEN / f"{name}-{WORLDS[name]}.json"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert json.loads(file.read_text()) == json.loads(found)
