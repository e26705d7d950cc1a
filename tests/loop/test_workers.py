"""Several processes on one port: one of them serves RDMA, and when it dies another does."""

import asyncio
import contextlib
import signal
import socket

from loop_harness import peer

from rdmanet.loop import doors
from tests.support.waiting import until_seen


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pid, fabric = (await reader.readline()).split()
    return reader, writer, int(pid), fabric.decode()


async def test_another_worker_takes_over(tmp_path):
    with socket.socket() as reserved, contextlib.ExitStack() as stack:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        workers = {}
        for _ in range(3):
            worker = stack.enter_context(peer("worker.py", port))
            assert await worker.line() == "ready"
            workers[worker.pid] = worker
        kept = []
        while workers:
            reader, writer, pid, fabric = await connect(port)
            assert fabric == "rdma" and pid in workers
            kept.append((reader, writer, pid))
            # Each of those before has lost its connections, and nobody else's.
            workers.pop(pid).send_signal(signal.SIGKILL)
            assert await reader.read() == b""
            if workers:
                await until_seen(lambda: doors.owner("127.0.0.1", port) in workers)
        assert len({pid for _, _, pid in kept}) == 3
        for _, writer, _ in kept:
            writer.close()


async def test_meanwhile_others_are_reached_by_tcp():
    with socket.socket() as reserved, contextlib.ExitStack() as stack:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        first, second = (stack.enter_context(peer("worker.py", port)) for _ in range(2))
        for worker in (first, second):
            assert await worker.line() == "ready"
        holder = doors.owner("127.0.0.1", port)
        assert holder in (first.pid, second.pid)
        holder, other = (first, second) if holder == first.pid else (second, first)
        other.stop()
        holder.send_signal(signal.SIGKILL)
        await asyncio.get_running_loop().run_in_executor(None, holder.process.wait)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert writer.get_extra_info("fabric") == "tcp"
        other.send_signal(signal.SIGCONT)
        assert await reader.readline() == b"%d tcp\n" % other.pid
        writer.close()
