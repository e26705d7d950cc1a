"""Services that every server has beside its own: whether it is healthy, and what it offers.

The first message of a connection names a service. These have names that begin with "rdmanet.", which no class has, and
any other name means the server's own service. So a connection has one service, as ever, and these have connections of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from msgspec import Raw

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.method import Method
from rdmanet.rpc.schema import Schema, Service, methods_of, schema_of

__all__ = ["Health", "HealthStatus", "Reflection"]

HealthStatus = Literal["SERVING", "NOT_SERVING"]

Served = tuple[Schema, list[tuple[Method, Callable[..., Any]]]]


class Health(Service):
    """Whether a server is healthy: ``async with rpc.connect(rpc.Health, host, port) as health: await health.check()``.

    Every server has this service. `Server.set_health` says what it answers. While a server drains, it is NOT_SERVING.
    """

    async def check(self, service: str = "") -> HealthStatus:
        """SERVING or NOT_SERVING: of the server, or of a part of it that it has a name for.

        Cancelling it changes nothing.

        :raises Error: NOT_FOUND; there is no such part
        """
        raise NotImplementedError


class Reflection(Service):
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


Health.__rpc_schema__.name = "rdmanet.Health"
Reflection.__rpc_schema__.name = "rdmanet.Reflection"


class Introspected(Protocol):
    """What they need of their server."""

    schema: Schema
    builtin: dict[str, Served]
    health: dict[str, HealthStatus]

    @property
    def refusal(self) -> str | None: ...


def builtin_of(server: Introspected) -> dict[str, Served]:
    """The services that a server has beside its own, by their names."""
    services: list[Service] = [_Health(server), _Reflection(server)]
    return {schema_of(service).name: (schema_of(service), methods_of(service)) for service in services}


class _Health(Health):
    def __init__(self, server: Introspected) -> None:
        self._server = server

    async def check(self, service: str = "") -> HealthStatus:
        status = self._server.health.get(service)
        if status is None:
            raise Error(Code.NOT_FOUND, f"the server knows no part of it of the name {service[:100]!r}")
        return "NOT_SERVING" if self._server.refusal is not None else status


class _Reflection(Reflection):
    def __init__(self, server: Introspected) -> None:
        self._server = server

    async def services(self) -> list[str]:
        return [self._server.schema.name, *self._server.builtin]

    async def schema(self, service: str) -> Any:
        if service == self._server.schema.name:
            return Raw(self._server.schema.encoded)
        if (found := self._server.builtin.get(service)) is None:
            raise Error(Code.NOT_FOUND, f"there is no service {service[:100]!r}")
        return Raw(found[0].encoded)


_Health.__rpc_schema__.name = Health.__rpc_schema__.name
_Reflection.__rpc_schema__.name = Reflection.__rpc_schema__.name
