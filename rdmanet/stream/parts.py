# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The parts of one connection, what they may ask of its life, and what is known of it at any moment.

``Lifecycle`` (lifecycle.py) has the parts, which do not know each other. What concerns several of them, and decides
nothing about the life, is in files of its own, which see a life as it is described here: beginning.py, reports.py and
ending.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rdmanet._core import STREAM_COUNTERS
from rdmanet.protocol import Event, State
from rdmanet.stream.callbacks import Callbacks
from rdmanet.stream.connection import Connection
from rdmanet.stream.deadlines import Deadlines
from rdmanet.stream.establish import CLIENT, Endpoint
from rdmanet.stream.facts import Facts
from rdmanet.stream.loop_context import LoopContext
from rdmanet.stream.machine import Machine
from rdmanet.stream.options import StreamConfig
from rdmanet.stream.readiness import Readiness
from rdmanet.stream.teardown import Teardown
from rdmanet.stream.writing import WritingHalf

if TYPE_CHECKING:
    from rdmanet.stream.regions import Regions

_CLIENT, _OPEN = CLIENT, State.OPEN  # as globals of this module, see lifecycle.py
_COUNTERS = [*STREAM_COUNTERS, "bytes_unsent", "bytes_unread", "send_slots", "peer_qp"]
_IN_FLIGHT = _COUNTERS.index("sends_in_flight")


class Life:
    """The life of one connection, as its parts see it.

    :ivar machine: its states, and the error that it ends with
    :ivar connection: its bytes
    :ivar endpoint: its identifier and its queue pair
    :ivar known_regions: the memory on offer; None unless somebody has used `regions`
    :ivar writing: our half of it
    :ivar callbacks: its protocol
    :ivar deadlines: the limits of what waits for the peer
    :ivar facts: what get_extra_info() knows by name; empty until the connection is established
    :ivar readiness: what shows whether there is something to read, once somebody has asked for that
    :ivar teardown: how far it is taken apart
    :ivar on_made: to be called when the connection is established
    :ivar on_over: the same, once, when the connection, or the attempt, is over for its program
    """

    loop: asyncio.AbstractEventLoop
    loop_context: LoopContext
    config: StreamConfig
    machine: Machine
    connection: Connection
    endpoint: Endpoint
    known_regions: Regions | None
    writing: WritingHalf
    callbacks: Callbacks
    deadlines: Deadlines
    facts: Facts
    readiness: Readiness | None
    teardown: Teardown
    on_made: Callable[[], None]
    on_over: Callable[[], None]

    @property
    def regions(self) -> Regions:
        """The memory on offer. Most connections never have any, so it is made when it is first used."""
        raise NotImplementedError

    def handle(self, event: Event) -> None:
        """Something has happened."""
        raise NotImplementedError

    def handle_error(self, event: Event, error: BaseException | None, reason: str) -> None:
        """The same, with its cause; if it has us send an Abort, that tells the peer the reason."""
        raise NotImplementedError

    def close(self) -> None:
        """The application, or its server, closes the connection."""
        raise NotImplementedError

    def callback_raised(self, exc: BaseException, name: str) -> None:
        """The protocol's method of that name raised."""
        raise NotImplementedError

    def detach(self) -> None:
        """Everything is given back: forget those who refer to the life."""
        raise NotImplementedError

    def release_now(self) -> None:
        """Give everything back at once."""
        raise NotImplementedError


def facts_now(life: Life) -> tuple[Any, ...]:
    """What `ConnectionInfo` begins with, and its counters (base/accounts.py)."""
    said = _said_now(life)
    numbers = said[12]
    return (*said[:12], dict(zip(_COUNTERS, numbers, strict=True)) if numbers else {})


def plain_row(life: Life) -> tuple[list[str], tuple[Any, ...]] | None:
    """Its names and numbers as `rows_of` yields them (base/accounts.py); None if there is more to say.

    `rdmanet ss` asks for this of thousands of connections: what few of them take is in explaining.py.
    """
    said = _said_now(life)
    numbers = said[12]
    if said[5] != "open" or said[9] == "adapter" or life.known_regions is not None or numbers[_IN_FLIGHT]:
        return None
    return _COUNTERS, (*said[:12], "", "", numbers)


def _said_now(life: Life) -> tuple[Any, ...]:
    """What both say, the last of which are the numbers of `_COUNTERS`; none before the connection is established."""
    machine, connection, facts = life.machine, life.connection, life.facts.known()
    local = peer = None
    path, error = "", machine.error
    numbers: list[int] = []
    if facts:
        local, peer = facts["sockname"], facts["peername"]
        numbers = connection.counts()
        numbers += (
            connection.get_write_buffer_size(),
            int(connection.unread),
            life.config.data_slots,
            life.facts.peers_qp,
        )
        qp = connection.qp
        if qp is not None and not qp.closed:  # else it is over
            if facts["rdma_library"] != "embedded":
                path = "adapter"
            else:
                path = "tcp" if connection.probed else "memory"
    return (
        "rdma",
        facts.get("fabric_reason", ""),
        "client" if life.endpoint.role is _CLIENT else "server",
        None if local is None else (local[0], local[1]),
        None if peer is None else (peer[0], peer[1]),
        "open" if machine.state is _OPEN else machine.state.name.lower(),
        connection.reading,
        connection.protocol_paused,
        facts.get("rdma_device", ""),
        path,
        facts.get("rdma_qp", 0),
        "" if error is None else f"{type(error).__name__}: {error}",
        numbers,
    )
