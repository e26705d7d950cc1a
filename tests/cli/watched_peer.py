"""A process for `rdmanet ss` to look at: it has a server and connections, and does what its test says, line by line."""

import asyncio
import contextlib
import os
import resource
import select
import sys

import rdmanet
from tests.support.lines import hear, tell
from tests.support.waiting import until_seen

MUCH = 16 << 20
ends: list["End"] = []


class End(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        ends.append(self)

    def region_offered(self, remote):
        self.remote = remote


def take_all(taken: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))


async def main() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(End, "127.0.0.1", 0)
    plain = await loop._rdmanet.base.create_server(asyncio.Protocol, "127.0.0.1", 0)
    port, plain_port = (each.sockets[0].getsockname()[1] for each in (server, plain))
    transport, _ = await loop.create_connection(End, "127.0.0.1", port)
    by_tcp, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", plain_port)
    transport.write(b"hello")
    await until_seen(lambda: len(ends) == 2)
    tell(port=port, plain=plain_port)
    while said := await loop.run_in_executor(None, hear):
        if said["do"] == "do not read":
            ends[1].transport.pause_reading()
            transport.write(bytes(MUCH))
            await until_seen(lambda: not transport.get_extra_info("rdma_stats")["credits"])
        elif said["do"] == "read":
            async with ends[1].transport.offer(bytearray(4096)):
                await until_seen(lambda: hasattr(ends[0], "remote"))
                for _ in range(200):
                    await ends[0].remote.read(0, 8)
        elif said["do"] == "compute":
            tell(done=True)
            while not select.select([sys.stdin], [], [], 0)[0]:
                pass
            hear()
        elif said["do"] == "take all descriptors":
            taken = [os.open("/dev/null", os.O_RDONLY)]
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 8, hard))
            take_all(taken)
            tell(done=True)
            heard = asyncio.ensure_future(loop.run_in_executor(None, hear))
            while not (await asyncio.wait([heard], timeout=0.01))[0]:
                take_all(taken)  # a connection may have given its socket back
            for fd in taken:
                os.close(fd)
        elif said["do"] == "block":
            tell(done=True)
            hear()
        tell(done=True)
    for each in (transport, by_tcp, ends[1].transport):
        each.abort()
    server.close()
    plain.close()


rdmanet.run(main(), loop_factory={"asyncio": asyncio.SelectorEventLoop, "uvloop": None}[sys.argv[1]])
