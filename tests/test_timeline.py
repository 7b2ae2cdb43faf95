"""The picture of a step: its spans are those of the schedule, in the order in which the fold runs them."""

import json
import os
import subprocess
import sys

import pytest
import torch
from browser import CHROMIUM, Browser
from tiny import TINY, write_tiny

from ftrain import Run, load_recipe, marks, timeline
from ftrain.launch import World
from ftrain.marks import BACKWARD, FORWARD, UPDATE, marked
from ftrain.metrics import read_lines, tracing
from ftrain.recipe import RecipeError
from ftrain.timeline import EXCHANGE, GRADIENTS, SUMS, TRANSFER, WEIGHTS, Span, Timeline
from ftrain.trainer import profiled_steps, train

LAYERS = [f"layers.{i}" for i in range(4)]
OVERRIDES = ("model.n_layers=4", "data.global_batch_size=4", "train.micro_batch_size=1", "train.steps=3")


def profiled(rank, folder, overrides):
    """The spans of the third step on rank 0, as the trainer makes them."""
    path = folder / f"{rank}.toml"
    path.write_text(TINY)
    run = Run(load_recipe(path, (*OVERRIDES, *overrides)), World(rank, 2), mark=marked)
    state, found = run.init(), []
    with tracing((3,), folder if rank == 0 else None, 0, lambda trace: found.append(timeline.read(trace, 0))) as tick:
        for step in range(3):
            state, _ = run.step(state, run.batch(step))
            tick()
    return found[0] if found else None


@pytest.fixture(scope="module")
def two_ranks(ranks, tmp_path_factory):
    return ranks(2, profiled, tmp_path_factory.mktemp("two"), ("parallel.shard=2",))[0]


def occurrences(found, phase, layer):
    return [span for span in found.of(phase) if span.layer == layer]


def test_every_layer_is_gathered_run_pulled_back_and_reduced_in_the_order_of_the_schedule(two_ranks):
    assert two_ranks.step == 3
    for micro in range(2):  # 4 sequences over 2 ranks, one at a time
        forward = [occurrences(two_ranks, FORWARD, layer)[micro] for layer in LAYERS]
        backward = [occurrences(two_ranks, BACKWARD, layer)[micro] for layer in LAYERS]
        gathers = [occurrences(two_ranks, WEIGHTS, layer)[2 * micro : 2 * micro + 2] for layer in LAYERS]
        reductions = [occurrences(two_ranks, GRADIENTS, layer)[micro] for layer in LAYERS]
        for i in range(4):
            first, second = gathers[i]
            assert first.start < first.end <= forward[i].start < forward[i].end
            assert forward[3].end <= backward[i].start < backward[i].end
            assert second.start < second.end <= backward[i].start
            assert backward[i].end <= reductions[i].start < reductions[i].end
        for i in range(3):
            assert forward[i].end <= forward[i + 1].start and backward[i + 1].end <= backward[i].start
            assert gathers[i + 1][0].start < forward[i].end  # while layer i runs
            assert gathers[i][1].start < backward[i + 1].end
            assert reductions[i + 1].end > backward[i].start  # left in flight
    for phase, count in ((FORWARD, 2), (BACKWARD, 2), (WEIGHTS, 4), (GRADIENTS, 2)):
        assert [len(occurrences(two_ranks, phase, layer)) for layer in LAYERS] == [count] * 4
    for layer, gathers in (("embedding", 2), ("norm, output", 2)):
        assert len(occurrences(two_ranks, WEIGHTS, layer)) == gathers
        assert len(occurrences(two_ranks, GRADIENTS, layer)) == 2
    assert [span.layer for span in two_ranks.of(UPDATE)] == ["optimizer", "post"]
    assert not two_ranks.of(SUMS)


