"""The modules of RDMA's connections and servers, which are imported when a loop first needs them.

They take most of the time of a program's start, and most connections of many programs are TCP's.
"""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any

from rdmanet.loop.tcp_alone import OUT_OF_REACH, may_work_again

logger = logging.getLogger("rdmanet")

_is_told = False
modules: Any = None
"""Those that each connection uses, once they are loaded: to import each of them where it is used takes longer than that
use. `load` says which they are."""


def load(serves: bool = False) -> Any:
    """Import all that connections by RDMA take, however they end, but for what short ones do not (stream/whole.py).

    :param serves: import all that servers take, too, and their connections
    :return: a namespace of those that each connection uses
    :raises OSError: the program cannot read these modules any more (ELIBACC), or has no descriptor or memory left now
    """
    global _is_told, modules
    if modules is not None and not serves:
        return modules
    try:
        import rdmanet.streams.files  # noqa: F401
        from rdmanet import transport
        from rdmanet.stream import addresses, loop_context, tls, waits
        from rdmanet.streams import reader_writer

        if serves:
            import ctypes  # noqa: F401  without it, nobody knows what a TCP listener refuses (serving.py)

            import rdmanet.stream.listening  # noqa: F401
    except (ImportError, OSError) as exc:
        if may_work_again(exc):
            raise
        text = OUT_OF_REACH.format(exc)
        if not _is_told:
            _is_told = True
            logger.warning("all connections take TCP: %s", text)
        raise OSError(errno.ELIBACC, text) from exc
    modules = SimpleNamespace(
        addresses=addresses, loop_context=loop_context, reader_writer=reader_writer, tls=tls, transport=transport,
        waits=waits,
    )  # fmt: skip
    return modules
