"""Where a run speaks to a person: lines that stay, and one line of progress, of training or of tokenising.

On a terminal the line is updated in place; elsewhere, in a log, a line is left now and then. Quiet says nothing.
"""

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

COLUMNS = 80
REDRAW_SECONDS = 0.1  # of a line of tokenising, which may change more often than an eye can follow
PATIENCE_SECONDS = 5.0  # tokenising of less is not worth a line in a log


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


def tokenising_line(done: int, total: int, seconds: float) -> str:
    """Tokenising that has done so many bytes of text in so many seconds, as a line of at most 80 columns."""
    parts = [f"tokenising  {done / max(total, 1):>4.0%} of {size(total)}", f"{size(done / max(seconds, 1e-3))}/s"]
    if done:
        parts.append(f"{duration(seconds * (total - done) / done)} left")
    return "  ".join(parts)


def size(nbytes: float) -> str:
    """Bytes as people write the size of a file: 950 B, 12.3 MB, 4.56 GB."""
    for unit, letter in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {letter}"
    return f"{nbytes:.0f} B"


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
    """Prints lines that stay and one that is updated in place; without a terminal about twenty of these.

    steps: of the whole run. clock: seconds since anything.
    """

    def __init__(
        self,
        steps: int,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps, self.quiet, self.stream, self.clock = steps, quiet, stream or sys.stdout, clock
        self.live = self.stream.isatty()
        self.every = 1 if self.live else max(1, steps // 20)
        self.drawn = 0  # columns of the line that is being updated
        self.begun = clock()
        self.told = self.begun, 0.0  # when tokenising was last told of, and the share that was done

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(text, end="\n")

    def update(self, record: dict[str, Any], seconds_left: float | None) -> None:
        """The progress of a step."""
        step = record["step"]
        if self.live:
            self._draw(progress_line(record, self.steps, seconds_left))
        elif step == 1 or step % self.every == 0 or step == self.steps:
            self.say(progress_line(record, self.steps, seconds_left))

    def tokenising(self, done: int, total: int) -> None:
        """The progress of tokenising: bytes of text done, and all there are. What data.open_data calls `progress`."""
        now, share = self.clock(), done / max(total, 1)
        seconds, (last, told) = now - self.begun, self.told
        if done >= total:
            if seconds >= PATIENCE_SECONDS:
                self.say(f"tokenised {size(total)} in {duration(seconds)}")
            elif self.live:
                self._draw("")
        elif self.live and now - last >= REDRAW_SECONDS:
            self.told = now, share
            self._draw(tokenising_line(done, total, seconds))
        elif not self.live and seconds >= PATIENCE_SECONDS and share - told >= 0.1:
            self.told = now, share
            self.say(tokenising_line(done, total, seconds))

    def close(self) -> None:
        """Leave the last progress line where it is, and the cursor below it."""
        if self.drawn:
            print(file=self.stream, flush=True)
            self.drawn = 0

    def _draw(self, line: str) -> None:
        columns = shutil.get_terminal_size().columns - 1
        self._write(line[:columns], end="")

    def _write(self, text: str, end: str) -> None:
        if self.quiet:
            return
        erase = "\r" + " " * self.drawn + "\r" if self.drawn else ""
        self.drawn = 0 if end else len(text)
        print(erase + text, end=end, file=self.stream, flush=True)
