"""What is shown while it runs: a line that is redrawn on a terminal, on standard error; elsewhere nothing."""

import sys
import time

from rdmanet.cli.text import rate_text


class Progress:
    """The line of one measurement.

    :param what: the test and the size
    :param seconds: how long it takes; 0 if that is not known
    """

    REDRAW_S = 0.25

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._live = sys.stderr.isatty()
        self._drawn_s = 0.0

    def update(self, seconds: float, messages: int, bytes_per_s: float) -> None:
        now = time.monotonic()
        if not self._live or now - self._drawn_s < self.REDRAW_S:
            return
        self._drawn_s = now
        of = f" of {self._seconds:g}" if self._seconds else ""
        print(
            f"\r  {self._what}: {seconds:.1f}{of} s, {messages:,} messages, {rate_text(bytes_per_s)}\x1b[K",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
