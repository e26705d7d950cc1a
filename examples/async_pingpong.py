"""Ping-pong with `await`, on a connection that is made in one of two ways.

usage: python examples/async_pingpong.py [--cm] [OPTION...]         the server
       python examples/async_pingpong.py [--cm] [OPTION...] HOST    the client

To connect two queue pairs, each side needs the address of the other's. Without --cm, exchange() sends the addresses
over TCP, and the program chooses the device. With --cm the connection manager connects them: it finds the device that
reaches HOST, and the queue pairs belong to its identifiers. The traffic on the connection is the same.

An operation is a coroutine: it is posted when it first runs, and returns with its completion. So `gather(recv, send)`
posts the receive for the answer before it sends the question. That order is necessary: a reliable connection delivers a
message only into a posted receive. For the same reason the server posts its first receive before the client can send.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import rdmanet.verbs as v
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ, AsyncQP, exchange

CAP = v.QPCap(max_send_wr=2, max_recv_wr=2)


@dataclass
class Side:
    """A queue pair, a message to send, and room for one."""

    qp: AsyncQP
    ours: v.SGE
    theirs: v.SGE

    async def ping(self, count: int) -> None:
        started = time.perf_counter()
        for _ in range(count):
            await asyncio.gather(self.qp.recv(self.theirs), self.qp.send(self.ours))
        seconds = time.perf_counter() - started
        print(f"{count} iters in {seconds:.2f} seconds = {seconds * 1e6 / count:.2f} usec/iter")

    async def pong(self, count: int) -> None:
        """Answer; the first message is there already."""
        for _ in range(count - 1):
            await asyncio.gather(self.qp.recv(self.theirs), self.qp.send(self.ours))
        await self.qp.send(self.ours)


@contextlib.contextmanager
def open_side(args: argparse.Namespace, id: AsyncCMID | None = None) -> Iterator[Side]:
    with contextlib.ExitStack() as stack:
        context = id.context if id else stack.enter_context(v.open_device(args.device))
        pd = stack.enter_context(v.PD(context))
        cq = stack.enter_context(AsyncCQ(context, 64))
        mr = stack.enter_context(pd.alloc_mr(2 * args.size))
        qp = stack.enter_context(id.create_qp(pd, cq, CAP) if id else cq.create_qp(pd, CAP))
        yield Side(qp, mr.at[: args.size], mr.at[args.size :])


# In both ways the server hangs up, when it knows that its last message has arrived; the client waits for that.


async def serve_by_exchange(args: argparse.Namespace) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), open_side(args) as side:
            side.qp.qp.to_init()  # receives can be posted
            await asyncio.gather(side.qp.recv(side.theirs), exchange(side.qp, reader, writer))
            await side.pong(args.iters)

    async with await asyncio.start_server(serve, "0.0.0.0", args.port) as server:
        print("listening on", *server.sockets[0].getsockname(), flush=True)
        await server.serve_forever()


async def play_by_exchange(args: argparse.Namespace) -> None:
    reader, writer = await asyncio.open_connection(args.host, args.port)
    with contextlib.closing(writer), open_side(args) as side:
        await exchange(side.qp, reader, writer)
        await side.ping(args.iters)
        await reader.read()


async def serve_by_cm(args: argparse.Namespace) -> None:
    with AsyncCMListener(("0.0.0.0", args.port), library=v.find_device(args.device).library) as listener:
        print("listening on", *listener.local_addr, flush=True)
        async for id in listener:  # one that leaves early ends only what is its own
            with contextlib.suppress(OSError), id, open_side(args, id) as side:
                await asyncio.gather(side.qp.recv(side.theirs), id.accept())
                await side.pong(args.iters)
                await id.disconnect()


async def play_by_cm(args: argparse.Namespace) -> None:
    with AsyncCMID(library=v.find_device(args.device).library) as id:
        await id.resolve((args.host, args.port))
        with open_side(args, id) as side:
            await id.connect()
            await side.ping(args.iters)
            await id.disconnected()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cm", action="store_true", help="connect by the connection manager")
    parser.add_argument("-d", "--device", help="by default the first; with --cm, one of the library to use")
    parser.add_argument("-p", "--port", type=int, default=18515)
    parser.add_argument("-s", "--size", type=int, default=4096, help="of a message")
    parser.add_argument("-n", "--iters", type=int, default=1000, help="each way, the same for both sides")
    parser.add_argument("host", nargs="?")
    args = parser.parse_args()
    serve, play = (serve_by_cm, play_by_cm) if args.cm else (serve_by_exchange, play_by_exchange)
    try:
        asyncio.run(play(args) if args.host else serve(args))
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)


if __name__ == "__main__":
    main()
