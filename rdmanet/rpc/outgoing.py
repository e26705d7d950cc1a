"""What the program hands over, on its way to the peer: which bytes they are, and who may change them meanwhile.

Theory
------
The bytes of a message's buffers and arrays stay where they are until they are lent, or sent. Some have to be copied
before (`settle`): what is not contiguous, short arrays of which several are one memory (parts.py), and results that the
service may change (snapshot.py). A copy is made in pieces, between which the loop goes on.

Long memory in a message is not copied into it, but written from where it is (messages.Apart), and that may take longer
than the call. So it has to be settled for good: of an argument, which is the caller's again when its call ends, and of
an rpc.Buffer there is a copy, too.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any, Self

from rdmanet._core import unfilled
from rdmanet.rpc import snapshot
from rdmanet.rpc.array_types import ArrayType
from rdmanet.rpc.buffer import Buffer, buffer_of, bytes_of, check_plain
from rdmanet.rpc.copies import Steps, done, of_array, of_bytes
from rdmanet.rpc.gathering import gather
from rdmanet.rpc.item_types import item_type
from rdmanet.rpc.messages import Array, Lent
from rdmanet.rpc.packing import Packing
from rdmanet.rpc.paging import LEAST_BYTES
from rdmanet.rpc.parts import Layout
from rdmanet.stream.registered import RegisteredMemory


class Outgoing:
    """A buffer or an array.

    :ivar nbytes: how long it is
    :ivar memory: its bytes; None: it is a long array that is not contiguous, and is to be settled
    :ivar buffer: the program's Buffer, which keeps the memory registered; None if there is none
    :ivar is_settled: nobody changes the memory while it is lent (snapshot.py)
    :ivar is_constant: nor after that
    :ivar is_bytes: it is in `bytes`, and is not kept registered
    :ivar returned: the peer has said that it reads nothing of it any more
    :raises TypeError: it is not what the annotation says; the text begins with `what`
    :raises BufferError: it is not contiguous, and no array
    """

    __slots__ = ("buffer", "is_bytes", "is_constant", "is_settled", "memory", "nbytes", "returned", "_array")

    memory: memoryview | None
    buffer: Buffer | None

    def __init__(self, type_: Any, value: Any, what: str) -> None:
        self._array: Any = None
        self.is_settled = True  # the caller of a method knows when the memory is its own again
        self.returned = False
        if isinstance(type_, ArrayType):
            self._array = array = type_.checked(value, what)
            self.nbytes = array.nbytes
            self.buffer = self.memory = None
            if array.flags.c_contiguous:
                self.memory, self.buffer = bytes_of(array), buffer_of(array)
            elif array.nbytes < LEAST_BYTES:
                self.memory = memoryview(unfilled(array.nbytes))
                done(of_array(self.memory, array))
        else:
            self.memory = memory_of(value, what)
            self.nbytes = self.memory.nbytes
            self.buffer = value if isinstance(value, Buffer) else None
        self.is_constant = self.memory is not None and type(self.memory.obj) is bytes
        self.is_bytes = self.is_constant and self.buffer is None

    @classmethod
    def of_result(cls, type_: Any, held: list[Any], what: str) -> Self:
        """The same for what a method has returned.

        :param held: the result, to which nothing else refers; it is taken out
        """
        settled = snapshot.is_settled(held)
        going = cls(type_, held.pop(), what)
        array = going._array
        is_copy = array is not None and not array.flags.c_contiguous and going.memory is not None
        going.is_constant = going.buffer is None and (settled or is_copy)
        going.is_settled = going.is_constant or going.buffer is not None
        return going

    async def settle(self, loop: asyncio.AbstractEventLoop, for_good: bool = False) -> None:
        """From now on nobody changes the memory while it is lent, or `for_good`: if somebody might, copy it."""
        if self.memory is None or not (self.is_constant if for_good else self.is_settled):
            self.memory = await gather(loop, self.nbytes, self._copies, not self.is_settled)
            self.is_settled = self.is_constant = True

    def lend_apart(self, most: int) -> int:
        """How many loans more than one it takes."""
        return 0

    def memories(self) -> list[Any]:
        """What is to be lent."""
        return [self.memory if self.buffer is None else self.buffer.registered(RegisteredMemory)]

    def loan(self, offers: list[int]) -> Lent:
        """What the message says of it, when it is on offer."""
        return Lent(offers[0], self.nbytes)

    def _copies(self, memory: memoryview, piece_bytes: int) -> Steps:
        if self._array is not None:
            return of_array(memory, self._array, piece_bytes)
        assert self.memory is not None
        return of_bytes(memory, self.memory, piece_bytes)

    def item(self, data: Any) -> Any:
        """What is in the message, with these bytes or the loan of them."""
        array = self._array
        return data if array is None else Array(item_type(array.dtype), list(array.shape), data)


class Gathered:
    """The memory of all arrays in a message; used as an `Outgoing`.

    :param is_result: of a method, which may change them later. Else they are the caller's, who does not
    """

    __slots__ = (
        "buffer",
        "is_constant",
        "memory",
        "nbytes",
        "returned",
        "_is_result",
        "_layout",
        "_lying",
        "_packing",
    )

    memory: memoryview | None

    def __init__(self, packing: Packing, is_result: bool) -> None:
        self.buffer = None
        self.returned = False
        self.is_constant = is_result and packing.is_settled()
        self._is_result = is_result
        self._packing: Packing | None = packing
        self.nbytes = packing.nbytes
        self.memory = None  # until it is settled
        self._layout: Layout | None = None
        self._lying: list[Any] = []  # what is lent where it lies

    def lend_apart(self, most: int) -> int:
        """Have long arrays lent where they lie, at most so many. Returns how many loans more than one that takes."""
        packing = self._packing
        assert packing is not None
        if packing.whole is None or not (self.is_constant or not self._is_result):
            self._layout = packing.apart(most, self._is_result)
        if self._layout is None:
            return 0
        for number in self._layout.apart:
            buffer = packing.buffer_of(number)
            lies = packing.bytes_of(number) if buffer is None else buffer.registered(RegisteredMemory)
            self._lying.append(lies)
        return len(self._lying) - (0 if self._layout.gathered else 1)

    def memories(self) -> list[Any]:
        """What is to be lent."""
        return self._lying if self.memory is None else [self.memory, *self._lying]

    def loan(self, offers: list[int]) -> Lent:
        """What the message says of it, when it is on offer."""
        return (
            Lent(offers[0], self.nbytes) if self._layout is None else self._layout.said(offers, self.nbytes)
        )

    async def settle(self, loop: asyncio.AbstractEventLoop, for_good: bool = False) -> None:
        """Gather it. From now on nobody changes it."""
        packing, self._packing = self._packing, None
        if packing is None:
            return
        if (layout := self._layout) is not None:
            if layout.gathered:
                copies = functools.partial(packing.copies, layout=layout)
                self.memory = await gather(loop, layout.gathered_bytes, copies, self._may_change)
            return
        if self.is_constant or not (self._is_result or for_good):
            self.memory = packing.whole
        if self.memory is None:
            self.memory = await gather(loop, self.nbytes, packing.copies, self._may_change)
            self.is_constant = True

    @property
    def _may_change(self) -> bool:
        """Whether the service may, while it is gathered."""
        return self._is_result and not self.is_constant

    def item(self, data: Any) -> Any:
        """What is in the message for it."""
        return data


def memory_of(value: Any, what: str) -> memoryview:
    """The bytes of a buffer that the program hands over.

    :raises TypeError: it is no buffer; the text says where
    :raises BufferError: it is not contiguous
    """
    if isinstance(value, Buffer):
        if value.memory is None:
            raise TypeError(f"{what}: {value!r} is not of this process's memory: read it first")
        return value.memory
    check_plain(value, what)
    try:
        return Buffer(value).memory or memoryview(b"")
    except TypeError:
        raise TypeError(f"{what}: {type(value).__name__!r} is no buffer") from None
