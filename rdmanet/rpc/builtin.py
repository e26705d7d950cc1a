"""The services of a server: its own, and those that every server has, whether it is healthy and what it offers.

The first message of a connection names a service, by the name of its class or of a base of that. A connection has one
service. The names of those that every server has begin with "rdmanet.", as no other's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Raw

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.schema import Service, methods_of, schema_of
from rdmanet.rpc.stats import counters_of

__all__ = ["Health", "HealthStatus", "Reflection"]

HealthStatus = Literal["SERVING", "NOT_SERVING"]


class Served:
    """A service as it is served.

    :ivar methods: in the order of their numbers, with the functions to call
    :ivar counters: of the methods
    """

    __slots__ = ("counters", "methods", "schema")

    def __init__(self, service: Service) -> None:
        self.schema = schema_of(service)
        self.methods = methods_of(service)
        self.counters = counters_of(self.schema)


def served_by_name(services: Sequence[Service]) -> dict[str, Served]:
    """Services by all the names that they have. A name that two of them have from a base is nobody's.

    :raises TypeError: one is no service
    :raises ValueError: there is none, or two have the same name
    """
    every = [Served(service) for service in services]
    if not every:
        raise ValueError("rpc.serve: the list of services is empty")
    found: dict[str, Served] = {}
    for served in every:
        if found.setdefault(served.schema.name, served) is not served:
            raise ValueError(
                f"rpc.serve: two services have the name {served.schema.name!r}: give one a version="
            )
    own = dict(found)
    for name in {name for served in every for name in served.schema.names} - own.keys():
        have = [served for served in every if name in served.schema.names]
        if len(have) == 1:
            found[name] = have[0]
    return found


class Health(Service, name="rdmanet.Health"):
    """Whether a server is healthy: ``async with rpc.connect(rpc.Health, host, port) as health: await health.check()``.

    Every server has this service. `Server.set_health` says what it answers. While a server drains, it is NOT_SERVING.
    """

    async def check(self, service: str = "") -> HealthStatus:
        """SERVING or NOT_SERVING: of the server, or of a part of it that it has a name for.

        Cancelling it changes nothing.

        :raises Error: NOT_FOUND; there is no such part
        """
        raise NotImplementedError


class Reflection(Service, name="rdmanet.Reflection"):
    """What a server offers, as data: ``async with rpc.connect(rpc.Reflection, host, port) as reflection``.

    Every server has this service. ``python -m rdmanet call HOST:PORT`` shows what it says.
    """

    async def services(self) -> list[str]:
        """The names of its services: its own first. Cancelling it changes nothing."""
        raise NotImplementedError

    async def schema(self, service: str) -> Any:
        """The schema of a service, as docs/reference/rpc-protocol.md has it. Cancelling it changes nothing.

        :raises Error: NOT_FOUND; there is no such service
        """
        raise NotImplementedError


class Introspected(Protocol):
    """What they need of their server."""

    services: dict[str, Served]
    builtin: dict[str, Served]
    health: dict[str, HealthStatus]

    @property
    def refusal(self) -> str | None: ...


def names_of(services: dict[str, Served]) -> list[str]:
    """The names of services, without those of their bases."""
    return [name for name, served in services.items() if served.schema.name == name]


def builtin_of(server: Introspected) -> dict[str, Served]:
    """The services that a server has beside its own, by their names."""
    return served_by_name([_Health(server), _Reflection(server)])


class _Health(Health, name="rdmanet.Health"):
    def __init__(self, server: Introspected) -> None:
        self._server = server

    async def check(self, service: str = "") -> HealthStatus:
        status = self._server.health.get(service)
        if status is None:
            raise Error(Code.NOT_FOUND, f"the server knows no part of it of the name {service[:100]!r}")
        return "NOT_SERVING" if self._server.refusal is not None else status


class _Reflection(Reflection, name="rdmanet.Reflection"):
    def __init__(self, server: Introspected) -> None:
        self._server = server

    async def services(self) -> list[str]:
        return [*names_of(self._server.services), *self._server.builtin]

    async def schema(self, service: str) -> Any:
        server = self._server
        if (found := server.services.get(service) or server.builtin.get(service)) is None:
            raise Error(Code.NOT_FOUND, f"there is no service {service[:100]!r}")
        return Raw(found.schema.encoded)
