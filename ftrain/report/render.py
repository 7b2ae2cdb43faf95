"""An inspection as text for a terminal."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ftrain import fp8
from ftrain.report.as_json import collectives, folded, totals
from ftrain.report.inspection import Inspection
from ftrain.report.layout import Row


def render(inspection: Inspection, group: str = "*") -> str:
    """Header, parameters (those whose path matches `group`; identical layers in one line), collectives, memory."""
    parts = [_header(inspection), _parameters(inspection, group), _collectives(inspection), _memory(inspection)]
    return "\n\n".join(parts)


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
    return "\n".join(f"{what:10} {text}" for what, text in lines)


def _parameters(inspection: Inspection, group: str) -> str:
    head = ["parameter", "dtype", "shape", "split by", "local", "", "stored", "gradient", "optimizer", "sent", "fp8"]
    rows = [
        [path, row.dtype, shape(row.shape), _split(row), *_local(inspection, row), *_bytes(row), _fp8(row)]
        for path, (row, *_) in folded([row for row in inspection.rows if fnmatchcase(row.path, group)])
    ]
    rules = dict.fromkeys(rule for row in inspection.rows for rule in row.rules)
    all_of = totals(inspection.rows)
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "wire_bytes")
    rows.append(["all", "", "", "", "", "", *(size(all_of[name]) for name in names), ""])
    whose = "rank 0, which holds the most" if inspection.rank is None else f"rank {inspection.rank}"
    return "\n".join(
        [
            f"Parameters; bytes are those of {whose}, for each of the layers in a line"
            + (f"; rules: {', '.join(rules)}" if rules else ""),
            *table([head, *rows], left=(0, 1, 2, 3, 4, 5, 10)),
        ]
    )


def _split(row: Row) -> str:
    return "-" if row.pieces == 1 else str(row.stored)


def _local(inspection: Inspection, row: Row) -> tuple[str, str]:
    if inspection.rank is not None:
        return shape(row.local), row.split
    if row.split == "EMPTY":
        return shape(row.largest), f"EMPTY on {row.pieces - row.holders} of {row.pieces}"
    if row.split == "uneven":
        return f"{shape(row.largest)} to {shape(row.smallest)}", row.split
    return shape(row.largest), row.split


def _bytes(row: Row) -> list[str]:
    sent = f"{size(row.wire_bytes)} {short(row.wire_dtype)}" if row.wire_bytes else "-"
    return [size(row.parameter_bytes), size(row.gradient_bytes), size(row.optimizer_bytes), sent]


def _fp8(row: Row) -> str:
    if row.not_fp8 is not None:
        return f"no: {row.not_fp8}"
    return "yes" if row.fp8_shape is None else f"yes, padded to {shape(row.fp8_shape)}"


def _collectives(inspection: Inspection) -> str:
    kinds = collectives(inspection)
    if not kinds:
        return "Collectives of a step: none, one rank has nobody to talk to"
    own = kinds[0]["recipe"]
    compute = short(inspection.recipe.precision.compute)
    star = {name: " *" if own == name else "" for name in ("high_precision", "fp8")}
    head = ["for", "when", "operation", "over", "calls", f"bytes {compute}{star['high_precision']}"]
    head += ["calls", f"bytes fp8{star['fp8']}"]
    rows = [
        [kind["purpose"], kind["phase"], kind["op"], kind["axis"]]
        + [text for name in ("high_precision", "fp8") for text in _calls(kind[name])]
        for kind in kinds
    ]
    sums = [sum(kind[name]["moved"] for kind in kinds if kind[name]) for name in ("high_precision", "fp8")]
    rows.append(["all", "", "", "", "", size(sums[0]), "", size(sums[1])])
    return "\n".join(
        [
            "Collectives of a step, on one rank; bytes are those it sends in a ring; * as the recipe says",
            *table([head, *rows], left=(0, 1, 2, 3)),
        ]
    )


def _calls(values: dict | None) -> tuple[str, str]:
    return ("-", "-") if values is None else (str(values["count"]), size(values["moved"]))


def _memory(inspection: Inspection) -> str:
    rows = [
        [part.what, size(part.most), size(part.at_peak), "exact" if part.exact else "estimate"]
        for part in inspection.memory.parts
    ]
    rows.append(["all, at the peak", "", size(inspection.memory.peak), "estimate"])
    whose = inspection.rank or 0
    lines = [f"Memory of rank {whose}", *table([["", "at most", "at the peak", ""], *rows], left=(0, 3))]
    if len(inspection.holdings) > 1:
        rows = [[f"{h.first} to {h.last}", str(h.ranks), size(h.total)] for h in inspection.holdings]
        lines += [
            "",
            "Ranks do not store alike: parameters, gradients and optimizer state of each, by its place on shard",
        ]
        lines += table([["shard", "ranks", "stored"], *rows], left=(0,))
    return "\n".join(lines)


def table(rows: Iterable[list[str]], left: tuple[int, ...]) -> list[str]:
    """Rows of text in columns; those of `left` flush left, the others flush right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
