"""Tables and progress on a terminal, or in a log that nobody redraws."""

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO


def table(rows: Iterable[Sequence[str]], *, indent: str = "  ") -> str:
    """Lay out rows, the first being the header, in columns; numbers stand to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for number, row in enumerate(cells):
        padded = [
            cell.rjust(width) if _numeric(cells, column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
        if number == 0:
            lines.append(indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _numeric(cells: list[list[str]], column: int) -> bool:
    return all(not row[column] or row[column][0] in "0123456789-" for row in cells[1:])


class Progress:
    """A bar that is redrawn on a terminal, and one line each quarter elsewhere."""

    REDRAW_S = 0.05
    WIDTH = 32

    def __init__(self, total_bytes: int, *, out: TextIO | None = None) -> None:
        self._total = total_bytes
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._begin = time.perf_counter()
        self._next_s = 0.0
        self._quarter = 0

    def update(self, done_bytes: int) -> None:
        """Say how far it is; cheap enough to be called for every chunk."""
        elapsed = time.perf_counter() - self._begin
        last = done_bytes >= self._total
        if self._live:
            if elapsed < self._next_s and not last:
                return
            self._next_s = elapsed + self.REDRAW_S
        else:
            quarter = 4 if last else 4 * done_bytes // self._total
            if quarter <= self._quarter:
                return
            self._quarter = quarter
        fraction = done_bytes / self._total if self._total else 1.0
        filled = int(self.WIDTH * fraction)
        line = (
            f"  [{'#' * filled}{'.' * (self.WIDTH - filled)}] {fraction:4.0%}  "
            f"{done_bytes / 2**20:.0f} MiB  {done_bytes / max(elapsed, 1e-9) / 1e9:.2f} GB/s"
        )
        self._out.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        if self._live and last:
            self._out.write("\n")
        self._out.flush()
