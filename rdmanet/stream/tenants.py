"""What a loop context (loop_context.py) has, as it sees that: connections' lives, and servers. Only types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rdmanet.stream.parting import Sender

if TYPE_CHECKING:
    from rdmanet._core import QP, AsyncEvent
    from rdmanet.base.accounts import ConnectionInfo, ServerInfo


class Tenant(Protocol):
    """What belongs to a loop context and is told when its loop ends: a connection's life, a server."""

    def _loop_ended(self) -> None: ...


class Listening(Tenant, Protocol):
    """A server."""

    def info(self) -> ServerInfo: ...


class Connected(Tenant, Sender, Protocol):
    """A connection's life."""

    def info(self) -> ConnectionInfo: ...

    def row(self) -> tuple[list[str], tuple[Any, ...]]: ...


class DeviceUser(Tenant, Protocol):
    """A connection's life, as the events of its device see it."""

    @property
    def qp(self) -> QP | None: ...

    def on_connection_error(self, error: OSError) -> None:
        """The connection is over, for this reason."""

    def port_event(self, event: AsyncEvent) -> None:
        """An event of a port of its device."""
