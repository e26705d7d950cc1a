"""Several services on one port: each client finds its own by its name, and hears which there are if it is not there."""

import inspect
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
from net import Net, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.dynamic_client import discover
from rdmanet.rpc.schema import schema_of


class Store(rpc.Service):
    async def get(self, key: str) -> str: ...  # type: ignore[empty-body]


class Admin(rpc.Service):
    async def get(self, key: str) -> str:
        return f"admin {key}"

    def watch(self, count: int) -> AsyncIterator[int]: ...


class DiskStore(Store):
    async def get(self, key):  # type: ignore[no-untyped-def]
        return f"disk {key}"


class NewStore(rpc.Service, name="Store", version=2):
    async def get(self, key: int) -> int:
        return key


async def test_each_client_has_its_own(net: Net):
    server = await net.serve([DiskStore(), Admin(), NewStore()])  # type: ignore[arg-type]
    assert await (await net.connect(Store, server)).get("a") == "disk a"
    assert await (await net.connect(DiskStore, server)).get("a") == "disk a"
    assert await (await net.connect(Admin, server)).get("a") == "admin a"
    assert await (await net.connect(NewStore, server)).get(3) == 3
    assert {name: each.begun for name, each in server.stats().items()} == {
        "DiskStore.get": 2,
        "Admin.get": 1,
        "Admin.watch": 0,
        "Store/2.get": 1,
    }
    assert "DiskStore, Admin, Store/2" in repr(server)


@pytest.mark.parametrize("served", [[DiskStore()], [DiskStore(), NewStore()]])
async def test_a_service_that_is_not_there(net: Net, served: list[rpc.Service]):
    """Its methods may have the same names and types: it is another service all the same."""
    server = await net.serve(served if len(served) > 1 else served[0])  # type: ignore[arg-type]
    error = await failure(net.connect(Admin, server))
    has = ", ".join(schema_of(each).name for each in served)
    assert error.code is Code.UNIMPLEMENTED and error.text == f"the server has {has}, and no Admin"
    assert await (await net.connect(Store, server)).get("a") == "disk a"


async def test_a_version_that_is_not_there(net: Net):
    server = await net.serve(DiskStore())
    error = await failure(net.connect(NewStore, server))
    assert (error.code, error.text) == (Code.UNIMPLEMENTED, "the server has DiskStore, and no Store/2")


async def test_what_differs_has_the_right_name(net: Net):
    class Other(rpc.Service, name="Store"):
        async def get(self, key: int) -> str: ...  # type: ignore[empty-body]

    server = await net.serve([Admin(), DiskStore()])  # type: ignore[arg-type]
    error = await failure(net.connect(Other, server))
    assert error.code is Code.FAILED_PRECONDITION
    assert error.text.startswith("the server's Store differs from ours: get: parameter key: int is not str")


async def test_health_and_reflection_know_all(net: Net):
    server = await net.serve([DiskStore(), Admin()])  # type: ignore[arg-type]
    reflection = await net.connect(rpc.Reflection, server)
    assert await reflection.services() == ["DiskStore", "Admin", "rdmanet.Health", "rdmanet.Reflection"]
    assert await reflection.schema("Store") == await reflection.schema("DiskStore")
    assert [method[0] for method in (await reflection.schema("Admin"))[0]] == ["get", "watch"]
    health = await net.connect(rpc.Health, server)
    server.set_health("NOT_SERVING", "Admin")
    assert [await health.check(name) for name in ("", "Store", "Admin")] == [
        "SERVING",
        "SERVING",
        "NOT_SERVING",
    ]
    server.set_health("NOT_SERVING")
    assert await health.check("DiskStore") == "NOT_SERVING"


@pytest.mark.parametrize("transport", ["unix"])
async def test_a_client_without_the_class(net: Net):
    server = await net.serve([DiskStore(), Admin()])  # type: ignore[arg-type]
    path, port = net.address(server)[0], None
    async with discover("Store", path, port, "unix") as (channel, schema):
        assert channel.service == "Store" and list(schema.methods) == ["get"]
    with pytest.raises(rpc.Error, match="UNIMPLEMENTED: the server has DiskStore, Admin, and no Shop"):
        async with discover("Shop", path, port, "unix"):
            pass


