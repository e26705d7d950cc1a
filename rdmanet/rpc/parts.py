"""The memory of a message's arrays on loan in parts: long arrays where they lie, and the others gathered.

Theory
------
To gather arrays takes as long as to send them, or longer: memory for all of them has to be there, and they are copied
into it. So a long array, which nobody changes while it is lent, is a loan of its own, where it lies. The others are
gathered, in one loan. The message says which part of its memory is which (messages.Parts); where an array begins in the
memory is the same as if all were gathered (packing.py).

    memory      | a, long           | b | c | d, long           | e |
    loans       | a |   | d |   | b | c | e |

A loan costs some 50 us of CPU, so an array of PART_LEAST and more has one, if the connection has so many left; the
longest have them first.

The receiver checks that the parts are in order. They follow each other in their offers. So they are no more than the
length that the message says, which was counted, and no array gets the memory of another.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rdmanet.rpc.messages import Lent, Part, Parts

PART_LEAST: Final = 2 << 20
ALIGN: Final = 16
"""No item of NumPy wants more."""


# ---- The sender ------------------------------------------------------------------------------------------------


class Layout:
    """Which arrays are lent where they lie, and where the others are gathered.

    :param placed: each array's place in the memory of the message, and its length
    :param nbytes: of that memory
    :param apart: the numbers of those that are lent where they lie
    :ivar apart: these, in order
    :ivar gathered: the numbers of the others, and where each begins in the memory into which they are gathered
    :ivar gathered_bytes: how long that is
    """

    def __init__(self, placed: Sequence[tuple[int, int]], nbytes: int, apart: set[int]) -> None:
        self.gathered: list[tuple[int, int]] = []
        self.gathered_bytes = 0
        self.apart = sorted(apart)
        self._parts: list[tuple[int, int, int]] = []  # place, length, and which loan
        loans = 0
        begin = None  # of the part that is gathered
        for number, (place, length) in enumerate(placed):
            if number in apart:
                begin = None
                loans += 1
                self._parts.append((place, length, loans))
                continue
            end = min(-(-(place + length) // ALIGN) * ALIGN, nbytes)
            if begin is None:
                begin = place
                self._parts.append((place, 0, 0))
            at = self.gathered_bytes + place - begin - self._parts[-1][1]
            self.gathered.append((number, at))
            self.gathered_bytes += end - begin - self._parts[-1][1]
            self._parts[-1] = begin, end - begin, 0

    def said(self, offers: Sequence[int], nbytes: int) -> Parts:
        """What the message says.

        :param offers: that of what is gathered first, if there is anything; then those of the arrays
        """
        first = 0 if self.gathered else 1
        return Parts(
            0, nbytes, [Part(place, length, offers[loan - first]) for place, length, loan in self._parts]
        )


# ---- The receiver ----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Bytes that follow each other, in the memory of a message and in an offer."""

    place: int
    end: int
    number: int
    """Of the offer, in `Places.offers`."""
    offset: int
    """Where they begin there."""


class Places:
    """Where the memory of a message is.

    :param memory: what the message has
    :ivar offers: the numbers of the offers, if it is on loan
    :ivar lengths: how much of each offer it is
    :raises ValueError: the message says what cannot be
    """

    def __init__(self, memory: memoryview | Lent) -> None:
        self.offers: list[int] = []
        self.lengths: list[int] = []
        self._runs: list[Run] = []
        if isinstance(memory, memoryview):
            self._runs.append(Run(0, memory.nbytes, 0, 0))
            return
        numbers: dict[int, int] = {}
        end = 0
        for part in getattr(memory, "parts", None) or [Part(0, memory.length, memory.offer)]:
            if part.place < end:
                raise ValueError(
                    f"a part of the memory begins at {part.place}, and the one before it ends at {end}"
                )
            if (end := part.place + part.length) > memory.length:
                raise ValueError(
                    f"a part ends at {end}, and the memory of the message has {memory.length} bytes"
                )
            number = numbers.setdefault(part.offer, len(numbers))
            if number == len(self.offers):
                self.offers.append(part.offer)
                self.lengths.append(0)
            self._runs.append(Run(part.place, end, number, self.lengths[number]))
            self.lengths[number] += part.length

    def check(self, place: int, nbytes: int) -> None:
        """Raise ValueError if so many bytes there are not all in one part."""
        run = self._runs[self._at(place)]
        if not run.place <= place <= run.end - nbytes:
            raise ValueError(f"an array of {nbytes} bytes at {place} is not in one part of the memory")

    def runs(self, place: int, end: int) -> Iterator[Run]:
        """The parts of what is there."""
        for index in range(self._at(place), len(self._runs)):
            run = self._runs[index]
            if run.place >= end:
                break
            begin = max(place, run.place)
            yield Run(begin, min(end, run.end), run.number, run.offset + begin - run.place)

    def _at(self, place: int) -> int:
        """Which part begins there, or is the last to begin before."""
        return max(0, bisect.bisect_right(self._runs, place, key=operator.attrgetter("place")) - 1)
