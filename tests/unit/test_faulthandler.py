"""A program that turns faulthandler on after it has connected sees a bus error there, and outlives it."""

import subprocess
import sys

PROGRAM = """
import asyncio, errno, faulthandler, mmap, os, tempfile

import rdmanet

over = asyncio.Queue()


class Sender(asyncio.Protocol):
    def connection_lost(self, exc):
        over.put_nowait(exc)


async def send(host, port):
    transport, _ = await rdmanet.create_rdma_connection(Sender, host, port)
    faulthandler.enable()
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        os.ftruncate(file.fileno(), 0)
        transport.write(memoryview(memory))
        error = await over.get()
    assert error.errno == errno.EFAULT, error


async def main():
    server = await rdmanet.start_rdma_server(asyncio.Protocol, "127.0.0.1", 0)
    for _ in range(2):  # faulthandler takes part once
        await send(*server.sockets[0].getsockname()[:2])
    server.close()
    await server.wait_closed()
    print("alive")


asyncio.run(main())
"""


def test_a_file_is_shortened_beside_faulthandler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    assert "Fatal Python error: Bus error" in done.stderr
