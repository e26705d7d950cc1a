"""Listens by TCP, and tells the first client a challenge with a wrong proof: says what it `heard` before, and after."""

import os
import socket

from tests.support.versions import WIRE

listener = socket.create_server(("127.0.0.1", 0))
name = socket.socket(socket.AF_UNIX)
name.bind(f"\0rdmanet-cm/::ffff:127.0.0.1/{listener.getsockname()[1]}")  # else it is a TCP program's
say(port=listener.getsockname()[1])
client = listener.accept()[0]
say(heard=client.recv(4096).hex())
client.sendall(b"RDMC" + bytes([WIRE]) + b"\x0a\0\x48" + os.urandom(64))
heard = b""
while more := client.recv(4096):
    heard += more
say(heard=heard.hex())
hear()
