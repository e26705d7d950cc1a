"""The facts about an established connection that ``get_extra_info()`` tells by name.

``RdmaTransport.get_extra_info`` (rdma_transport.py) says what each is. They are put together when somebody asks: most
programs never do. A client that found its server by name has no port of its own. The number that stands for one is held
(client_ports.py) from when somebody asks for the peer's name, as long as the connection exists; whoever asks first
later gets one that is nobody else's at that moment. Who lists connections does not ask: that would take a descriptor
for each. The port is 0 there until the program has asked.

Who asks may be another thread than the loop's, or a forked child, or a signal handler or a finalizer that has
interrupted somebody who asks: hence the lock is one that its thread may take again, and a child has its own.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from rdmanet._core import CMID, PD, Connection, process_id
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.client_ports import HeldPort, with_port

_asking = threading.RLock()


def _forked() -> None:
    """In the child, the thread that had the lock is gone."""
    global _asking
    _asking = threading.RLock()


os.register_at_fork(after_in_child=_forked)


class Facts:
    """What is known of one connection; nothing until it is established.

    :ivar peers_qp: the number of the peer's queue pair, as the client's request said
    :ivar held_port: keeps the peer's port from others, if it is not a real one and somebody has asked for it
    """

    __slots__ = ("_has_asked", "_is_over", "_known", "_learned", "_pid", "held_port", "peers_qp")

    def __init__(self) -> None:
        self.peers_qp = 0
        self.held_port: HeldPort | None = None
        self._learned: tuple[Any, ...] | None = None
        self._known: dict[str, Any] | None = None
        self._has_asked = False
        self._is_over = False
        self._pid = 0

    def learn(self, cm_id: CMID, connection: Connection, reason: str) -> None:
        """The connection is established.

        :param reason: why it is by RDMA
        """
        qp = connection.qp
        assert qp is not None
        pd = connection.engine.pd
        self._pid = process_id()
        self._learned = reason, cm_id.local_addr, cm_id.peer_addr, cm_id.port_num, qp.qp_num, pd

    def __bool__(self) -> bool:
        """Whether the connection has been established."""
        return self._learned is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The fact of this name; `default` if it is not known."""
        if self._known is None and name not in _NAMES:
            return default  # what asyncio asks of each connection (sslcontext) has nothing put together
        kept = self.kept()
        if name == "peername" and kept and not self._has_asked:
            self._take_port(kept)
        return kept.get(name, default)

    def kept(self) -> dict[str, Any]:
        """All of them, by their names, in a dict that is kept; empty until the connection is established.

        The peer's port is 0 if it is not a real one and nobody has asked for it.
        """
        if self._learned is None:
            return {}
        if self._known is None:
            with _asking:
                known = _told(*self._learned)
                if self._known is None:
                    self._known = known
        return self._known

    def known(self) -> dict[str, Any]:
        """The same, for who lists connections: nothing is kept.

        Of thousands that stay, Python's collector would look at all that a list has made, in the middle of a slice.
        """
        if self._known is None and self._learned is not None:
            return _told(*self._learned)
        return self.kept()

    def _take_port(self, known: dict[str, Any]) -> None:
        """Somebody asks for the peer's name."""
        with _asking:
            peer: SockAddr | None = known["peername"]
            if peer is not None and not peer[1] and not self._has_asked:
                peer = with_port(peer, self.peers_qp)
                held = HeldPort(peer)
                if self._has_asked:  # by what has interrupted us
                    held.close()
                    return
                self.held_port, known["peername"] = held, (peer[0], held.port, *peer[2:])
                self._has_asked = True
                if self._is_over or self._pid != process_id():
                    held.close()
            self._has_asked = True

    def close(self) -> None:
        """The connection has ended; the facts stay."""
        self._is_over = True
        if self.held_port is not None:  # who asks at this moment in another thread lets its port go
            with _asking:
                self.held_port.close()


_NAMES = frozenset(
    "fabric fabric_reason sockname peername rdma_device rdma_library rdma_port rdma_qp rdma_pd".split()
)
"""Those of `_told`."""


def _told(
    reason: str, ours: SockAddr | None, theirs: SockAddr | None, port_num: int, qp_num: int, pd: PD
) -> dict[str, Any]:
    return {
        "fabric": "rdma",
        "fabric_reason": reason,
        "sockname": ours if ours is None or ours[1] else with_port(ours, qp_num),
        "peername": theirs,
        "rdma_device": pd.context.name,
        "rdma_library": pd.context.library.name,
        "rdma_port": port_num,
        "rdma_qp": qp_num,
        "rdma_pd": pd,
    }
