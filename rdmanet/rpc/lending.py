"""Buffers on their way between the two sides of a call.

Theory
------
Who has the memory lends it: puts it on offer on the call's connection (`RdmaTransport.offer`), for reading, and sends
the offer's number in place of the bytes. Who gets the number reads by RDMA READ, when it wants to, into memory of its
own. The offer's key is good for this connection only, and ends with the call, whatever ends it: its answer, an error,
its deadline, or that it is cancelled. Then the peer has RETURN_S to finish what it has begun, and to let go. It lets go
at once if it runs, and has nothing under way; a Reply says whether that is so already (`returned`), and then there is
nothing to wait for. Then the device invalidates the key, whatever the peer does (bindings.py); if it cannot, the
connection ends. Only then the call ends, even if it is cancelled once more: its owner may change the memory, and nobody
else reads what it writes there.

A loan costs a few messages of its own: offer, revocation, confirmation. Below LEND_BYTES it is faster to send the bytes
in the message, which is also the only way over TCP and Unix sockets. The receiver's transport puts them where they stay
(long_bodies.py). The sender copies them into the message; or writes them beside it, from where they are, if nobody can
change them.

Nobody waits for a loan: the calls that have one may wait for this one. When LOANS_MOST are lent, further buffers go in
their messages, and one that is too long for a message is refused. The arrays of one message may be several loans
(parts.py): twice as many in addition, if the peer accepts so many, of all messages together. When these are lent,
arrays are gathered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, cast

from rdmanet._core import AccessFlags, unfilled
from rdmanet.errors import RdmaError
from rdmanet.rpc.array_types import ArrayType, shown
from rdmanet.rpc.buffer import Buffer, bytes_of, check_plain, exported, over
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.item_types import item_type, text_checks
from rdmanet.rpc.limits import exceeded
from rdmanet.rpc.link import LOANS_MOST, Link
from rdmanet.rpc.messages import Apart, Array, Lent
from rdmanet.rpc.method import Kind, Method
from rdmanet.rpc.outgoing import Gathered, Outgoing
from rdmanet.rpc.packing import Packed, Packing
from rdmanet.rpc.paging import LEAST_BYTES, brought_in, filled, in_turns
from rdmanet.rpc.parts import Places
from rdmanet.rpc.reads import read_offer
from rdmanet.rpc.stats import Counter
from rdmanet.stream.bindings import Binding
from rdmanet.stream.options import REVOKE_TIMEOUT_S
from rdmanet.stream.peer_memory import OfferedMemory
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.stream.regions import Regions

LEND_BYTES: Final = 3 << 19
"""Of memory that may change, which is copied into a message. Measured on the embedded device: a loan costs 0.2 to 0.3
ms more than a message. At 2 MiB both take the same time, at 4 MiB the loan takes two thirds."""
LEND_TIMES: Final = 4
"""`bytes`, which are not copied, are lent from so many times the length from which the device had better put what comes
into memory that it is told of. The embedded device copies by a processor in any case, and says 2 MiB: there a message
of 4 MiB takes half of what a loan takes, and at 16 MiB both take the same time. An adapter says 64 KiB."""
LEND_LEAST: Final = 1 << 20
"""What is longer than the peer takes in a message is lent from this length on."""
APART_BYTES: Final = 512 << 10
"""So much memory that nobody changes is written beside its message, and not copied into that. For less, the copy takes
less time."""
RETURN_S: Final = 0.25
"""How long a peer has to let go of memory when the call is over. One that runs takes much less than that."""
_KEEP_BYTES: Final = 64 << 10
"""A view of fewer bytes is copied: it would keep all that was received with it."""


# ---- From the program to the peer ----------------------------------------------------------------------------


Loans = list[tuple[int, Outgoing | Gathered]]
"""What is to be lent, with the places among the arguments; -1 of the memory of arrays in them."""


def prepared(link: Link, method: Method, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Loans, bool]:
    """The arguments as they are sent, those that are to be lent, with their places, and whether some are `Apart`."""
    loans: Loans = []
    are_apart = False
    for index in method.buffers:
        if index >= len(arguments):
            break  # left out, which only calls without the class do (dynamic_client.py)
        parameter = method.parameters[index]
        value = arguments[index]
        if type(value) is bytes and len(value) < APART_BYTES and not parameter.is_array:
            continue  # the quick answer for most
        if not parameter.is_array and not method.brings:
            if (whole := whole_bytes(link, value, APART_BYTES, index in method.inline)) is not None:
                sent, are_apart = Apart(memoryview(whole)), True
                arguments = (*arguments[:index], sent, *arguments[index + 1 :])
                continue
        going = Outgoing(parameter.type, value, f"{method.label}: parameter {parameter.name}")
        by_reference = index not in method.inline and goes_by_reference(link, going.nbytes, going.is_bytes)
        if by_reference or going.nbytes >= LEAST_BYTES:
            loans.append((index, going))
        else:
            sent = in_message(link, going)
            if is_apart(going) and not method.brings:
                sent, are_apart = beside(going), True
            arguments = (*arguments[:index], sent, *arguments[index + 1 :])
    return arguments, loans, are_apart


def whole_bytes(link: Link, value: Any, least: int, is_inline: bool = False) -> bytes | memoryview | None:
    """`bytes`, or a view of such, that a message has from where they are; None if there is more to be looked at."""
    if type(value) is memoryview:
        if type(value.obj) is not bytes or value.format != "B" or value.ndim != 1 or not value.c_contiguous:
            return None
        value = memoryview(value)  # the program may release its own
    nbytes = len(value) if type(value) in (bytes, memoryview) else 0
    if not least <= nbytes <= link.longest or (nbytes >= LEAST_BYTES and not link.lends):
        return None
    return value if is_inline or not goes_by_reference(link, nbytes, is_bytes=True) else None


def goes_by_reference(link: Link, nbytes: int, is_bytes: bool = False) -> bool:
    """Whether the peer is to read so much by RDMA. It can be lent, if that is done before anything is awaited.

    :param is_bytes: its message need not have a copy of it
    """
    least = max(LEND_BYTES, LEND_TIMES * link.place_bytes) if is_bytes else LEND_BYTES
    is_long = nbytes >= least or (nbytes > link.longest and nbytes >= LEND_LEAST)
    return is_long and link.lends and link.loans_left > 0


async def apart(link: Link, going: Outgoing | Gathered) -> Any:
    """The same as `in_message`; long memory is beside the message, where nobody changes it any more.

    :raises Error: RESOURCE_EXHAUSTED if it is too long; nothing is copied then
    """
    _check_length(link, going.nbytes)
    if going.nbytes > link.longest:
        raise exceeded(
            "message_bytes", link.longest, f"a message with {going.nbytes} bytes of memory to the peer"
        )
    is_long = going.nbytes >= LEAST_BYTES
    await going.settle(link.loop, for_good=is_long)
    assert going.memory is not None
    return going.item(Apart(going.memory) if is_long else going.memory)


def in_message(link: Link, going: Outgoing) -> Any:
    """What is in the message for a buffer that does not go by reference.

    :raises Error: RESOURCE_EXHAUSTED if it could not be lent, and is too long
    """
    assert going.memory is not None
    _check_length(link, going.nbytes)
    return going.item(going.memory)


def is_apart(going: Outgoing) -> bool:
    """Whether memory that goes in a message is to be `beside` it."""
    return going.is_constant and going.nbytes >= APART_BYTES


def beside(going: Outgoing) -> Any:
    """The same as `in_message` for memory that nobody changes any more, and that is written beside the message."""
    assert going.memory is not None
    return going.item(Apart(going.memory))


def memory_in_message(link: Link, packing: Packing) -> memoryview | None:
    """The memory of arrays, if it does not go by reference; None if there is none.

    :raises Error: as for `in_message`
    """
    _check_length(link, packing.nbytes)
    return packing.gathered() if packing.nbytes else None


def _check_length(link: Link, nbytes: int) -> None:
    if nbytes > link.longest and nbytes >= LEND_LEAST and link.lends and link.loans_left <= 0:
        text = f"{LOANS_MOST} buffers are lent on this connection, and one of {nbytes} bytes cannot go in a message"
        raise exceeded("message_bytes", link.longest, text)


async def lend(
    link: Link,
    method: Method,
    arguments: tuple[Any, ...],
    loans: Loans,
    block: contextlib.AsyncExitStack,
    counter: Counter,
) -> tuple[Any, Any]:
    """Lend what `prepared` has found, and the memory of arrays, until the block ends.

    What is not lent goes in the message. Returns the arguments as they are sent, and the memory, which is added to the
    loans if it is one.
    """
    found = list(arguments)
    for index, going in loans:
        assert isinstance(going, Outgoing)
        if index not in method.inline and goes_by_reference(link, going.nbytes, going.is_bytes):
            found[index] = await block.enter_async_context(lent(link, going))
            counter.lent_bytes += going.nbytes
        elif method.brings:  # and Packing encodes all
            await going.settle(link.loop)
            found[index] = in_message(link, going)
        else:
            found[index] = await apart(link, going)
    if not method.brings:
        return found, None
    packing = Packing(found, method.label)
    if not packing.nbytes:
        return packing.raw, None
    gathered = Gathered(packing, is_result=False)
    if not goes_by_reference(link, packing.nbytes):
        return packing.raw, await apart(link, gathered)
    loans.append((-1, gathered))
    counter.lent_bytes += packing.nbytes
    return packing.raw, await block.enter_async_context(lent(link, gathered))


@contextlib.asynccontextmanager
async def lent(link: Link, going: Outgoing | Gathered) -> AsyncIterator[Any]:
    """A block in which the peer can read this memory. Yields what is sent for it.

    When the block has ended, nobody else can read it.

    :raises Error: UNAVAILABLE if the connection is lost, RESOURCE_EXHAUSTED if the peer does not confirm former loans
    """
    transport = cast(RdmaTransport, link.transport)
    regions = transport._regions
    with _counted(link, going.lend_apart(link.parts_left)):
        await going.settle(link.loop)
        bindings: list[Binding] = []
        try:
            try:
                offers = await _offered(link, regions, going.memories(), bindings)
            except OSError as exc:
                if isinstance(exc, ConnectionError) or transport.is_closing():
                    raise link.lost_error() from exc
                if isinstance(exc, RdmaError):
                    raise Error(
                        Code.RESOURCE_EXHAUSTED, f"the peer does not let go of memory: {exc}"
                    ) from exc
                raise
            yield going.item(going.loan(offers))
        finally:
            bindings = [binding for binding in bindings if regions.take_back(binding, RETURN_S)]
            if going.returned:
                for binding in bindings:
                    binding.acknowledged()  # the peer's word for the number comes later
            await until_done(*(binding.over for binding in bindings))


async def _offered(link: Link, regions: Regions, memories: list[Any], bindings: list[Binding]) -> list[int]:
    """Put these on offer; their numbers. The bindings that are begun are added, and are to be taken back."""

    def bind(memory: Any) -> None:
        bindings.append(regions.bind(memory, AccessFlags.REMOTE_READ, REVOKE_TIMEOUT_S))

    if len(memories) == 1:
        bind(memories[0])
    else:
        await in_turns(link.loop, [functools.partial(bind, memory) for memory in memories])
    return [(await regions.announced(binding, most=link.offers_most)).id for binding in bindings]


@contextlib.contextmanager
def _counted(link: Link, more: int) -> Iterator[None]:
    """This is lent, and takes so many loans more than one."""
    link.loans_left -= 1
    link.parts_left -= more
    try:
        yield
    finally:
        link.loans_left += 1
        link.parts_left += more


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Wait for futures that are done soon. Cancelling this takes effect then."""
    cancelled: asyncio.CancelledError | None = None
    for future in futures:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # whose traceback has this frame


