"""A program that gets along with few descriptors by TCP does so on the switched loop."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loop_harness import plain_server
from test_plain_peers import reason

from rdmanet.loop.choice import DESCRIPTORS_LEAST

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, rdmanet, resource, sys, {module}

async def main():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    for _ in range(3):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"question\\n")
        assert await reader.read() == b"question\\n"
        fabric = writer.get_extra_info("fabric")
        writer.close()
        await writer.wait_closed()
    server.close()
    print(fabric, writer.get_extra_info("fabric_reason"))

with asyncio.Runner(loop_factory=lambda: rdmanet.loop_factory(base={loop})) as runner:
    runner.run(main())
"""


@pytest.mark.once
@pytest.mark.parametrize("limit", [20, 28, 32, 36, 40, 48, DESCRIPTORS_LEAST - 1])
@pytest.mark.parametrize("loop", ["asyncio.SelectorEventLoop", "uvloop.Loop"])
def test_a_program_with_few(loop, limit):
    code = PROGRAM.format(loop=loop, module=loop.partition(".")[0])
    done = subprocess.run(
        [sys.executable, "-c", code, str(limit)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"tcp this process may have {limit} descriptors (`ulimit -n`), and RDMA needs {DESCRIPTORS_LEAST}\n"
    )


async def test_a_client_that_has_one_left():
    """What looks for a server's sign would take it from the connection."""
    server, port = await plain_server()
    asyncio.get_running_loop()._rdmanet.chooser.close()
    kept = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 64, limits[1]))
    try:
        with pytest.raises(OSError):
            while True:
                kept.append(socket.socket())
        for _ in range(2):  # the client's, and the server's
            kept.pop().close()
        chooser = asyncio.get_running_loop()._rdmanet.chooser
        spare = [socket.socket() for _ in range(2)]
        said = chooser.choose("127.0.0.1", ("127.0.0.1", port))
        for each in spare:
            each.close()
        assert said == "no descriptor is left to look for an RDMA server on this host"
    finally:
        for each in kept:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await reason(port)
    server.close()
