"""An echo server over RDMA: written as a Protocol, or with --streams as a coroutine.

usage: python examples/echo_server.py [--streams] [HOST] [PORT]

The only lines that differ from the same server over TCP are the two that start it.
"""

import argparse
import asyncio
import contextlib
import sys
from typing import cast

import rdmanet


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        print("connected:", transport.get_extra_info("peername"), transport.get_extra_info("rdma_device"))

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    # A client that reads slower than it writes must not fill our memory.
    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        print("disconnected:", exc or "end of stream")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    print("connected:", writer.get_extra_info("peername"), writer.get_extra_info("rdma_device"))
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    print("disconnected")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("host", nargs="?", default="127.0.0.1")
    parser.add_argument("port", nargs="?", type=int, default=7471)
    args = parser.parse_args()
    if args.streams:
        server = await rdmanet.start_rdma_stream_server(echo, args.host, args.port)
    else:
        server = await rdmanet.start_rdma_server(Echo, args.host, args.port)
    async with server:
        print("listening on", *(socket.getsockname() for socket in server.sockets))
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
