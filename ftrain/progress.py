"""The progress line: what a step's record says, in 80 columns, and where to print it."""

import shutil
import sys
from typing import Any, TextIO

COLUMNS = 80


def progress_line(record: dict[str, Any], steps: int, seconds_left: float | None) -> str:
    """A step's record (see throughput.py) as one line of at most 80 columns, if it can be."""
    rate = record["tokens_per_second"]
    parts = [
        f"{record['step']:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.3f}",
        f"lr {record['lr']:.1e}",
        f"grad {record['grad_norm']:.3g}",
        f"{quantity(rate)} tok/s",
    ]
    if "mfu" in record:
        parts.append(f"mfu {record['mfu']:.0%}")
    parts.append(f"{record['memory_bytes'] / 2**30:.3g} GiB")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    line = "  ".join(parts)
    return line if len(line) <= COLUMNS else " ".join(parts)


def quantity(number: float) -> str:
    """Three digits and a letter: 950, 12.3k, 4.56M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes: 0:07, 12:30, 3h05."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


class Progress:
    """Prints lines that stay and one that is updated in place; without a terminal about twenty of these."""

    def __init__(self, steps: int, *, quiet: bool = False, stream: TextIO | None = None):
        self.steps, self.quiet, self.stream = steps, quiet, stream or sys.stdout
        self.live = self.stream.isatty()
        self.every = 1 if self.live else max(1, steps // 20)
        self.drawn = 0  # columns of the line that is being updated

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(text, end="\n")

    def update(self, record: dict[str, Any], seconds_left: float | None) -> None:
        """The progress of a step."""
        step = record["step"]
        if self.live:
            columns = shutil.get_terminal_size().columns - 1
            self._write(progress_line(record, self.steps, seconds_left)[:columns], end="")
        elif step == 1 or step % self.every == 0 or step == self.steps:
            self.say(progress_line(record, self.steps, seconds_left))

    def close(self) -> None:
        """Leave the last progress line where it is, and the cursor below it."""
        if self.drawn:
            print(file=self.stream, flush=True)
            self.drawn = 0

    def _write(self, text: str, end: str) -> None:
        if self.quiet:
            return
        erase = "\r" + " " * self.drawn + "\r" if self.drawn else ""
        self.drawn = 0 if end else len(text)
        print(erase + text, end=end, file=self.stream, flush=True)
