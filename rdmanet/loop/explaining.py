"""What a server of the loop says of itself: its connections by both fabrics, and its doors and workers.

A server has a door at each of its addresses (doors.py), by which clients on this host find RDMA; or it has none, and
there is a reason. Of several workers on one port one has the door, and deals connections out to the others, each of
which listens for them at a port of its own (workers.py). Who sees a port in a list must be able to tell which of these
it is. Nothing is computed before somebody asks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rdmanet.loop.doors import Heir
from rdmanet.loop.settings import Settings
from rdmanet.loop.workers import Register, Registration

if TYPE_CHECKING:
    from rdmanet.base.accounts import ConnectionInfo, DoorInfo, ServerInfo
    from rdmanet.stream.server import RdmaServer

INTERNET = (socket.AF_INET, socket.AF_INET6)

HowFound = Register | Heir | tuple[Heir, Registration] | str
"""How clients find RDMA at an address: who gets them is ours to say, or another worker's, with which we may be
registered; or why they do not find it."""


class ExplainedDualServer:
    """What a server says of itself. The fields are those of DualServer, which derives from this."""

    _settings: Settings
    _tcp_infos: Callable[[], Iterable[ConnectionInfo]]
    _rdma: list[RdmaServer]
    _doors: dict[Any, HowFound]

    @property
    def sockets(self) -> Any:
        raise NotImplementedError

    def is_serving(self) -> bool:
        raise NotImplementedError

    @property
    def connections(self) -> list[ConnectionInfo]:
        """The connections that it has accepted and that live, by RDMA and by TCP; see ``rdmanet.connections()``."""
        by_rdma = [info for server in self._rdma for info in server.connections]
        return by_rdma + self._by_tcp(self.info_but_tcp())

    def _by_tcp(self, server: ServerInfo) -> list[ConnectionInfo]:
        return [info for info in self._tcp_infos() if server.has(info)]

    def info(self) -> ServerInfo:
        """The server as it is now."""
        info = self.info_but_tcp()
        info.connections += len(self._by_tcp(info))
        return info

    def info_but_tcp(self) -> ServerInfo:
        """The same, but its connections by TCP are not counted, so it takes no longer if there are many."""
        from rdmanet.base.accounts import ServerInfo

        found = [server.info() for server in self._rdma]
        addresses = [sock.getsockname() for sock in self.sockets if sock.family in INTERNET]
        return ServerInfo(
            places=[address[:2] for address in addresses],
            fabric="rdma and tcp" if any(each.places for each in found) else "tcp",
            serving=self.is_serving(),
            connections=sum(each.connections for each in found),
            half_open=sum(each.half_open for each in found),
            waiting=sum(each.waiting for each in found),
            backlog=max((each.backlog for each in found), default=0),
            doors=[door for address in addresses if (door := self._door(address)) is not None],
        )

    def _door(self, address: Any) -> DoorInfo | None:
        """What is known of the door there; None if the server has not begun to offer RDMA."""
        from rdmanet.base.accounts import DoorInfo, WorkerInfo

        place = address[:2]
        match self._doors.get(address):
            case Register(is_closed=True):
                return DoorInfo(place, "its RDMA listener is closed, as when the device is removed")
            case Register() as register:
                return DoorInfo(place, workers=[WorkerInfo(*each) for each in register.workers()])
            case Heir(pid=pid):
                return DoorInfo(place, front=pid)
            case (Heir(pid=pid), registration):
                return DoorInfo(place, front=pid, port=registration.port)
            case str(why):
                return DoorInfo(place, why)
        if self._settings.patterns.exclude(*place):
            return DoorInfo(place, "the peers that RDMA is for do not include it (peers=, RDMANET_PEERS)")
        return None

    def explain(self) -> str:
        """What the server does, and who waits for whom on its connections: text, some lines for each connection."""
        return "\n\n".join([self.info().explain(), *(info.explain() for info in self.connections)])
