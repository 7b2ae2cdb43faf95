"""What one step did, and when: spans read off a profiler's trace, as a page for a browser and as a few lines of text.

A run that is made with `marks.marked` names the phases of each layer in its profile. The spans are those of the real
step: nothing here knows the schedule, so a change to fold.py shows in the picture.

On a CPU a span is as long as the call that it marks. On a GPU, where calls return at once, it is as long as the kernels
that were launched in it. `transfer` spans are the transport's own: gloo's work, NCCL's kernels.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ftrain import marks
from ftrain.page import page

# What is on its way between two phases, from the start of one to the end of the other; and the transport's own work.
WEIGHTS, GRADIENTS, SUMS, TRANSFER = "weights", "gradients", "sums", "transfer"
_BETWEEN = {
    marks.GATHER: (WEIGHTS, marks.ARRIVE),
    marks.SCATTER: (GRADIENTS, marks.SETTLE),
    marks.REPLICATE: (SUMS, marks.REDUCE),
}
# What the rank itself does for what comes and goes: pack, wait, unpack.
EXCHANGE = (marks.PACK, *(phase for first, (_, last) in _BETWEEN.items() for phase in (first, last)))
# What is drawn in which lane, from the top, and the words for it.
LANES = {
    "weights under way": (WEIGHTS,),
    "compute": (marks.FORWARD, marks.BACKWARD, *EXCHANGE, marks.UPDATE),
    "gradients under way": (GRADIENTS, SUMS),
    "on the wire": (TRANSFER,),
}
WORDS = {
    WEIGHTS: "gather",
    marks.FORWARD: "forward",
    marks.BACKWARD: "backward",
    **dict.fromkeys(EXCHANGE, "pack, wait, unpack"),
    marks.UPDATE: "update",
    GRADIENTS: "reduce-scatter",
    SUMS: "all-reduce over replicas",
    TRANSFER: "transfer",
}
MOST_ROWS = 8  # of a lane; what overlaps even so lies on each other in the last one
_STEP = "ProfilerStep#"


class Span(NamedTuple):
    """One phase of one layer: milliseconds since the step began. layer: for a transfer, what was called."""

    phase: str
    layer: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """Milliseconds."""
        return self.end - self.start


class Timeline(NamedTuple):
    """The spans of one step in the order in which they start; length: of the step, in milliseconds."""

    step: int
    length: float
    spans: list[Span]

    def of(self, *phases: str) -> list[Span]:
        """The spans of these phases."""
        return [span for span in self.spans if span.phase in phases]


def read(trace: Path, done: int) -> Timeline:
    """The last step of a trace.json, as torch's profiler writes it. done: steps taken before the profiler's step 0.

    Raises ValueError for a trace with no whole step of a marked run in it.
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in ranges if event["name"].startswith(_STEP)]
    if not steps or not any(map(_phase, ranges)):
        raise ValueError(f"{trace}: has no step of a run with marks in it.")
    last = max(steps, key=lambda event: event["ts"])
    start, end = last["ts"], last["ts"] + last["dur"]
    marked = [(_phase(event), event) for event in ranges if start <= event["ts"] < end]
    phases = [(*phase, event) for phase, event in marked if phase is not None]
    kernels = _kernels(events)
    if kernels:  # a phase is then as long as what it launched, and the step too
        phases = [(phase, layer, kernels[_id(e)]) for phase, layer, e in phases if _id(e) in kernels]
        start, end = min(e["ts"] for *_, e in phases), max(e["ts"] + e["dur"] for *_, e in phases)
    work = [(TRANSFER, name, e) for e in events if start <= e["ts"] < end and (name := _transfer(e, bool(kernels)))]

    def spans(found: Iterable[tuple[str, str, dict]]) -> list[Span]:
        def at(time: float) -> float:
            return (time - start) / 1e3

        return [Span(phase, layer, at(e["ts"]), at(e["ts"] + e["dur"])) for phase, layer, e in found]

    step = done + int(last["name"].removeprefix(_STEP)) + 1
    all_spans = _with_what_is_under_way(spans(phases), bool(kernels)) + spans(work)
    return Timeline(step, (end - start) / 1e3, sorted(all_spans, key=lambda span: span.start))


