"""What `inspect-sharding` says of a recipe on so many ranks: layout, collectives, memory, or every problem at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from os import PathLike

from ftrain.fp8.use import starred
from ftrain.launch import World
from ftrain.recipe import Recipe, RecipeError, load_recipe, resolve_parallel
from ftrain.report.depth import makes_of, rehearse_deep
from ftrain.report.holdings import Holding, holdings
from ftrain.report.layout import Row, layout
from ftrain.report.memory import Memory, memory
from ftrain.report.planned import PlannedMesh
from ftrain.report.traffic import Line, traffic
from ftrain.run import Run
from ftrain.sharding import MeshShape, ShardingError

STAND_IN = "tensorwise"  # the fp8 recipe of the comparison, for a recipe that has none


@dataclass(frozen=True, repr=False)
class Inspection:
    """Everything about a layout, without a device. run: on the meta device, as `rank` of the mesh.

    high_precision, fp8: the collectives of one step with and without fp8. One of them is the recipe's own; the other
    is the same recipe but for [fp8], None where that cannot run.
    """

    name: str
    recipe: Recipe
    run: Run
    rank: int | None
    rows: list[Row]
    high_precision: list[Line] | None
    fp8: list[Line] | None
    memory: Memory
    holdings: list[Holding]
    notes: list[str]

    def __repr__(self) -> str:
        """A line: what a prompt shows, and a notebook keeps beside the page."""
        from ftrain.report.render import in_a_line  # which is made of inspections

        return f"<Inspection of {in_a_line(self)}>"

    def _repr_html_(self) -> str:
        """The report as a notebook shows it: the page of `inspect-sharding --html`, in a frame."""
        from ftrain.report.as_html import in_notebook

        return in_notebook(self)


def inspect(
    name: str | PathLike,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    rank: int | None = None,
) -> Inspection:
    """How the recipe of a file or shipped name lies on `world_size` ranks. Needs no device and no other process.

    world_size: None: the fewest ranks that the recipe's [parallel] describes. rank: whose parts, bytes and memory to
    give; None: those of rank 0, which holds the most. Raises RecipeError with every problem there is.
    """
    recipe, run = checked(name, overrides, world_size, rank)
    own = rehearse_deep(recipe, run, rank or 0)
    rows = layout(run, own.per_element, rank or 0)
    mine, others = traffic(own, run.mesh_shape), _other_traffic(recipe, run)
    in_fp8 = run.execution.fp8.recipe.is_fp8
    alike = len({make.in_fp8 for make in makes_of(run)}) == 1
    return Inspection(
        name=str(name),
        recipe=recipe,
        run=run,
        rank=rank,
        rows=rows,
        high_precision=others if in_fp8 else mine,
        fp8=mine if in_fp8 else others,
        memory=memory(own, rows, alike),
        holdings=holdings(run, own.per_element),
        notes=_notes(run, rows),
    )


def matching(rows: Sequence[Row], group: str) -> list[Row]:
    """The rows whose path matches the glob. Raises RecipeError where none does."""
    found = [row for row in rows if fnmatchcase(row.path, group)]
    if not found:
        there = ", ".join(dict.fromkeys(starred(row.path) for row in rows))
        raise RecipeError([f"--group {group!r} matches no parameter; there are {there}."])
    return found


def checked(
    name: str | PathLike, overrides: Sequence[str] = (), world_size: int | None = None, rank: int | None = None
) -> tuple[Recipe, Run]:
    """A recipe that can run on so many ranks, and its planned Run. Arguments as of `inspect`.

    Raises RecipeError with every problem: of keys, of fp8, of the layout, of the rank.
    """
    problems: list[str] = []
    try:
        recipe = load_recipe(name, overrides, world_size=world_size)
    except RecipeError as error:
        problems += error.problems
        try:
            recipe = load_recipe(name, overrides)  # the ranks do not fit, perhaps; what else is wrong?
        except RecipeError:
            raise RecipeError(problems) from None
    size = recipe.parallel.fewest if world_size is None else world_size
    if rank is not None and not 0 <= rank < size:
        problems.append(f"--rank {rank} is none of {size} ranks: expected 0 to {size - 1}.")
    if problems:
        raise RecipeError(problems)
    try:
        return recipe, planned_run(recipe, size, rank or 0)
    except (RecipeError, ShardingError) as error:
        raise RecipeError(str(error).splitlines()) from None


def planned_run(recipe: Recipe, world_size: int, rank: int) -> Run:
    """The Run of one rank, on the meta device."""
    parallel = resolve_parallel(recipe.parallel, world_size)
    shape = MeshShape(parallel.replicate, parallel.tensor, parallel.shard)
    mesh = PlannedMesh(shape, rank)
    eager = replace(recipe, train=replace(recipe.train, compile=False))
    return Run(eager, World(rank, world_size), mesh.device, mesh.as_mesh())


def _other_traffic(recipe: Recipe, run: Run) -> list[Line] | None:
    """The collectives of the same recipe with fp8 switched off, or on where it is off."""
    if run.execution.fp8.recipe.is_fp8:
        options = replace(recipe.fp8, recipe="none")
    else:
        skip = tuple(p for p in ("output", "embedding") if p in run.execution.fp8.weights)
        options = replace(recipe.fp8, recipe=STAND_IN, all_gather=True, precompute_scales=True, skip=skip)
    other = replace(recipe, fp8=options)
    try:
        planned = planned_run(other, run.world.world_size, 0)
    except RecipeError:
        return None
    return traffic(rehearse_deep(other, planned, calls_only=True), run.mesh_shape)


def _notes(run: Run, rows: list[Row]) -> list[str]:
    """What a reader of the layout should know, a sentence each."""
    mesh = run.mesh_shape
    tokens = run.recipe.train.micro_batch_size * run.recipe.data.seq_len
    notes = run.execution.fp8.notes(run.abstract, run.plans, mesh, "cuda", tokens, True)
    padding, arrives = sum(row.padding_bytes for row in rows), mesh.shard * sum(row.wire_bytes for row in rows)
    if padding > arrives / 20:
        worst = max(rows, key=lambda row: row.padding_bytes)
        notes.append(
            f"{padding / arrives:.0%} of what gathers bring is filler, most of it in {starred(worst.path)}: "
            f"its {worst.shape[0]} rows in {worst.pieces} pieces of {worst.largest[0]} leave "
            f"{worst.pieces - worst.holders} empty; more parallel.replicate and less parallel.shard needs less"
        )
    return notes
