"""An inspection as text for a terminal of 80 columns."""

from collections.abc import Callable, Iterable, Sequence
from textwrap import wrap

from ftrain import fp8
from ftrain.report.as_json import collectives, folded, totals
from ftrain.report.inspection import Inspection, matching
from ftrain.report.layout import Row

COLUMNS = 80
MARGIN = 11  # of what is said beside a word, such as "model"
HIGH, FP8 = "high_precision", "fp8"


def render(inspection: Inspection, group: str = "*") -> str:
    """Header, parameters (those whose path matches `group`; identical layers in one line), collectives, memory.

    Raises RecipeError for a group that matches nothing.
    """
    parts = [_header(inspection), _parameters(inspection, group), _collectives(inspection), _memory(inspection)]
    return "\n\n".join(parts)


def in_a_line(inspection: Inspection) -> str:
    """The recipe, how many ranks, and the peak of their memory."""
    n, peak = inspection.run.mesh_shape.size, size(inspection.memory.peak)
    return f"{inspection.name} on {n} rank{'s' if n > 1 else ''}: {peak} a rank at the peak of a step"


def _header(inspection: Inspection) -> str:
    run, recipe = inspection.run, inspection.recipe
    mesh, cfg = run.mesh_shape, run.cfg
    axes = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in mesh.axes) or "one rank"
    if inspection.rank is not None and mesh.axes:
        at = ", ".join(f"{axis} {mesh.coordinate(inspection.rank)[axis]}" for axis in mesh.axes)
        axes += f"; rank {inspection.rank} is at {at}"
    tokens = recipe.data.global_batch_size * recipe.data.seq_len
    micro = f"{run.micro_batches} micro-batch" + ("es" if run.micro_batches > 1 else "")
    keep = "" if recipe.parallel.reshard_after_forward else ", weights kept for the backward"
    lines = [
        ("recipe", f"{inspection.name} on {mesh.size} rank{'s' if mesh.size > 1 else ''}"),
        ("mesh", axes),
        (
            "model",
            f"{run.n_params:,} parameters: {cfg.n_layers} layers, dim {cfg.dim}, {cfg.n_heads} heads of {cfg.head_dim} "
            f"({cfg.n_kv_heads} for keys), ffn {cfg.ffn_dim}, vocabulary {cfg.vocab_size}"
            + (", tied" if cfg.tie_embeddings else ""),
        ),
        (
            "batch",
            f"{recipe.data.global_batch_size} sequences of {recipe.data.seq_len} tokens = {tokens:,} tokens a step; "
            f"on a rank {micro} of {recipe.train.micro_batch_size}",
        ),
        (
            "precision",
            f"{recipe.precision.params} stored, {recipe.precision.compute} computed, "
            f"{recipe.precision.reduce} reduced; remat {recipe.train.remat}{keep}",
        ),
    ]
    scheme = run.execution.fp8.recipe
    says = fp8.describe(scheme) if scheme.is_fp8 else [scheme.name]
    lines += [("" if i else "fp8", line) for i, line in enumerate(says)]
    lines += [("note", note) for note in inspection.notes]
    return "\n".join(line for what, text in lines for line in beside(what, text))


# --- parameters -----------------------------------------------------------------------------------------------------