# ---- From the peer to the program ----------------------------------------------------------------------------


class Loan:
    """The source of a Buffer that the peer lends.

    :param on_release: called once, when nothing will be read any more
    """

    def __init__(self, link: Link, loan: Lent, on_release: Any = None) -> None:
        self._link = link
        self._loan = loan
        self._is_over = False
        self._on_release = on_release

    async def read_into(self, memory: Any, offset: int) -> None:
        if self._is_over:
            raise over()
        await brought_in(self._link.loop, memory)
        remote = await found(self._link, self._loan)
        if self._is_over:
            raise over()
        await read_offer(self._link, remote, memory, offset)

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._on_release is not None:
                self._on_release()


async def found(link: Link, loan: Lent) -> OfferedMemory:
    """The peer's memory behind a loan. It is as long as the peer says, so memory can be taken for it.

    :raises Error: INVALID_ARGUMENT if it is not, or if nothing can be lent on this connection; as for `Link.offered`
    """
    return await _found(link, loan.offer, loan.length)


async def found_all(link: Link, places: Places) -> list[OfferedMemory]:
    """The same for the memory of arrays, of which there may be parts."""
    return [
        await _found(link, offer, length) for offer, length in zip(places.offers, places.lengths, strict=True)
    ]


async def _found(link: Link, offer: int, length: int) -> OfferedMemory:
    remote = await link.offered(offer)
    if length > remote.length:
        text = f"the peer lends {length} bytes, and has only {remote.length} on offer"
        raise Error(Code.INVALID_ARGUMENT, text)
    return remote


