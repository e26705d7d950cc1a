"""What test_types.py has mypy check. Lines that end in `# wrong` are mistakes that it has to find."""

from collections.abc import AsyncIterator

import numpy
import numpy.typing as npt

from rdmanet import rpc


class Store(rpc.Service):
    async def get(self, name: str) -> memoryview:
        return memoryview(name.encode())

    async def put(self, name: str, data: memoryview, *, times: int = 1) -> int:
        return data.nbytes * times

    async def watch(self, prefix: str) -> AsyncIterator[str]:
        yield prefix

    async def weights(self, name: str) -> numpy.ndarray:
        return numpy.zeros(3)

    async def push(self, name: str, gradient: npt.NDArray[numpy.float32]) -> npt.NDArray[numpy.float32]:
        return gradient

    @rpc.method(outlives_connection=True)
    async def total(self, numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])


async def numbers() -> AsyncIterator[int]:
    yield 1


async def main() -> None:
    server = await rpc.serve(Store(), "127.0.0.1", 0, limits=rpc.Limits(calls=10))
    async with rpc.connect(Store, "127.0.0.1", 7471, timeout=5) as store:
        found: memoryview = await store.get("w")
        size: int = await store.put("w", found, times=2)
        names: list[str] = [name async for name in store.watch("w")]
        total: int = await rpc.options(store, timeout=1.0).total(numbers())
        print(found, size, names, total)
        array: numpy.ndarray = await rpc.options(store, into=numpy.empty(3), timeout=1.0).weights("w")
        pushed: npt.NDArray[numpy.float32] = await store.push("w", numpy.zeros(3, numpy.float32))
        print(array, pushed)
        await store.get(1)  # wrong
        await store.put("w", "text")  # wrong
        await store.put("w", found, size=1)  # wrong
        await store.set("w")  # wrong
        text: str = await store.get("w")  # wrong
        await store.total(store.watch("w"))  # wrong
        await rpc.options(store, timeout=1.0).get(None)  # wrong
        await store.push("w", [1.0, 2.0])  # wrong
        doubles: npt.NDArray[numpy.float64] = await store.push("w", pushed)  # wrong
        await store.push("w", doubles)  # wrong
        await rpc.options(store, into=array, time=1.0).weights("w")  # wrong
        print(text, doubles)
    client = await rpc.connect(Store, "127.0.0.1", 7471)
    view: memoryview = await client.get("w")
    await client.aclose()
    count: int = await client.get("w")  # wrong
    several = await rpc.serve([Store(), rpc.Health()], "127.0.0.1", 0)
    caller: rpc.Peer | None = rpc.peer()
    print(view, count, several, caller)
    await rpc.serve([object()], "127.0.0.1", 0)  # wrong
    await rpc.serve(object(), "127.0.0.1", 0)  # wrong
    await server.drain(timeout=1)
