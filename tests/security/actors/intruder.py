"""Comes to a queue pair by TCP, knows all of its numbers, and hasn't the secret.

argv: number of the queue pair, of its peer, sequence number, GID, attempts. It says what it was answered.
"""

import collections
import os
import socket
import struct

from tests.support.versions import WIRE

MAGIC, GREETING = 0x53524E52, 72
ANSWERS = {1: "welcome", 2: "challenge", 3: "refused", 4: "secret"}
number, peer, psn, gid, attempts = (
    int(argv[0]),
    int(argv[1]),
    int(argv[2]),
    bytes.fromhex(argv[3]),
    int(argv[4]),
)
answers = collections.Counter()
for _ in range(attempts):
    with socket.create_connection(("127.0.0.1", number >> 8), 30) as stream:
        stream.sendall(
            struct.pack("<IHHIIII16s32s", MAGIC, WIRE, 0, peer, number, psn, 0, gid, os.urandom(32))
        )
        while greeting := stream.recv(GREETING, socket.MSG_WAITALL):
            answers[answer := ANSWERS[greeting[4]]] += 1
            if answer == "challenge":
                stream.sendall(os.urandom(32))
            elif answer == "welcome":
                break
say(attempts=attempts, answers=answers)
