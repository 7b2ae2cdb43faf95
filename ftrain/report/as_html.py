"""An inspection as one page that needs nothing but itself: the look is page/style.css, what moves is page/report.js.

Everything is in the HTML as it stands. The script changes which rank is shown, and hides parameters that are not
searched for. It finds the report as `--json` gives it, identical layers in one, so a page is as small for 16384 ranks
as for four.
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise, product
from typing import Any

from ftrain.page import framed, page
from ftrain.report.as_json import as_json
from ftrain.report.inspection import Inspection
from ftrain.report.render import in_a_line, shape, short, size
from ftrain.report.words import coordinates, count, dim_name, holds, numbers, rank_count, short_number
from ftrain.sharding import AXES, MeshShape, Spec, chunk, local_slices

CELLS = {"replicate": 4, "tensor": 16, "shard": 8}  # of the map of ranks, at most, along each axis
CELLS_ALONE = 64  # along `shard`, where nothing else has ranks
CUTS = 64  # lines in the picture of a parameter, at most

# The parts of memory.WHAT by their colours in page/style.css; small change shares one.
COLOURS = {
    "parameters": "c1",
    "gradients": "c2",
    "optimizer state": "c3",
    "gathered weights": "c4",
    "gradients of single layers, under way": "c5",
    "activations kept for the backward": "c6",
    "logits and loss": "c7",
    "backward of one layer": "c8",
}


def as_html(inspection: Inspection, group: str = "*") -> str:
    """The page of `inspect-sharding --html`. group: a glob over paths, the parameters to list."""
    found = as_json(inspection, group, fold=True)
    ranks = rank_count(found["world_size"])
    body = [
        "<main>",
        _header(inspection, found),
        _problems([], found["notes"], f"No problems: this recipe runs on {ranks}."),
        _rank_bar(inspection),
        _mesh(inspection),
        _memory(inspection),
        _wire(inspection, found),
        _parameters(inspection, found),
        "</main>",
    ]
    return page(f"{found['recipe']} on {ranks} - ftrain", "\n".join(body), script="report.js", data=found)


def problems_as_html(name: str, world_size: int | None, problems: Sequence[str]) -> str:
    """The page of a recipe that cannot run, with every reason."""
    where = "" if world_size is None else f" on {rank_count(world_size)}"
    body = [
        "<main>",
        f"<header><h1>{escape(name)}<small>{where}</small></h1></header>",
        _problems(problems, [], ""),
        "</main>",
    ]
    data = {"recipe": name, "world_size": world_size, "problems": list(problems)}
    return page(f"{name}: {count(len(problems), 'problem')} - ftrain", "\n".join(body), data=data)


def in_notebook(inspection: Inspection) -> str:
    """The page in a frame, for a notebook's cell."""
    return framed(as_html(inspection), in_a_line(inspection))


# --- sections -------------------------------------------------------------------------------------------------------


def _header(inspection: Inspection, found: dict[str, Any]) -> str:
    model, batch = found["model"], found["batch"]
    tokens = batch["sequences"] * batch["seq_len"]
    tied = ", embeddings tied" if model["tie_embeddings"] else ""
    says = (
        f"{model['parameters']:,} parameters: {model['n_layers']} layers, dim {model['dim']}, "
        f"{model['n_heads']} heads ({model['n_kv_heads']} for keys), ffn {model['ffn_dim']}, "
        f"vocabulary {model['vocab_size']}{tied}. "
        f"{batch['sequences']} sequences of {batch['seq_len']} tokens a step, "
        f"on a rank {count(batch['micro_batches'], 'micro-batch', 'es')} of {batch['micro_batch_size']}. "
        f"{short(found['precision']['params'])} stored, {short(found['precision']['compute'])} computed, "
        f"{short(found['precision']['reduce'])} reduced; fp8 {found['fp8']['recipe']}, remat {found['remat']}."
    )
    first = inspection.holdings[0]
    high, low = _sums(found)
    sent = "nothing" if not found["collectives"] else f"{_sent(high)} / {_sent(low)}"
    tiles = [
        (short_number(model["parameters"]), "parameters"),
        (f"{tokens:,}", "tokens a step"),
        (size(first.total), "stored by a rank, at most"),
        (size(inspection.memory.peak), f"rank {inspection.rank or 0} at the peak, estimate"),
        (sent, f"sent by a rank a step, {short(found['precision']['compute'])} / fp8"),
    ]
    return "\n".join(
        [
            f"<header><h1>{escape(found['recipe'])}<small> on {rank_count(found['world_size'])}</small></h1>",
            f"<p>{escape(says)}</p></header>",
            '<dl class="tiles">',
            *(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for value, what in tiles),
            "</dl>",
        ]
    )


