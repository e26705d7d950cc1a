"""Listens where a client looks for its peer, asks it for the secret, and tries words on the proof that it gets.

argv: a file of words. It says its port; when it has the proof, which word fits, if any, and how many it tried.
"""

import hashlib
import hmac
import socket
import struct

MAGIC, CHALLENGE, GREETING = 0x53524E52, 2, 72
nonce = bytes(32)
with socket.create_server(("127.0.0.1", 0)) as listener, open(argv[0]) as file:
    say(port=listener.getsockname()[1])
    if hear()["comes"]:
        client, _ = listener.accept()
        with client:
            hello = client.recv(GREETING, socket.MSG_WAITALL)
            client.sendall(struct.pack("<IB3x32s32x", MAGIC, CHALLENGE, nonce))
            proof = client.recv(32, socket.MSG_WAITALL)
        assert len(proof) == 32
        tried, found = 0, None
        for word in file.read().split("\n"):
            tried += 1
            key = hashlib.sha256(word.encode()).digest()
            if hmac.digest(key, b"stream requester\0" + hello + nonce, "sha256") == proof:
                found = word
        say(tried=tried, found=found)
