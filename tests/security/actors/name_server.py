"""Serves requests of the connection manager by name alone: argv is the port, which a TCP program has on 127.0.0.1.

It says `listens`, and then, for each request, its `request`, and whether it came `by_link`: in memory, from a process
that it is linked to. It keeps the connections. A line with `become` has it lock itself up (link_words.py), and it says
`became`.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct

from link_words import become
from rdmanet.verbs import PD, QPCap
from rdmanet.verbs_async import AsyncCMListener, AsyncCQ

kept = []


def is_clients(sock):
    """Whether this socket was accepted at the name, from a process of our own user."""
    if sock.family != socket.AF_UNIX or not os.fsencode(sock.getsockname()).startswith(b"\0rdmanet-cm/"):
        return False
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.geteuid() and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def has_clients_socket():
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is the listing's own, or its client has gone
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as sock:
                if is_clients(sock):
                    return True
    return False


async def serve(listener):
    async for id in listener:
        say(request=id.private_data.rstrip(b"\0").decode(), by_link=not has_clients_socket())
        cq = AsyncCQ(id.context, 8)
        id.create_qp(PD(id.context), cq, QPCap(max_send_wr=1, max_recv_wr=1))
        kept.append((id, cq))
        await id.accept(b"by name")


async def main():
    with AsyncCMListener(("127.0.0.1", int(argv[0]))) as listener:
        say(listens=True)
        serving = asyncio.create_task(serve(listener))
        while (order := await asyncio.get_running_loop().run_in_executor(None, hear)) is not None:
            become(*order["become"])
            say(became=True)
        serving.cancel()


asyncio.run(main())
