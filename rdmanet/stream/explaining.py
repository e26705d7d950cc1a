"""What is known of an RDMA connection or server now: `ConnectionInfo` and `ServerInfo` (base/accounts.py).

It is made when somebody asks, of what the connection's parts have anyway. It may be asked at any moment of the
connection's life, also before it is established and when it is over, and from another thread than the loop's.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence, Sized
from typing import Any, Protocol

from rdmanet._core import CMID, best_gid, gid_advice
from rdmanet.base.accounts import MOMENT_US, ConnectionInfo, Place, ServerInfo
from rdmanet.base.cpus import why_far_from
from rdmanet.stream.admission import Admission, waiting_for
from rdmanet.stream.bindings import HeldOffer
from rdmanet.stream.transport_socket import RdmaSocket


class Life(Protocol):
    """The life of an accepted connection."""

    def info(self) -> ConnectionInfo: ...


class Accepted(Protocol):
    """This side of an accepted connection: a transport."""

    @property
    def _life(self) -> Life: ...

    def _end_now(self, error: Exception | None = None) -> None: ...

    def _close_above(self) -> None: ...

    def abort(self) -> None: ...


class ExplainedServer:
    """What a server says of itself. The fields are those of RdmaServer, which derives from this."""

    _transports: set[Accepted]
    _sockets: list[RdmaSocket]
    _active: int
    _half_open: Sized
    _admission: Admission | None
    _admission_by_name: Admission | None
    _backlog: int

    @property
    def _is_foreign(self) -> bool:
        raise NotImplementedError

    def is_serving(self) -> bool:
        raise NotImplementedError

    @property
    def connections(self) -> list[ConnectionInfo]:
        """The connections that it has accepted and that live, as they are now; see ``rdmanet.connections()``."""
        return [] if self._is_foreign else [transport._life.info() for transport in list(self._transports)]

    def info(self) -> ServerInfo:
        """The server as it is now."""
        lines = [line for line in (self._admission, self._admission_by_name) if line is not None]
        return ServerInfo(
            places=[(sock.getsockname()[0], sock.getsockname()[1]) for sock in self._sockets],
            fabric="rdma",
            serving=self.is_serving(),
            connections=self._active,
            half_open=len(self._half_open),
            waiting=sum(line.waiting for line in lines),
            backlog=waiting_for(self._backlog),
        )

    def explain(self) -> str:
        """What the server does, and who waits for whom on its connections: text, some lines for each connection."""
        return "\n\n".join([self.info().explain(), *(info.explain() for info in self.connections)])


def info_of(
    now: tuple[Any, ...], transport: Any, cm_id: CMID | None, held: Sequence[HeldOffer] = ()
) -> ConnectionInfo:
    """The connection as it is now.

    :param now: what facts_now() says of it (parts.py)
    :param transport: its transport; None if that is let go
    :param cm_id: its identifier, once there is one
    :param held: what its peer has of our memory
    """
    *said, stats = now
    info = ConnectionInfo(*said)
    info.stats = stats
    if info.path == "adapter":
        info.far = why_far_from(info.device)
    if held:
        stats["offers"] = len(held)
        stats["bytes_offered"] = sum(each.length for each in held)
    is_silent = info.stats.get("sends_in_flight", 0) and info.stats["us_since_sent"] > MOMENT_US
    if cm_id is not None and (is_silent or info.state == "opening"):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it is closed, or its device is lost
            info.local, info.peer = (
                info.local or _place(cm_id.local_addr),
                info.peer or _place(cm_id.peer_addr),
            )
            info.way = _way(cm_id)
    info.transport = transport  # type: ignore[misc]
    return info


def _way(cm_id: CMID) -> str:
    """From which GID the peer is to be reached, and which would be better; "" while that is not known."""
    context, local, peer = cm_id.context, cm_id.local_addr, cm_id.peer_addr
    if context is None or local is None or peer is None:
        return ""
    table = context.gid_table(cm_id.port_num)
    far, near = (ipaddress.ip_address(address[0].partition("%")[0]) for address in (peer, local))
    way = gid_advice(table, local[0])
    if near.is_loopback and not far.is_loopback and far not in {entry.address for entry in table}:
        best = best_gid(entry for entry in table if entry.address.version == far.version)
        way += f". It is of this host alone, and {far} is not"
        if best is not None and not best.address.is_loopback:
            way += f": use GID index {best.gid_index} ({best.address})"
    return way


def _place(address: Any) -> Place | None:
    return None if address is None else (address[0], address[1])