class Into:
    """A caller's memory that a result is written into.

    :raises TypeError: it is read-only, or no buffer
    :raises BufferError: it is not C-contiguous
    """

    def __init__(self, memory: Any) -> None:
        check_plain(memory, "into")
        view = memoryview(exported(memory, "into"))
        if view.readonly:
            raise TypeError(f"into: {type(memory).__name__!r} is read-only")
        if not view.c_contiguous:
            raise BufferError("into: the memory is not C-contiguous")
        self._memory = memory
        self._bytes = bytes_of(memory)  # always the same one: by it, a registration is known again

    def check(self, method: Method) -> None:
        """Raise TypeError if this method's result cannot be written into it."""
        if method.kind in (Kind.SERVER_STREAM, Kind.BOTH):
            raise TypeError(f"{method.label}: into= is for one result, not for a stream")
        is_array = isinstance(method.result, ArrayType)
        if not is_array and method.result is not memoryview:
            raise TypeError(
                f"{method.label}: into= is for results that are annotated as an array or a memoryview"
            )
        if is_array and not hasattr(self._memory, "__array_interface__"):
            raise TypeError(
                f"{method.label}: the result is an array: into= is {type(self._memory).__name__!r}"
            )

    def room(self, value: Any, nbytes: int) -> tuple[memoryview, Any]:
        """The bytes to be written, and the result that they make.

        :raises Error: OUT_OF_RANGE; the result does not fit
        """
        memory, view = self._memory, self._bytes
        if isinstance(value, Array):
            if (item_type(memory.dtype), list(memory.shape)) != (value.dtype, value.shape):
                text = (
                    f"the result is an array of {shown(value.dtype)}, {tuple(value.shape)}: into= is one of "
                )
                raise Error(Code.OUT_OF_RANGE, f"{text}{memory.dtype.str!r}, {memory.shape}")
            return view, memory
        if nbytes > view.nbytes:
            raise Error(Code.OUT_OF_RANGE, f"the result has {nbytes} bytes: into= has {view.nbytes}")
        if nbytes < view.nbytes:
            view = view[:nbytes]
        return view, view