def _phase(event: dict) -> tuple[str, str] | None:
    """(phase, layer) of a marked event."""
    prefix, _, rest = event["name"].partition(" ")
    phase, _, layer = rest.partition(" ")
    return (phase, layer) if prefix == marks.PREFIX else None


def _id(event: dict) -> int | None:
    """What a range and its kernels have in common."""
    return event.get("args", {}).get("External id")


def _kernels(events: Iterable[dict]) -> dict[int | None, dict]:
    """For each range, the time on a GPU from its first kernel to the end of its last one, whatever their streams."""
    found: dict[int | None, dict] = {}
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and _phase(event):
            one = found.setdefault(_id(event), {"ts": event["ts"], "dur": event["dur"]})
            end = max(one["ts"] + one["dur"], event["ts"] + event["dur"])
            one["ts"] = min(one["ts"], event["ts"])
            one["dur"] = end - one["ts"]
    return found


def _transfer(event: dict, on_gpu: bool) -> str | None:
    """What the transport calls its own event, such as "all_gather"; None for any other event."""
    name = event["name"]
    if on_gpu:
        return name.split("_")[1] if event["cat"] == "kernel" and name.startswith("nccl") else None
    return name.removeprefix("gloo:") if name.startswith("gloo:") else None


def _with_what_is_under_way(spans: list[Span], on_gpu: bool) -> list[Span]:
    """With what is on its way: from the n-th start for a layer to the end of the n-th wait for it. On a GPU the spans
    of the starts are those of their kernels, and so are these spans already."""
    layers: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in sorted(spans, key=lambda span: span.start):
        layers[span.layer][span.phase].append(span)
    result = []
    for layer, phases in layers.items():
        for first, (what, last) in _BETWEEN.items():
            starts = phases.pop(first, []) if on_gpu else phases.get(first, [])
            ends = [] if on_gpu else [span.end for span in phases.get(last, [])]
            ends += [span.end for span in starts[len(ends) :]]
            result += [Span(what, layer, s.start, max(s.end, end)) for s, end in zip(starts, ends, strict=False)]
        exchange = [span for phase in EXCHANGE for span in phases.get(phase, [])]
        inner = {span for span in exchange if any(_has(other, span) for other in exchange)}
        result += [span for some in phases.values() for span in some if span not in inner]
    return result


def _has(span: Span, other: Span) -> bool:
    """Whether the other one is a part of the span."""
    return other != span and span.start <= other.start and other.end <= span.end


# --- numbers --------------------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Milliseconds of a step. exchange: packing, waiting for and unpacking weights and gradients; wire: in which
    something was on the wire; hidden: of these, while a layer computed."""

    forward: float
    backward: float
    exchange: float
    update: float
    rest: float
    wire: float
    hidden: float


def numbers(timeline: Timeline) -> Numbers:
    """What the time of a step went to. The rest is the batch, and what else is between the layers."""
    phases = (marks.FORWARD, marks.BACKWARD, marks.UPDATE)
    forward, backward, update = (sum(s.length for s in timeline.of(phase)) for phase in phases)
    exchange = _total(_union(timeline.of(*EXCHANGE)))
    computing, wire = _union(timeline.of(marks.FORWARD, marks.BACKWARD)), _union(timeline.of(TRANSFER))
    either = _total(_union([*(Span("", "", *pair) for pair in (*computing, *wire))]))
    hidden = _total(computing) + _total(wire) - either
    rest = timeline.length - forward - backward - exchange - update
    return Numbers(forward, backward, exchange, update, rest, _total(wire), hidden)


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The stretches of time that are in any of the spans: one may lie in another."""
    joined: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and span.start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], span.end)
        else:
            joined.append((span.start, span.end))
    return joined


def _total(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in stretches)


def text(timeline: Timeline) -> str:
    """The numbers of a step, for a terminal."""
    found = numbers(timeline)
    rows = [
        ("forward", found.forward),
        ("backward", found.backward),
        ("packing, waiting, unpacking", found.exchange),
        ("optimizer", found.update),
        ("batch and the rest", found.rest),
    ]
    lines = [f"step {timeline.step} of rank 0 took {timeline.length:.1f} ms"]
    lines += [f"  {what:34} {time:9.1f} ms {time / timeline.length:5.0%}" for what, time in rows]
    if found.wire:
        lines.append(f"  {_wire(found)}")
    return "\n".join(lines)


