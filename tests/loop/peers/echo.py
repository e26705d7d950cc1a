"""A server of the loop's in a process of its own. It prints its port and each connection's fabric, and echoes.

Asked for "big" it sends several frames, and says so when the last of them is the device's.
"""

import asyncio
import sys

import rdmanet


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        print(transport.get_extra_info("fabric"), flush=True)

    def data_received(self, data):
        if data == b"abort":
            self.transport.abort()
        elif data == b"eof":
            self.transport.write_eof()
        elif data == b"exit":
            sys.exit()
        elif data == b"big":
            self.transport.set_write_buffer_limits(high=0)
            self.transport.write(bytes(4_000))
            if not self.transport.get_write_buffer_size():
                print("sent", flush=True)
        else:
            self.transport.write(data)

    def resume_writing(self):
        print("sent", flush=True)

    def connection_lost(self, exc):
        print("lost", exc, flush=True)


async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = loop.create_future()
    loop.add_reader(sys.stdin, lambda: sys.stdin.readline() or over.done() or over.set_result(None))
    await over
    server.close()


rdmanet.run(main())
