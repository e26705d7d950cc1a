"""Puts up a door of a TCP server's, or registers as its worker: argv is who it is, with commas between (the roles are
link_words.become's), `door` or `worker`, the server's address and port.

Says the `port` of its own server, or why it is `unfit`; then, for each line that it hears, how many `requests` it got.
"""

import asyncio
import contextlib
import socket

from tests.support.waiting import begin

import rdmanet
import rdmanet.streams.reader_writer
import rdmanet.transport
from link_words import become_or_end
from rdmanet.loop import kernel

roles, what, address, port = argv
NUMBER = 3  # of a descriptor: nothing that it could say would be true
requests = 0
kept = []


async def answer(reader, writer):
    global requests
    await reader.readline()
    requests += 1
    writer.write(b"the impostor\n")
    writer.close()


async def put_up_door(name, own_port, inode):
    sign, door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    kept.append(sign)
    for each in (sign, door):
        each.bind(name)
    door.listen()
    door.setblocking(False)
    while True:
        caller, _ = await asyncio.get_running_loop().sock_accept(door)
        with caller, contextlib.suppress(OSError):
            caller.send(b"rdmanet-stream 2 %d %d %d\n" % (own_port, NUMBER, inode))


def register(name, own_port, inode):
    for _ in range(19):
        worker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker.connect(name + b"/workers")
        kept.append(worker)
        worker.setblocking(False)
        with contextlib.suppress(OSError):  # it may be sent away at once
            worker.send(b"rdmanet-worker 2 %d %d %d\n" % (own_port, inode, NUMBER))
            asyncio.get_running_loop().add_reader(worker, hear_front, worker)


def hear_front(worker):
    """As a worker that is not busy."""
    with contextlib.suppress(OSError):
        if worker.recv(4096):
            return
    asyncio.get_running_loop().remove_reader(worker)


async def main():
    server = await rdmanet.start_rdma_stream_server(answer, "127.0.0.1", 0)
    own_port = server.sockets[0].getsockname()[1]
    listener = kernel.tcp_listener("127.0.0.1", own_port)
    inode = listener.inode if listener else 0
    name = b"\0rdmanet-stream/%s/%d" % (address.encode(), int(port))
    loop = asyncio.get_running_loop()
    if what == "door":
        kept.extend(await begin(put_up_door(name, own_port, inode)))
    else:
        register(name, own_port, inode)
    say(port=own_port)
    while await loop.run_in_executor(None, hear) is not None:
        say(requests=requests)


become_or_end(roles.split(","), say)
asyncio.run(main())
