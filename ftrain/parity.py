"""Does a recipe compute what it should? One batch through it and through a plain reference, side by side.

The reference is the same model with the same parameters on the same sequences: float32, whole on one rank,
eager, without fp8. What a recipe loses against it is noise: of fp8, of bfloat16, of the order of sums. More
than its `Bars` allow is a mistake, in the recipe or in ftrain.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftrain import fp8, resume, tree
from ftrain.execution import Execution
from ftrain.fp8.casts import cast_all, jobs
from ftrain.fp8.measure import cast_loss, sqnr
from ftrain.fp8.recipes import operands
from ftrain.launch import World, process_group
from ftrain.linear import Linear
from ftrain.optim import Optimizer
from ftrain.recipe import Recipe
from ftrain.run import Run, default_device
from ftrain.sharding import Mesh, full
from ftrain.step import TrainState, make_global_norm, make_train_step
from ftrain.tree import Tree


@dataclass(frozen=True)
class Bars:
    """What a recipe may lose.

    loss: relative difference. gradient: SQNR of the worst parameter's, in dB. saturated, flushed: the largest
    share of a weight's, an input's or an output gradient's values that a cast cuts off or turns into zeros.
    """

    loss: float
    gradient: float
    saturated: float
    flushed: float


# Measured on the debug recipe, worst of all: fp8 14.0 dB, 0.42 flushed; bfloat16 32 dB; sharded float32 105 dB.
# Noise grows with depth. docs/fp8.md has the numbers.
FP8 = Bars(loss=5e-3, gradient=10.0, saturated=1e-2, flushed=0.5)
BFLOAT16 = Bars(loss=2e-3, gradient=25.0, saturated=0.0, flushed=0.0)
FLOAT32 = Bars(loss=1e-5, gradient=80.0, saturated=0.0, flushed=0.0)


def parity(recipe: Recipe, *, checkpoint: Path | str | None = None, world: World | None = None) -> dict[str, Any]:
    """How far the recipe as written is from the reference, on its first batch, and a verdict. Collective.

    checkpoint: the parameters (and fp8 histories) to take; None takes the recipe's initial values.
    Returns JSON's types: passed; failures (sentences); bars; loss, reference_loss; gradients, each with path
    and sqnr (dB, or the words "same" or "not finite"), the worst first; casts, each with path, tensor ("w",
    "x" or "g") and the shares saturated and flushed, the worst first; step, checkpoint.
    """
    world = world or World()
    with process_group(world, default_device(world), recipe.parallel.timeout):
        run = Run(recipe, world=world)
        state, path = resume.state_to_read(run, checkpoint)
        return compare(run, state) | {"step": state.step, "checkpoint": str(path) if path else None}


def compare(run: Run, state: TrainState) -> dict[str, Any]:
    """`parity` of one state of a run: all of its result but where the state came from. Collective."""
    grads, metrics = gradients(run, state, run.batch(0))
    params, grads = full(state.params), full(grads)
    loss = metrics["loss"].item()
    result: list[Any] = [None]
    if run.mesh.rank == 0:
        known = state.fp8_state.weights if state.fp8_state else None
        reference_loss, reference, casts = reference_gradients(run, params, known)
        noise = tree.map(_sqnr, reference, grads)
        result = [judge(bars(run), loss, reference_loss, dict(tree.named_leaves(noise)), casts)]
    if run.mesh.world is not None:
        dist.broadcast_object_list(result, src=0, group=run.mesh.world, device=torch.device("cpu"))
    return result[0]


def bars(run: Run) -> Bars:
    """What this run may lose."""
    if run.execution.fp8.recipe.is_fp8:
        return FP8
    return BFLOAT16 if "bfloat16" in vars(run.recipe.precision).values() else FLOAT32


def judge(bars: Bars, loss: float, reference_loss: float, noise: dict[str, float], casts: list[dict]) -> dict[str, Any]:
    """Measurements against bars, as `parity` returns them. noise: path -> SQNR in dB."""
    ordered = sorted(noise.items(), key=lambda item: -math.inf if math.isnan(item[1]) else item[1])
    failures, error = [], abs(loss - reference_loss) / abs(reference_loss)
    if not error <= bars.loss:
        failures.append(f"the loss differs by {error:.2g} of the reference's, more than {bars.loss:g}")
    low = [path for path, value in ordered if not value >= bars.gradient]
    if low:
        failures.append(
            f"{len(low)} of {len(noise)} gradients have less than {bars.gradient:g} dB, the worst {low[0]} "
            f"with {noise[low[0]]:.1f}"
        )
    for kind, verb in (("saturated", "saturate"), ("flushed", "flush to zero")):
        high = sorted((c for c in casts if not c[kind] <= getattr(bars, kind)), key=lambda c: -c[kind])
        if high:
            allowed = getattr(bars, kind)
            failures.append(
                f"{len(high)} of {len(casts)} casts {verb} more than {allowed:.1%} of their values, "
                f"the worst {high[0]['tensor']} of {high[0]['path']} with {high[0][kind]:.1%}"
            )
    return {
        "passed": not failures,
        "failures": failures,
        "bars": asdict(bars),
        "loss": loss,
        "reference_loss": reference_loss,
        "gradients": [{"path": path, "sqnr": _plain(value)} for path, value in ordered],
        "casts": sorted(casts, key=lambda cast: (-cast["saturated"], -cast["flushed"])),
    }


def text(result: dict[str, Any], rows: int = 10) -> str:
    """A result of `parity` for a reader: the verdict, then the worst gradients and casts, so many of each."""
    bars, gradients, casts = result["bars"], result["gradients"], result["casts"]
    error = abs(result["loss"] - result["reference_loss"]) / abs(result["reference_loss"])
    start = result["checkpoint"] or "initial values: no --checkpoint was given"
    lines = [
        f"parity after {result['step']} steps ({start}): {'passed' if result['passed'] else 'FAILED'}",
        *(f"  {failure}" for failure in result["failures"]),
        f"loss {result['loss']:.6f}, reference {result['reference_loss']:.6f}: {error:.1e} apart, "
        f"{bars['loss']:g} allowed",
        f"SQNR of gradients in dB, {bars['gradient']:g} required; the worst of {len(gradients)}:",
        *(
            f"  {g['sqnr'] if isinstance(g['sqnr'], str) else format(g['sqnr'], '5.1f')}  {g['path']}"
            for g in gradients[:rows]
        ),
    ]
    if casts:
        lines += [
            "casts of weights (w), inputs (x) and output gradients (g): shares saturated",
            f"({bars['saturated']:.0%} allowed) and flushed to zero ({bars['flushed']:.0%}); "
            f"the worst of {len(casts)}:",
            *(f"  {c['saturated']:6.2%}  {c['flushed']:6.2%}  {c['tensor']} of {c['path']}" for c in casts[:rows]),
        ]
    return "\n".join(lines)


def _sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    return math.inf if torch.equal(reference, value.to(reference.dtype)) else float(sqnr(reference, value))


def _plain(noise: float) -> float | str:
    """An SQNR as JSON can hold it."""
    return noise if math.isfinite(noise) else "same" if noise > 0 else "not finite"


def gradients(run: Run, state: TrainState, batch: dict[str, torch.Tensor]) -> tuple[Tree, dict[str, Any]]:
    """The gradient of the mean token loss, laid out as the parameters, not clipped; and the step's metrics.

    It is what a step of this run computes, on its micro-batches and ranks; nothing is updated. Collective.
    """
    step = make_train_step(
        run.model.loss,
        _keeps_gradients(make_global_norm(run.mesh, run.plans)),
        mesh=run.mesh,
        plans=run.plans,
        micro_batches=run.micro_batches,
    )
    new, metrics = step(state._replace(opt_state=state.params), batch)
    return new.opt_state, metrics


def _keeps_gradients(norm: Callable) -> Optimizer:
    """An optimizer that changes no parameter: its state is the gradient it was given."""

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return tree.map(torch.zeros_like, params), grads

    def apply(grads: Tree, state: Tree, params: Tree, *, scale: torch.Tensor, **_: Any) -> tuple[Tree, Tree]:
        return params, tree.map(lambda grad: grad * scale, grads)

    return Optimizer(lambda params: params, update, norm=norm, apply=apply)


# --- the reference ---


def reference_gradients(run: Run, params: Tree, known: Tree) -> tuple[float, Tree, list[dict[str, Any]]]:
    """(loss, gradients, what the recipe's casts would lose) of whole `params` on the first global batch.

    known: the fp8 state of the weights, for scales that have a history. The micro-batches are the run's, so
    that the values which share a scale are the same.
    """
    params = tree.map(lambda p: p.float(), params)
    recipe = run.recipe
    watched = _Watched(run.execution.fp8, params, dict(_states(run.abstract, known)))
    execution = Execution(mesh=Mesh(device=run.device), loss_chunks=recipe.train.loss_chunks, watch=watched.linear)
    step = make_train_step(
        run.family.make_model(run.cfg, execution).loss,
        _keeps_gradients(make_global_norm(execution.mesh, None)),
        micro_batches=recipe.data.global_batch_size // recipe.train.micro_batch_size,
    )
    batch = {key: value.to(run.device) for key, value in run.data.train.batch(0).items()}
    new, metrics = step(TrainState(0, params, params), batch)
    watched.weights()
    return metrics["loss"].item(), new.opt_state, watched.shares()


def _states(abstract: Tree, known: Tree) -> list[tuple[str, Any]]:
    """(path, WeightState or None) of every parameter."""
    _, treedef = tree.flatten(abstract)
    states = [None] * treedef.num_leaves if known is None else treedef.flatten_up_to(known)
    return list(zip(tree.names(abstract), states, strict=True))


class _Watched:
    """What a recipe's casts would lose of the values that pass through a reference's products."""

    def __init__(self, use: fp8.Fp8, params: Tree, states: dict[str, Any]):
        self.use, self.params, self.states = use, dict(tree.named_leaves(params)), states
        # On one rank in float32 a gathered weight is the parameter itself: its storage tells which.
        self.paths = {leaf.untyped_storage()._cdata: path for path, leaf in self.params.items()}
        self.lost: dict[tuple[str, str], torch.Tensor] = {}  # (saturated, flushed, values), summed

    def linear(self, linear: Linear) -> Linear:
        """`linear` with every input and output gradient looked at."""

        def column(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._see(x, weights, linear.column(x, *weights))

        def row(x: torch.Tensor, weight: Any) -> torch.Tensor:
            return self._see(x, (weight,), (linear.row(x, weight),))[0]

        return linear._replace(column=column, row=row)

    def _see(
        self, x: torch.Tensor, weights: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        paths = [self.paths[weight.untyped_storage()._cdata] for weight in weights]
        in_fp8 = [path for path in paths if self.use.runs(path)]
        if in_fp8:
            self._cast(in_fp8[0], "x", x)  # one cast serves all
        for path, y in zip(paths, outputs, strict=True):
            if path in in_fp8 and y.requires_grad:
                y.register_hook(lambda g, path=path: self._cast(path, "g", g))
        return outputs

    def weights(self) -> None:
        """Look at the weights themselves."""
        for path, weight in self.params.items():
            if self.use.runs(path):
                self._cast(path, "w", weight)

    def _cast(self, path: str, tensor: str, value: torch.Tensor) -> None:
        state, scale = self.states[path], None
        if state is not None:
            history = {"x": state.x, "g": state.g}.get(tensor)
            scale = state.scale if tensor == "w" else history and history.scale
        uses = [(product, operand) for product, _, operand in operands(self.use.recipe, tensor)]
        for job in jobs(value.detach().flatten(0, -2), tensor, "", uses, scale):
            (codes,) = cast_all([job], None)
            each = codes.scale if job.tile is None else fp8.formats.spread(codes.scale, job.matrix.shape, job.tile)
            saturated, flushed = cast_loss(job.matrix, each, fp8.FORMATS[job.operand.format])
            lost = torch.stack([saturated, flushed, torch.ones_like(flushed)]) * job.matrix.numel()
            self.lost[path, tensor] = self.lost.get((path, tensor), 0) + lost.double()

    def shares(self) -> list[dict[str, Any]]:
        """Path, tensor and the two shares, of all that was looked at."""
        found = []
        for (path, tensor), lost in self.lost.items():
            saturated, flushed, values = lost.tolist()
            found.append({"path": path, "tensor": tensor, "saturated": saturated / values, "flushed": flushed / values})
        return found
