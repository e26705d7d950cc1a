"""The page of the wire format is enough: a client that was written from it alone speaks with a server, by TCP.

The client uses sockets and msgpack, and nothing of rdmanet. It runs in a thread, as the program of somebody else would
in a process.
"""

import asyncio
import hashlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import pytest
from net import Journal, Net

from rdmanet import rpc

pytestmark = pytest.mark.parametrize("transport", ["tcp"])

HELLO, CALL, REPLY, FAILURE, ITEM, END, WINDOW, CANCEL, RELEASE, GOAWAY, PING, PONG = range(12)
ITEM_COST = 64
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Client:
    """A peer that blocks."""

    def __init__(self, address: tuple[str, int], digest: bytes = bytes(32), stream_bytes: int = 1000) -> None:
        self.socket = socket.create_connection(address)
        self.window = stream_bytes
        self.last = 0
        self.say(HELLO, "rdmanet.rpc", 1, "Bank", digest, 1 << 20, 0, stream_bytes, None)
        # What a later version adds comes behind.
        kind, magic, version, self.service, self.digest, self.longest, self.calls, self.credit, schema, *_ = (
            self.hear()
        )
        assert (kind, magic, version) == (HELLO, "rdmanet.rpc", 1)
        self.schema = schema
        self.numbers = {} if schema is None else {method[0]: at for at, method in enumerate(schema[0])}

    def say(self, *items: Any) -> None:
        body = pack(items)
        self.socket.sendall(struct.pack("!I", len(body)) + body)

    def hear(self) -> list[Any]:
        (length,) = struct.unpack("!I", self._exactly(4))
        return unpack(self._exactly(length))  # type: ignore[no-any-return]

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self.socket.recv(count - len(found))
            if not part:
                raise EOFError
            found += part
        return found

    def begin(self, method: str, *arguments: Any, timeout_us: int | None = None) -> int:
        self.last += 1
        self.say(CALL, self.last, self.numbers[method], timeout_us, arguments)
        return self.last

    def call(self, method: str, *arguments: Any, timeout_us: int | None = None) -> Any:
        number = self.begin(method, *arguments, timeout_us=timeout_us)
        kind, answered, *rest = self.hear()
        assert answered == number
        return rest[0] if kind == REPLY else (kind, *rest)

    def results(self, number: int, slow: bool = False) -> list[Any]:
        """The items of a stream, with credit for each as it is taken."""
        found: list[Any] = []
        taken = 0
        while True:
            kind, answered, *rest = self.hear()
            assert answered == number
            if kind == END:
                return found
            assert kind == ITEM
            found.append(rest[0])
            taken += len(pack(rest[0])) + ITEM_COST
            self.say(WINDOW, number, self.window + taken)

    def stream(self, number: int, items: list[Any]) -> Any:
        """Send a stream as credit allows; returns the answer, and how often it had to wait."""
        credit, sent, waits = self.credit, 0, 0
        for item in items:
            while sent >= credit:
                kind, answered, credit = self.hear()
                assert (kind, answered) == (WINDOW, number)
                waits += 1
            self.say(ITEM, number, item)
            sent += len(pack(item)) + ITEM_COST
        self.say(END, number)
        while (heard := self.hear())[0] == WINDOW:
            pass
        assert heard[:2] == [REPLY, number]
        return heard[2], waits

    def close(self) -> None:
        self.socket.close()


