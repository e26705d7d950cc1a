"""Random versions of a service: either they do not connect, and it is said why, or every value arrives.

A failure prints its seed: ``RDMANET_TEST_SEED=17 pytest tests/rpc/test_random_versions.py``. What it has found are
plain tests in test_versions.py.
"""

import os
import random
from typing import Any

import msgspec
import pytest
from net import Net
from random_types import Node, Value, a_node, a_value, another, arrived, build

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.schema import schema_of

SEED = int(os.environ.get("RDMANET_TEST_SEED", 0))
VALUES = 4


def service(node: Node) -> type[rpc.Service] | None:
    """A service that takes and returns this type; None if msgspec does not know it."""

    async def take(self: Any, value: Any) -> None:
        self.got = value

    async def give(self: Any) -> Any:
        return self.given

    try:
        take.__annotations__["value"] = give.__annotations__["return"] = build(node)
        return type("Store", (rpc.Service,), {"take": take, "give": give})
    except TypeError:
        return None


def pair(seed: int) -> tuple[random.Random, Node, Node, Any, Any]:
    """Two versions; what begins with them goes on until there are two that can be declared."""
    rng = random.Random(seed)
    while True:
        old = a_node(rng)
        new = another(old, rng)
        services = service(old), service(new)
        if None not in services:
            return rng, old, new, *services


def told(seed: int, old: Node, new: Node, sent: Value, got: Any) -> str:
    return (
        f"RDMANET_TEST_SEED={seed}: {sent.value!r} of {build(old)!r} has arrived as {got!r} of {build(new)!r}"
    )


def connects(client: Any, server: Any, method: str) -> bool:
    """Whether the client understands the server's method, if that is the only one."""
    ours, theirs = schema_of(client), schema_of(server)
    only = [[each for each in schema.description[0] if each[0] == method] for schema in (ours, theirs)]
    try:
        ours.understands(msgspec.msgpack.encode([only[1], theirs.description[1]]))
    except rpc.Error as exc:
        assert exc.code is Code.FAILED_PRECONDITION and f"{method}: " in exc.text
        return False
    return True


def try_pair(seed: int) -> int:
    """Each value of a version is read by the other, as an argument and as a result. Returns how often they fit."""
    rng, old, new, older, newer = pair(seed)
    fit = 0
    for written, read, writer, reader in ((old, new, older, newer), (new, old, newer, older)):
        takes, gives = schema_of(reader).methods["take"], schema_of(reader).methods["give"]
        if not connects(writer, reader, "take"):
            assert not connects(reader, writer, "give")
            continue
        assert connects(reader, writer, "give")
        fit += 1
        for _ in range(VALUES):
            sent = a_value(written, rng)
            try:
                (taken,) = takes.decode_arguments(msgspec.msgpack.encode([sent.value]))
                given = gives.decode_result(msgspec.msgpack.encode(sent.value), 1 << 26)
            except rpc.Error as exc:
                raise AssertionError(told(seed, written, read, sent, exc)) from exc
            if takes.parameters[0].is_buffer:
                continue  # it is made of its type on the connection
            assert arrived(sent, read, taken), told(seed, written, read, sent, taken)
            assert arrived(sent, read, given), told(seed, written, read, sent, given)
    return fit


def try_pairs(first: int, count: int) -> None:
    fit = sum(try_pair(seed) for seed in range(first, first + count))
    assert fit > count / 2  # of twice as many: it is not that they never connect


def test_versions():
    try_pairs(SEED, 500)


@pytest.mark.long
def test_more_versions():
    try_pairs(1_000_000 + SEED, 20_000)


async def connected(net: Net, seed: int) -> None:
    """The same on a connection."""
    rng, old, new, older, newer = pair(seed)
    for written, read, writer, reader in ((old, new, older, newer), (new, old, newer, older)):
        for method, client_class, server_class in (("take", writer, reader), ("give", reader, writer)):
            served = server_class()
            server = await net.serve(served)
            if not connects(writer, reader, "take") or not connects(reader, writer, "take"):
                with pytest.raises(rpc.Error, match="FAILED_PRECONDITION"):
                    async with net.connecting(client_class, server):
                        pass
                continue
            async with net.connecting(client_class, server) as client:
                for _ in range(VALUES):
                    sent = a_value(written, rng)
                    if method == "take":
                        await client.take(sent.value)
                        got = served.got
                    else:
                        served.given = sent.value
                        got = await client.give()
                    assert arrived(sent, read, got), told(seed, written, read, sent, got)


@pytest.mark.parametrize("number", range(3))
async def test_versions_that_connect(net: Net, number: int):
    await connected(net, SEED + number)


@pytest.mark.long
async def test_more_versions_that_connect(net: Net):
    for number in range(500):
        await connected(net, 2_000_000 + SEED + number)