def _problems(problems: Sequence[str], notes: Sequence[str], fine: str) -> str:
    if problems:
        return _section("problems", count(len(problems), "problem"), _list(problems), "bad")
    return _section("problems", fine, _list(notes) if notes else "", "good")


def _rank_bar(inspection: Inspection) -> str:
    last, rank = inspection.run.mesh_shape.size - 1, inspection.rank or 0
    return (
        f'<div class="rank" role="group" aria-label="The rank that is shown"{" hidden" if last == 0 else ""}>'
        f'<label>rank <input id="rank" type="number" min="0" max="{last}" value="{rank}" inputmode="numeric"></label>'
        f'<input id="slide" type="range" min="0" max="{last}" value="{rank}" aria-label="rank">'
        f'<output id="at" for="rank slide">{escape(coordinates(inspection.run.mesh_shape, rank))}</output></div>'
    )


def _mesh(inspection: Inspection) -> str:
    mesh = inspection.run.mesh_shape
    if mesh.size == 1:
        return _section("mesh", "Mesh: one rank", "<p>It holds everything.</p>")
    axes = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in mesh.axes)
    most = CELLS if mesh.axes != ("shard",) else {**CELLS, "shard": CELLS_ALONE}
    bins = {axis: _bins(getattr(mesh, axis), most[axis]) for axis in AXES}
    shown = bins["replicate"] if len(bins["replicate"]) == mesh.replicate else bins["replicate"][:1]
    wide = "wrap" if mesh.tensor == 1 else "grid"
    blocks = []
    for replica in shown:
        # One tensor peer under the other; with shard alone, ranks follow each other.
        cells = [
            _cell(inspection, {"replicate": (replica[0],) * 2, "tensor": tensor, "shard": shard})
            for tensor, shard in product(bins["tensor"], bins["shard"])
        ]
        name = f"replica {replica[0]} of {mesh.replicate}" if mesh.replicate > 1 else "ranks"
        head = f"<h3>{name}</h3>" if mesh.replicate > 1 else ""
        style = f' style="--columns:{len(bins["shard"])}"'
        blocks.append(
            f'{head}<div class="map {wide}" role="radiogroup" aria-label="{name}"{style}>{"".join(cells)}</div>'
        )
    says = ["Point at a rank, tap it, or move with the arrow keys: the page then shows that rank."]
    if mesh.tensor > 1:
        says.append(f"Down: tensor{_each(bins['tensor'])}. Across: shard{_each(bins['shard'])}.")
    elif len(bins["shard"]) < mesh.shard:
        says.append(f"A cell is {_span(bins['shard'][0])} ranks along shard.")
    if len(shown) < mesh.replicate:
        says.append(f"The {mesh.replicate} replicas hold the same; one is shown.")
    says.append("The stronger the colour, the more is stored.")
    return _section("mesh", f"Mesh: {axes}", f"<p>{escape(' '.join(says))}</p>" + "\n".join(blocks))


def _cell(inspection: Inspection, at: dict[str, tuple[int, int]]) -> str:
    mesh, current = inspection.run.mesh_shape, inspection.rank or 0
    first = _rank_at(mesh, {axis: span[0] for axis, span in at.items()})
    n = _span(at["tensor"]) * _span(at["shard"])
    held = next(holding for holding in inspection.holdings if at["shard"][0] <= holding.last)
    share = held.total / inspection.holdings[0].total
    who = f"rank {first}" if n == 1 else f"rank {first} and {n - 1} more"
    coordinate = ", ".join(f"{axis} {numbers(*at[axis])}" for axis in mesh.axes)
    label = f"{who}: {coordinate}, stores {size(held.total)}"
    here = all(at[axis][0] <= mesh.coordinate(current)[axis] <= at[axis][1] for axis in AXES)
    spans = ",".join(f"{at[axis][0]}-{at[axis][1]}" for axis in AXES)
    return (
        f'<button type="button" role="radio" aria-checked="{str(here).lower()}" tabindex="{0 if here else -1}" '
        f'data-rank="{first}" data-at="{spans}" aria-label="{escape(label)}" title="{escape(label)}" '
        f'style="--share:{share:.2f}">{first if n == 1 else ""}</button>'
    )


