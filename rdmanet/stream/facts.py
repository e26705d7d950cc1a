"""The facts about an established connection that ``get_extra_info()`` tells by name.

``RdmaTransport.get_extra_info`` (rdma_transport.py) says what each is. A client that found its server by name has no
port of its own; the number that stands for one is held here, as long as the connection exists (client_ports.py).
"""

from __future__ import annotations

from typing import Any, cast

from rdmanet._core import CMID, Connection
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.client_ports import HeldPort, with_port


class Facts(dict[str, Any]):
    """What is known of one connection; nothing until it is established.

    :ivar held_port: keeps the peer's port from others, if it is not a real one
    """

    __slots__ = ("held_port",)

    def __init__(self) -> None:
        super().__init__()
        self.held_port: HeldPort | None = None

    def learn(self, cm_id: CMID, connection: Connection, reason: str) -> None:
        """The connection is established.

        :param reason: why it is by RDMA
        """
        qp, context = connection.qp, cm_id.context
        assert context is not None and qp is not None
        number, theirs = qp.qp_num, cm_id.peer_addr
        peer = theirs
        if theirs is not None and not theirs[1]:  # nobody else may have this peer's address
            peer = with_port(theirs, qp.query()[0].dest_qp_num or 0)
            self.held_port = HeldPort(peer)
            peer = cast(SockAddr, (peer[0], self.held_port.port, *peer[2:]))
        ours = cm_id.local_addr
        self.update(
            fabric="rdma",
            fabric_reason=reason,
            sockname=ours if ours is None or ours[1] else with_port(ours, number),
            peername=peer,
            rdma_device=context.name,
            rdma_library=context.library.name,
            rdma_port=cm_id.port_num,
            rdma_qp=number,
            rdma_pd=connection.engine.pd,
        )

    def close(self) -> None:
        """The connection has ended; the facts stay."""
        if self.held_port is not None:
            self.held_port.close()
