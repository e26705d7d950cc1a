"""The rest of a long message goes from the transport to where it stays, without a copy on the way.

Theory
------
What a transport gives to `data_received` is memory of its own, from which the framer copies the body of a long message.
Transports can also fill memory that a protocol names: asyncio's BufferedProtocol. That takes two calls for each piece,
so it is not for short messages. So a link lets a `LongBody` be its transport's protocol from the first piece of a long
body until the last. All else that a transport says is the link's, as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Owner(Protocol):
    """What is needed of the link."""

    def body_came(self, nbytes: int) -> None:
        """So many bytes of the body have come, into its room."""

    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def region_offered(self, remote: Any) -> None: ...
    def region_revoked(self, remote: Any) -> None: ...


class LongBody(asyncio.BufferedProtocol):
    """The protocol of a link's transport, while the rest of a long body comes.

    :param room: gives the memory for what is missing
    """

    def __init__(self, link: Owner, room: Callable[[], Any]) -> None:
        self._room = room
        self.buffer_updated = link.body_came  # type: ignore[method-assign]
        self.eof_received = link.eof_received  # type: ignore[method-assign]
        self.connection_lost = link.connection_lost  # type: ignore[method-assign]
        self.pause_writing = link.pause_writing  # type: ignore[method-assign]
        self.resume_writing = link.resume_writing  # type: ignore[method-assign]
        self.region_offered = link.region_offered
        self.region_revoked = link.region_revoked

    rdma_get_buffer_ahead = False  # no more is wanted than this body

    def get_buffer(self, sizehint: int) -> Any:
        return self._room()
