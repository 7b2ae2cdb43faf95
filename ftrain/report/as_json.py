"""An inspection as plain values for JSON: every parameter, or identical layers in one."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ftrain import fp8
from ftrain.fp8.use import starred
from ftrain.recipe import model_family
from ftrain.report.inspection import Inspection, matching
from ftrain.report.layout import Row
from ftrain.report.traffic import Line


def as_json(inspection: Inspection, group: str = "*", fold: bool = False, exact_only: bool = False) -> dict[str, Any]:
    """Everything that is known, as dicts, lists, strings and numbers. Bytes are those of one rank.

    group: a glob over paths, the parameters to list; totals are of all. fold: list identical layers once, as
    "layers.0-31.wq". exact_only: leave out estimates of memory, which differ between versions of torch. Raises
    RecipeError for a group that matches nothing.
    """
    run, rows = inspection.run, inspection.rows
    found = matching(rows, group)
    chosen = folded(found) if fold else [(row.path, [row]) for row in found]
    memory = [dataclasses.asdict(part) for part in inspection.memory.parts if part.exact or not exact_only]
    if exact_only:
        memory = [{"what": part["what"], "most": part["most"]} for part in memory]
    mesh = run.mesh_shape
    return {
        "recipe": inspection.name,
        "world_size": mesh.size,
        "mesh": {axis: getattr(mesh, axis) for axis in mesh.axes},
        "rank": inspection.rank or 0,
        "coordinate": {axis: at for axis, at in mesh.coordinate(inspection.rank or 0).items() if axis in mesh.axes},
        "model": {"family": model_family(run.recipe.model), **dataclasses.asdict(run.cfg), "parameters": run.n_params},
        "batch": {
            "sequences": run.recipe.data.global_batch_size,
            "seq_len": run.recipe.data.seq_len,
            "micro_batch_size": run.recipe.train.micro_batch_size,
            "micro_batches": run.micro_batches,
        },
        "precision": dataclasses.asdict(run.recipe.precision),
        "remat": run.recipe.train.remat,
        "reshard_after_forward": run.recipe.parallel.reshard_after_forward,
        "fp8": {
            "recipe": run.execution.fp8.recipe.name,
            "products": fp8.describe(run.execution.fp8.recipe),
            "all_gather": run.execution.fp8.all_gather,
            "precompute_scales": run.execution.fp8.precompute_scales,
        },
        "notes": inspection.notes,
        "problems": [],
        "parameters": [{"path": path, **_row(same[0]), "count": len(same)} for path, same in chosen],
        "totals": totals(rows),
        "holdings": [dataclasses.asdict(holding) for holding in inspection.holdings],
        "collectives": collectives(inspection),
        "memory": {"parts": memory} | ({} if exact_only else {"peak": inspection.memory.peak}),
    }


def _row(row: Row) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "path"}
    return values | {"stored": [list(axes) for axes in row.stored.dims], "used": [list(axes) for axes in row.used.dims]}


def totals(rows: Iterable[Row]) -> dict[str, int]:
    """Sums over all parameters: elements of the model, and bytes of one rank."""
    rows = list(rows)
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "wire_bytes", "padding_bytes")
    return {"parameters": sum(row.numel for row in rows)} | {n: sum(getattr(row, n) for row in rows) for n in names}


def collectives(inspection: Inspection) -> list[dict[str, Any]]:
    """One entry for each kind of collective: its count and bytes in high precision and in fp8, None for none."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for name, lines in (("high_precision", inspection.high_precision), ("fp8", inspection.fp8)):
        for line in lines or ():
            kinds.setdefault(key_of(line), {"high_precision": None, "fp8": None})[name] = {
                "count": line.count,
                "sent": line.sent,
                "moved": line.moved,
                "dtypes": list(line.dtypes),
            }
    own = "fp8" if inspection.run.execution.fp8.recipe.is_fp8 else "high_precision"
    fields = ("purpose", "phase", "op", "axis")
    return [dict(zip(fields, key, strict=True)) | values | {"recipe": own} for key, values in kinds.items()]


def key_of(line: Line) -> tuple[str, str, str, str]:
    """What makes two lines the same kind."""
    return line.purpose, line.phase, line.op, line.axis


def folded(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in the layer's number alone, together: ("layers.0-31.wq", its rows), where the first one was."""
    alike: dict[tuple, list[Row]] = {}
    for row in rows:
        alike.setdefault((starred(row.path), dataclasses.replace(row, path="")), []).append(row)
    return [(_together([row.path for row in same]), same) for same in alike.values()]


def _together(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    parts = list(zip(*(path.split(".") for path in paths), strict=True))
    return ".".join(part[0] if len(set(part)) == 1 else _ranges([int(number) for number in part]) for part in parts)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
