"""How a client takes a result that is a buffer or an array, or has arrays in it: from its message, or by RDMA.

What is read by reference is read into new memory, of which a connection has `Limits.lent_bytes` at a time, or into the
caller's own. When it was read, or cannot be, the server is told that it may have its memory back (Release).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from rdmanet.rpc import lending
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.errors import Code, late
from rdmanet.rpc.gathering import fetch, fill
from rdmanet.rpc.lending import Loan, as_declared, fetched, here, loan_of
from rdmanet.rpc.limits import Limits, exceeded
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import Lent
from rdmanet.rpc.packing import Packed
from rdmanet.rpc.pending import Pending
from rdmanet.rpc.reads import read_loans


class Fetching:
    """Takes the results of one connection.

    :param release: tells the server that the result of this call is not needed any more
    :ivar reading_bytes: memory into which results are being read
    """

    def __init__(self, link: Link, limits: Limits, release: Callable[[int], None]) -> None:
        self.reading_bytes = 0
        self._link = link
        self._limits = limits
        self._release = release

    async def take(self, pending: Pending, result: Any, deadline: float | None) -> Any:
        """A result as the method declares it.

        :raises Error: INTERNAL if it is none; DEADLINE_EXCEEDED; RESOURCE_EXHAUSTED
        """
        if isinstance(result, Packed):
            return await self._unpacked(pending, result, deadline)
        if not pending.method.result_is_buffer:
            return result
        if pending.into is None and type(result) is memoryview:
            return as_declared(pending.method.result, result)
        return await self._buffer(pending, result, deadline)

    async def _unpacked(self, pending: Pending, packed: Packed, deadline: float | None) -> Any:
        method, memory, most = pending.method, packed.memory, self._limits.decoded_bytes
        loop = self._link.loop
        if not isinstance(memory, Lent):
            try:
                return await fill(loop, method.unpack_result(packed, most))
            except ValueError as exc:
                raise method.wrong_result(exc) from None
        try:
            with self._counted(memory.length):
                async with asyncio.timeout_at(deadline):
                    remotes = await lending.found_all(self._link, packed.places)
                    unpacking = method.unpack_result(packed, most)
                    read = functools.partial(read_loans, self._link, packed.places, remotes)
                    found = await fetch(loop, unpacking, read)
            pending.counter.lent_bytes += memory.length
            return found
        except TimeoutError:
            raise late() from None
        except ValueError as exc:
            raise method.wrong_result(exc) from None
        finally:
            self._release(pending.number)

    async def _buffer(self, pending: Pending, result: Any, deadline: float | None) -> Any:
        type_, number, into = pending.method.result, pending.number, pending.into
        loan = loan_of(result)
        what = f"{pending.method.label}: the result"
        if loan is None:
            lending.check(type_, result, Code.INTERNAL, what)
            return await here(self._link, type_, result, Code.INTERNAL, into)
        if type_ is Buffer:
            try:
                async with asyncio.timeout_at(deadline):
                    await lending.found(self._link, loan)  # the program may take memory for all of it
            except BaseException as exc:
                self._release(number)
                if isinstance(exc, TimeoutError):
                    raise late() from None
                raise
            pending.counter.lent_bytes += loan.length
            return Buffer.of(Loan(self._link, loan, lambda: self._release(number)), loan.length)
        try:
            lending.check(type_, result, Code.INTERNAL, what)
            with self._counted(loan.length if into is None else 0):
                async with asyncio.timeout_at(deadline):
                    found = await fetched(self._link, type_, result, loan, Code.INTERNAL, into)
            pending.counter.lent_bytes += loan.length
            return found
        except TimeoutError:
            raise late() from None
        finally:
            self._release(number)

    @contextlib.contextmanager
    def _counted(self, nbytes: int) -> Iterator[None]:
        if nbytes > self._limits.lent_bytes - self.reading_bytes:
            raise exceeded("lent_bytes", self._limits.lent_bytes, f"a result of {nbytes} bytes")
        self.reading_bytes += nbytes
        try:
            yield
        finally:
            self.reading_bytes -= nbytes
