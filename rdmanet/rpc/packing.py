"""Arrays inside of lists, structs, dictionaries and so on: how they go in a message, and how they come out of one.

Theory
------
All arrays inside of a message's arguments, of its result or of its item have their bytes in one place, the memory of
the message, one behind the other. The value itself has for each the type of its items, its shape, and where its bytes
begin (messages.Placed). The memory is in the message, or on loan: long arrays where they lie, and the others gathered,
in one loan (parts.py). So a dictionary of two hundred arrays costs little more than one array of that size.

    the sender      `Packing` encodes the value; msgspec calls it for each array, which gets the next place. Then the
                    bytes are gathered: straight from the arrays, also from those that are not contiguous. What is lent
                    where it lies is not copied
    the receiver    `Unpacking` decodes the value. msgspec calls it for each array, which is checked, and gets memory of
                    its own. Then the bytes are copied, or read by RDMA, into that memory

Before memory is taken for an array, it is checked as any other (array_types.py), and that its bytes are within the
memory of the message, behind those of the array before it. That memory was counted before. So the arrays take no more
than was sent.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from rdmanet._core import REUSED_BYTES, unfilled
from rdmanet.errors import shown
from rdmanet.rpc.array_types import ArrayType, declared, taken
from rdmanet.rpc.buffer import Buffer, buffer_of, bytes_of
from rdmanet.rpc.copies import PIECE_BYTES, Steps, done, of_array, of_bytes
from rdmanet.rpc.item_types import check_texts, has_texts, text_checks
from rdmanet.rpc.messages import Lent, Placed
from rdmanet.rpc.parts import ALIGN, PART_LEAST, Layout, Places
from rdmanet.rpc.snapshot import is_settled

_SHARING_BYTES: Final = 128 << 10
"""Arrays of so many bytes share memory with others, which is read in one go and reused: new memory takes longer than to
copy into it. Shorter ones are copied out of it."""
_KEPT_MOST: Final = 16
"""Who keeps such an array keeps at most so many times its bytes."""


class Packed:
    """A value in msgpack, and the memory of the arrays in it.

    :ivar nbytes: how many bytes of a message they are
    """

    __slots__ = ("_places", "memory", "nbytes", "raw")

    def __init__(self, raw: Any, memory: memoryview | Lent) -> None:
        self.raw = (
            bytes(raw) if isinstance(memory, Lent) else raw
        )  # it waits, and would keep all that came with it
        self.memory = memory
        self.nbytes = len(raw) + (memory.nbytes if isinstance(memory, memoryview) else 0)
        self._places: Places | None = None

    def __len__(self) -> int:
        return self.nbytes

    @property
    def memory_bytes(self) -> int:
        """How long the memory is, wherever it is."""
        return self.memory.nbytes if isinstance(self.memory, memoryview) else self.memory.length

    @property
    def places(self) -> Places:
        """Where it is.

        :raises ValueError: it has come in parts that cannot be
        """
        if self._places is None:
            self._places = Places(self.memory)
        return self._places


# ---- The sender ------------------------------------------------------------------------------------------------


class Packing:
    """A value on its way into a message.

    :param what: begins the text of errors
    :ivar raw: the value in msgpack
    :ivar nbytes: how much memory its arrays take
    :raises TypeError: there is something in it that cannot be sent
    """

    def __init__(self, value: Any, what: str) -> None:
        self.nbytes = 0
        self._what = what
        self._arrays: list[Any] = []
        self._offsets: list[int] = []  # of these in the memory
        self.raw = msgspec.Raw(msgspec.msgpack.Encoder(enc_hook=self._place).encode(value))

    def _place(self, value: Any) -> Placed:
        if isinstance(value, sys.modules["numpy"].generic):
            text = f"{shown(value)} is a number of NumPy's: pass its item(), or numpy.asarray() of it"
            raise TypeError(f"{self._what}: {text}")
        array, items = taken(value, self._what)
        offset = self.nbytes
        if array.nbytes:
            offset = -(-offset // ALIGN) * ALIGN
            self._arrays.append(array)
            self._offsets.append(offset)
            self.nbytes = offset + array.nbytes
        return Placed(items, list(array.shape), offset)

    def is_settled(self) -> bool:
        """Whether nobody can change the arrays, when the value is gone (snapshot.py)."""
        return all(is_settled(self._arrays, index) for index in range(len(self._arrays)))

    @property
    def whole(self) -> memoryview | None:
        """The memory, if it need not be gathered: if it is that of one array."""
        if len(self._arrays) != 1 or not self._arrays[0].flags.c_contiguous:
            return None
        return bytes_of(self._arrays[0])

    def gathered(self) -> memoryview:
        """The bytes of all arrays, gathered now unless they are `whole`."""
        if (memory := self.whole) is None:
            memory = memoryview(unfilled(self.nbytes))
            done(self.copies(memory))
        return memory

    def copies(
        self, memory: memoryview, piece_bytes: int = PIECE_BYTES, layout: Layout | None = None
    ) -> Steps:
        """What gathers the bytes into this memory, in pieces: all of them, or those that a layout has gathered."""
        copies: Steps = []
        end = 0
        for number, offset in enumerate(self._offsets) if layout is None else layout.gathered:
            array = self._arrays[number]
            memory[end:offset] = bytes(offset - end)  # it may have had what the peer is not to know
            end = offset + array.nbytes
            copies += of_array(memory[offset:end], array, piece_bytes)
        memory[end:] = bytes(memory.nbytes - end)
        return copies

    def apart(self, most: int, is_result: bool) -> Layout | None:
        """How it is lent in parts, of which at most so many are arrays; None if that would be no better.

        :param is_result: the service may change the arrays, but for those that are settled
        """
        if most <= 0 or self.nbytes < PART_LEAST:
            return None
        lengths = [array.nbytes if array.flags.c_contiguous else 0 for array in self._arrays]
        longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:most]
        apart = {number for number in longest if lengths[number] >= PART_LEAST}
        if is_result:
            apart = {number for number in apart if self._is_lendable(number)}
        if not apart:
            return None
        nbytes = [array.nbytes for array in self._arrays]
        return Layout(list(zip(self._offsets, nbytes, strict=True)), self.nbytes, apart)

    def _is_lendable(self, number: int) -> bool:
        return is_settled(self._arrays, number) or self.buffer_of(number) is not None

    def buffer_of(self, number: int) -> Buffer | None:
        """The Buffer whose memory this array is."""
        return buffer_of(self._arrays[number])

    def bytes_of(self, number: int) -> memoryview:
        """The bytes of an array, which is contiguous."""
        return bytes_of(self._arrays[number])


# ---- The receiver ----------------------------------------------------------------------------------------------


class Block:
    """A part of the message's memory, which is taken at a time: that of one array, or of several.

    :param start: where it begins
    :param nbytes: how long it may be
    :ivar used: how much of that it is
    :ivar copied_bytes: of the arrays that have memory of their own; the others lie in its memory
    """

    __slots__ = ("copied_bytes", "nbytes", "start", "used", "_copied", "_memory")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes
        self.used = 0
        self.copied_bytes = 0
        self._copied: list[tuple[Any, int]] = []
        self._memory: Any = None

    def has_room(self, place: int, nbytes: int) -> bool:
        """Whether an array there can be in it."""
        return place + nbytes <= self.start + self.nbytes

    def copied(self, array: Any, place: int) -> None:
        """Have this array's bytes copied out of it."""
        self._copied.append((array, place - self.start))
        self.copied_bytes += array.nbytes

    @property
    def memory(self) -> Any:
        """Its memory, which it gets when somebody wants it."""
        if self._memory is None:
            self._memory = unfilled(self.nbytes)
        return self._memory

    def copy_out(self) -> None:
        """Copy the arrays that have memory of their own, when it was filled."""
        self._copy_from(memoryview(self.memory))

    def _copy_from(self, memory: memoryview) -> None:
        for array, at in self._copied:
            bytes_of(array)[:] = memory[at : at + array.nbytes]

    def copies_from(self, memory: memoryview) -> Steps:
        """What copies it from the message's memory, in pieces."""
        here = memory[self.start : self.start + self.used]
        steps: Steps = [functools.partial(self._copy_from, here)]
        if self._memory is not None:
            steps += of_bytes(memoryview(self._memory)[: self.used], here)
        return steps


