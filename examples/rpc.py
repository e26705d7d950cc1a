"""Call methods of an object in another process: over RDMA or, with --tcp, over TCP.

usage: python examples/rpc.py serve | call  [--tcp] [HOST] [PORT]

The class is all that both sides share. The server serves an instance, and the client gets an object with the same
methods: arguments are checked against the annotations, and mypy sees them. 8 MB of numbers go by reference over RDMA,
and in the message over TCP. Errors, and a deadline for one call, come back as rpc.Error.
"""

import argparse
import asyncio
import sys
import time
from array import array
from collections.abc import AsyncIterator

from rdmanet import rpc
from rdmanet.errors import printable


class Calculator(rpc.Service):
    async def add(self, numbers: list[float]) -> float:
        return sum(numbers)

    async def sleep(self, s: float, result: str) -> str:
        await asyncio.sleep(min(max(0, s), 5))  # 0 for what is no number
        return result

    async def largest(self, numbers: memoryview) -> float:
        if not numbers.nbytes or numbers.nbytes % 8:
            raise rpc.Error(rpc.Code.INVALID_ARGUMENT, f"{numbers.nbytes} bytes are no array of doubles")
        found: float = max(numbers.cast("d"))
        return found

    async def count(self, stop: int) -> AsyncIterator[int]:
        for number in range(stop):
            yield number


async def serve(host: str, port: int, transport: str) -> None:
    async with await rpc.serve(Calculator(), host, port, transport=transport) as server:
        print("listening on", *server.sockets[0].getsockname(), flush=True)
        await server.serve_forever()


async def call(host: str, port: int, transport: str) -> None:
    async with rpc.connect(Calculator, host, port, transport=transport) as calculator:
        print("1 + 2 + 3 =", await calculator.add([1, 2, 3]))
        naps = [calculator.sleep(s, f"slept for {s} s") for s in (0.2, 0.1)]
        for nap in asyncio.as_completed(naps):
            print(printable(await nap))
        million = array("d", range(1_000_000))
        print("the largest is", await calculator.largest(memoryview(million)))
        print("counted", [number async for number in calculator.count(5)])
        try:
            await rpc.options(calculator, timeout=0.05).sleep(5, "never")
        except rpc.Error as error:
            print(error)
        started = time.perf_counter()
        for _ in range(1000):
            await calculator.add([1, 1])
        print(f"{(time.perf_counter() - started) * 1e3:.0f} us a call")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "call"])
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("host", nargs="?", default="127.0.0.1")
    parser.add_argument("port", nargs="?", type=int, default=7473)
    args = parser.parse_intermixed_args()
    command = serve if args.command == "serve" else call
    try:
        asyncio.run(command(args.host, args.port, "tcp" if args.tcp else "rdma"))
    except (KeyboardInterrupt, OSError, rpc.Error) as exc:
        sys.exit(str(exc) or 130)


if __name__ == "__main__":
    main()
