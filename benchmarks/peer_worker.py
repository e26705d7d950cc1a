"""One process of `benchmarks.peers`: the side that answers, or the one that asks.

usage: PYTHON -m benchmarks.peer_worker PEER serve|ask polling|sleeping round-trip|one-way SIZE COUNT CPU WHERE

Whoever asks writes each cache line of a message and sends it; whoever answers reads each, and does the same. One way,
only the last message is answered. Both poll, or both sleep. WHERE is a directory of this pair's own. The server prints
a line when it can be asked. The client prints the seconds that a message took: the median round trip, or the time from
the first message to the answer, divided by the number of messages.

Each peer is a function that says how to exchange messages. It is written as its project's manual does it, with what
that offers to save copies.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.touch import address_of, function

WARM_UP = 20
SLOTS = 2
"""Messages that may be on the way at once in plain shared memory."""
fill = function("fill", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ubyte)
look = function("look", ctypes.c_void_p, ctypes.c_size_t)


class Pair:
    """What a peer is asked to do."""

    def __init__(self, asks: bool, polls: bool, one_way: bool, size: int, count: int, where: str) -> None:
        self.asks, self.polls, self.one_way = asks, polls, one_way
        self.size, self.count, self.where = size, count, where

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

    def steps(self) -> Iterator[bool]:
        """Say, again and again, whether a message is to go there or back. Tell at the end what that took."""
        times: list[float] = []
        warm_up = min(WARM_UP, self.count)
        if self.one_way:
            for burst in (warm_up, self.count):
                begun = time.perf_counter()
                for _ in range(burst):
                    yield True
                yield False
                times = [(time.perf_counter() - begun) / (burst + 1)]
        else:
            for _ in range(warm_up + self.count):
                begun = time.perf_counter()
                yield True
                yield False
                times.append(time.perf_counter() - begun)
            del times[:warm_up]
        if self.asks:
            print("took", statistics.median(times), flush=True)

    def run(self, send: Callable[[], object], receive: Callable[[], object]) -> None:
        """`send` fills and sends a message, `receive` waits for one and looks at it."""
        back, there = (receive, send) if self.asks else (send, receive)
        for goes in self.steps():
            (there if goes else back)()

    async def run_async(
        self, send: Callable[[], Awaitable[object]], receive: Callable[[], Awaitable[object]]
    ) -> None:
        back, there = (receive, send) if self.asks else (send, receive)
        for goes in self.steps():
            await (there if goes else back)()


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
        if pair.size >= 1 << 20:  # by default a thousand messages may wait, and take memory
            socket.set_hwm(4)
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
        messages = node.service_builder(name).publish_subscribe(iox2.Slice[ctypes.c_uint8])
        service = messages.enable_safe_overflow(False).open_or_create()  # it loses none
        event = node.service_builder(name).event().open_or_create()
        ports.append((service, event))
    (sends, rings), (receives, hears) = ports
    blocks = sends.publisher_builder().backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
    publisher = blocks.initial_max_slice_len(pair.size).create()
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
        if not pair.asks:
            await (
                asyncio.Event().wait()
            )  # until we are killed: an endpoint that ends takes its last message back

    async def main() -> None:
        if pair.asks:
            endpoint = await ucxx.create_endpoint("127.0.0.1", int(port_file.read_text()))
            await exchange(endpoint)
            return
        listener = ucxx.create_listener(exchange)
        port_file.write_text(str(listener.port))
        pair.ready()
        await asyncio.Event().wait()

    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # its objects are not torn down in an order that it likes


def shared_memory(pair: Pair) -> None:
    """Slots in one file, and counters of what was sent and read; who sleeps reads a byte from a pipe."""
    page = mmap.PAGESIZE
    slot = -(-pair.size // page) * page
    half = page + SLOTS * slot
    path = Path(pair.where, "memory")
    pipes = [f"{side}-{what}" for side in pair.sides for what in ("sent", "read")]
    if not pair.asks:
        path.write_bytes(bytes(2 * half))
        for name in pipes:
            os.mkfifo(Path(pair.where, name))
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    halves = [memory[:half], memory[half:]]
    sends, receives = halves if pair.asks else halves[::-1]
    out, come = (address_of(memory) + page for memory in (sends, receives))
    # Counters of the sender and of the reader, in cache lines of their own.
    sent, freed = sends[:8].cast("Q"), sends[64:72].cast("Q")
    arrived, read = receives[:8].cast("Q"), receives[64:72].cast("Q")
    tells_sent, hears_freed, hears_sent, tells_read = (
        os.open(Path(pair.where, name), os.O_RDWR) for name in pipes
    )
    filled = heard = 0
    pair.ready()

    def send() -> None:
        nonlocal filled
        if filled >= SLOTS and pair.one_way:  # else the answer has said that the slot is free
            if pair.polls:
                while filled - freed[0] == SLOTS:
                    pass
            else:
                os.read(hears_freed, 1)
        fill(out + filled % SLOTS * slot, pair.size, 1)
        filled += 1
        if pair.polls:
            sent[0] = filled
        else:
            os.write(tells_sent, b".")

    def receive() -> None:
        nonlocal heard
        if pair.polls:
            while arrived[0] == heard:
                pass
        else:
            os.read(hears_sent, 1)
        look(come + heard % SLOTS * slot, pair.size)
        heard += 1
        if pair.polls:
            read[0] = heard
        elif pair.one_way:
            os.write(tells_read, b".")

    pair.run(send, receive)


def multiprocessing(pair: Pair) -> None:
    """A connection of the standard library, as multiprocessing.Pipe() makes it."""
    from multiprocessing.connection import Client, Listener

    path = f"{pair.where}/connection"
    if pair.asks:
        connection = Client(path, "AF_UNIX")
    else:
        with Listener(path, "AF_UNIX") as listener:
            pair.ready()
            connection = listener.accept()
    sent, out = pair.buffer()
    received, come = pair.buffer()

    def send() -> None:
        fill(out, pair.size, 1)
        connection.send_bytes(sent)

    def receive() -> None:
        while pair.polls and not connection.poll():
            pass
        connection.recv_bytes_into(received)
        look(come, pair.size)

    with connection:
        pair.run(send, receive)


def grpc_aio(pair: Pair) -> None:
    """Bytes without protobuf: a unary call for each round trip, a stream of requests one way. It cannot poll."""
    import grpc
    import grpc.aio

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

    def message() -> bytes:
        content, at = pair.buffer()
        fill(at, pair.size, 1)
        return bytes(content)

    def looked(content: bytes) -> bytes:
        look(content, len(content))
        return content

    async def answer(request: bytes, context: Any) -> bytes:
        looked(request)
        return message()

    async def answer_all(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            looked(request)
        return message()

    async def serve() -> None:
        server = grpc.aio.server(options=options)
        methods = {
            "answer": grpc.unary_unary_rpc_method_handler(answer),
            "answer_all": grpc.stream_unary_rpc_method_handler(answer_all),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Bench", methods)])
        server.add_insecure_port(f"unix:{pair.where}/grpc")
        await server.start()
        pair.ready()
        await server.wait_for_termination()

    async def ask() -> None:
        async with grpc.aio.insecure_channel(f"unix:{pair.where}/grpc", options) as channel:
            one, many = channel.unary_unary("/Bench/answer"), channel.stream_unary("/Bench/answer_all")
            call: Any = None
            for goes in pair.steps():
                if not goes:
                    if pair.one_way:
                        await call.done_writing()
                    looked(await call)
                    call = None
                elif pair.one_way:
                    call = call or many()
                    await call.write(message())
                else:
                    call = one(message())

    asyncio.run(ask() if pair.asks else serve())


PEERS = (rdmanet, pyzmq, iceoryx2, zenoh, ucxx, shared_memory, multiprocessing, grpc_aio)


def main() -> None:
    name, role, waiting, way, size, count, cpu, where = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu)})
    peer = next(peer for peer in PEERS if peer.__name__ == name)
    peer(Pair(role == "ask", waiting == "polling", way == "one-way", int(size), int(count), where))


if __name__ == "__main__":
    main()
