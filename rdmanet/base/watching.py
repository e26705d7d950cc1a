"""Who can be watched in this process, from inside: `connections()`; and from outside, by onlookers.py.

A *source* is what has connections: the loop context of each loop and library (stream/loop_context.py), and the switch
of each switched loop, which knows those by TCP (loop/switch.py). Each has a `Watched` from its beginning to its end.
Nothing else happens until somebody asks.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from rdmanet.base.onlookers import Onlookers, Source
from rdmanet.base.onlookers import Readers as Readers

if TYPE_CHECKING:
    from rdmanet.base.accounts import ConnectionInfo

logger = logging.getLogger("rdmanet")


class Watched:
    """A source can be watched until this is closed."""

    def __init__(self, source: Source, readers: Readers) -> None:
        """Without descriptors it can be watched from inside only."""
        self._key = id(source)
        self._onlookers: Onlookers | None = None
        try:
            self._onlookers = Onlookers(source, readers)
        except OSError as exc:
            logger.debug("`rdmanet ss` will not see a loop of this process: %s", exc)
        _sources[id(source)] = source

    def close(self, loop_lives: bool = True) -> None:
        """It has ended. Later calls do nothing."""
        _sources.pop(self._key, None)
        if self._onlookers is not None:
            self._onlookers.close(loop_lives)


_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()


def connections() -> list[ConnectionInfo]:
    """All connections of this process, of all its loops, as they are now.

    These are the connections by RDMA, whoever has made them; and of loops that are switched (`rdmanet.run`), those by
    TCP as well, each with the reason why it is TCP. Each has its facts as attributes, the counters of
    ``get_extra_info("rdma_stats")`` as ``stats``, and says by ``explain()`` who waits for whom.

    It may be called in any thread. What it returns is a picture of this moment: ask again to see what has changed.
    """
    sources = (each() for each in _sources.valuerefs())
    return [info for source in sources if source is not None for info in source.connection_infos()]
