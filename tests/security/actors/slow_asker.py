"""Knows the secret, and is slow to prove it: argv is address and port, how many, and the secret.

Says how many were `challenged`. When it hears a line all prove what they know, and ask; it says how they `ended`.
"""

import collections
import hashlib
import hmac
import os
import socket
import struct

from tests.support.versions import WIRE

from rdmanet import credit

REQ, HELLO, PROOF = 1, 9, 11


def message(kind, body):
    return struct.pack(">4sBBH", b"RDMC", WIRE, kind, 8 + len(body)) + body


greeting = credit.pack_hello(credit.Hello(4096, 8))
head = struct.pack(">II", 0x123456, 0) + bytes([1, 1, 7, 0, 1, 0, len(greeting), 0]) + bytes(8)
request = message(REQ, head + greeting.ljust(56, b"\0"))
askers = []
for _ in range(int(argv[2])):
    one = socket.create_connection((argv[0], int(argv[1])), 30)
    hello = message(HELLO, os.urandom(32))
    one.sendall(hello)
    challenge = one.recv(72, socket.MSG_WAITALL)
    askers.append((one, hello + challenge[:40]))
say(challenged=len(askers))
hear()
ended = collections.Counter()
for one, hellos in askers:
    try:
        # Both HELLOs: the passive side's without its header, which is filled in when it is sent.
        said = b"cm active\0" + hellos[:40] + bytes(8) + hellos[48:]
        one.sendall(message(PROOF, hmac.digest(bytes.fromhex(argv[3]), said, hashlib.sha256)) + request)
        ended[{2: "asked and answered", 4: "refused"}.get(one.recv(232)[5], "?")] += 1
    except (ConnectionError, IndexError):
        ended["refused"] += 1
say(ended=ended)