def test_all_of_it_lies_in_the_step_and_adds_up(two_ranks):
    assert all(0 <= span.start <= span.end for span in two_ranks.spans)
    assert all(span.end <= two_ranks.length for span in two_ranks.spans if span.phase != TRANSFER)
    lane = sorted(two_ranks.of(*timeline.LANES["compute"]), key=lambda span: span.start)
    assert all(a.end <= b.start + 1e-4 for a, b in zip(lane, lane[1:], strict=False))  # one thing at a time
    found = timeline.numbers(two_ranks)
    assert found.forward + found.backward + found.exchange + found.update + found.rest == pytest.approx(
        two_ranks.length
    )
    assert min(found) > -1e-6 and found.hidden <= found.wire + 1e-6
    kinds = {span.layer for span in two_ranks.of(TRANSFER)}
    assert "all_gather" in kinds and len(kinds) > 1  # gloo's own work
    text = timeline.text(two_ranks)
    assert text.startswith("step 3 of rank 0 took ") and "on the wire" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "overrides, gathers, there, absent",
    [
        (("parallel.shard=2", "parallel.reshard_after_forward=false"), 2, {GRADIENTS}, {SUMS}),
        (("parallel.shard=2", "train.remat=full", "fp8.recipe=tensorwise"), 4, {GRADIENTS}, {SUMS}),
        (("parallel.shard=1", "parallel.replicate=2"), 0, {SUMS, marks.PACK}, {WEIGHTS, GRADIENTS}),
        (("parallel.shard=1", "parallel.tensor=2"), 0, {marks.PACK, TRANSFER}, {WEIGHTS, GRADIENTS, SUMS}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_layout_does_not_do_is_not_drawn(ranks, tmp_path, overrides, gathers, there, absent):
    found = ranks(2, profiled, tmp_path, overrides)[0]
    phases = {span.phase for span in found.spans}
    assert there <= phases and not absent & phases
    micro = len(occurrences(found, FORWARD, "layers.2"))
    assert len(occurrences(found, WEIGHTS, "layers.2")) * 2 == gathers * micro
    assert len(occurrences(found, BACKWARD, "layers.2")) == micro


def test_a_profile_changes_no_number(tiny, tmp_path):
    recipe = tiny("train.steps=4")
    train(recipe, out=tmp_path / "plain", quiet=True)
    train(recipe, out=tmp_path / "profiled", quiet=True, profile=True)
    plain, seen = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("plain", "profiled"))
    assert [(line["loss"], line["grad_norm"]) for line in plain] == [(line["loss"], line["grad_norm"]) for line in seen]
    assert not (tmp_path / "plain" / "timeline.html").exists()


def data(page):
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def test_the_command_draws_it(tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "ftrain.cli", "train", write_tiny(tmp_path), "--nproc", "2", "--out", str(out)]
    words += ["--profile", *(word for override in OVERRIDES for word in ("--set", override))]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert "step 3 of rank 0 took" in done.stdout and str(out / "timeline.html") in done.stdout
    drawn, read = data(out / "timeline.html"), timeline.read(out / "trace.json", 0)
    assert [lane["title"] for lane in drawn["lanes"]] == list(timeline.LANES)
    for lane, phases in zip(drawn["lanes"], timeline.LANES.values(), strict=True):
        spans = sorted(tuple(span) for row in lane["rows"] for span in row)
        assert spans == sorted((s.phase, s.layer, round(s.start, 3), round(s.end, 3)) for s in read.of(*phases))


def test_which_step_is_profiled(tiny):
    said = []
    assert profiled_steps(tiny(), 0, said.append) == (3,)
    assert profiled_steps(tiny(), 4, said.append) == (6,)  # the last one
    assert profiled_steps(tiny("metrics.profile_steps=[2,5]"), 3, said.append) == (2, 5)
    assert said == []
    assert profiled_steps(tiny("metrics.profile_steps=[2,3]"), 3, said.append) == ()
    assert said == ["no profile: of steps 2 to 3 none is to come; 3 are done"]


def test_a_profile_needs_a_folder(tiny):
    with pytest.raises(RecipeError, match="--profile needs a folder to write to: give --out"):
        train(tiny(), quiet=True, profile=True)


def test_a_resumed_run_counts_on(tiny, tmp_path):
    train(tiny("train.steps=3", "schedule.decay=none"), out=tmp_path, quiet=True)
    train(tiny("train.steps=8", "schedule.decay=none"), out=tmp_path, quiet=True, profile=True)
    assert data(tmp_path / "timeline.html")["step"] == 6


def test_a_trace_without_marks_is_refused(tmp_path):
    with torch.profiler.profile() as profile:
        torch.ones(1)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(ValueError, match="trace.json: has no step"):
        timeline.read(tmp_path / "trace.json", 0)


def test_on_a_gpu_a_phase_is_as_long_as_its_kernels(tmp_path):
    """Calls return at once there; the profiler tells the kernels of a range, per stream, by the range's id."""

    def event(cat, name, ts, dur, id=None):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"External id": id}}

    def launched(name, id, at, *kernels):
        cpu = event("user_annotation", f"ftrain {name}", at, 2, id)
        return [cpu, *(event("gpu_user_annotation", f"ftrain {name}", ts, dur, id) for ts, dur in kernels)]

    events = [
        event("user_annotation", "ProfilerStep#4", 0, 100, 1),
        *launched("gather layers.0", 2, 10, (1000, 100), (1150, 400)),  # packed on one stream, gathered on another
        *launched("arrive layers.0", 3, 14, (1600, 50)),
        *launched("forward layers.0", 4, 20, (1650, 1000)),
        *launched("gather layers.0", 5, 30, (3000, 1000)),
        *launched("arrive layers.0", 6, 40),  # nothing to unpack
        *launched("backward layers.0", 7, 50, (4000, 2000)),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1150, 400),
        event("kernel", "gemm", 1650, 1000),
        event("user_annotation", "ProfilerStep#3", -500, 400, 8),
        *launched("forward layers.0", 9, -400, (200, 300)),  # of the step before, on the GPU in this one
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = timeline.read(tmp_path / "trace.json", 10)
    assert (found.step, found.length) == (15, 5.0)
    assert found.spans == [
        Span(WEIGHTS, "layers.0", 0.0, 0.55),
        Span(TRANSFER, "AllGather", 0.15, 0.55),
        Span("arrive", "layers.0", 0.6, 0.65),
        Span(FORWARD, "layers.0", 0.65, 1.65),
        Span(WEIGHTS, "layers.0", 2.0, 3.0),
        Span(BACKWARD, "layers.0", 3.0, 5.0),
    ]