async def test_what_cannot_be_served_together(net: Net):
    class Twin(Store):
        async def get(self, key: str) -> str:
            return key

    for services, says in (
        ([], "the list of services is empty"),
        ([Admin(), Admin()], "two services have the name 'Admin': give one a version="),
    ):
        with pytest.raises(ValueError, match=says):
            await net.serve(services)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a rdmanet.rpc.Service"):
        await net.serve([object()])  # type: ignore[arg-type]
    server = await net.serve([DiskStore(), Twin()])  # type: ignore[arg-type]
    assert (await failure(net.connect(Store, server))).code is Code.UNIMPLEMENTED  # of which of the two?
    assert await (await net.connect(Twin, server)).get("a") == "a"


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"name": ""}, "name='' is no text of 1 to 200 characters"),
        ({"name": "a/2"}, "without '/'"),
        ({"name": "rdmanet.Mine"}, "names that begin with 'rdmanet.' are taken"),
        ({"version": "2"}, "version='2' is no whole number of 32 bits"),
        ({"version": -1}, "version=-1"),
    ],
)
def test_names_that_are_none(keywords: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):

        class Wrong(rpc.Service, **keywords): ...


def test_annotations_are_inherited():
    class Base(rpc.Service):
        async def put(self, name: str, data: numpy.ndarray, *, times: int = 1) -> int: ...  # type: ignore[empty-body]

    class Middle(Base):
        async def put(self, name, data: bytes, *, times=2): ...  # type: ignore[no-untyped-def, override]

    class Last(Middle):
        async def put(self, name, data, *, times=3): ...  # type: ignore[no-untyped-def]

    assert schema_of(Last).description[0][0][2:] == [
        [["name", "str", True], ["data", "buffer", True], ["times", "int", False]],
        None,
        "int",
    ]
    with pytest.raises(TypeError, match="parameter more has no annotation"):

        class Wrong(Base):
            async def put(self, name, data, more, *, times=1): ...  # type: ignore[no-untyped-def, override]


async def test_signatures_of_a_client(net: Net):
    """Of its methods, as the class has them: for people, IDEs and libraries that look at them."""
    client = await net.connect(NewStore, await net.serve(NewStore()))
    assert str(inspect.signature(client.get)) == "(key: int) -> int"
    assert str(inspect.signature(rpc.options(client, timeout=5).get)) == "(key: int) -> int"
    assert await client.get(key=3) == 3


# ---- Clients without a block -----------------------------------------------------------------------------------


async def test_a_client_that_is_awaited(net: Net):
    server = await net.serve(DiskStore())
    client = await net.connecting(Store, server)
    other = await net.connecting(Store, server, retry=rpc.Retry())
    assert await client.get("a") == await rpc.options(other, timeout=5).get("a") == "disk a"
    await client.aclose()
    await client.aclose()
    assert (await failure(client.get("a"))).code is Code.CANCELLED
    assert await other.get("a") == "disk a"
    await rpc.options(other, timeout=5).aclose()
    assert (await failure(other.get("a"))).code is Code.CANCELLED
    assert "aclose" not in schema_of(Store).methods


@pytest.mark.parametrize("options", [{}, {"retry": rpc.Retry(attempts=1)}, {"policy": "spread"}])
async def test_nobody_listens(net: Net, options: dict[str, Any]):
    server = await net.serve(DiskStore())
    where = net.address(server)
    server.close()
    await server.wait_closed()
    for connecting in (
        rpc.connect(Store, *where, transport=net.transport, **options),
        rpc.connect(Store, [where[0] if len(where) == 1 else where], transport=net.transport, **options),
    ):
        error = await failure(connecting)
        assert error.code is Code.UNAVAILABLE and not error.begun
        assert isinstance(error, OSError) and isinstance(error.__cause__, OSError)
        assert error.errno == error.__cause__.errno and str(error.__cause__) in error.text
        with pytest.raises(rpc.Error, match="UNAVAILABLE"):
            async with connecting:
                pass