def _memory(inspection: Inspection) -> str:
    memory, rank = inspection.memory, inspection.rank or 0
    most = inspection.holdings[0].total
    stored = []
    for held in inspection.holdings:
        sizes = (held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes)
        parts = list(zip(("parameters", "gradients", "optimizer state"), sizes, strict=True))
        who = rank_count(held.ranks)
        if len(inspection.holdings) > 1:
            who = f"shard {numbers(held.first, held.last)}: {who}"
        stored.append(
            f'<li data-first="{held.first}" data-last="{held.last}"><p>{who}<b>{size(held.total)}</b></p>'
            + _bar(parts, most)
            + "</li>"
        )
    peak = [(part.what, part.at_peak) for part in memory.parts]
    rows = [
        f'<tr><th scope="row"><i class="{COLOURS.get(part.what, "c9")}"></i>{part.what}</th>'
        f"<td>{'' if part.exact else '≈ '}{size(part.most)}</td>"
        f"<td>{'' if part.exact and part.at_peak == part.most else '≈ '}{size(part.at_peak)}</td></tr>"
        for part in memory.parts
    ]
    body = [
        "<h3>Stored by each rank, exact</h3>",
        f'<ol class="bars">{"".join(stored)}</ol>',
        f"<h3>Rank {rank} at the peak of a step, estimate</h3>",
        f'<div class="bars"><p>all of it<b>{size(memory.peak)}</b></p>{_bar(peak, memory.peak)}</div>',
        '<table><thead><tr><th scope="col">part (≈ an estimate)</th><th scope="col">at most</th>'
        f'<th scope="col">at the peak</th></tr></thead><tbody>{"".join(rows)}</tbody></table>',
    ]
    return _section("memory", "Memory of a rank", "\n".join(body))


def _wire(inspection: Inspection, found: dict[str, Any]) -> str:
    kinds = found["collectives"]
    if not kinds:
        return _section("wire", "Bytes a step", "<p>None: one rank has nobody to talk to.</p>")
    high = short(found["precision"]["compute"])
    names = {"high_precision": high, "fp8": "fp8"}
    own = kinds[0]["recipe"]
    most = max(kind[name]["moved"] for kind in kinds for name in names if kind[name])
    rows = []
    for kind in kinds:
        bars = []
        for name, says in names.items():
            if (values := kind[name]) is None:
                bars.append(f'<span class="name">{says}</span><span class="bar"></span><span class="value">-</span>')
                continue
            width = f"{100 * values['moved'] / most:.2f}%" if most else "0"
            bars.append(
                f'<span class="name">{says}</span><span class="bar"><i class="{name}" style="width:{width}"></i></span>'
                f'<span class="value">{size(values["moved"])}</span>'
            )
        calls = count((kind[own] or kind["high_precision"] or kind["fp8"])["count"], "call")
        where = f"{kind['phase']}, {kind['op'].replace('_', '-')} over {kind['axis']}, {calls}"
        rows.append(f"<li><p><b>{kind['purpose']}</b> {where}</p>{''.join(bars)}</li>")
    high_sum, fp8_sum = _sums(found)
    fp8 = "fp8 cannot run here"
    if fp8_sum is not None:
        less = f", {1 - fp8_sum / high_sum:.0%} less" if fp8_sum < high_sum else ""
        fp8 = f"{size(fp8_sum)} with fp8{less}"
    says = (
        f"{size(high_sum)} in {high}; {fp8}. The recipe says {names[own]}. "
        "Bytes are those that one rank sends in a ring."
    )
    return _section("wire", "Bytes a step", f'<p>{escape(says)}</p><ol class="pairs">{"".join(rows)}</ol>')


def _parameters(inspection: Inspection, found: dict[str, Any]) -> str:
    rows = [_parameter(inspection, row) for row in found["parameters"]]
    names = count(len(rows), "entry", plural="entries")
    body = [
        '<p><label class="find">path <input id="find" type="search" placeholder="wq, layers.3.*, norm" '
        'autocomplete="off" spellcheck="false"></label> '
        f'<output id="found" for="find">{names}; identical layers share one</output></p>',
        f'<ol class="entries">{"".join(rows)}</ol>',
    ]
    return _section("parameters", "Who holds which rows", "\n".join(body))


