"""A store of tensors in two other processes: put, get into the caller's array, get of rows; then one is killed.

usage: python examples/tensor_store.py

Each store keeps tensors by name in memory that it has registered. What to find where is asked by rdmanet.rpc; the
tensors themselves are written and read by rdmanet.tensors, in which the store takes no part. It learns of a tensor that
was written by the notification that comes with it. From then on nobody can write to it.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import numpy

import rdmanet
from rdmanet import rpc, tensors

ROWS, COLUMNS = 20_000, 64


class Store(rpc.Service):
    def __init__(self, endpoint: tensors.Endpoint) -> None:
        self._endpoint = endpoint
        self._kept: dict[str, tuple[tensors.Memory, bytes, asyncio.Event]] = {}

    async def address(self) -> bytes:
        return self._endpoint.address()

    async def room(self, name: str, dtype: str, shape: list[int]) -> bytes:
        """Where the caller may write a tensor, for a minute."""
        if name in self._kept:
            raise rpc.Error(rpc.Code.ALREADY_EXISTS, f"there is a tensor {name}")
        room = memoryview(rdmanet.alloc(numpy.dtype(dtype).itemsize * int(numpy.prod(shape))))
        memory = self._endpoint.register(numpy.frombuffer(room, dtype).reshape(shape))
        self._kept[name] = memory, memory.describe(mode="w", lease=60), asyncio.Event()
        return self._kept[name][1]

    async def find(self, name: str) -> bytes:
        """Where to read a tensor, for an hour."""
        if name not in self._kept:
            raise rpc.Error(rpc.Code.NOT_FOUND, f"there is no tensor {name}")
        memory, _, written = self._kept[name]
        await written.wait()
        return memory.describe(lease=3600)

    async def notice(self) -> None:
        """Publish what has been written."""
        async for notification in self._endpoint.notifications():
            memory, descriptor, written = self._kept[notification.payload.decode()]
            await memory.revoke(descriptor)
            written.set()


async def serve() -> None:
    async with tensors.open() as endpoint:
        store = Store(endpoint)
        noticing = asyncio.create_task(store.notice())
        async with await rpc.serve(store, "127.0.0.1", 0) as server:
            print(server.sockets[0].getsockname()[1], flush=True)
            await asyncio.to_thread(sys.stdin.read)  # until whoever has started it ends
        noticing.cancel()


class Client:  # one store, as others see it
    def __init__(self, store: Store, peer: tensors.Peer) -> None:
        self._store = store
        self._peer = peer

    async def put(self, name: str, array: numpy.ndarray) -> None:
        descriptor = await self._store.room(name, array.dtype.str, list(array.shape))
        await self._peer.write(array, descriptor, notify=name.encode())

    async def get(self, name: str, into: numpy.ndarray) -> None:
        await self._peer.read(await self._store.find(name), into)

    async def get_rows(self, name: str, indices: numpy.ndarray, into: numpy.ndarray) -> None:
        await self._peer.read_rows(await self._store.find(name), indices, into)


@contextlib.asynccontextmanager
async def started(endpoint: tensors.Endpoint) -> AsyncIterator[tuple[Client, asyncio.subprocess.Process]]:
    """A store in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "serve", stdin=pipe, stdout=pipe)
    assert process.stdin and process.stdout
    try:
        port = int(await process.stdout.readline())
        async with rpc.connect(Store, "127.0.0.1", port) as store:
            yield Client(store, await endpoint.connect(await store.address())), process
    finally:
        process.stdin.close()
        await process.wait()


async def main() -> None:
    random = numpy.random.default_rng(1)
    table, indices = random.random((ROWS, COLUMNS), "f4"), random.integers(0, ROWS, 1000)
    mine = numpy.empty_like(table)
    async with tensors.open() as endpoint, started(endpoint) as (one, process), started(endpoint) as (two, _):
        for number, store in enumerate((one, two), 1):
            await store.put("embeddings", table * number)
            await store.get("embeddings", into=mine)
            print(f"store {number}: {mine.nbytes} bytes, right: {(mine == table * number).all()}")
            await store.get_rows("embeddings", indices, into=mine[:1000])
            print(f"store {number}: 1000 rows, right: {(mine[:1000] == table[indices] * number).all()}")
        process.kill()
        try:
            while True:  # what is under way may still be done
                await one.get("embeddings", into=mine)
        except (OSError, rpc.Error) as error:
            print("store 1 was killed:", type(error).__name__)
        await two.get("embeddings", into=mine)
        print(f"store 2: {mine.nbytes} bytes, right: {(mine == table * 2).all()}")


if __name__ == "__main__":
    try:
        asyncio.run(serve() if sys.argv[1:] == ["serve"] else main())
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
