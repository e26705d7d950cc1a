"""Annotations that are texts mean what they mean where the method is defined, whoever inherits it."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rdmanet.rpc.schema import schema_of

HEAD = "from __future__ import annotations\nimport abc\nimport msgspec\nfrom rdmanet import rpc\n"
ITEM = 'class Item(msgspec.Struct):\n    key: int\n    name: str = ""\n'
"""Another class each time; those of one service have the same fields, as their names are the same."""
API = f"""{HEAD}{ITEM}

class Mixin:
    async def of_mixin(self) -> Item: ...

class Store(rpc.Service):
    async def get(self, key: int) -> Item: ...

async def borrowed(self) -> Item: ...
"""


class Modules:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, source: str) -> Any:
        module = types.ModuleType(name)
        self.names.append(name)
        sys.modules[name] = module
        exec(source, vars(module))
        return module


@pytest.fixture
def modules() -> Iterator[Modules]:
    found = Modules()
    yield found
    for name in found.names:
        del sys.modules[name]


def result(service: Any, method: str) -> Any:
    return schema_of(service).methods[method].result


def test_of_a_base_in_another_module(modules: Modules):
    api = modules("annotations_api", API)
    mine = modules(
        "annotations_mine",
        f"""{HEAD}{ITEM}
from annotations_api import Mixin, Store, borrowed as function
class Sub(Mixin, Store):
    borrowed = function
    async def own(self) -> Item: ...
class SubSub(Sub):
    async def get(self, key: int) -> Item: ...
def local():
    class Item(msgspec.Struct):
        key: int
        name: str = ""
    class Local(Mixin, Store):
        borrowed = function
        async def own(self) -> Item: ...
    return Local, Item
""",
    )
    for name in ("get", "of_mixin", "borrowed"):
        assert result(mine.Sub, name) is api.Item
    assert result(mine.Sub, "own") is result(mine.SubSub, "get") is result(mine.SubSub, "own") is mine.Item
    local, item = mine.local()
    assert [result(local, name) for name in ("get", "of_mixin", "borrowed")] == [api.Item] * 3
    assert result(local, "own") is item


def test_of_its_own_body(modules: Modules):
    """A class in the body goes before one of the module. A method that is named as a type is not that type."""
    module = modules(
        "annotations_body",
        f"""{HEAD}{ITEM}
class Store(rpc.Service):
    class Item(msgspec.Struct):
        key: int
    async def list(self) -> list[Item]: ...
    async def get(self) -> Item: ...
class Sub(Store):
    class Item(msgspec.Struct):
        key: int
    async def own(self) -> Item: ...
""",
    )
    assert result(module.Store, "get") is result(module.Sub, "get") is module.Store.Item
    assert result(module.Sub, "list") == list[module.Store.Item]
    assert result(module.Sub, "own") is module.Sub.Item


def test_of_a_function(modules: Modules):
    """Also if a metaclass, or a base that wants to know of its subclasses, is between `class` and us."""
    api = modules("annotations_api", API)
    module = modules(
        "annotations_function",
        f"""{HEAD}{ITEM}
class Known(rpc.Service):
    def __init_subclass__(cls, **options):
        Item = None
        super().__init_subclass__(**options)
def local():
    class Item(msgspec.Struct):
        key: int
        name: str = ""
    class Mixin:
        async def get(self) -> Item: ...
    class Abstract(Mixin, Known, abc.ABC):
        async def own(self) -> Item: ...
    class Sub(Abstract):
        pass
    return Abstract, Sub, Item
""",
    )
    assert module.Item is not api.Item
    *services, item = module.local()
    for service in services:
        assert result(service, "get") is result(service, "own") is item


if sys.version_info >= (3, 12):

    def test_of_a_service_that_has_type_parameters(modules: Modules):
        module = modules(
            "annotations_parameters",
            f"{HEAD}class Store[T](rpc.Service):\n    async def get[U](self, a: T, b: U) -> list[T]: ...\n",
        )
        assert schema_of(module.Store).description[0][0][4] == ["list", "any"]


def test_a_field_is_not_lost(modules: Modules):
    """What an inherited method returns has all fields of the base's class, whatever the subclass's module has."""
    api = modules("annotations_api", API)
    mine = modules(
        "annotations_mine",
        f"{HEAD}class Item(msgspec.Struct):\n    key: int\n"
        "from annotations_api import Store\nclass Sub(Store):\n    pass\n",
    )
    raw = msgspec.msgpack.encode(api.Item(1, "bolt"))
    assert schema_of(mine.Sub).methods["get"].decode_result(raw, 1000) == api.Item(1, "bolt")
    assert schema_of(mine.Sub).digest == schema_of(api.Store).digest
