"""A server of the soak of calls: it is killed, or told to drain, and another one takes its place.

usage: python -m tests.soak.calls_server JOURNAL

It says where it listens, over RDMA and over TCP. Each call of `once` is a line of the journal, which outlives it. When
its standard input ends, it drains, and says what is left.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy
from numpy.typing import NDArray

from rdmanet import rpc
from tests.support.lines import lines, tell

HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")


class Record(msgspec.Struct):
    """Arrays wherever a type may stand."""

    name: str
    state: dict[str, numpy.ndarray]
    layers: list[NDArray[numpy.float32]]
    pair: tuple[NDArray[numpy.int64], int]
    mask: NDArray[numpy.bool_] | None = None


class Listener(rpc.Service):
    """An object of a caller's, which the server calls."""

    async def turned(self, array: numpy.ndarray) -> numpy.ndarray:
        raise NotImplementedError

    async def every(self, array: numpy.ndarray, step: int) -> AsyncIterator[numpy.ndarray]:
        yield array


class Arrays(rpc.Service):
    """Calls that may be made twice."""

    @rpc.method(idempotent=True)
    async def record(self, record: Record) -> Record:
        return record

    @rpc.method(idempotent=True)
    async def state(self, state: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
        return dict(reversed(state.items()))

    @rpc.method(idempotent=True)
    async def both(
        self, one: numpy.ndarray, other: numpy.ndarray | None, more: list[numpy.ndarray]
    ) -> tuple[numpy.ndarray | None, numpy.ndarray, list[numpy.ndarray]]:
        return other, one, more

    @rpc.method(idempotent=True)
    async def array(self, array: numpy.ndarray) -> numpy.ndarray:
        return array

    @rpc.method(idempotent=True)
    async def view(self, data: memoryview) -> memoryview:
        return data

    @rpc.method(idempotent=True)
    async def lend(self, data: bytes) -> rpc.Buffer:
        return rpc.Buffer(data)

    @rpc.method(idempotent=True)
    async def items(self, state: dict[str, numpy.ndarray]) -> AsyncIterator[dict[str, numpy.ndarray]]:
        for name, array in state.items():
            yield {name: array}

    async def sums(self, arrays: AsyncIterator[numpy.ndarray]) -> AsyncIterator[tuple[int, numpy.ndarray]]:
        async for array in arrays:
            yield array.nbytes, array

    @rpc.method(idempotent=True)
    async def metadata(self, name: str) -> Any:
        return rpc.metadata().get(name)

    async def ask(
        self, listener: Listener, one: numpy.ndarray, more: dict[str, numpy.ndarray]
    ) -> tuple[dict[str, numpy.ndarray], list[numpy.ndarray]]:
        """Call the caller back, for all at once, and in a stream."""
        found = await asyncio.gather(*map(listener.turned, more.values()))
        return dict(zip(more, found, strict=True)), [item async for item in listener.every(one, 3)]

    @rpc.method(idempotent=True, thread=True)
    def counted(self, array: numpy.ndarray) -> tuple[int, numpy.ndarray]:
        """In a thread."""
        return sum(array.tobytes()), array

    @rpc.method(idempotent=True)
    async def said(self, text: str, array: numpy.ndarray) -> numpy.ndarray:
        """With metadata that goes back."""
        await rpc.send_initial_metadata({"first": text})
        rpc.set_trailing_metadata({"last": text[::-1]})
        return array


class Journal(rpc.Service):
    """Calls that may not."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def once(self, number: int, array: numpy.ndarray) -> int:
        os.write(self._fd, b"%d\n" % number)
        return number + array.nbytes


async def main(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    services = [Arrays(), Journal(fd)]
    servers = [await rpc.serve(services, HOST, 0, transport=each) for each in ("rdma", "tcp")]
    tell(ports=[server.sockets[0].getsockname()[1] for server in servers])
    async for _ in lines():
        pass
    await asyncio.gather(*(server.drain() for server in servers))
    shares = [server.shares for server in servers]
    left = [len(server.running) + len(server.callees) for server in servers]
    tell(left=sum(left) + sum(share.calls + share.held_bytes for share in shares))
    os.close(fd)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
