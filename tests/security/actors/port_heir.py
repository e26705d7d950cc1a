"""Listens on a TCP port that a queue pair had, and welcomes whoever comes: argv is the port (0: one that none can
have), and the text that it waits for.

Says that it has the `port`; then how many bytes of greeting (`hello`) and what else it `got` from the first who came;
or when it is asked how many `came`: none.
"""

import select
import socket
import struct

HELLO = struct.Struct("<IHHIIII16s32s")
GREETING = struct.Struct("<IB3x32s32s")
MAGIC, WELCOME = 0x53524E52, 1


def serve(connection):
    hello, got = connection.recv(HELLO.size, socket.MSG_WAITALL), b""
    if hello:
        connection.sendall(GREETING.pack(MAGIC, WELCOME, bytes(32), bytes(32)))
    try:
        while hello and argv[1].encode() not in got and (more := connection.recv(4096)):
            got += more
    except ConnectionResetError:
        pass
    say(hello=len(hello), got=got.decode("latin-1"))


def bind(heir, ports):
    for port in ports:
        try:
            heir.bind(("127.0.0.1", port))
        except OSError:
            continue
        return
    raise OSError(f"none of {ports} is to be had")


with socket.socket() as heir:
    bind(heir, [int(argv[0])] if int(argv[0]) else range(20000, 32768))
    heir.listen()
    say(port=heir.getsockname()[1])
    ready, _, _ = select.select([0, heir], [], [])
    if heir in ready:
        serve(heir.accept()[0])
        hear()
    else:
        say(came=0)
