"""Whether a result can be lent where it is, or has to be copied first.

Theory
------
Who gets a result by reference reads it after the method has returned. The service may change the memory meanwhile
(``return self.weights``), and does not know when it is read. So the peer reads a copy, of one moment, as it does over
the other transports. No copy is needed

    of a Buffer             who returns one, or its `array`, does not change the memory while a call has it
    of bytes                nobody can change them
    of memory for which nobody else has a reference: an array that the method has made, or has got

Whoever can reach the memory of an array refers to the array, or to what the array has its memory from: other arrays,
memoryviews, and what comes of DLPack and ``__array_interface__`` do. CPython counts the references of each object. So
the memory is the result's alone if each of these objects has one reference, from the next, and no weak ones (and the
memory of a message another one, of those who use it again: framing.pyx). Where
more are counted, by whatever mistake, there is a copy. A memoryview that is a result is not judged so: several of them
may stand behind one reference to the memory.

The copy of one moment holds up the loop. So what is longer than MOMENT_BYTES is copied in pieces of that length, and
others have their turn between two of them: each piece is of one moment then, and with it each array that is no longer.
A service that changes a longer result in place while others call it returns memory of its own, which is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from sys import getrefcount
from typing import Any, Final
from weakref import getweakrefcount

from rdmanet._core import ReusableMemory
from rdmanet.rpc.framing import is_kept

MOMENT_BYTES: Final = 16 << 20
"""Copied in some 2 ms, if nobody else uses the memory."""
_ONE: Final = 2
"""What getrefcount() says of an object with one reference. Its argument is the other one."""


async def alone(result: Awaitable[Any]) -> list[Any]:
    """A result, in a list that is all that refers to it.

    What a compiled coroutine awaits, that refers to until it waits again.
    """
    return [await result]


def is_settled(held: list[Any], index: int = 0) -> bool:
    """Whether nobody will change the memory of a result, or of an array in one.

    :param held: has it at this index, and is to be all that refers to it
    """
    if type(held[index]) is memoryview:
        return _is_constant(held[index])
    if type(held[index]) is bytearray:
        return getrefcount(held[index]) == _ONE
    numpy = sys.modules.get("numpy")
    if numpy is None or type(held[index]) is not numpy.ndarray:
        return type(held[index]) is bytes
    is_alone = getrefcount(held[index]) == _ONE and not getweakrefcount(held[index])
    array = held[index]
    while type(array.base) is numpy.ndarray:
        is_alone = is_alone and getrefcount(array.base) == _ONE and not getweakrefcount(array.base)
        array = array.base
    if array.base is None:
        return is_alone and bool(array.flags.owndata)
    if type(array.base) in (bytearray, ReusableMemory):
        return is_alone and getrefcount(array.base) == _ONE + is_kept(array.base)
    return type(array.base) is bytes or (type(array.base) is memoryview and _is_constant(array.base))


def _is_constant(view: memoryview) -> bool:
    """Whether nobody can change these bytes: those of `bytes`, and what somebody has got as a memoryview."""
    if type(view.obj) is bytes:
        return True
    return view.readonly and type(view.obj) is ReusableMemory and getrefcount(view.obj) == _ONE
