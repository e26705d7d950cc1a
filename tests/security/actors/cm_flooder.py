"""Floods the connection manager over one connection after another: argv is port, how many, kind, MiB.

`ready` asks, and says behind the answer that it is ready, without end; `refused` asks without the secret, and goes on
behind that. Each connection goes on for so many MiB, if nobody hangs up. It says how many came to their end (`through`)
and on how many somebody hung up (`ended`).
"""

import socket
import struct

from tests.support.versions import WIRE

from rdmanet import credit

REQ, RTU = 1, 3
MIB = 1 << 20


def message(kind, body=b""):
    return struct.pack(">4sBBH", b"RDMC", WIRE, kind, 8 + len(body)) + body


hello = credit.pack_hello(credit.Hello(4096, 8))
head = struct.pack(">II", 0x123456, 0) + bytes([1, 1, 7, 0, 1, 0, len(hello), 0]) + bytes(8)
request = message(REQ, head + hello.ljust(56, b"\0"))
port, count, kind, mib = int(argv[0]), int(argv[1]), argv[2], int(argv[3])
flood = message(RTU) * (MIB // 8)
through = ended = 0
for _ in range(count):
    with socket.create_connection(("127.0.0.1", port), 30) as stranger:
        try:
            if kind == "ready":
                stranger.sendall(request)
                answer = stranger.recv(232, socket.MSG_WAITALL)
                assert len(answer) == 232, answer
            else:
                stranger.sendall(request + flood)
            for _ in range(mib):
                stranger.sendall(flood)
        except ConnectionError:
            ended += 1
        else:
            through += 1
say(through=through, ended=ended)
