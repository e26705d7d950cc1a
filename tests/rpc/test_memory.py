"""The memory that large arguments and results are read into: it is used again, but not while anybody has it."""

from typing import Any

import numpy
import pytest
from net import Net, idle

from rdmanet import rpc
from rdmanet._core import REUSED_BYTES, ReusableMemory

SIZE = 2 * REUSED_BYTES


class Store(rpc.Service):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def put(self, data: memoryview, keeps: bool) -> int:
        if keeps:
            self.kept.append(data)
        return address(data)

    async def put_array(self, data: numpy.ndarray, keeps: bool) -> int:
        if keeps:
            self.kept.append(data[1:3])  # a part keeps all of it
        return address(data)

    async def put_bytes(self, data: bytes) -> int:
        self.kept.append(data)
        return len(data)

    async def get(self, first: int) -> memoryview:
        return memoryview(filled(first))


def filled(number: int, nbytes: int = SIZE) -> bytes:
    return bytes([number]) * nbytes


def address(memory: Any) -> int:
    return int(numpy.frombuffer(memory, "u1").__array_interface__["data"][0])


@pytest.mark.parametrize("transport", ["rdma"])
async def test_an_argument_that_is_a_view(net: Net):
    service = Store()
    client, server = await net.pair(service)

    async def put(number: int, keeps: bool) -> int:
        found = await client.put(memoryview(filled(number)), keeps)
        await idle(server)
        return found

    at = await put(1, False)
    assert await put(2, True) == at
    others = {await put(number, False) for number in range(3, 6)}
    assert len(others) == 1 and at not in others
    assert service.kept == [filled(2)]
    assert service.kept[0].readonly and type(service.kept[0].obj) is ReusableMemory
    service.kept.clear()
    assert await put(6, True) == at
    assert service.kept == [filled(6)]


async def test_an_argument_that_is_an_array(net: Net):
    service = Store()
    client, server = await net.pair(service)

    async def put(number: int, keeps: bool) -> int:
        found = await client.put_array(numpy.full(SIZE // 8, number, "<f8"), keeps)
        await idle(server)
        return found

    reused = {await put(1, False) for _ in range(3)}
    at = await put(2, True)
    others = {await put(number, False) for number in range(3, 6)}
    assert at not in others and service.kept[0].tolist() == [2, 2]
    service.kept.clear()
    reused |= {at, *others, await put(6, False)}
    assert len(reused) <= 3  # this process has also what a caller copies into a message


async def test_bytes_are_the_programs_own(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    for number in (1, 2):
        assert await client.put_bytes(filled(number)) == SIZE
    assert service.kept == [filled(1), filled(2)]
    assert all(type(data) is bytes for data in service.kept)


@pytest.mark.parametrize("transport", ["rdma"])
async def test_a_result(net: Net):
    client, _ = await net.pair(Store())
    first = await client.get(1)
    at = address(first)
    second = await client.get(2)
    assert address(second) != at
    assert (first.tobytes(), second.tobytes()) == (filled(1), filled(2))
    del first
    third = await client.get(3)
    assert address(third) == at
    assert (second.tobytes(), third.tobytes()) == (filled(2), filled(3))


SIZES = [1, REUSED_BYTES - 1, REUSED_BYTES, REUSED_BYTES + 1, 3 * REUSED_BYTES - 1]


@pytest.mark.parametrize("nbytes", SIZES)
async def test_sizes(net: Net, nbytes: int):
    service = Store()
    client, _ = await net.pair(service)
    for number in (1, 2):
        await client.put(memoryview(filled(number, nbytes)), True)
        await client.put_array(numpy.full(nbytes, number, "u1"), True)
    assert service.kept[0] == filled(1, nbytes) and service.kept[2] == filled(2, nbytes)
    parts = [part.tolist() for part in service.kept[1::2]]
    assert parts == [[number] * min(2, nbytes - 1) for number in (1, 2)]