def _wire(found: Numbers) -> str:
    return f"on the wire for {found.wire:.1f} ms, {found.hidden / found.wire:.0%} of it while a layer computed"


# --- the page -------------------------------------------------------------------------------------------------------


def as_html(timeline: Timeline, name: str, ranks: int) -> str:
    """The step as a page of its own (page/timeline.js draws it). name: of the recipe; ranks: how many there were."""
    found, where = numbers(timeline), f"{ranks} rank{'s' if ranks > 1 else ''}"
    lanes = [(title, phases) for title, phases in LANES.items() if timeline.of(*phases)]
    data = {
        "step": timeline.step,
        "length": round(timeline.length, 3),
        "words": WORDS,
        "lanes": [
            {"title": title, "rows": [_plain(row) for row in _rows(timeline.of(*phases))]} for title, phases in lanes
        ],
    }
    tiles = [
        (f"{timeline.length:.1f} ms", "the step"),
        (f"{found.forward:.1f} ms", "forward"),
        (f"{found.backward:.1f} ms", "backward"),
        (f"{found.exchange:.1f} ms", "packing, waiting for and unpacking weights and gradients"),
        (f"{found.update + found.rest:.1f} ms", "optimizer, batch and the rest"),
    ]
    phases = [phase for _, phases in lanes for phase in phases if timeline.of(phase)]
    legend = {WORDS[phase]: phase for phase in phases}  # of the phases of one word, which look alike, one
    body = [
        "<main>",
        f"<header><h1>Step {timeline.step} of {escape(name)}<small> rank 0 of {where}</small></h1>",
        f"<p>{_wire(found).capitalize() if found.wire else 'Nothing was on the wire'}.</p></header>",
        '<dl class="tiles">',
        *(f"<div><dt>{what}</dt><dd>{value}</dd></div>" for value, what in tiles),
        "</dl>",
        '<section aria-labelledby="picture"><h2 id="picture">What ran when</h2>',
        "<p>Point at a span, tap it, or move with the arrow keys.</p>",
        '<p><label class="find">zoom <input id="zoom" type="range" min="0" max="6" step="0.1" value="0"></label></p>',
        '<div id="lanes" class="lanes"></div>',
        '<p class="legend">'
        + "".join(f'<span><i class="{phase}"></i>{word}</span>' for word, phase in legend.items())
        + "</p>",
        '<output id="about">&nbsp;</output>',
        "<noscript><p>The picture needs JavaScript; the numbers are below.</p></noscript></section>",
        '<section aria-labelledby="layers"><h2 id="layers">Milliseconds of each layer</h2>',
        f"{_table(timeline)}</section>",
        "</main>",
    ]
    return page(f"step {timeline.step} of {name} - ftrain", "\n".join(body), script="timeline.js", data=data)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """As few rows as hold the spans so that none overlap, up to MOST_ROWS."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end <= span.start), rows[-1] if len(rows) == MOST_ROWS else None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _plain(row: Sequence[Span]) -> list[list[Any]]:
    return [[span.phase, span.layer, round(span.start, 3), round(span.end, 3)] for span in row]


def _table(timeline: Timeline) -> str:
    """A line for each layer, in the order of the forward: all its time, over all micro-batches."""
    columns = {
        "gather": (WEIGHTS,),
        "forward": (marks.FORWARD,),
        "backward": (marks.BACKWARD,),
        "reduce": (GRADIENTS, SUMS),
    }
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for span in timeline.spans:
        sums[span.layer, span.phase] += span.length
    lines = []
    for layer in dict.fromkeys(span.layer for span in timeline.of(marks.FORWARD)):
        times = [sum(sums[layer, phase] for phase in phases) for phases in columns.values()]
        cells = "".join(f"<td>{time:.2f}</td>" for time in times)
        lines.append(f'<tr><th scope="row">{escape(layer)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{title}</th>' for title in ("layer", *columns))
    return f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
