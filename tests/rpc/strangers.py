"""A service, and peers that speak to it by hand, over TCP: they say what no client of ours would."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from net import Net

from rdmanet import rpc
from rdmanet.rpc.messages import MAGIC, VERSION, Call, Framer, Hello, frame, raw
from rdmanet.rpc.schema import schema_of


class Store(rpc.Service):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.alive = 0

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def hold(self, data: bytes) -> None:
        await self.gate.wait()

    async def peek(self, data: rpc.Buffer) -> int:
        return data.nbytes

    async def name(self, name: str) -> None: ...

    async def much(self) -> bytes:
        return bytes(1_000_000)

    async def large(self) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1_000_000)

    async def tree(self, value: Any) -> None: ...

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def wait(self) -> None:
        self.alive += 1
        try:
            await self.gate.wait()
        finally:
            self.alive -= 1

    async def fail(self, text: str) -> None:
        raise rpc.Error(rpc.Code.ABORTED, text, ["details"] * 1000)

    async def fail_much(self, nbytes: int) -> None:
        raise rpc.Error(rpc.Code.ABORTED, "no", bytes(nbytes))

    async def idle(self, numbers: AsyncIterator[int]) -> int:
        await self.gate.wait()
        return sum([number async for number in numbers])

    async def watch(self) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)


SCHEMA = schema_of(Store)
NUMBERS = {name: method.number for name, method in SCHEMA.methods.items()}
HELLO = Hello(MAGIC, VERSION, "Store", SCHEMA.digest, 1 << 20, 100, 10_000)
LIMITS = rpc.Limits(message_bytes=1 << 20, calls=50, stream_bytes=10_000, hello_seconds=0.2)


def call(number: int, method: str, *arguments: Any, timeout_us: int | None = None) -> Call:
    return Call(number, NUMBERS[method], timeout_us, raw(arguments))


class Stranger:
    """A peer that is spoken by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._framer = Framer((1 << 32) - 1)
        self._heard: list[Any] = []

    def say(self, *said: Any) -> None:
        self.writer.write(b"".join(each if isinstance(each, bytes) else frame(each) for each in said))

    async def hear(self) -> Any:
        """The next message; None at the end of the connection."""
        while not self._heard:
            try:
                data = await self.reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._heard += self._framer.feed(data)
        return self._heard.pop(0)

    async def is_cut_off(self) -> bool:
        while await self.hear() is not None:
            pass
        return True


async def stranger(net: Net, server: rpc.Server, *said: Any) -> Stranger:
    peer = Stranger(*await asyncio.open_connection(*net.address(server)))
    net._stack.callback(peer.writer.close)
    peer.say(*said)
    return peer
