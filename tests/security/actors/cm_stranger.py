"""Speaks the connection manager's language, without the secret: argv is the port, and how many times each way.

Says for each way how the attempts ended: with a REP, a REJ and its reason, or without a word.
"""

import collections
import os
import socket
import struct

from tests.support.versions import WIRE

REQ, REP, REJ, HELLO, CHALLENGE, PROOF, MRA = 1, 2, 4, 9, 10, 11, 12


def message(kind, body):
    return struct.pack(">4sBBH", b"RDMC", WIRE, kind, 8 + len(body)) + body


REQUEST = message(REQ, struct.pack(">II", 0x123456, 0).ljust(80, b"\0"))


def read(conversation, length):
    said = b""
    while len(said) < length and (more := conversation.recv(length - len(said))):
        said += more
    return said


def how_it_ends(conversation):
    kind = MRA  # says that the server needs time to answer
    while kind == MRA:
        header = read(conversation, 8)
        if len(header) < 8:
            return "nothing"
        _, _, kind, length = struct.unpack(">4sBBH", header)
        body = read(conversation, length - 8)
    if kind == REJ:
        return f"REJ {int.from_bytes(body[:2], 'big'):#x}"
    return {REP: "REP", CHALLENGE: "CHALLENGE"}.get(kind, f"message {kind}")


def just_ask(conversation):
    conversation.sendall(REQUEST)


def prove_with(proof_of):
    """Both HELLOs, and then a proof, and the request behind it."""

    def way(conversation):
        nonce = os.urandom(32)
        conversation.sendall(message(HELLO, nonce))
        challenge = read(conversation, 72)
        if len(challenge) == 72 and challenge[5] == CHALLENGE:
            conversation.sendall(message(PROOF, proof_of(challenge)) + REQUEST)

    return way


def ask_unproven(conversation):
    conversation.sendall(message(HELLO, os.urandom(32)))
    if read(conversation, 72)[5:6] == bytes([CHALLENGE]):
        conversation.sendall(REQUEST)


def prove_unasked(conversation):
    conversation.sendall(message(PROOF, os.urandom(32)) + REQUEST)


ways = {
    "asks": just_ask,
    "guesses": prove_with(lambda challenge: os.urandom(32)),
    "mirrors": prove_with(lambda challenge: challenge[40:]),
    "mirrors the nonce": prove_with(lambda challenge: challenge[8:40]),
    "asks unproven": ask_unproven,
    "proves unasked": prove_unasked,
}
ends = {name: collections.Counter() for name in ways}
for name, way in ways.items():
    for _ in range(int(argv[1])):
        with socket.create_connection(("127.0.0.1", int(argv[0]))) as conversation:
            try:
                way(conversation)
                ends[name][how_it_ends(conversation)] += 1
            except ConnectionError:
                ends[name]["nothing"] += 1
say(**ends)
hear()
