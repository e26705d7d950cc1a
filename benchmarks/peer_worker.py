"""One process of `benchmarks.peers`: the side that answers, or the one that asks.

usage: PYTHON -m benchmarks.peer_worker PEER serve|ask MODE SIZE COUNT CPU WHERE

Whoever asks writes each cache line of a message and sends it; whoever answers reads each, and does the same.
MODE is polling or sleeping: how both wait. WHERE is a directory of this pair's own. The server prints a line
when it can be asked; the client prints the median round trip in seconds.

Each peer is a function that returns how to exchange messages. It is written as its project's manual does it, with
what that offers to save copies.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.touch import address_of, function

WARM_UP = 20
fill = function("fill", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ubyte)
look = function("look", ctypes.c_void_p, ctypes.c_size_t)


class Pair:
    """What a peer is asked to do."""

    def __init__(self, asks: bool, polls: bool, size: int, count: int, where: str) -> None:
        self.asks, self.polls, self.size, self.count, self.where = asks, polls, size, count, where

    @property
    def sides(self) -> tuple[str, str]:
        """Names of what we send by and what we receive by."""
        return ("requests", "replies") if self.asks else ("replies", "requests")

    def buffer(self) -> tuple[bytearray, int]:
        """Memory for a message, and where it is."""
        memory = bytearray(self.size)
        return memory, address_of(memory)

    def ready(self) -> None:
        if not self.asks:
            print("ready", flush=True)

    def run(self, send: Callable[[], object], receive: Callable[[], object]) -> None:
        """`send` fills and sends a message, `receive` waits for one and looks at it."""
        times = []
        for _ in range(WARM_UP + self.count):
            begun = time.perf_counter()
            for step in (send, receive) if self.asks else (receive, send):
                step()
            times.append(time.perf_counter() - begun)
        self.tell(times)

    async def run_async(
        self, send: Callable[[], Awaitable[object]], receive: Callable[[], Awaitable[object]]
    ) -> None:
        times = []
        for _ in range(WARM_UP + self.count):
            begun = time.perf_counter()
            for step in (send, receive) if self.asks else (receive, send):
                await step()
            times.append(time.perf_counter() - begun)
        self.tell(times)

    def tell(self, times: list[float]) -> None:
        if self.asks:
            print("took", statistics.median(times[WARM_UP:]), flush=True)


def rdmanet(pair: Pair) -> None:
    import uvloop

    import rdmanet

    options = {"busy_poll": float("inf") if pair.polls else 0.0}

    async def exchange(reader: Any, writer: Any) -> None:
        sent, received = (memoryview(rdmanet.alloc(pair.size)) for _ in range(2))
        out, come = address_of(sent), address_of(received)

        async def send() -> None:
            fill(out, pair.size, 1)
            writer.write(sent)
            await writer.drain()

        async def receive() -> None:
            await reader.readinto_exactly(received)
            look(come, pair.size)

        await pair.run_async(send, receive)
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        port_file = Path(pair.where, "port")
        if pair.asks:
            await exchange(
                *await rdmanet.open_rdma_connection("127.0.0.1", int(port_file.read_text()), **options)
            )
            return
        served: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        server = await rdmanet.start_rdma_stream_server(
            lambda *ends: served.set_result(ends), "127.0.0.1", 0, **options
        )
        port_file.write_text(str(server.sockets[0].getsockname()[1]))
        pair.ready()
        await exchange(*await served)
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def pyzmq(pair: Pair) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        (socket.connect if pair.asks else socket.bind)(f"ipc://{pair.where}/zmq")
        sent, out = pair.buffer()
        received, come = pair.buffer()
        pair.ready()

        def send() -> None:
            fill(out, pair.size, 1)
            socket.send(sent)

        def receive() -> None:
            if not pair.polls:
                socket.recv_into(received)
            else:
                while True:
                    try:
                        socket.recv_into(received, flags=zmq.NOBLOCK)
                        break
                    except zmq.Again:
                        pass
            look(come, pair.size)

        pair.run(send, receive)
        socket.setsockopt(zmq.LINGER, 1000)


def iceoryx2(pair: Pair) -> None:
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    ports = []
    for side in pair.sides:
        name = iox2.ServiceName.new(f"{pair.where}/{side}")
        service = node.service_builder(name).publish_subscribe(iox2.Slice[ctypes.c_uint8]).open_or_create()
        event = node.service_builder(name).event().open_or_create()
        ports.append((service, event))
    (sends, rings), (receives, hears) = ports
    publisher = sends.publisher_builder().initial_max_slice_len(pair.size).create()
    subscriber = receives.subscriber_builder().create()
    notifier, listener = rings.notifier_builder().create(), hears.listener_builder().create()
    pair.ready()

    def send() -> None:
        sample = publisher.loan_slice_uninit(pair.size)
        fill(sample.payload_ptr, pair.size, 1)
        sample.assume_init().send()
        if not pair.polls:
            notifier.notify()

    def receive() -> None:
        while (sample := subscriber.receive()) is None:
            if not pair.polls:
                listener.blocking_wait()
        look(sample.payload_ptr, pair.size)
        sample.delete()

    pair.run(send, receive)


def zenoh(pair: Pair) -> None:
    import zenoh

    config = zenoh.Config()
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("transport/shared_memory/enabled", "true")
    config.insert_json5(
        "connect/endpoints" if pair.asks else "listen/endpoints", f'["unixsock-stream/{pair.where}/zenoh"]'
    )
    with zenoh.open(config) as session:
        publisher = session.declare_publisher(
            f"bench/{pair.sides[0]}", congestion_control=zenoh.CongestionControl.BLOCK, express=True
        )
        subscriber = session.declare_subscriber(f"bench/{pair.sides[1]}")
        sent, out = pair.buffer()
        pair.ready()
        while pair.asks and not publisher.matching_status.matching:
            time.sleep(0.01)

        def send() -> None:
            fill(out, pair.size, 1)
            publisher.put(sent)

        def receive() -> None:
            if not pair.polls:
                sample = subscriber.recv()
            else:
                while (sample := subscriber.try_recv()) is None:
                    pass
            received = sample.payload.to_bytes()
            look(received, len(received))

        pair.run(send, receive)


def ucxx(pair: Pair) -> None:
    os.environ["UCXPY_PROGRESS_MODE"] = "polling" if pair.polls else "blocking"
    import numpy
    import ucxx

    port_file = Path(pair.where, "port")
    sent, received = (numpy.zeros(pair.size, dtype=numpy.uint8) for _ in range(2))

    async def exchange(endpoint: Any) -> None:
        async def send() -> None:
            fill(sent.ctypes.data, pair.size, 1)
            await endpoint.send(sent)

        async def receive() -> None:
            await endpoint.recv(received)
            look(received.ctypes.data, pair.size)

        await pair.run_async(send, receive)

    async def main() -> None:
        if pair.asks:
            endpoint = await ucxx.create_endpoint("127.0.0.1", int(port_file.read_text()))
            await exchange(endpoint)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve(endpoint: Any) -> None:
            await exchange(endpoint)
            done.set_result(None)

        listener = ucxx.create_listener(serve)
        port_file.write_text(str(listener.port))
        pair.ready()
        await done

    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # its objects are not torn down in an order that it likes


def shared_memory(pair: Pair) -> None:
    """Two halves of one file, and a counter for each; who sleeps reads a byte from a pipe."""
    page = mmap.PAGESIZE
    room = -(-pair.size // page) * page
    path = Path(pair.where, "memory")
    if not pair.asks:
        path.write_bytes(bytes(2 * (page + room)))
        for side in pair.sides:
            os.mkfifo(Path(pair.where, side))
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    pair.ready()
    pipes = [os.open(Path(pair.where, side), os.O_RDWR) for side in pair.sides]
    halves = [memory[: page + room], memory[page + room :]]
    sends, receives = halves if pair.asks else halves[::-1]
    sent, received = (half[:8].cast("Q") for half in (sends, receives))
    out, come = (address_of(half) + page for half in (sends, receives))
    heard = 0

    def send() -> None:
        fill(out, pair.size, 1)
        if pair.polls:
            sent[0] += 1
        else:
            os.write(pipes[0], b".")

    def receive() -> None:
        nonlocal heard
        if pair.polls:
            while received[0] == heard:
                pass
            heard += 1
        else:
            os.read(pipes[1], 1)
        look(come, pair.size)

    pair.run(send, receive)


PEERS = (rdmanet, pyzmq, iceoryx2, zenoh, ucxx, shared_memory)


def main() -> None:
    name, role, mode, size, count, cpu, where = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu)})
    peer = next(peer for peer in PEERS if peer.__name__ == name)
    peer(Pair(role == "ask", mode == "polling", int(size), int(count), where))


if __name__ == "__main__":
    main()