def canonical(value: Any) -> Any:
    """A schema in its canonical form, whatever form it was read in."""
    if isinstance(value, dict):
        return {name: canonical(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        items = [canonical(item) for item in value]
        return [items[0], *sorted(items[1:], key=pack)] if items[:1] in (["one of"], ["union"]) else items
    return value


class Transfer(msgspec.Struct, tag="transfer", tag_field="kind"):
    amount: int
    to: str = "nobody"


class Bank(rpc.Service):
    def __init__(self) -> None:
        self.journal = Journal()

    async def add(self, a: int, b: int = 5) -> int:
        return a + b

    async def book(self, transfer: Transfer | None, how: Literal["now", "later"]) -> dict[str, Any]:
        return {"got": transfer, "how": how}

    async def fail(self) -> None:
        raise rpc.Error(rpc.Code.NOT_FOUND, "no such account", {"account": 7})

    async def mirror(self, data: memoryview) -> bytes:
        return bytes(data)[::-1]

    async def wait(self) -> None:
        self.journal("waits")
        try:
            await asyncio.Event().wait()
        finally:
            self.journal("ends")

    async def count(self, number: int) -> AsyncIterator[int]:
        for value in range(number):
            yield value

    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    async def double(self, numbers: AsyncIterator[int]) -> AsyncIterator[int]:
        async for number in numbers:
            yield 2 * number


async def spoken(net: Net, conversation: Any, **options: Any) -> Any:
    """Have a conversation with a server in a thread."""
    server = await net.serve(Bank(), **options)

    def run() -> Any:
        client = Client(net.address(server))  # type: ignore[arg-type]
        try:
            return conversation(client)
        finally:
            client.close()

    return await asyncio.to_thread(run)


async def test_calls(net: Net):
    def conversation(client: Client) -> None:
        assert client.service == "Bank"
        assert client.call("add", 1, 2) == 3
        assert client.call("add", 1) == 6
        transfer = {"kind": "transfer", "amount": 1, "to": "me", "unknown": 0}
        booked = {"got": {"kind": "transfer", "amount": 1, "to": "me"}, "how": "now"}
        assert client.call("book", transfer, "now") == booked
        assert client.call("mirror", b"123") == b"321"
        assert client.call("fail") == (FAILURE, 5, "no such account", {"account": 7}, None, True)
        assert client.call("add", "1")[:2] == (FAILURE, 3)
        assert client.call("mirror", [1, 100])[:2] == (FAILURE, 3)  # a loan, without RDMA
        assert client.call("wait", timeout_us=1000)[:2] == (FAILURE, 4)
        client.say(CALL, 9, 999, None, [])
        assert client.hear()[:3] == [FAILURE, 9, 12]
        client.say(PING, 1 << 52)
        assert client.hear() == [PONG, 1 << 52]
        client.say(CANCEL, 9)
        client.say(RELEASE, 9)
        client.say(WINDOW, 9, 1 << 52)
        number = client.begin("wait")
        client.say(CANCEL, number)
        assert client.hear()[:3] == [FAILURE, number, 1]
        assert client.call("add", 1, 2) == 3

    await spoken(net, conversation)


async def test_streams(net: Net):
    def conversation(client: Client) -> None:
        assert client.results(client.begin("count", 100)) == list(range(100))
        assert client.results(client.begin("count", 0)) == []
        answer, waits = client.stream(client.begin("total"), list(range(1000)))
        assert answer == sum(range(1000)) and waits > 5
        number = client.begin("double")
        for value in (1, 2):
            client.say(ITEM, number, value)
            assert client.hear() == [ITEM, number, 2 * value]
        client.say(END, number)
        assert client.hear() == [END, number]
        number = client.begin("count", 1 << 40)
        assert [client.hear()[2] for _ in range(5)] == list(range(5))
        client.say(CANCEL, number)
        while (heard := client.hear())[0] == ITEM:
            pass
        assert heard[:3] == [FAILURE, number, 1]
        assert client.call("add", 1, 2) == 3

    await spoken(net, conversation, limits=rpc.Limits(stream_bytes=2000))


async def test_credit(net: Net):
    """The server keeps to it exactly: an item that begins within its credit, and no more."""

    def conversation(client: Client) -> int:
        number = client.begin("count", 100)
        client.say(PING, 1)
        items = 0
        pongs = 0
        while pongs < 20:
            if client.hear()[0] == ITEM:
                items += 1
            else:
                pongs += 1
                client.say(PING, pongs)
        client.say(CANCEL, number)
        return items

    assert await spoken(net, conversation) == -(-1000 // (1 + ITEM_COST))


async def test_the_digest(net: Net):
    server = await net.serve(Bank())

    def conversation() -> None:
        stranger = Client(net.address(server))  # type: ignore[arg-type]
        digest = hashlib.sha256(pack(canonical(stranger.schema))).digest()
        assert digest == stranger.digest
        stranger.close()
        friend = Client(net.address(server), digest)  # type: ignore[arg-type]
        assert friend.schema is None and friend.digest == digest
        friend.numbers = stranger.numbers
        assert friend.call("add", 1, 2) == 3
        friend.close()

    await asyncio.to_thread(conversation)


async def test_the_end(net: Net):
    """Goaway, and that half of a connection is none."""
    service = Bank()
    server = await net.serve(service)
    loop = asyncio.get_running_loop()

    def conversation() -> None:
        client = Client(net.address(server))  # type: ignore[arg-type]
        number = client.begin("wait")
        drained = asyncio.run_coroutine_threadsafe(service.journal.until("waits"), loop)
        drained.result()
        loop.call_soon_threadsafe(lambda: asyncio.ensure_future(server.drain()))
        assert client.hear() == [GOAWAY, "it is shutting down"]
        assert client.hear() == [PING, 1]
        assert client.call("add", 1, 2) == 3  # as if it had crossed
        client.say(PONG, 1)
        assert client.hear() == [GOAWAY, "it is shutting down", 2]
        late = client.begin("add", 1, 2)
        assert client.hear()[:3] == [FAILURE, late, 14]
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            client.hear()
        client.close()
        assert number == 1

    await asyncio.to_thread(conversation)
    await service.journal.until("ends")