def loan_of(value: Any) -> Lent | None:
    """The loan in what has come for a buffer, an array, or arrays in something; None if the bytes have come, too."""
    data = value.data if isinstance(value, Array) else value.memory if isinstance(value, Packed) else value
    return data if isinstance(data, Lent) else None


def check(type_: Any, value: Any, code: Code, what: str) -> None:
    """Check what has come for an array, before memory is taken for it; see `ArrayType.check`."""
    if isinstance(type_, ArrayType) and isinstance(value, Array):
        data = value.data
        type_.check(value, data.length if isinstance(data, Lent) else data.nbytes, code, what)


async def here(link: Link, type_: Any, value: Any, code: Code, into: Into | None = None) -> Any:
    """What has come for a buffer or an array with its bytes, as the annotation wants it.

    :param code: of the error if the bytes are no such array's
    """
    if isinstance(value, memoryview) and into is None:
        return as_declared(type_, value)
    data = cast(memoryview, value.data if isinstance(value, Array) else value)
    if into is None and (array := _where_it_came(type_, value, data, code)) is not None:
        return await _given(link.loop, type_, array, code)
    memory, result = _room(type_, value, data.nbytes, code, into)
    await filled(link.loop, memory, data)
    return await _given(link.loop, type_, result, code)


async def fetched(
    link: Link, type_: Any, value: Any, loan: Lent, code: Code, into: Into | None = None
) -> Any:
    """What has come for a buffer or an array on loan, as the annotation wants it.

    Its size has been checked against the limits. If the program has none to write it `into`, memory is taken for it.

    :param code: as for `here`
    """
    remote = await found(link, loan)
    memory, result = _room(type_, value, loan.length, code, into)
    await brought_in(link.loop, memory)
    await read_offer(link, remote, memory, 0)
    return type_(memory) if type_ in (bytes, bytearray) else await _given(link.loop, type_, result, code)


