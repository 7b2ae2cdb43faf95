"""What fp8 knows of a weight: before its layer is gathered, and where a linear layer meets it."""

from typing import NamedTuple

from torch import Tensor

from .formats import Scaled
from .linear import History


class WeightState(NamedTuple):
    """What is known of one weight before the step runs; every part may be absent.

    scale: float32 (), of the whole weight, made by the post transform from parameters that are final.
    codes: this rank's shard, already cast with that scale.
    x, g: the histories of the layer's input and output gradient (delayed scaling).
    """

    scale: Tensor | None = None
    codes: Tensor | None = None
    x: History | None = None
    g: History | None = None


class Fp8Weight(NamedTuple):
    """A gathered weight that fp8 multiplies: codes (`Scaled`), or a tensor that the linear layer casts."""

    weight: Scaled | Tensor
    x: History | None = None
    g: History | None = None

    @property
    def gradient(self) -> Tensor:
        """In a tree of gradients: the weight's own."""
        return self.weight.port if isinstance(self.weight, Scaled) else self.weight

    @property
    def observed(self) -> tuple[Tensor | None, Tensor | None]:
        """In a tree of gradients: the amaxes of x and of g that came out of the histories' ports."""
        return None if self.x is None else self.x.port, None if self.g is None else self.g.port


def state_gradients(state: WeightState | None, observed: tuple | None) -> list[Tensor | None]:
    """What the leaves of a WeightState get in a backward: their observed amax for the ports, None for the rest."""
    if state is None:
        return []
    known: list[Tensor | None] = [None for part in (state.scale, state.codes) if part is not None]
    for history, amax in zip((state.x, state.g), observed or (None, None), strict=True):
        if history is not None:
            known += [None] * (history.scale is not None) + [amax]
    return known
