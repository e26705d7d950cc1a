"""Bytes whose place in the stream shows in their value.

A stream that loses, doubles or swaps a piece must fail the comparison wherever the piece begins.
So the pattern repeats with a prime period, longer than any slot of a receive ring, and a check
costs one memcmp: neither test nor peer has to keep what it sent.
"""

import random

PERIOD = (1 << 20) + 7
REPEATED = random.Random(7).randbytes(PERIOD) * 2


class Pattern:
    """One reading position in the endless pattern; sender and receiver have one each."""

    def __init__(self, seed: int = 0) -> None:
        self.start = seed
        self.position = 0

    def take(self, length: int) -> bytes:
        """The next `length` bytes (at most PERIOD of them)."""
        assert length <= PERIOD
        begin = (self.start + self.position) % PERIOD
        self.position += length
        return REPEATED[begin : begin + length]

    def check(self, data: bytes | bytearray | memoryview) -> None:
        """Raise AssertionError unless `data` is what comes next."""
        view = memoryview(data)
        while view:
            piece = view[:PERIOD]
            at = self.position
            if piece != self.take(len(piece)):
                raise AssertionError(f"the stream differs from what was sent after byte {at} (+{len(piece)})")
            view = view[PERIOD:]
