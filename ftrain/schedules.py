"""Learning rates over a run, as functions of the update's number."""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # the number of an update, the first being 1 -> its learning rate


def schedule(
    decay: str,
    lr: float,
    *,
    steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_lr_ratio: float = 0.0,
) -> Schedule:
    """The learning rate over a run: a linear warm-up, a plateau at `lr`, and a decay that ends with the run.

    decay: "cosine", "linear", "wsd" (a plateau, then linear: arXiv:2404.06395) or "none".
    decay_steps: the decay's length. Default: all steps after the warm-up, or for wsd a fifth of `steps`.
        It never starts before the warm-up has ended.
    The result takes the number of an update, from 1. It is `lr` exactly at step max(1, warmup_steps), never
    above it, never below lr * min_lr_ratio (also in the warm-up), and keeps its last value after `steps`.
    Raises ValueError for a warm-up longer than the run and for other numbers that cannot be.
    """
    shapes = {"cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "linear": lambda x: 1 - x}
    shapes |= {"wsd": shapes["linear"], "none": lambda x: 1.0}
    if decay not in shapes:
        raise ValueError(f'no schedule is called "{decay}"; there are {", ".join(shapes)}')
    if steps < 1 or not 0 <= warmup_steps <= steps:
        raise ValueError(f"a warm-up of {warmup_steps} steps in a run of {steps}: expected at least 0, at most all")
    if not 0 <= min_lr_ratio <= 1 or (decay_steps is not None and decay_steps < 0):
        raise ValueError(f"min_lr_ratio={min_lr_ratio}, decay_steps={decay_steps}: expected a fraction and a length")
    default = steps // 5 if decay == "wsd" else steps
    length = min(default if decay_steps is None else decay_steps, steps - max(1, warmup_steps))
    floor = lr * min_lr_ratio

    def at(step: int) -> float:
        if step < warmup_steps:
            value = lr * max(1, step) / warmup_steps
        elif step <= steps - length or length == 0:
            value = lr
        else:
            value = floor + (lr - floor) * shapes[decay](min(1.0, (step - (steps - length)) / length))
        return min(lr, max(floor, value))

    return at
