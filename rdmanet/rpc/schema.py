"""What a service offers, read from its class: its methods (method.py), and how two versions of it compare.

Theory
------
A service is a class. Its coroutine functions and asynchronous generators are its methods, unless their names begin with
an underscore. Client and server read the same class, so both know the types, and so does mypy. What cannot be served is
refused when the class is defined, with the names of method and parameter.

A `Schema` is those methods in the order of their names; the place of a method is its number on the wire. Its
`description` is plain data (describe.py), and its `digest` the SHA-256 of that. Two sides with the same digest need
not compare. `Schema.understands` compares otherwise.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

import msgspec

from rdmanet.errors import ProtocolError, shown
from rdmanet.rpc.annotations import defining_frame, owner_of, resolved
from rdmanet.rpc.describe import METHODS_MOST, Structs, decode_description, differences
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.method import Kind, Method

__all__ = ["Schema", "Service"]

NAME_MOST: Final = 200
"""Characters of the name of a service."""


class Schema:
    """The methods of a service.

    :ivar name: the name of its class, or what that says, and its version: "Store", "Store/2"
    :ivar names: those by which a server knows it: its own, and those of the services that it is derived from
    :ivar methods: by their names, in order
    :ivar lends: whether one of them takes a service object
    """

    def __init__(self, name: str, methods: list[Method], names: Sequence[str] = ()) -> None:
        self.name = name
        self.names = (name, *names)
        self.methods = {method.name: method for method in sorted(methods, key=lambda method: method.name)}
        self.numbered = list(self.methods.values())
        for number, found in enumerate(self.numbered):
            found.number = number
        self.lends = any(found.objects for found in self.numbered)

    @functools.cached_property
    def description(self) -> list[Any]:
        """[methods, structs] as plain data.

        :raises TypeError: two types of the same name differ
        """
        structs: Structs = {}
        methods = [method.describe(structs) for method in self.numbered]
        return [methods, dict(sorted(structs.items()))]

    @functools.cached_property
    def encoded(self) -> bytes:
        """The description in msgpack."""
        return msgspec.msgpack.encode(self.description)

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the description in msgpack."""
        return hashlib.sha256(self.encoded).digest()

    def understands(self, raw: Any, server_name: str = "", who: str = "server") -> dict[str, int]:
        """Compare with the schema of a server, as it came by the wire: the server's numbers of our methods.

        :param server_name: what the server calls the service
        :param who: what the server is called in errors

        Methods that the server does not have are left out: calling them is UNIMPLEMENTED.

        :raises Error: FAILED_PRECONDITION; the text says what differs
        :raises ProtocolError: it is no schema
        """
        methods, theirs = decode_description(raw)
        ours = self.description[1]
        numbers = {method[0]: number for number, method in enumerate(methods)}
        known = [(found, methods[numbers[found.name]]) for found in self.numbered if found.name in numbers]
        if not known and self.numbered:
            raise Error(
                Code.FAILED_PRECONDITION,
                f"the {who} has none of the methods of {self.name}; it has {', '.join(sorted(numbers)[:10])}",
            )
        lines: list[str] = []
        try:
            for found, there in known:
                lines += _method_differences(found, there, ours, theirs)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            raise ProtocolError(f"the {who}'s schema refers to what is not in it") from None
        if lines:
            shown = "; ".join(lines[:5]) + ("; and more" if lines[5:] else "")
            ours_too = "ours" if server_name in ("", self.name) else f"our {self.name}"
            text = f"the {who}'s {server_name or self.name} differs from {ours_too}: {shown}"
            raise Error(Code.FAILED_PRECONDITION, text)
        return {found.name: numbers[found.name] for found, _ in known}

    def agreed(self, hello: Any, who: str = "server") -> tuple[list[int | None], list[Method]]:
        """What the server's Hello makes of our methods: its numbers of them, and how they are called there.

        The second is empty if it has the same version. :raises Error, ProtocolError: as for `understands`, and
        UNIMPLEMENTED if it does not have the service
        """
        if hello.services is not None:
            has = ", ".join(hello.services[:10]) + ", ..." * (len(hello.services) > 10)
            raise Error(Code.UNIMPLEMENTED, f"the {who} has {has}, and no {self.name}")
        if hello.digest == self.digest:
            return [method.number for method in self.numbered], []
        known = self.understands(hello.methods, hello.service, who)
        return [known.get(method.name) for method in self.numbered], self.fitted(hello.methods)

    def fitted(self, raw: Any) -> list[Method]:
        """Our methods, as they are called at the server whose schema this is (`Method.fitted`)."""
        there = {method[0]: method for method in decode_description(raw)[0]}
        return [each.fitted(there[each.name]) if each.name in there else each for each in self.numbered]