def _parameter(inspection: Inspection, row: dict[str, Any]) -> str:
    mesh, rank = inspection.run.mesh_shape, inspection.rank or 0
    sizes, spec = tuple(row["shape"]), Spec(tuple(tuple(axes) for axes in row["stored"]))
    here = local_slices(sizes, spec, mesh, rank)
    strips = "".join(
        _strip(dim, n, axes, mesh, part)
        for dim, (n, axes, part) in enumerate(zip(sizes, spec.dims, here, strict=True))
        if dim == 0 or axes
    )
    split = row["split"]
    if split == "EMPTY":
        split = f"empty on {row['pieces'] - row['holders']} of {row['pieces']}"
    badges = [f'<span class="badge {row["split"].lower()}">{split}</span>']
    badges += ['<span class="badge fp8">fp8</span>'] if row["not_fp8"] is None else []
    layers = f", each of {row['count']}" if row["count"] > 1 else ""
    facts = [
        ("stored", size(row["parameter_bytes"])),
        ("gradient", size(row["gradient_bytes"])),
        ("optimizer", size(row["optimizer_bytes"])),
        ("sent", f"{size(row['wire_bytes'])} {short(row['wire_dtype'])}" if row["wire_bytes"] else "-"),
    ]
    why = [] if row["not_fp8"] is None else [f"not fp8: {row['not_fp8']}"]
    why += [f"padded to {shape(row['fp8_shape'])} in fp8 products"] if row["fp8_shape"] else []
    rules = [f"rules: {', '.join(row['rules'])}"] if row["rules"] else []
    return "".join(
        [
            f'<li data-path="{escape(row["path"])}"><h3><code>{escape(row["path"])}</code> {"".join(badges)}</h3>',
            f'<p class="shape">{" × ".join(map(str, sizes))} {row["dtype"]}{layers}</p>',
            f'<div class="strips">{strips}</div><p class="holds">{holds(rank, sizes, spec, here)}</p>',
            f"<dl>{''.join(f'<div><dt>{what}</dt><dd>{value}</dd></div>' for what, value in facts)}</dl>",
            f'<p class="why">{escape("; ".join([*rules, *why]))}</p></li>',
        ]
    )


def _strip(dim: int, n: int, axes: Sequence[str], mesh: MeshShape, part: slice) -> str:
    """A dim of a parameter as a strip: where it is cut, and the rank's part."""
    # Lines of the outer splits, as long as there is room for them.
    edges, pieces = [0, n], 1
    for axis in axes:
        parts = getattr(mesh, axis)
        if pieces * parts > CUTS:
            break
        pieces *= parts
        edges = [a + e for a, b in pairwise(edges) for i in range(parts) for e in chunk(b - a, parts, i)[:1]] + [n]
    cuts = "".join(f"M{edge} 0v1" for edge in dict.fromkeys(edges[1:-1]))
    return (
        f'<span>{dim_name(dim)}</span><svg class="strip" viewBox="0 0 {max(n, 1)} 1" preserveAspectRatio="none" '
        f'data-dim="{dim}" aria-hidden="true"><rect class="held" x="{part.start}" width="{part.stop - part.start}" '
        f'height="1"/><path class="cuts" d="{cuts}"/></svg>'
    )


# --- words ----------------------------------------------------------------------------------------------------------


def _each(bins: list[tuple[int, int]]) -> str:
    return f", {_span(bins[0])} to a cell" if _span(bins[0]) > 1 else ""


def _sent(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes)


def _sums(found: dict[str, Any]) -> tuple[int, int | None]:
    """Bytes that a rank sends in a step, in high precision and in fp8; None where that cannot run."""
    columns = [
        [kind[name]["moved"] for kind in found["collectives"] if kind[name]] for name in ("high_precision", "fp8")
    ]
    return sum(columns[0]), sum(columns[1]) if columns[1] or not columns[0] else None


# --- pieces ---------------------------------------------------------------------------------------------------------


def _section(id: str, title: str, body: str, kind: str = "") -> str:
    head = f'<section id="{id}" class="{kind}" aria-labelledby="{id}-title"><h2 id="{id}-title">{escape(title)}</h2>'
    return f"{head}\n{body}</section>"


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _bar(parts: Iterable[tuple[str, int]], most: int) -> str:
    """Parts side by side, the whole bar being `most` bytes long."""
    shown = [(what, nbytes) for what, nbytes in parts if nbytes]
    label = ", ".join(f"{what} {size(nbytes)}" for what, nbytes in shown)
    pieces = "".join(
        f'<i class="{COLOURS.get(what, "c9")}" style="width:{100 * nbytes / most:.2f}%" '
        f'title="{what}: {size(nbytes)}"></i>'
        for what, nbytes in shown
    )
    return f'<div class="bar" role="img" aria-label="{escape(label)}">{pieces}</div>'


def _bins(n: int, most: int) -> list[tuple[int, int]]:
    """0 to n-1 in at most `most` spans of equal length, as (first, last); the last may be shorter."""
    length = -(-n // most)
    length = next((width for width in range(length, 2 * length) if n % width == 0), length)
    return [(first, min(first + length, n) - 1) for first in range(0, n, length)]


def _span(span: tuple[int, int]) -> int:
    return span[1] - span[0] + 1


def _rank_at(mesh: MeshShape, at: dict[str, int]) -> int:
    """The inverse of MeshShape.coordinate."""
    return (at["replicate"] * mesh.shard + at["shard"]) * mesh.tensor + at["tensor"]