def test_rows_hold_what_overlaps():
    spans = [Span(SUMS, str(i), i, 100) for i in range(20)]
    drawn = json.loads(
        timeline.as_html(Timeline(1, 100.0, spans), "x", 2).partition('id="data">')[2].partition("</script>")[0]
    )
    rows = drawn["lanes"][0]["rows"]
    assert len(rows) == timeline.MOST_ROWS and sum(map(len, rows)) == 20


def test_every_phase_has_a_word_and_a_lane():
    phases = {
        value for name, value in vars(marks).items() if name[0] in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" and name.isupper()
    }
    phases -= {marks.PREFIX}
    drawn = [phase for phases in timeline.LANES.values() for phase in phases]
    assert len(drawn) == len(set(drawn)) and phases <= set(drawn) == set(timeline.WORDS)
    assert set(EXCHANGE) < set(drawn)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_in_a_browser(tmp_path, two_ranks):
    page = tmp_path / "timeline.html"
    page.write_text(timeline.as_html(two_ranks, "tiny", 2))
    with Browser(tmp_path / "profile") as browser:
        for width in (320, 360, 1200):
            browser.open(page, width=width, dark=width == 360)
            assert browser.value("document.documentElement.scrollWidth") == width
            assert browser.complaints() == []
        drawn = sum(len(two_ranks.of(*phases)) for phases in timeline.LANES.values())
        assert browser.value("document.querySelectorAll('.row button').length") == drawn
        about = "document.getElementById('about').textContent"
        browser.value("document.querySelector('.row button').focus()")
        assert browser.value(about).startswith("gather embedding: ")
        browser.key("ArrowRight")
        assert browser.value(about).startswith("gather layers.0: ")
        browser.key("ArrowDown")
        assert browser.value("document.activeElement.parentElement.parentElement.ariaLabel") == "compute"
        browser.hover(".row .backward")
        assert browser.value(about).startswith("backward norm, output: ")
        widths = []
        for zoom in (0, 4):
            browser.value(f"document.getElementById('zoom').value = {zoom}; draw()")
            widths.append(browser.value("document.querySelector('.sheet').offsetWidth"))
            assert browser.value("document.documentElement.scrollWidth") == 1200  # it scrolls in its own area
        assert widths[1] == pytest.approx(16 * widths[0], rel=0.01)
