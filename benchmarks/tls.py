"""What TLS costs: CPU time of both ends of one connection in this process, beside OpenSSL alone.

    python -m benchmarks.tls

*alone* is ssl.MemoryBIO: encrypt, copy, decrypt. With aiofastnet installed, its TLS is measured over rdmanet's
transports, too. Each figure is the best of five.
"""

import asyncio
import importlib.util
import ssl
import time
from pathlib import Path

import uvloop

import rdmanet

CERTIFICATES = Path(__file__).parents[1] / "tests" / "streams" / "certificates"
SERVER = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
SERVER.load_cert_chain(CERTIFICATES / "server.pem")
CLIENT = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
ROUNDS = 5
SIZES = {64: 20000, 65536: 600, 1 << 20: 60}
LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


class End(asyncio.Protocol):
    """One end of a connection: it counts what comes, or answers it."""

    answers = False

    def connection_made(self, transport):
        self.transport = transport
        self.received = 0
        self.due = self.room = None

    def data_received(self, data):
        if self.answers:
            self.transport.write(data)
        self.received += len(data)
        if self.due is not None and self.received >= self.expected:
            self.due, due = None, self.due
            due.set_result(None)

    def expect(self, count):
        """Something to await until so many more bytes have come."""
        self.expected = self.received + count
        self.due = asyncio.get_running_loop().create_future()
        return self.due

    def pause_writing(self):
        self.room = asyncio.get_running_loop().create_future()

    def resume_writing(self):
        self.room, room = None, self.room
        room.set_result(None)


async def pair(kind):
    """(a server, the client's end, the server's end), the handshake done."""
    loop = asyncio.get_running_loop()
    accepted = loop.create_future()

    class Accepted(End):
        def connection_made(self, transport):
            super().connection_made(transport)
            accepted.set_result(self)

    if kind == "aiofastnet":
        return await pair_of_aiofastnet(loop, Accepted, accepted)
    listen, connect = (
        (loop.create_server, loop.create_connection)
        if kind == "TCP"
        else (rdmanet.start_rdma_server, rdmanet.create_rdma_connection)
    )
    server = await listen(Accepted, "127.0.0.1", 0, ssl=SERVER)
    _, client = await connect(End, *server.sockets[0].getsockname(), ssl=CLIENT)
    return server, client, await accepted


async def pair_of_aiofastnet(loop, protocol, accepted):
    from aiofastnet import start_tls

    server = await rdmanet.start_rdma_server(protocol, "127.0.0.1", 0)
    _, client = await rdmanet.create_rdma_connection(End, *server.sockets[0].getsockname())
    far = await accepted
    client.transport, far.transport = await asyncio.gather(
        start_tls(loop, client.transport, client, CLIENT, server_hostname="localhost"),
        start_tls(loop, far.transport, far, SERVER, server_side=True),
    )
    return server, client, far


def best(times):
    return min(times) * 1e6


def alone(size, count):
    """Microseconds of CPU for a message, by OpenSSL."""
    bios = [ssl.MemoryBIO() for _ in range(4)]
    client = CLIENT.wrap_bio(bios[0], bios[1], server_hostname="localhost")
    server = SERVER.wrap_bio(bios[2], bios[3], server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            pass
        bios[2].write(bios[1].read())
        bios[0].write(bios[3].read())
    data, times = bytes(size), []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(count):
            client.write(data)
            bios[2].write(bios[1].read())
            got = 0
            while got < size:
                got += len(server.read(min(size, 262144)))
        times.append((time.process_time() - began) / count)
    return best(times)


async def one_way(kind, size, count):
    """The same over a connection."""
    server, client, far = await pair(kind)
    data, times = bytes(size), []
    for _ in range(ROUNDS):
        arrived = far.expect(size * count)
        began = time.process_time()
        for _ in range(count):
            client.transport.write(data)
            if client.room is not None:
                await client.room
        await arrived
        times.append((time.process_time() - began) / count)
    await end(server, client, far)
    return best(times)


async def round_trip(kind, size, count):
    """The same for a message and its echo, one at a time."""
    server, client, far = await pair(kind)
    far.answers = True
    data, times = bytes(size), []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(count):
            answer = client.expect(size)
            client.transport.write(data)
            await answer
        times.append((time.process_time() - began) / count)
    await end(server, client, far)
    return best(times)


async def end(server, client, far):
    client.transport.abort()
    far.transport.abort()
    server.close()
    await server.wait_closed()


def main() -> None:
    kinds = ["rdmanet", "TCP"] + ["aiofastnet"] * bool(importlib.util.find_spec("aiofastnet"))
    for size, count in SIZES.items():
        base = alone(size, count)
        print(f"one way {size} B: alone {base:.2f} µs")
        for name, factory in LOOPS.items():
            for kind in kinds:
                with asyncio.Runner(loop_factory=factory) as runner:
                    cost = runner.run(one_way(kind, size, count))
                print(f"    {name}, {kind}: {cost:.2f} µs, {cost / base:.2f} times")
    print("round trip 64 B:")
    for name, factory in LOOPS.items():
        for kind in kinds:
            with asyncio.Runner(loop_factory=factory) as runner:
                print(f"    {name}, {kind}: {runner.run(round_trip(kind, 64, 2000)):.2f} µs")


if __name__ == "__main__":
    main()