def _where_it_came(type_: Any, value: Array, data: memoryview, code: Code) -> Any:
    """An array in the memory of its message, if that is its alone, or nearly; else None."""
    whole = memoryview(data.obj)
    if whole.readonly or data.nbytes < _KEEP_BYTES or 2 * data.nbytes < len(whole):
        return None
    try:
        array = type_.where(value, data)
    except ValueError as exc:
        raise Error(code, str(exc)) from None
    return array if array.flags.aligned else None


async def _given(loop: asyncio.AbstractEventLoop, type_: Any, result: Any, code: Code) -> Any:
    """A result as the program gets it, when its bytes are here."""
    if not isinstance(type_, ArrayType):
        return result
    try:
        if checks := text_checks(result):
            await in_turns(loop, checks)
        return type_.given(result)
    except ValueError as exc:
        raise Error(code, str(exc)) from None


def _room(type_: Any, value: Any, nbytes: int, code: Code, into: Into | None) -> tuple[memoryview, Any]:
    """Memory for so many bytes, and the result that they make."""
    if into is not None:
        return into.room(value, nbytes)
    if isinstance(value, Array):
        try:
            array = type_.empty(value)
        except ValueError as exc:
            raise Error(code, str(exc)) from None
        return bytes_of(array), array
    memory = memoryview(unfilled(nbytes))
    return memory, memory.toreadonly()


def at_once(method: Method, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of a call as its method declares them, if all buffers have come as plain bytes; None if not."""
    for index in method.buffers:
        value = arguments[index]
        if type(value) is bytes:
            continue  # decoded so for `bytes`
        type_ = method.parameters[index].type
        if type(value) is not memoryview or type_ is Buffer:
            return None
        arguments = (*arguments[:index], as_declared(type_, value), *arguments[index + 1 :])
    return arguments


def as_declared(type_: Any, memory: memoryview) -> Any:
    """Bytes that are here, as the method's annotation wants them."""
    if type_ in (bytes, bytearray):
        return type_(memory)
    if memory.nbytes < _KEEP_BYTES:
        memory = memoryview(bytes(memory))
    memory = memory.toreadonly()
    return Buffer(memory) if type_ is Buffer else memory
