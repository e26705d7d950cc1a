"""How a server takes a call's buffers: what has come for each becomes what the method's annotation says.

Bytes that came in the message are here. Those on loan are read from the caller's memory into new memory, which counts
until the call ends (shares.py); or the method gets an `rpc.Buffer`, and reads itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable
from typing import Any, TypeVar

from rdmanet.rpc import lending
from rdmanet.rpc.buffer import Buffer, over
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.gathering import fetch, fill
from rdmanet.rpc.lending import Loan, at_once, fetched, here, loan_of
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import Array, Lent
from rdmanet.rpc.packing import Packed
from rdmanet.rpc.reads import read_loans
from rdmanet.rpc.running import Running
from rdmanet.rpc.shares import Share

_T = TypeVar("_T")


async def taken(
    link: Link, share: Share, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
) -> tuple[Any, ...]:
    """The same as `take`, at once if they have all come."""
    if (found := at_once(running.method, arguments)) is None:
        running.taking = True
        try:
            found = await take(link, share, running, arguments, buffers)
        finally:
            running.taking = False
    return found


async def unpacked(link: Link, share: Share, running: Running) -> tuple[Any, ...]:
    """The arguments with the arrays in them; see `unpack`."""
    packed, running.packed, running.taking = running.packed, None, True
    assert packed is not None
    try:
        return await unpack(link, share, running, packed)
    finally:
        running.taking = False


async def take(
    link: Link, share: Share, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
) -> tuple[Any, ...]:
    """The arguments with their buffers, as the method declares them.

    :param buffers: those that are to be released when the call ends are added
    :raises Error: they are no such buffers, or too large, or the caller does not offer them
    """
    found, method = list(arguments), running.method
    for index in method.buffers:
        value, parameter = found[index], method.parameters[index]
        type_ = parameter.type
        if not isinstance(value, memoryview | Lent | Array):
            continue  # the default
        loan = loan_of(value)
        lending.check(type_, value, Code.INVALID_ARGUMENT, f"{method.label}: parameter {parameter.name}")
        if loan is None:
            found[index] = await here(link, type_, value, Code.INVALID_ARGUMENT)
        else:
            if running.call.is_over:  # an interceptor has answered, and goes on
                raise over()
            if type_ is not Buffer:
                share.hold_lent(running, loan.length, "arguments")
            running.borrows([await _in_time(lending.found(link, loan), share.limits.lent_seconds)])
            if type_ is Buffer:  # the method may take memory for all of it
                found[index] = Buffer.of(Loan(link, loan), loan.length)
            else:
                found[index] = await fetched(link, type_, value, loan, Code.INVALID_ARGUMENT)
            running.counter.lent_bytes += loan.length
        if type_ is Buffer:
            buffers.append(found[index])
    return tuple(found)


async def unpack(link: Link, share: Share, running: Running, packed: Packed) -> tuple[Any, ...]:
    """The arguments of a call that has come with the memory of arrays; buffers are as `take` gets them.

    :raises Error: as for `take`
    """
    method, memory = running.method, packed.memory
    try:
        if not isinstance(memory, Lent):
            return await fill(link.loop, method.unpack_arguments(packed))  # type: ignore[no-any-return]
        if running.call.is_over:  # an interceptor has answered, and goes on
            raise over()
        share.hold_lent(running, memory.length, "arguments")
        remotes = await _in_time(lending.found_all(link, packed.places), share.limits.lent_seconds)
        running.borrows(remotes)
        unpacking = method.unpack_arguments(packed)
        arguments = await fetch(
            link.loop, unpacking, functools.partial(read_loans, link, packed.places, remotes)
        )
        running.counter.lent_bytes += memory.length
        return arguments  # type: ignore[no-any-return]
    except ValueError as exc:
        raise method.wrong_argument(exc) from None


async def _in_time(finding: Awaitable[_T], seconds: float) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await finding
    except TimeoutError:
        text = f"the caller has not offered the memory of an argument for {seconds} s: the limit lent_seconds"
        raise Error(Code.DEADLINE_EXCEEDED, text) from None
