"""What the loop's tests are made of: protocols that remember, and peers in other processes."""

import asyncio
import contextlib
import functools
import os
import socket
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rdmanet.loop import workers as loop_workers
from rdmanet.loop.settings import Settings
from tests.support.processes import AwaitedProcess
from tests.support.waiting import Conditions

HERE = Path(__file__).resolve().parent
STREAM = os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream"


class Recorder(asyncio.Protocol):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.events: list[str] = []
        self.data = bytearray()
        self.error: BaseException | None = None
        self._conditions = Conditions()

    def connection_made(self, transport):
        self.transport = transport
        self._note("made")

    def data_received(self, data):
        self.data += data
        self._note("data")

    def eof_received(self):
        self._note("eof")

    def connection_lost(self, exc):
        self.error = exc
        self._note("lost")

    def _note(self, event: str) -> None:
        if not (event == "data" and self.events[-1:] == ["data"]):
            self.events.append(event)
        self._conditions.look()

    async def until(self, condition: Callable[[], object]) -> None:
        await self._conditions.until(condition)


class Echo(Recorder):
    """Sends back what it gets."""

    def data_received(self, data):
        super().data_received(data)
        self.transport.write(data)


async def plain_server(factory: Callable[[], asyncio.BaseProtocol] = Echo) -> tuple[Any, int]:
    """A TCP server that knows nothing of RDMA, and its port."""
    server = await asyncio.get_running_loop()._rdmanet.base.create_server(factory, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


def peer(name: str, *arguments: object, **environment: str) -> AwaitedProcess:
    """A script of peers/ in another process."""
    return AwaitedProcess(
        sys.executable, HERE / "peers" / name, *arguments,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), **environment}, keep_errors=True,
    )  # fmt: skip


@contextlib.contextmanager
def workers_on(address: str, count: int, *kind: str) -> Iterator[tuple[int, dict[int, AwaitedProcess]]]:
    """Servers that share a port: the port, and the servers by the numbers of their processes.

    :param kind: "adapter": they treat the embedded device as one, and so does this process: it connects to their ports,
        though they have no names
    """
    with socket.socket() as reserved, contextlib.ExitStack() as stack:
        if kind:
            original = Settings.config
            by_port = functools.partialmethod(lambda *args: original(*args).replaced(by_name_alone=False))
            stack.enter_context(unittest.mock.patch.object(Settings, "config", by_port))
            stack.enter_context(unittest.mock.patch.object(loop_workers, "is_dealt", lambda library: True))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, 0))
        port = reserved.getsockname()[1]
        peers = [stack.enter_context(peer("worker.py", port, address, *kind)) for _ in range(count)]
        yield port, {each.pid: each for each in peers}


def fabric(of: Any) -> str:
    return str(of.get_extra_info("fabric"))


@contextlib.asynccontextmanager
async def serving(
    factory: Callable[[], asyncio.BaseProtocol] = Echo, host: Any = "127.0.0.1", **options: Any
):
    """A server of the loop's, and its port."""
    server = await asyncio.get_running_loop().create_server(factory, host, 0, **options)
    try:
        yield server, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        server.abort_clients() if hasattr(server, "abort_clients") else None
