"""Remote procedure calls over a byte stream: over RDMA or, with --tcp, over TCP.

usage: python examples/rpc.py serve | call  [--tcp] [HOST] [PORT]

RDMA and TCP differ in one line on each side. A frame is a length of four bytes and that many bytes of msgpack: a Call,
or an Answer with the number of its call. Calls are answered when they end; with CALLS pending the server stops reading.

Input of the peer is checked: a frame has at most FRAME bytes (and at most CALLS of them are in memory), msgspec decodes
only a Call or an Answer, only FUNCTIONS can be called, and printable() escapes text of the peer.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

import rdmanet
from rdmanet.errors import printable

FRAME, CALLS = 1 << 16, 100
Call = tuple[int, str, list[Any]]  # its number, the function's name, arguments
Answer = tuple[int, Any, str | None]  # the call's number, what was returned, what was raised


async def send(writer: asyncio.StreamWriter, record: Call | Answer) -> None:
    body = msgspec.msgpack.encode(record)
    writer.write(len(body).to_bytes(4, "big") + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > FRAME:
        raise ValueError(f"the peer announces {length} bytes")
    return await reader.readexactly(length)


async def add(*numbers: float) -> float:
    return sum(numbers)


FUNCTIONS: dict[str, Callable[..., Awaitable[Any]]] = {"add": add}
FUNCTIONS["sleep"] = lambda s, result: asyncio.sleep(min(max(0, s), 5), result)  # 0 for what is no number


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def answer(number: int, function: str, arguments: list[Any]) -> None:
        try:
            await send(writer, (number, await FUNCTIONS[function](*arguments), None))
        except Exception as exc:
            await send(writer, (number, None, repr(exc)))

    room = asyncio.Semaphore(CALLS)
    try:
        async with asyncio.TaskGroup() as calls:
            while await room.acquire():
                call = msgspec.msgpack.decode(await receive(reader), type=Call)
                calls.create_task(answer(*call)).add_done_callback(lambda _: room.release())
    except* (EOFError, ConnectionError, ValueError, RecursionError):
        writer.close()  # it has gone, or does not make sense, or not at this depth


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.numbers = reader, writer, itertools.count()
        self.answers: dict[int, asyncio.Future[tuple[Any, str | None]]] = {}

    async def call(self, function: str, *arguments: Any) -> Any:
        """What the function returns; RuntimeError with what it raises."""
        number = next(self.numbers)
        self.answers[number] = answer = asyncio.get_running_loop().create_future()
        await send(self.writer, (number, function, list(arguments)))
        result, error = await answer
        if error is None:
            return result
        raise RuntimeError(f"{function}: {printable(error)}")

    async def receive_answers(self) -> None:
        """Give each call its answer, as long as there is a connection."""
        while True:
            number, *answer = msgspec.msgpack.decode(await receive(self.reader), type=Answer)
            if not (future := self.answers.pop(number)).cancelled():
                future.set_result(answer)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "call"])
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("host", nargs="?", default="127.0.0.1")
    parser.add_argument("port", nargs="?", type=int, default=7473)
    args = parser.parse_intermixed_args()
    if args.command == "serve":
        start_server = asyncio.start_server if args.tcp else rdmanet.start_rdma_stream_server
        server = await start_server(serve, args.host, args.port)
        print("listening on", *server.sockets[0].getsockname(), flush=True)
        await server.serve_forever()
    open_connection = asyncio.open_connection if args.tcp else rdmanet.open_rdma_connection
    client = Client(*await open_connection(args.host, args.port))
    async with asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(client.receive_answers())
        print("1 + 2 + 3 =", printable(str(await client.call("add", 1, 2, 3))))
        for nap in asyncio.as_completed([client.call("sleep", s, f"slept for {s} s") for s in (0.2, 0.1)]):
            print(printable(str(await nap)))
        started = time.perf_counter()
        for _ in range(1000):
            await client.call("add", 1, 1)
        print(f"{(time.perf_counter() - started) * 1e3:.0f} us a call")
        receiving.cancel()
    client.writer.close()
    await client.writer.wait_closed()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
