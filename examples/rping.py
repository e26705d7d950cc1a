"""A ping that the server reads from the client's memory and writes back, like rping; either side may be that C program.

usage: python examples/rping.py -s | -c  [-a ADDRESS] [-p PORT] [-S SIZE] [-C COUNT]

The client sends the address of its memory, and the server's device accesses it; the client's program only gets a
message when that is done. One ping is

    client                                 server
    SEND  here is the ping     -------->
                               <--------   RDMA READ    the ping
                               <--------   SEND         go on
    SEND  here is room for it  -------->
                               <--------   RDMA WRITE   the ping
                               <--------   SEND         done

A message is an address, a key and a length; the server's messages leave them unused. Neither side sends twice in a row,
so one receive is enough, if it is posted before the message whose answer it receives.
"""

import argparse
import asyncio
import contextlib
import struct
import sys

import rdmanet.verbs as v
from rdmanet.errors import printable
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ

WHERE = struct.Struct("!QII")  # address, rkey, length
# The peer may read and write it. iWARP requires REMOTE_WRITE also for memory that a READ fills.
SHARED = v.AccessFlags.LOCAL_WRITE | v.AccessFlags.REMOTE_READ | v.AccessFlags.REMOTE_WRITE


class Side:
    """One end of a connection that is about to be made, with its memory."""

    def __init__(self, id: AsyncCMID, size: int, stack: contextlib.ExitStack) -> None:
        pd = stack.enter_context(v.PD(id.context))
        cq = stack.enter_context(AsyncCQ(id.context, 64))
        self.heard, self.said = (stack.enter_context(pd.alloc_mr(WHERE.size)) for _ in range(2))
        self.ping, self.pong = (stack.enter_context(pd.alloc_mr(size, SHARED)) for _ in range(2))
        stack.callback(id.close)
        self.qp = id.create_qp(pd, cq, v.QPCap(max_send_wr=4, max_recv_wr=2))

    async def hear(self) -> v.RemoteMemory:
        """The peer's next message."""
        received = await self.qp.recv(self.heard)
        address, rkey, length = WHERE.unpack(self.heard[: received.byte_len])
        return v.RemoteMemory(address, length, rkey)

    async def say(self, memory: v.MR) -> v.RemoteMemory:
        """Tell the peer where memory is; returns its answer."""
        self.said[:] = WHERE.pack(memory.address, memory.rkey, memory.length)
        answer, _ = await asyncio.gather(self.hear(), self.qp.send(self.said))  # in this order
        return answer

    async def answer_pings(self, size: int) -> None:
        remote = await self.hear()
        while True:
            await self.qp.read(self.ping.at[: len(remote)], remote)
            text, end, _ = self.ping[: len(remote)].partition(b"\0")
            print("server ping data:", printable(text.decode(errors="replace"), size), flush=True)
            remote = await self.say(self.ping)
            await self.qp.write(self.ping.at[: len(text + end)], remote)
            remote = await self.say(self.ping)


async def serve(id: AsyncCMID, size: int) -> None:
    """Answer a client's pings until it hangs up."""
    with contextlib.ExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Side(id, size, stack).answer_pings(size))
                await asyncio.sleep(0)  # its first receive is posted before the client may send
                await id.accept()
                await id.disconnected()
                id.close()  # ends what the task waits for; hanging up does not, on every device
        except* v.CompletionResetError:
            pass


async def ping(id: AsyncCMID, size: int, count: int) -> None:
    with contextlib.ExitStack() as stack:
        side = Side(id, size, stack)
        await id.connect()
        for number in range(count):
            side.ping[:] = (b"rdma-ping-%d: there and back" % number).ljust(size, b".")[: size - 1] + b"\0"
            await side.say(side.ping)
            await side.say(side.pong)
            if side.pong[:] != side.ping[:]:
                raise ValueError(f"ping {number} came back as {side.pong[:]!r}")
            print("ping data:", side.pong[:-1].decode())
        await id.disconnect()


async def main() -> None:
    parser = argparse.ArgumentParser(description="rping -v -V, with its options")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("-s", "--server", action="store_true")
    role.add_argument("-c", "--client", action="store_true")
    parser.add_argument("-d", "--device", help="one of the library to use; by default the first of all")
    parser.add_argument("-a", "--address", default="0.0.0.0")
    parser.add_argument("-p", "--port", type=int, default=7174)
    parser.add_argument("-C", "--count", type=int, default=10, help="of pings")
    parser.add_argument("-S", "--size", type=int, default=64, help="of a ping; for a server, of the longest")
    args = parser.parse_args()
    library = v.find_device(args.device).library
    if args.server:
        with AsyncCMListener((args.address, args.port), library=library) as listener:
            print("listening on", *listener.local_addr, flush=True)
            await serve(await listener.get_request(), args.size)
    else:
        with AsyncCMID(library=library) as id:
            await id.resolve((args.address, args.port))
            await ping(id, args.size, args.count)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
