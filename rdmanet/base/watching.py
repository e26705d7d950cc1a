"""Who can be watched in this process, from inside: `connections()`; and from outside, by onlookers.py.

A *source* is what has connections: the loop context of each loop and library (stream/loop_context.py), and the switch
of each switched loop, which knows those by TCP (loop/switch.py). Each has a `Watched` from its beginning to its end.
Nothing else happens until somebody asks.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rdmanet.base import late_import
from rdmanet.base.onlookers import Onlookers, Source
from rdmanet.base.onlookers import Readers as Readers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rdmanet.base.accounts import ConnectionInfo, ServerInfo
    from rdmanet.base.call_accounts import CallsInfo

logger = logging.getLogger("rdmanet")


@runtime_checkable
class TcpSource(Source, Protocol):
    """A source that has connections by TCP."""

    def tcp_sides(self) -> Iterator[str]:
        """The side of each that lives, "client" or "server"; the kernel is not asked."""


class Watched:
    """A source can be watched until this is closed."""

    def __init__(self, source: Source, readers: Readers) -> None:
        """Without descriptors it can be watched from inside only."""
        self._key = id(source)
        self._onlookers: Onlookers | None = None
        self._holds_spare = True
        late_import.hold_spare()
        try:
            self._onlookers = Onlookers(source, readers)
        except OSError as exc:
            logger.debug("`rdmanet ss` will not see a loop of this process: %s", exc)
        _sources[id(source)] = source

    def close(self, loop_lives: bool = True) -> None:
        """It has ended. Later calls do nothing."""
        _sources.pop(self._key, None)
        if self._holds_spare:
            self._holds_spare = False
            late_import.let_spare_go()
        if self._onlookers is not None:
            self._onlookers.close(loop_lives)


callers: weakref.WeakKeyDictionary[Any, Callable[[Any], CallsInfo | None]] = weakref.WeakKeyDictionary()
"""The servers and clients of rdmanet.rpc, and what tells of their calls: None if they are closed. Each has a `loop`."""


def calls_of(loop: Any) -> Iterator[CallsInfo]:
    """What the servers and clients of a loop have under way."""
    for ref in callers.keyrefs():  # a list: other threads may add to it
        caller = ref()
        if caller is not None and caller.loop is loop and (info := callers[caller](caller)) is not None:
            yield info


class CallSums:
    """What was counted of a method.

    :ivar numbers: as the attributes of rpc.MethodStats
    :ivar ended: how many calls have ended with each code
    """

    __slots__ = ("ended", "numbers")

    def __init__(self, numbers: dict[str, float], ended: dict[str, int]) -> None:
        self.numbers, self.ended = numbers, ended


call_sums: Callable[[], dict[tuple[str, str, str], CallSums]] = dict
"""What was counted of calls in this process, by side, service and method (rpc/totals.py)."""

opened_by_tcp = {"client": 0, "server": 0}
"""How many connections switched loops have made by TCP, by side."""

_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()


def connections() -> list[ConnectionInfo]:
    """All connections of this process, of all its loops, as they are now.

    These are the connections by RDMA, whoever has made them; and of loops that are switched (`rdmanet.run`), those by
    TCP as well, each with the reason why it is TCP. Each has its facts as attributes, the counters of
    ``get_extra_info("rdma_stats")`` as ``stats``, and says by ``explain()`` who waits for whom.

    It may be called in any thread. What it returns is a picture of this moment: ask again to see what has changed.
    """
    return [info for source in _living() for info in source.connection_infos()]


def transports() -> Iterator[Any]:
    """The transports of all connections of this process that are established."""
    return (transport for source in _living() for transport in source.transports())


def servers() -> list[ServerInfo]:
    """All servers of this process as they are now."""
    return [info for source in _living() for info in source.server_infos()]


def tcp_connections() -> tuple[dict[str, int], dict[str, int]]:
    """How many connections switched loops have made by TCP, and how many of these live: by side."""
    sides = [side for source in _living() if isinstance(source, TcpSource) for side in source.tcp_sides()]
    return dict(opened_by_tcp), {side: sides.count(side) for side in opened_by_tcp}


def _living() -> Iterator[Source]:
    return (source for each in _sources.valuerefs() if (source := each()) is not None)


def _forked() -> None:
    opened_by_tcp.update(client=0, server=0)


os.register_at_fork(after_in_child=_forked)
