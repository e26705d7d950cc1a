"""Be a client in one of several ways, and say how it ended.

usage: client.py echo HOST PORT BYTES | several HOST PORT COUNT | wait HOST PORT | refused HOST PORT
       client.py idle|idle_blocking|idle_then_echo HOST PORT KEEPALIVE
"""

import ast
import asyncio
import sys

import rdmanet


async def echo(host, port, size):
    """So many bytes there and back; then which way they took, as the device counts them."""
    reader, writer = await rdmanet.open_rdma_connection(host, int(port))
    data = bytes(range(251)) * (int(size) // 251 + 1)
    data = data[: int(size)]

    async def send():
        for at in range(0, len(data), 100_000):
            writer.write(data[at : at + 100_000])
            await writer.drain()

    task = asyncio.create_task(send())
    assert await reader.readexactly(len(data)) == data
    await task
    near, far = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    counted = writer.get_extra_info("rdma_pd").context.counters()
    ways = [way for way in ("local", "mapped", "cma", "engine", "stream") if counted[f"bytes_{way}"]]
    writer.close()
    await writer.wait_closed()
    print(near[0], far[0], writer.get_extra_info("rdma_device"), *ways)


async def refused(host, port):
    """Say why there is no connection."""
    try:
        await rdmanet.open_rdma_connection(host, int(port))
    except ConnectionRefusedError as exc:
        print(exc)


async def several(host, port, count):
    """So many at once."""

    async def one(number):
        reader, writer = await rdmanet.open_rdma_connection(host, int(port))
        text = f"number {number}".encode()
        writer.write(text)
        assert await reader.readexactly(len(text)) == text
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*map(one, range(int(count))))
    print("done")


async def idle(host, port, keepalive):
    """Say how the connection ended, which nobody uses."""
    reader, writer = await rdmanet.open_rdma_connection(
        host, int(port), keepalive=ast.literal_eval(keepalive)
    )
    writer.write(b"x")
    await reader.readexactly(1)
    print("connected", flush=True)
    try:
        await reader.read()
        print("end", flush=True)
    except OSError as exc:
        print(type(exc).__name__, exc, flush=True)
    writer.close()


async def idle_blocking(host, port, keepalive):
    """The same by a blocking stream."""
    arguments = host, int(port), ast.literal_eval(keepalive)
    await asyncio.get_running_loop().run_in_executor(None, read_blocking, *arguments)


def read_blocking(host, port, keepalive):
    with rdmanet.open_rdma_stream(host, port, keepalive=keepalive) as stream:
        stream.sendall(b"x")
        stream.recv(1)
        print("connected", flush=True)
        try:
            print("end", stream.recv(1), flush=True)
        except OSError as exc:
            print(type(exc).__name__, exc, flush=True)


async def idle_then_echo(host, port, keepalive):
    """Idle until a line comes; then the connection is used again."""
    reader, writer = await rdmanet.open_rdma_connection(
        host, int(port), keepalive=ast.literal_eval(keepalive)
    )
    writer.write(b"x")
    await reader.readexactly(1)
    print("connected", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    writer.write(b"x")
    await reader.readexactly(1)
    print("echo", flush=True)
    writer.close()


async def wait(host, port):
    """Until the connection ends."""
    reader, writer = await rdmanet.open_rdma_connection(host, int(port))
    writer.write(b"x")
    await reader.readexactly(1)
    print("connected", flush=True)
    try:
        await reader.read()
        print("end")
    except ConnectionError:
        print("reset")
    writer.close()


WAYS = {
    "echo": echo,
    "refused": refused,
    "several": several,
    "wait": wait,
    "idle": idle,
    "idle_blocking": idle_blocking,
    "idle_then_echo": idle_then_echo,
}


async def main(way, *arguments):
    try:
        await WAYS[way](*arguments)
    except ConnectionRefusedError:
        print("refused")


asyncio.run(main(*sys.argv[1:]))
