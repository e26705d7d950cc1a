"""Listens on a TCP port that a queue pair had, and welcomes whoever comes: argv is the port.

Says that it `has` it; then how many bytes of greeting and what else it `got` from the first who came.
"""

import socket
import struct

HELLO = struct.Struct("<IHHIIII16s32s")
GREETING = struct.Struct("<IB3x32s32s")
MAGIC, WELCOME = 0x53524E52, 1

heir = socket.socket()
heir.bind(("127.0.0.1", int(argv[0])))
heir.listen()
say(has=True)
connection = heir.accept()[0]
hello, got = connection.recv(HELLO.size, socket.MSG_WAITALL), b""
if hello:
    connection.sendall(GREETING.pack(MAGIC, WELCOME, bytes(32), bytes(32)))
    try:
        while argv[1].encode() not in got and (more := connection.recv(4096)):
            got += more
    except ConnectionResetError:
        pass
say(hello=len(hello), got=got.decode("latin-1"))
hear()
