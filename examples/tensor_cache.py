"""Keep tensors in another process, by name: as many as fit, those that were used last.

usage: python examples/tensor_cache.py serve | try  [--tcp] [--mib SIZE] [HOST] [PORT]

`get` reads a tensor by RDMA from the cache's memory into an array of the caller's. The cache registers each tensor
once, however often it is read. A tensor that has to go while somebody reads it stays until that call has ended.
"""

import argparse
import asyncio
import sys

import numpy

from rdmanet import rpc


class Cache(rpc.Service):
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tensors: dict[str, rpc.Buffer] = {}  # the least recently used first

    async def put(self, name: str, tensor: numpy.ndarray) -> list[str]:
        """Returns the names of those that had to go."""
        if tensor.nbytes > self._most_bytes:
            text = f"{tensor.nbytes} bytes do not fit into {self._most_bytes}"
            raise rpc.Error(rpc.Code.RESOURCE_EXHAUSTED, text)
        self._tensors.pop(name, None)
        gone = []
        while sum(map(len, self._tensors.values())) + tensor.nbytes > self._most_bytes:
            gone.append(next(iter(self._tensors)))
            del self._tensors[gone[-1]]
        self._tensors[name] = rpc.Buffer(tensor)
        return gone

    async def get(self, name: str) -> numpy.ndarray:
        if name not in self._tensors:
            raise rpc.Error(rpc.Code.NOT_FOUND, f"there is no tensor {name}")
        kept = self._tensors[name] = self._tensors.pop(name)  # the last one now
        tensor: numpy.ndarray = kept.array
        return tensor


async def serve(host: str, port: int, transport: str, mib: int) -> None:
    async with await rpc.serve(Cache(mib << 20), host, port, transport=transport) as server:
        print("listening on", *server.sockets[0].getsockname(), flush=True)
        await server.serve_forever()


async def try_it(host: str, port: int, transport: str, mib: int) -> None:
    mine = numpy.empty((1024, 1024), "f4")
    async with rpc.connect(Cache, host, port, transport=transport) as cache:
        fetching = rpc.options(cache, into=mine)
        for number in range(mib // 4 + 1):  # one more than fit
            gone = await cache.put(f"layer{number}", numpy.full_like(mine, number))
            print(f"put layer{number}", *(f"instead of {name}" for name in gone))
            await fetching.get("layer1" if number else "layer0")
            print("got", mine.mean())
        try:
            await fetching.get("layer0")
        except rpc.Error as error:
            print(error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve", "try"])
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--mib", type=int, default=12, help="how much the cache keeps")
    parser.add_argument("host", nargs="?", default="127.0.0.1")
    parser.add_argument("port", nargs="?", type=int, default=7474)
    args = parser.parse_intermixed_args()
    command = serve if args.command == "serve" else try_it
    try:
        asyncio.run(command(args.host, args.port, "tcp" if args.tcp else "rdma", args.mib))
    except (KeyboardInterrupt, OSError, rpc.Error) as exc:
        sys.exit(str(exc) or 130)


if __name__ == "__main__":
    main()