class Service:
    """The base of services. A subclass is read when it is defined, and its instances can be served.

    A client finds its service on the server by the name of the class: ``class Store(rpc.Service)``. An instance of a
    class that is derived from it, ``class DiskStore(Store)``, is served under both names. A method that it overrides
    has the annotations of the base where it has none of its own.

    :param name: the name of the service, if it is not that of the class: ``class Store2(rpc.Service, name="Store")``
    :param version: a whole number, which is part of the name: a server may have two versions of a service that do not
        understand each other. Versions that do need none
    :raises TypeError: a method cannot be called from elsewhere; the text names it and the parameter. This is raised by
        the `class` statement
    :raises ValueError: the name or the version is none
    """

    __rpc_schema__: ClassVar[Schema] = Schema("Service", [])

    async def aclose(self) -> None:
        """Of a client: close its connections, as at the end of ``async with``. Of a service: nothing.

        Pending calls get CANCELLED, and so do later ones. A client that a method has got gives its object back.
        """

    def __init_subclass__(cls, name: str | None = None, version: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        full = _name(cls, cls.__name__ if name is None else name, version)
        cls.__rpc_schema__ = _read(cls, full, defining_frame(cls, sys._getframe(1)))


# ---- Reading a class -----------------------------------------------------------------------------------------


def _name(cls: type, name: str, version: int | None) -> str:
    """The name of a service, with its version."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_MOST or "/" in name:
        raise ValueError(
            f"{cls.__name__}: name={shown(name)} is no text of 1 to {NAME_MOST} characters without '/'"
        )
    if name.startswith("rdmanet.") and not cls.__module__.startswith("rdmanet."):
        raise ValueError(f"{cls.__name__}: name={shown(name)}: names that begin with 'rdmanet.' are taken")
    if version is None:
        return name
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 32:
        raise ValueError(f"{cls.__name__}: version={shown(version)} is no whole number of 32 bits")
    return f"{name}/{version}"


def _read(cls: type, full_name: str, frame: FrameType) -> Schema:
    methods = []
    bases = [
        each.__rpc_schema__ for each in cls.__mro__[1:] if issubclass(each, Service) and each is not Service
    ]
    for name in dir(cls):
        if name.startswith("_"):
            continue
        found = inspect.getattr_static(cls, name)
        if not inspect.isfunction(found) or (owner := owner_of(cls, name)) is Service:
            continue
        base: Schema | None = None if owner is cls else vars(owner).get("__rpc_schema__")
        known = None if base is None else base.methods.get(name)
        if known is not None and known.function is found:
            hints = known.hints
        else:
            hints = resolved(cls, owner, found, frame)
            _inherit(hints, found, [base.methods[name] for base in bases if name in base.methods])
        methods.append(Method(cls.__name__, name, found, hints))
    if len(methods) > METHODS_MOST:
        raise TypeError(f"{cls.__name__} has {len(methods)} methods: {METHODS_MOST} are allowed")
    read = Schema(full_name, methods, [base.name for base in bases])
    try:
        _ = read.digest
    except TypeError as exc:
        raise TypeError(f"{cls.__name__}: {exc}") from None
    return read


def _inherit(hints: dict[str, Any], function: Callable[..., Any], methods: list[Method]) -> None:
    """Give a method the annotations of those that it overrides, where it has none of its own."""
    if missing := {"return", *inspect.signature(function).parameters} - hints.keys():
        for method in reversed(methods):
            hints |= {name: method.hints[name] for name in missing & method.hints.keys()}


# ---- Comparing -----------------------------------------------------------------------------------------------


def _method_differences(ours: Method, there: Any, structs: Structs, theirs: Structs) -> list[str]:
    """What makes calls of ours fail there, or its results here."""
    mine: Structs = {}
    name, kind, parameters, stream, result = ours.describe(mine)
    _, kind_there, parameters_there, stream_there, result_there = there
    if kind != kind_there:
        return [f"{name} is {Kind(kind).name} here, {Kind(kind_there).name} there"]
    lines = []
    for index, (here, other) in enumerate(zip(parameters, parameters_there, strict=False)):
        if here[0] != other[0]:
            return [f"{name}: parameter {index + 1} is {here[0]} here, {other[0]} there"]
        lines += differences(here[1], structs, other[1], theirs, f"{name}: parameter {here[0]}")
    for other in parameters_there[len(parameters) :]:
        if other[2]:
            lines.append(f"{name}: parameter {other[0]} is required there")
    for here in parameters[len(parameters_there) :]:
        if here[2]:
            lines.append(f"{name}: parameter {here[0]} is unknown there")
    if stream is not None:
        lines += differences(stream, structs, stream_there, theirs, f"{name}: the caller's stream")
    return lines + differences(result_there, theirs, result, structs, f"{name}: the result")


def schema_of(service: type[Service] | Service) -> Schema:
    """The schema of a service, or of its class.

    :raises TypeError: it is neither
    """
    cls = service if isinstance(service, type) else type(service)
    if not issubclass(cls, Service):
        raise TypeError(f"{shown(service)} is not a rdmanet.rpc.Service")
    return cls.__rpc_schema__


def methods_of(service: Service) -> list[tuple[Method, Callable[..., Any]]]:
    """The methods of a service in the order of their numbers, with the functions to call."""
    return [(method, getattr(service, method.name)) for method in schema_of(service).numbered]
