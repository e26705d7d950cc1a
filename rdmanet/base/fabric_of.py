"""By which fabric something of the program's own went: `fabric()`.

Theory
------
A transport says it by ``get_extra_info("fabric")``, but a program mostly has something else in its hand. That leads to
the connection in one of three ways:

* It has ``get_extra_info()`` itself, which asks the transport, or knows its socket at least.
* An attribute is the transport, or leads there. aiohttp has a response give its connection back when the body is there,
  which a short one is before the program sees the response. Its protocol still knows the connection then.
* It knows the two addresses of the connection, as a socket and an ASGI scope do. These are looked for among the
  connections of the process. What was found is kept, so it is the first request of a connection that pays for that.

No library is imported for this: whatever has these names is taken.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rdmanet.base import watching

_WAYS = ("_transport", "transport", "connection", "_protocol")
_STEPS_MOST = 6  # four lead from a response of httpx to a transport
_found: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
"""Transports that were looked for, by their two addresses."""


@dataclass(frozen=True)
class FabricInfo:
    """By which fabric something went.

    :ivar fabric: "rdma", "tcp", "unix" or "memory"
    :ivar reason: why, in words; "" if nobody knows
    :ivar device: the name of the device; "" if it is not by RDMA, or not known
    """

    fabric: str
    reason: str = ""
    device: str = ""


def fabric(x: object) -> FabricInfo:
    """By which fabric this went: "rdma", "tcp", "unix" or "memory", and why.

    It takes a transport, a stream (a reader or a writer), a socket, a response of httpx or aiohttp, a request of
    aiohttp's server, an ASGI scope, a client of ``rdmanet.rpc`` (of several servers, that of the last call counts), and
    ``rpc.peer()``. A stream, a socket or a response that rdmanet knows nothing of is "tcp", too.

    It may be called in any thread, and waits for nothing.

    :raises TypeError: it does not lead to a connection
    :raises LookupError: it has no connection, or none any more. Of a scope also: none is known between its addresses
    """
    found: Any = x
    for _ in range(_STEPS_MOST):
        if isinstance(found, weakref.ref):
            found = found()
        if found is None:
            raise LookupError(f"rdmanet.fabric: {type(x).__name__} has no connection, or none any more")
        if isinstance(found, Mapping) and "type" in found and "client" in found:
            return _of_scope(found)
        if callable(getattr(found, "get_extra_info", None)):
            outer = found.get_extra_info("outer")  # of a connection within it (rpc/inner.py)
            asked = (outer or found).get_extra_info
            if kind := asked("fabric"):
                return FabricInfo(kind, asked("fabric_reason") or "", asked("rdma_device") or "")
            found = asked("socket")
        elif isinstance(kind := getattr(found, "transport", None), str):  # what rpc.peer() returns
            return FabricInfo(kind, f"the client came by {kind.upper()}" if kind in ("rdma", "tcp") else "")
        elif isinstance(more := getattr(found, "extensions", None), dict) and "network_stream" in more:
            found = more["network_stream"]
        elif ways := [name for name in _WAYS if hasattr(found, name)]:
            found = next((way for name in ways if (way := getattr(found, name)) is not None), None)
        elif getattr(found, "family", None) == socket.AF_UNIX:
            return FabricInfo("unix")
        elif hasattr(found, "getpeername") and getattr(found, "type", None) == socket.SOCK_STREAM:
            try:
                known = _between(found.getsockname(), found.getpeername())
            except (OSError, ValueError) as exc:  # ValueError: of uvloop's
                raise LookupError(f"rdmanet.fabric: {type(x).__name__} has no connection: {exc}") from None
            return FabricInfo("tcp", "no loop of rdmanet's has made it") if known is None else fabric(known)
        else:
            break
    raise TypeError(f"rdmanet.fabric: {type(x).__name__} does not lead to a connection")


def _of_scope(scope: Mapping[str, Any]) -> FabricInfo:
    client, server = scope["client"], scope.get("server")
    if server and server[1] is None:
        return FabricInfo("unix")
    if client and server and (known := _between(server, client)) is not None:
        return fabric(known)
    raise LookupError(
        f"rdmanet.fabric: no connection is known between {server} and {client}, as the ASGI scope says: it is over, the"
        " event loop is not rdmanet's, or a proxy's header has replaced the client"
    )


def _between(local: Any, peer: Any) -> Any:
    """The transport between these addresses; None if there is none."""
    local, peer = tuple(local[:2]), tuple(peer[:2])
    known = _found.get((local, peer))
    if known is None or known.is_closing():
        for each in watching.transports():
            asked = each.get_extra_info  # for the peer's name last: of a client it may take a descriptor
            if (asked("sockname") or ())[:2] == local and (asked("peername") or ())[:2] == peer:
                _found[local, peer] = known = each
                if not known.is_closing():
                    break
    return known
