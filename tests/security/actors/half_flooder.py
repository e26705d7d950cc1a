"""Floods a stream server by TCP with valid requests: argv is the port, and how many connections at a time.

Each asks, and says nothing more if it is accepted. As soon as one is hung up on, or refused, the next one comes. It
says `there` when the first of them have asked, and for each line how many it has made (`made`), how many of these were
accepted, and how many refused or hung up on (`ended`).
"""

import os
import resource
import select
import socket
import struct
import sys

from tests.support.versions import WIRE

from rdmanet import credit

REQ, REP, MRA = 1, 2, 12


def message(kind, body):
    return struct.pack(">4sBBH", b"RDMC", WIRE, kind, 8 + len(body)) + body


hello = credit.pack_hello(credit.Hello(4096, 8))
head = struct.pack(">II", 0x123456, 0) + bytes([1, 1, 7, 0, 1, 0, len(hello), 0]) + bytes(8)  # no RNR retries
request = message(REQ, head + hello.ljust(56, b"\0"))
port, count = int(argv[0]), int(argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, max(count + 100, 4096)))
os.nice(10)  # somebody else's processors
poll = select.epoll()
there = {}
counts = {"made": 0, "accepted": 0, "ended": 0}


def ask():
    one = socket.socket()
    one.connect(("127.0.0.1", port))
    one.send(request)
    one.setblocking(False)
    there[one.fileno()] = one
    poll.register(one, select.EPOLLIN)
    counts["made"] += 1


def look(fd):
    """Is it still to stay?"""
    try:
        answer = there[fd].recv(4096)
    except ConnectionError:
        return False
    kinds = set()
    while answer:
        kinds.add(answer[5])
        answer = answer[int.from_bytes(answer[6:8], "big") :]
    counts["accepted"] += REP in kinds
    return bool(kinds) and kinds <= {REP, MRA}


for _ in range(count):
    ask()
say(there=True)
poll.register(sys.stdin, select.EPOLLIN)
while True:
    for fd, _ in poll.poll():
        if fd == sys.stdin.fileno():
            if hear() is None:
                raise SystemExit
            say(**counts)
        elif not look(fd):
            poll.unregister(fd)
            there.pop(fd).close()
            counts["ended"] += 1
            ask()