def _parameters(inspection: Inspection, group: str) -> str:
    rows = folded(matching(inspection.rows, group))
    dtypes = dict.fromkeys(row.dtype for _, (row, *_) in rows)
    axes = [axis for axis in inspection.run.mesh_shape.axes if any(axis in str(row.stored) for _, (row, *_) in rows)]
    split = [f"{', '.join(axis[0] for axis in axes)}: split over {', '.join(axes)}"] if axes else []
    whose = "rank 0, which holds the most" if inspection.rank is None else f"rank {inspection.rank}"
    title = (
        f"Parameters in {' and '.join(dtypes)}; the part is that of {whose}; held: with gradient and optimizer state"
    )
    table_rows, before = [["parameter", "shape", "part", "held", "sent"]], ""
    for path, (row, *others) in rows:
        prefix, name = _in_layer(path)
        if prefix != before and prefix:
            table_rows.append([f"{prefix}, each" if others else prefix, "", "", "", ""])
        before = prefix
        held = size(row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes)
        sent = f"{size(row.wire_bytes)} {short(row.wire_dtype)}" if row.wire_bytes else "-"
        table_rows.append([f"  {name}" if prefix else name, _split_shape(row), shape(row.local), held, sent])
    all_of = totals(inspection.rows)
    names = {"stored": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
    sums = ", ".join(
        f"{what} {size(all_of[name])}" for what, name in {**names, "sent in a gather": "wire_bytes"}.items()
    )
    lines = [*wrap("; ".join([title, *split]), COLUMNS), *table(table_rows, left=(0, 1, 2))]
    lines += [line for what, text in [("all", sums), *_remarks(inspection, rows)] for line in beside(what, text)]
    return "\n".join(lines)


def _in_layer(path: str) -> tuple[str, str]:
    """("layers.0-31", "wq") of "layers.0-31.wq"; ("", path) of what lies in no layer."""
    parts = path.split(".")
    end = next((i + 1 for i, part in enumerate(parts[:-1]) if part[0].isdigit()), 0)
    return ".".join(parts[:end]), ".".join(parts[end:])


def _split_shape(row: Row) -> str:
    """The shape with the first letters of the axes that split each dim: "128256:ts x 16384"."""
    dims = zip(row.shape, row.stored.dims, strict=True)
    return " x ".join(f"{n}:{''.join(axis[0] for axis in axes)}" if axes else str(n) for n, axes in dims)


def _remarks(inspection: Inspection, rows: list[tuple[str, list[Row]]]) -> list[tuple[str, str]]:
    """What is not so of all parameters: a word, and the parameters that it is said of."""
    in_fp8 = inspection.run.execution.fp8.recipe.is_fp8
    said: dict[str, Callable[[Row], str | None]] = {
        "uneven": lambda row: f"{shape(row.largest)} to {shape(row.smallest)}" if row.split == "uneven" else None,
        "EMPTY": lambda row: f"on {row.pieces - row.holders} of {row.pieces}" if row.split == "EMPTY" else None,
        "not fp8": lambda row: row.not_fp8 if in_fp8 else None,
    }
    remarks = []
    for what, of in said.items():
        together: dict[str, list[str]] = {}
        for path, (row, *_) in rows:
            if (text := of(row)) is not None:
                together.setdefault(text, []).append(path)
        if together:
            remarks.append((what, "; ".join(f"{', '.join(paths)}: {text}" for text, paths in together.items())))
    rules = dict.fromkeys(rule for _, (row, *_) in rows for rule in row.rules)
    return [*remarks, *([("rules", ", ".join(rules))] if rules else [])]


# --- collectives and memory -----------------------------------------------------------------------------------------


def _collectives(inspection: Inspection) -> str:
    kinds = collectives(inspection)
    if not kinds:
        return "Collectives of a step: none, one rank has nobody to talk to"
    own = kinds[0]["recipe"]
    names = {HIGH: short(inspection.recipe.precision.compute), FP8: "fp8"}
    rows, before = (
        [["for", "when", "operation", "calls", *(name + "*" * (own == key) for key, name in names.items())]],
        "",
    )
    axes = [kind["axis"] for kind in kinds]
    for kind in sorted(kinds, key=lambda kind: axes.index(kind["axis"])):  # in their order, an axis at a time
        if kind["axis"] != before:
            before = kind["axis"]
            rows.append([f"over {before}", *[""] * 5])
        counts = dict.fromkeys(str(kind[name]["count"]) for name in names if kind[name])
        moved = ["-" if kind[name] is None else size(kind[name]["moved"]) for name in names]
        rows.append([f"  {kind['purpose']}", kind["phase"], kind["op"], "/".join(counts), *moved])
    sums = [sum(kind[name]["moved"] for kind in kinds if kind[name]) for name in names]
    rows.append(["all", "", "", "", *map(size, sums)])
    title = "Collectives of a step, in bytes that one rank sends in a ring; * as the recipe says"
    return "\n".join([*wrap(title, COLUMNS), *table(rows, left=(0, 1, 2))])


def _memory(inspection: Inspection) -> str:
    rows = [
        [part.what, size(part.most), size(part.at_peak), "exact" if part.exact else "estimate"]
        for part in inspection.memory.parts
    ]
    rows.append(["all, at the peak", "", size(inspection.memory.peak), "estimate"])
    whose = inspection.rank or 0
    lines = [f"Memory of rank {whose}", *table([["", "at most", "at the peak", ""], *rows], left=(0, 3))]
    if len(inspection.holdings) > 1:
        places = [f"{h.first} to {h.last}" if h.last > h.first else str(h.first) for h in inspection.holdings]
        rows = [[at, str(h.ranks), size(h.total)] for at, h in zip(places, inspection.holdings, strict=True)]
        lines += ["", "Ranks do not hold alike: parameters, gradients and optimizer state of each"]
        lines += table([["place on shard", "ranks", "held"], *rows], left=(0,))
    return "\n".join(lines)


# --- layout of text -------------------------------------------------------------------------------------------------


def table(rows: Iterable[Sequence[str]], left: tuple[int, ...]) -> list[str]:
    """Rows of text in columns; those of `left` flush left, the others flush right.

    Where that is wider than COLUMNS, first cells that are too long have a line of their own.
    """
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    gaps = 2 * (len(widths) - 1) + 2
    widths[0] = min(widths[0], max(8, COLUMNS - gaps - sum(widths[1:])))
    lines = []
    for row in cells:
        if len(row[0]) > widths[0]:
            lines.append("  " + row[0])
            row[0] = ""
        if any(row):
            columns = enumerate(zip(row, widths, strict=True))
            line = "  ".join(text.ljust(n) if i in left else text.rjust(n) for i, (text, n) in columns)
            lines.append("  " + line.rstrip())
    return lines


def beside(what: str, text: str) -> list[str]:
    """A word, and beside it a text of as many lines as it needs."""
    lines = wrap(text, COLUMNS - MARGIN, break_on_hyphens=False) or [""]
    return [f"{'' if i else what:{MARGIN}}{line}".rstrip() for i, line in enumerate(lines)]


def shape(sizes: tuple[int, ...]) -> str:
    """(128, 64) as "128x64"."""
    return "x".join(map(str, sizes))


def short(dtype: str) -> str:
    """A dtype's name as people write it."""
    return {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}.get(dtype, dtype)


def size(nbytes: float) -> str:
    """Bytes in the largest unit (of 1024) that gives a number of at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
