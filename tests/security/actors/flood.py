"""Connects to a door so and so often, and says nothing there.

usage: flood.py COUNT tcp ADDRESS PORT | flood.py COUNT stream NAME | flood.py COUNT packets NAME

NAME is of an abstract Unix socket. Begins when it is told to, says when it is half through, and when it has ended.
Then a line from the test is answered by how many of its connections have been closed by the other end.
"""

import errno
import os
import resource
import select
import socket
import struct

KINDS = {
    "tcp": (socket.AF_INET, socket.SOCK_STREAM),
    "stream": (socket.AF_UNIX, socket.SOCK_STREAM),
    "packets": (socket.AF_UNIX, socket.SOCK_SEQPACKET),
}
PATIENCE_S = 1

count, (family, kind) = int(argv[0]), KINDS[argv[1]]
address = (argv[2], int(argv[3])) if family == socket.AF_INET else "\0" + argv[2]
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, max(count + 100, 4096)))
os.nice(10)  # somebody else's processors
connections: list[socket.socket] = []


def knock() -> bool:
    """One more. False: nobody opens, and nobody takes us into the queue."""
    connection = socket.socket(family, kind)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_S, 0))
    try:
        connection.connect(address)
    except OSError as exc:
        connection.close()
        if exc.errno not in (errno.EAGAIN, errno.EINPROGRESS, errno.ETIMEDOUT):
            raise
        return False
    connections.append(connection)
    return True


def closed() -> int:
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    return len(poll.poll(0))


say(ready=True)
hear()
open_for_all = all(knock() for _ in range(count // 2))
say(made=len(connections))
open_for_all = open_for_all and all(knock() for _ in range(count - count // 2))
say(made=len(connections))
while hear():
    say(closed=closed())
