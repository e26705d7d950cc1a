"""The facts about an established connection that ``get_extra_info()`` tells by name.

``RdmaTransport.get_extra_info`` (rdma_transport.py) says what each is. They are put together when somebody asks: most
programs never do. A client that found its server by name has no port of its own; the number that stands for one is
held here from then on, as long as the connection exists (client_ports.py); whoever asks later gets one that is nobody
else's at that moment. Who asks may be another thread than the loop's, or a forked child.
"""

from __future__ import annotations

import threading
from typing import Any, cast

from rdmanet._core import CMID, PD, Connection, process_id
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.client_ports import HeldPort, with_port

_asking = threading.Lock()


class Facts:
    """What is known of one connection; nothing until it is established.

    :ivar peers_qp: the number of the peer's queue pair, as the client's request said
    :ivar held_port: keeps the peer's port from others, if it is not a real one and somebody has asked for it
    """

    __slots__ = ("_is_over", "_known", "_learned", "_pid", "held_port", "peers_qp")

    def __init__(self) -> None:
        self.peers_qp = 0
        self.held_port: HeldPort | None = None
        self._learned: tuple[Any, ...] | None = None
        self._known: dict[str, Any] | None = None
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

    def __getitem__(self, name: str) -> Any:
        return self.known()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The fact of this name; `default` if it is not known."""
        return self.known().get(name, default)

    def known(self) -> dict[str, Any]:
        """All of them, by their names; empty until the connection is established."""
        if self._learned is None:
            return {}
        if self._known is None:
            with _asking:
                if self._known is None:
                    self._known = self._told(*self._learned)
                is_ours = not self._is_over and self._pid == process_id()
                if not is_ours and self.held_port is not None:
                    self.held_port.close()
        return self._known

    def _told(
        self,
        reason: str,
        ours: SockAddr | None,
        theirs: SockAddr | None,
        port_num: int,
        qp_num: int,
        pd: PD,
    ) -> dict[str, Any]:
        if theirs is not None and not theirs[1]:  # nobody else may have this peer's address
            theirs = with_port(theirs, self.peers_qp)
            self.held_port = HeldPort(theirs)
            theirs = cast(SockAddr, (theirs[0], self.held_port.port, *theirs[2:]))
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

    def close(self) -> None:
        """The connection has ended; the facts stay."""
        self._is_over = True
        if self.held_port is not None:  # who asks at this moment in another thread lets its port go
            with _asking:
                self.held_port.close()
