"""A program that gets along with few descriptors by TCP does so on the switched loop."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from loop_harness import Recorder

from rdmanet.loop import choice
from rdmanet.loop.choice import DESCRIPTORS_LEAST, Chooser
from rdmanet.loop.peers import Peers
from tests.support.descriptors import descriptors_left
from tests.support.waiting import until_seen

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


async def test_a_client_that_has_one_left(monkeypatch):
    """It is for the TCP connection, and not for what looks for a server's sign."""
    monkeypatch.setattr(choice, "DESCRIPTORS_LEAST", 0)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        made = [await loop.create_connection(Recorder, *address)]  # uvloop takes more for its first
        loop._rdmanet.chooser.close()
        for _ in range(2):
            with descriptors_left(1):
                made.append(await loop.create_connection(Recorder, *address))
            assert made[-1][0].get_extra_info("fabric_reason") == (
                "no descriptor is left to look for an RDMA server on this host"
            )
        for transport, _ in made:
            transport.abort()
        await until_seen(lambda: all("lost" in protocol.events for _, protocol in made))


def test_who_takes_tcp_anyhow_needs_none_to_choose():
    chooser = Chooser(Peers("192.0.2.1"))
    with descriptors_left(0):
        for _ in range(2):
            said = chooser.choose("127.0.0.1", ("127.0.0.1", 7))
            assert said == "the peers that RDMA is for do not include it"
