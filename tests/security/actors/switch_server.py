"""A server: argv is its address, its port, and what it is, of `plain` (of TCP alone), `shared` (its port is, with other
workers), `trusting` (it believes all who register), `patient` (it keeps all who say nothing at its register).

Says its `port`, and then, for each line that it hears, how many `requests` it has had, and how many descriptors are
`left`, up to `MANY`. At a line with `tcp_alone` it ends its RDMA first.
"""

import asyncio
import contextlib
import encodings.idna  # noqa: F401
import os

import rdmanet
import rdmanet.loop.serving
import rdmanet.loop.workers
import rdmanet.transport
from rdmanet.loop.trust import Speaker

address, port, *kinds = argv
requests = 0
MANY = 32


async def answer(reader, writer):
    global requests
    await reader.readline()
    requests += 1
    writer.write(b"the server\n")
    writer.close()


def descriptors_left():
    opened = []
    with contextlib.suppress(OSError):
        while len(opened) < MANY:
            opened.append(os.dup(0))
    for fd in opened:
        os.close(fd)
    return len(opened)


async def main():
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(answer, address, int(port), reuse_port="shared" in kinds)
    say(port=server.sockets[0].getsockname()[1])
    while (order := await loop.run_in_executor(None, hear)) is not None:
        if "tcp_alone" in order:
            for each in server._rdma:
                each.close()
        say(requests=requests, left=descriptors_left())
    server.close()


if "trusting" in kinds:
    Speaker.why_not = Speaker.why_not_with = lambda *_: ""
if "patient" in kinds:
    rdmanet.loop.workers._CALLERS_MOST = 1 << 20
if "plain" in kinds:
    asyncio.run(main())
else:
    rdmanet.run(main())