class Unpacking:
    """A value that has come with memory, and is decoded: what is still to be filled.

    :ivar packed: what has come
    :ivar value: it, when it was decoded
    :ivar blocks: the memory of its arrays, which is to be filled
    :raises ValueError: it has come in parts that cannot be
    """

    def __init__(self, packed: Packed) -> None:
        self.value: Any = None
        self.packed = packed
        self._places = packed.places
        self._nbytes = packed.memory_bytes
        self._end = 0  # of the last array
        self.blocks: list[Block] = []
        self._texts: list[Any] = []

    def decode(self, decode: Callable[[Any], Any]) -> None:
        """Decode it. The arrays are there then, and not filled.

        :raises Exception: what `decode` raises, for an array that is refused as well
        """
        token = _current.set(self)
        self._end = 0
        self.blocks.clear()
        self._texts.clear()
        try:
            self.value = decode(self.packed.raw)
        finally:
            _current.reset(token)

    def place(self, type_: ArrayType, placed: Placed) -> Any:
        """An array for what has come in place of one.

        :raises ValueError: it is refused
        """
        nbytes, place = type_.nbytes_of(placed), placed.place
        if isinstance(place, bytes):
            if len(place) != nbytes:
                raise ValueError(f"an array of the shape {placed.shape} does not have {len(place)} bytes")
            array = type_.empty(placed)
            bytes_of(array)[:] = place
            check_texts(array)
            return type_.given(array)
        self._claim(place, nbytes)
        array = self._memory_for(type_, placed, place, nbytes)
        if nbytes and has_texts(array.dtype):
            self._texts.append(array)
        return type_.given(array)

    def _claim(self, place: int, nbytes: int) -> None:
        """Raise ValueError if the next array cannot have so many bytes there."""
        if not self._end <= place <= self._nbytes - nbytes:
            text = f"an array of {nbytes} bytes at {place} is not in the {self._nbytes} bytes of memory of the message"
            raise ValueError(f"{text}, behind the arrays before it")
        self._end = place + nbytes

    def _memory_for(self, type_: ArrayType, placed: Placed, place: int, nbytes: int) -> Any:
        if nbytes == 0:
            return type_.empty(placed)
        self._places.check(place, nbytes)
        block = self.blocks[-1] if self.blocks and self.blocks[-1].has_room(place, nbytes) else None
        is_aligned = block is None or (place - block.start) % ALIGN == 0
        if nbytes < _SHARING_BYTES or (nbytes <= REUSED_BYTES and not is_aligned):
            if block is None or block.copied_bytes + nbytes > REUSED_BYTES:
                block = self._block(place, REUSED_BYTES)
            array = type_.empty(placed)
            block.copied(array, place)
        else:
            if block is None or not is_aligned or block.nbytes > _KEPT_MOST * nbytes:
                # Nobody knows how many will share it: twice as many as before, so that little is left over.
                more = min(2 * self.blocks[-1].used, _KEPT_MOST * nbytes // 2) if self.blocks else 0
                block = self._block(place, max(REUSED_BYTES, nbytes, more))
            array = type_.over(placed, block.memory, place - block.start)
        block.used = place + nbytes - block.start
        return array

    def _block(self, place: int, nbytes: int) -> Block:
        self.blocks.append(Block(place, min(nbytes, self._nbytes - place)))
        return self.blocks[-1]

    def fill(self) -> Any:
        """Copy what has come in the message, now. Returns the value.

        :raises ValueError: a text is none
        """
        memory = self.packed.memory
        assert isinstance(memory, memoryview)
        for block in self.blocks:
            done(block.copies_from(memory))
        for check in self.text_checks():
            check()
        return self.value

    def text_checks(self) -> Steps:
        """What checks the arrays, when they are filled; see item_types.text_checks."""
        return [check for array in self._texts for check in text_checks(array)]


_current: Final[ContextVar[Unpacking | None]] = ContextVar("rdmanet.rpc.unpacking", default=None)
"""What is being decoded. msgspec calls `unpacked` for an array in it, and tells no more of it."""
_NOTHING: Final = Unpacking(Packed(b"", memoryview(b"")))


def unpacked(hint: Any, value: Any) -> Any:
    """An array, for what has come in place of one; msgspec's ``dec_hook``.

    :param hint: the annotation of the array
    :raises ValueError: it is refused
    """
    try:
        placed = msgspec.convert(value, Placed)
    except msgspec.ValidationError as exc:
        raise ValueError(f"what has come for an array is none: {exc}") from None
    return (_current.get() or _NOTHING).place(_type_of(hint), placed)


@functools.lru_cache(1024)
def _type_of(hint: Any) -> ArrayType:
    found = declared(hint, "")
    assert isinstance(found, ArrayType)
    return found
