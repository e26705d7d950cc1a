"""Arguments, tables, numbers with units, and progress: on a terminal, or in a log, which cannot be redrawn."""

from __future__ import annotations

import argparse
import math
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")


def file_path(text: str) -> Path:
    """The argument FILE. Path("") would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the file name is empty")
    from pathlib import Path  # a tenth of the time that `rdmanet ss` takes to start

    return Path(text)


def argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """The type of an argument that is parsed so; the text of its ValueError is what the user is told."""

    def parsed(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return parsed


def seconds(what: str, least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of an argument that is a number of seconds from `least` to `most`. Another one is called `what`."""

    def parsed(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is {what}")
        return found

    return parsed


def chosen(command: str, devices: Sequence[Any], name: str | None) -> Sequence[Any] | None:
    """The devices that the argument DEVICE leaves; None if there is none of that name, which is told."""
    if name is None:
        return devices
    found = [device for device in devices if device.name == name]
    if not found:
        names = ", ".join(device.name for device in devices) or "none"
        print(f"{command}: no device is named {name}; devices: {names}", file=sys.stderr)
    return found or None


def gid_text(gid: bytes) -> str:
    """A GID as the kernel writes it, and show_gids: eight groups of four digits."""
    return gid.hex(":", 2)


def interface_name(index: int) -> str:
    """The name of a network interface; "" if there is none, as on InfiniBand, or if it has just gone."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return ""


def table(rows: Iterable[Sequence[str]], *, indent: str = "  ") -> str:
    """Lay out rows in columns; the first row is the header. Columns of numbers are aligned right."""
    cells = [[*map(str, row)] for row in rows]
    columns = [*zip(*cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    sides = [
        ">" if all(not cell or cell[0] in "0123456789-" for cell in column[1:]) else "<" for column in columns
    ]
    line = indent + "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [line.format(*row).rstrip() for row in cells]
    lines.insert(1, indent + "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """A size as people read it: 12 bytes, 3.4 KiB, 64.0 MiB."""
    if nbytes < 1 << 10:
        return f"{nbytes} bytes"
    if nbytes < 1 << 20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB"


def rate_text(bytes_per_s: float) -> str:
    """A throughput in the largest unit of which there is a tenth: 2.31 GB/s, 0.12 GB/s, 83.00 MB/s, 0.46 kB/s."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size / 10:
            return f"{bytes_per_s / size:.2f} {unit}"
    return f"{bytes_per_s / 1e3:.2f} kB/s"


class Progress:
    """A bar that is redrawn on a terminal; elsewhere a line for each quarter."""

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
        """Show how many bytes are done. Cheap enough to call for every chunk."""
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
            f"{size_text(done_bytes)}  {rate_text(done_bytes / max(elapsed, 1e-9))}"
        )
        self._out.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        if self._live and last:
            self._out.write("\n")
        self._out.flush()
