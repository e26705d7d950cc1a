"""Asks for connections, is accepted, and falls silent: argv is the port, and how many attempts at most.

It ends when one that was accepted is hung up on, or after so many attempts; it says how many of each there were, and
keeps its connections until it hears a line.
"""

import select
import socket
import struct

from tests.support.versions import WIRE

REQ, REP, REJ = 1, 2, 4
body = (struct.pack(">II", 0x123456, 0) + bytes([1, 1, 7, 0, 1])).ljust(80, b"\0")
request = struct.pack(">4sBBH", b"RDMC", WIRE, REQ, 8 + len(body)) + body
attempts = accepted = refused = shown_out = 0
held, poll = {}, select.poll()
while attempts < int(argv[1]) and not shown_out:
    attempts += 1
    one = socket.create_connection(("127.0.0.1", int(argv[0])), 30)
    try:
        one.sendall(request)
        kind = one.recv(232)[5]
    except (ConnectionError, IndexError):
        kind = REJ
    if kind == REP:
        accepted += 1
        held[one.fileno()] = one
        poll.register(one, select.POLLIN)
    else:
        refused += 1
        one.close()
    shown_out = len(poll.poll(0))
say(attempts=attempts, accepted=accepted, refused=refused, shown_out=shown_out)
hear()
