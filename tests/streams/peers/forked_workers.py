"""forked_workers.py WAY: listens, and forks workers that connect to it, each on several loops one after another.

WAY is how programs fork: "fork" by os.fork, "pool" by multiprocessing.Pool, "executor" by ProcessPoolExecutor. The
parent serves them meanwhile, so its event channels stay open all the time.
"""

import asyncio
import concurrent.futures
import multiprocessing
import os
import sys
import warnings

from script import HOST, port_of, say

import rdmanet

warnings.simplefilter("ignore", DeprecationWarning)  # pools have threads, which go together badly with forks
FORK = multiprocessing.get_context("fork")
WORKERS = 2
LOOPS = 3  # of each worker


def run(main):
    if os.environ.get("RDMANET_TEST_LOOP") == "uvloop":
        import uvloop

        return uvloop.run(main)
    return asyncio.run(main)


async def ask(port):
    reader, writer = await rdmanet.open_rdma_connection(HOST, port)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


def work(port):
    asyncio._set_running_loop(None)  # the parent's, in a child that was forked by a coroutine
    return [run(ask(port)) for _ in range(LOOPS)]


async def by_fork(port):
    children = []
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if work(port) == [b"hello\n"] * LOOPS else 2
            finally:
                os._exit(status)
        children.append(os.pidfd_open(pid))
    loop = asyncio.get_running_loop()
    for child in children:
        ended = loop.create_future()
        loop.add_reader(child, ended.set_result, None)
        await ended
        loop.remove_reader(child)
        assert os.waitid(os.P_PIDFD, child, os.WEXITED).si_status == 0
        os.close(child)
    return [[b"hello\n"] * LOOPS] * WORKERS


async def by_pool(port):
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    with FORK.Pool(WORKERS) as pool:
        pool.map_async(
            work,
            [port] * 2 * WORKERS,
            chunksize=1,
            callback=lambda found: loop.call_soon_threadsafe(done.set_result, found),
            error_callback=lambda exc: loop.call_soon_threadsafe(done.set_exception, exc),
        )
        return await done


async def by_executor(port):
    loop = asyncio.get_running_loop()
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=FORK) as pool:
        return await asyncio.gather(*(loop.run_in_executor(pool, work, port) for _ in range(2 * WORKERS)))


async def main():
    async def serve(reader, writer):
        writer.write(b"hello\n")
        writer.close()

    server = await rdmanet.start_rdma_stream_server(serve, HOST, 0)
    ways = {"fork": by_fork, "pool": by_pool, "executor": by_executor}
    answers = await ways[sys.argv[1]](port_of(server))
    assert all(answer == [b"hello\n"] * LOOPS for answer in answers), answers
    server.close()


run(main())
say("well")
