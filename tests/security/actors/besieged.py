"""An echo server with the usual limit of descriptors, which it needs for files, too.

usage: besieged.py ADDRESS [named] [sleeping]

    named      a TCP program has the port, so that the manager listens by its name only
    sleeping   it never polls, so the device's engine hears all messages first

Says its port. Of the bytes that come each is answered: "q" by the connection's queue pair in six digits, others by
"y", if a file can be opened, and "n". A line from the test is answered by how many could, and could not.
"""

import asyncio
import os
import resource
import socket
import sys

import rdmanet

FILES = 1024
counts = {"opened": 0, "refused": 0}


def open_a_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        counts["refused"] += 1
        return False
    counts["opened"] += 1
    return True


def sample(loop: asyncio.AbstractEventLoop) -> None:
    """Also between messages."""
    open_a_file()
    loop.call_later(0.01, sample, loop)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while question := await reader.read(1):
            if question == b"q":
                writer.write(b"%06x" % writer.get_extra_info("rdma_qp"))
            else:
                writer.write(b"y" if open_a_file() else b"n")
    except ConnectionError:
        pass
    writer.close()


async def main(address: str, *options: str) -> None:
    loop = asyncio.get_running_loop()
    port, plain = 0, socket.socket()
    if "named" in options:
        plain.bind((address, 0))
        plain.listen()
        port = plain.getsockname()[1]
    busy_poll = 0 if "sleeping" in options else None
    server = await rdmanet.start_rdma_stream_server(serve, address, port, busy_poll=busy_poll)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    sample(loop)
    say(port=server.sockets[0].getsockname()[1])
    over = asyncio.Event()

    def asked() -> None:
        if sys.stdin.readline():
            say(**counts)
        else:
            over.set()

    loop.add_reader(sys.stdin, asked)
    await over.wait()
    server.close()
    server.close_clients()
    await server.wait_closed()
    plain.close()


asyncio.run(main(*argv))
