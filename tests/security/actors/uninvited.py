"""Tries to get in without the secret, so and so often.

usage: uninvited.py COUNT manager ADDRESS PORT     by the connection manager, as any program does
       uninvited.py COUNT queues ADDRESS PORT      at a queue pair's port: a requester's words, and a guessed proof
       uninvited.py COUNT link NAME                at a queue pair's name: words that are none

Begins when it is told to, and says how it was received.
"""

import asyncio
import os
import resource
import socket
import struct
from collections import Counter

from tests.support.versions import WIRE

import rdmanet

AT_ONCE = 20
HELLO = struct.Struct("<4sHHIIII16s32s")
HAS_SECRET = 1
GREETING, CHALLENGE, WELCOME = 72, 2, 1

count, door, *address = argv
os.nice(10)  # somebody else's processors
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))


async def by_manager() -> str:
    try:
        _, writer = await rdmanet.open_rdma_connection(address[0], int(address[1]))
    except OSError:
        return "refused"
    writer.close()
    return "in"


async def at_queue_pair() -> str:
    ours, its = 0x800001, int(address[1]) << 8
    heard, writer = "nothing", None  # it may close before we are through
    try:
        reader, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(HELLO.pack(b"RNRS", WIRE, HAS_SECRET, ours, its, 0, 0, bytes(16), os.urandom(32)))
        if (await reader.readexactly(GREETING))[4] == CHALLENGE:
            heard = "challenged"
        writer.write(os.urandom(32))
        heard = "in" if (await reader.readexactly(GREETING))[4] == WELCOME else "refused"
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    if writer is not None:
        writer.close()
    return heard


async def at_link() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setblocking(False)
        try:
            link.connect("\0" + address[0])
            link.send(bytes(64))
            heard = await asyncio.get_running_loop().sock_recv(link, 1000)
        except BlockingIOError:
            return "busy"
        except ConnectionError:
            return "closed"
    return "refused" if heard else "closed"


async def main() -> None:
    way = {"manager": by_manager, "queues": at_queue_pair, "link": at_link}[door]
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> str:
        async with room:
            return await way()

    say(**Counter(await asyncio.gather(*(one() for _ in range(int(count))))))


say(ready=True)
hear()
asyncio.run(main())
