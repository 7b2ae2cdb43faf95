"""The collectives of one step, by what they are for."""

from collections import Counter
from dataclasses import dataclass

from ftrain.models import families
from ftrain.report.planned import WORLD
from ftrain.report.rehearsal import Rehearsal, Site
from ftrain.sharding import AXES, MeshShape

# What a collective is for, by the first of these functions that was running when it was called.
_PURPOSES = (
    ("fsdp.Gather._scales", "scales of weights"),
    ("fsdp.Gather.scatter", "gradients"),
    ("fsdp.InFlight", "gradients, over replicas"),
    ("fsdp.Gather.start", "weights"),
    ("post.", "scales of weights"),
    ("step.sum_over_tensor", "gradients of what tensor peers share"),
    ("step.make_global_norm", "gradient norm"),
    ("step._over_ranks", "loss and token count"),
    ("nn.cross_entropy", "loss over the vocabulary"),
    ("casts.", "scales of activations"),
)
ACTIVATIONS = "activations"
_BACKWARD = ("fold._Run.backward", "transforms.Pullback", "fsdp.Gather.scatter", "fsdp.InFlight")
_FORWARD = ("fold.", *(f"{name}." for name in families()))


@dataclass(frozen=True)
class Line:
    """Collectives of one kind in one step of one rank.

    phase: "forward", "backward", "update". count: calls. sent: bytes that this rank puts in. moved: bytes that it
    sends over its links in a ring, which no algorithm beats: (n-1) x its piece for an all-gather, (n-1)/n x the whole
    for a reduce-scatter, twice that for an all-reduce.
    """

    purpose: str
    phase: str
    op: str
    axis: str
    count: int
    sent: int
    moved: int
    dtypes: tuple[str, ...]


def traffic(rehearsal: Rehearsal, mesh: MeshShape) -> list[Line]:
    """The lines of a rehearsed step: those over `shard` first, each in the order forward, backward, update."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str, str]] = Counter()
    dtypes: dict[tuple[str, str, str, str], set[str]] = {}
    for site, count in rehearsal.counts.items():
        key = (purpose_of(site), phase_of(site), site.op, site.axis)
        counts[key] += count
        sent[key] += rehearsal.sent[site]
        dtypes.setdefault(key, set()).add(str(site.dtype).removeprefix("torch."))
    lines = []
    for key, count in counts.items():
        n = mesh.size if key[3] == WORLD else getattr(mesh, key[3])
        purpose, phase, op, axis = key
        bytes_moved = moved(op, sent[key], n)
        lines.append(Line(purpose, phase, op, axis, count, sent[key], bytes_moved, tuple(sorted(dtypes[key]))))
    axes, phases = (*reversed(AXES), WORLD), ("forward", "backward", "update")
    return sorted(lines, key=lambda line: (axes.index(line.axis), phases.index(line.phase), line.purpose, line.op))


def moved(op: str, sent: int, n: int) -> int:
    """Bytes that a rank sends in a ring of n, when it puts in `sent`."""
    shares = {"all_gather": n * (n - 1), "reduce_scatter": n - 1, "all_reduce": 2 * (n - 1)}
    return sent * shares[op] // n


def purpose_of(site: Site) -> str:
    """What a collective is for, in a few words."""
    return next((what for start, what in _PURPOSES if _runs(site, start)), ACTIVATIONS)


def phase_of(site: Site) -> str:
    """When in the step a collective is called. The head's gradients are made in its forward: fold.sum_over_chunks."""
    if any(_runs(site, start) for start in _BACKWARD):
        return "backward"
    return "forward" if any(_runs(site, start) for start in _FORWARD) else "update"


def _runs(site: Site, start: str) -> bool:
    return any(maker.startswith(start) for maker in site.makers)
