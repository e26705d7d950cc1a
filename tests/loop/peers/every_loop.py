"""Makes loops by many names, here and in children, and prints which fabric a connection to itself takes on each."""

import asyncio
import multiprocessing
import subprocess
import sys

import uvloop


async def main():
    served = asyncio.get_running_loop().create_future()

    async def serve(reader, writer):
        writer.close()
        await writer.wait_closed()
        served.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    print(writer.get_extra_info("fabric"), flush=True)
    await reader.read()
    writer.close()
    await writer.wait_closed()
    await served
    server.close()


def on(loop):
    loop.run_until_complete(main())
    loop.close()


def here():
    asyncio.run(main())


if __name__ == "__main__":
    print(sys.argv[1:], flush=True)
    here()
    on(asyncio.new_event_loop())
    on(asyncio.SelectorEventLoop())
    if sys.version_info < (3, 14):  # which deprecates policies
        on(asyncio.DefaultEventLoopPolicy().new_event_loop())
    else:
        on(asyncio.EventLoop())
    uvloop.run(main())
    on(uvloop.new_event_loop())
    if sys.argv[1:] == ["first", "-m"]:
        for method in ("fork", "spawn", "forkserver"):
            child = multiprocessing.get_context(method).Process(target=here)
            child.start()
            child.join()
        subprocess.run([sys.executable, __file__, "again"], check=True)
