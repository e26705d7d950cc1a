"""A lock in offered memory that outlives its holders: who dies loses it when its lease is over.

usage: python examples/lock_with_lease.py serve [HOST PORT] | hold NUMBER HOST PORT [-s SECONDS]

The lock is eight bytes of the server, which only offers them: clients change them by compare_and_swap(). They hold when
the lease ends, in milliseconds, and the number of the client that has it; 0 says that nobody does.

- To take it, swap 0, or a lease that is over, for one of your own. Of all who try only one finds what it expects.
- To keep it, swap your lease for a later one, in good time.
- To give it back, swap your lease for 0.

A client that was stopped for longer than its lease does not know that it has lost the lock. So look at the clock before
each step that the lock protects, and make steps short; a step that must never come late needs the owner of what is
changed to refuse old leases. The clocks of all hosts must agree, but for a small part of a lease.
"""

import argparse
import asyncio
import sys
import time

import rdmanet

LEASE_MS = 1000
NUMBER_BITS = 16


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def end_ms(word: int) -> int:
    """When the lease is over; long ago, if nobody has the lock."""
    return word >> NUMBER_BITS


class Lock:
    """The lock, as one client sees it; `number` is that client's own, from 1 on."""

    def __init__(self, memory: rdmanet.OfferedMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        self.word = 0

    async def swap(self, expected: int, word: int) -> int:
        """What the lock was: `expected`, if it is `word` now."""
        found = await self.memory.compare_and_swap(0, expected, word)
        if found == expected:
            self.word = word
        return found

    def lease(self) -> int:
        return (now_ms() + LEASE_MS) << NUMBER_BITS | self.number

    async def take(self) -> None:
        expected = 0
        while (found := await self.swap(expected, self.lease())) != expected:
            if not expected:
                print(f"client {self.number} waits for client {found & ((1 << NUMBER_BITS) - 1)}", flush=True)
            while (left_ms := end_ms(found) - now_ms()) >= 0:
                await asyncio.sleep((left_ms + 1) / 1000)
            expected = found  # whoever has it may have kept it meanwhile: then this is not what is found

    async def keep(self) -> None:
        mine = self.word
        if await self.swap(mine, self.lease()) != mine:
            raise TimeoutError(f"client {self.number} has lost the lock: its lease was over, another took it")

    async def give_back(self) -> None:
        await self.swap(self.word, 0)  # not if it is another's by now


async def serve(host: str, port: int) -> None:
    async def offer(reader: rdmanet.RdmaStreamReader, writer: rdmanet.RdmaStreamWriter) -> None:
        async with writer.offer(memory, access="atomic"):
            await reader.read()  # until the client is gone
        writer.close()

    server = await rdmanet.start_rdma_stream_server(offer, host, port)
    with server.register(bytearray(8)) as memory:
        print("the lock is at {}, {}".format(*server.sockets[0].getsockname()[:2]), flush=True)
        await server.serve_forever()


async def hold(number: int, host: str, port: int, seconds: float) -> None:
    reader, writer = await rdmanet.open_rdma_connection(host, port)
    memory = await reader.next_offer()
    if memory is None:
        raise ConnectionError("the server has closed the connection")
    lock = Lock(memory, number)
    await lock.take()
    print(f"client {number} has the lock", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(min(LEASE_MS / 3000, seconds))
        await lock.keep()
    await lock.give_back()
    print(f"client {number} has given it back", flush=True)
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    server, holder = commands.add_parser("serve"), commands.add_parser("hold")
    holder.add_argument("number", type=int)
    for command in server, holder:
        command.add_argument("host", nargs="?", default="127.0.0.1")
        command.add_argument("port", nargs="?", type=int, default=7476)
    holder.add_argument("-s", "--seconds", type=float, default=3.0)
    args = parser.parse_args()
    if args.command == "serve":
        await serve(args.host, args.port)
    else:
        await hold(args.number, args.host, args.port, args.seconds)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
