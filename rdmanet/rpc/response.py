"""What a method says beside its result: initial metadata and trailing metadata, by gRPC's names.

Theory
------
Initial metadata is sent at once, before the result, and before the items of a stream: what a caller wants to know while
the method still works. Trailing metadata goes with the answer, also with an error. Both are maps from names to texts or
bytes, like a call's own metadata, and as long at most (`Limits.metadata_bytes`, on both sides).

At a server the method and its interceptors fill them in (context.py). A client reads them from a `Response` that it has
given along with the call, or from `Error.trailing_metadata`. A call says whether its caller reads them: for all others
nothing is sent, but the metadata of errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rdmanet.rpc.call_metadata import Metadata, checked_metadata, decoded
from rdmanet.rpc.limits import Limits

__all__ = ["Response"]


class Response:
    """What a method says beside its result, at its caller: ``await rpc.options(store, response=response).get("w")``.

    It is of one call at a time: each of several that run together has a Response of its own. A call that uses it again
    empties it first. With `Retry` it is of the last try.

    :ivar initial_metadata: a dict: what the method has sent before its answer, as far as it has come
    :ivar trailing_metadata: a dict: what came with the answer, also if that is an error. An error of the caller's side,
        such as a lost connection, brings none
    """

    __slots__ = ("_changed", "_is_busy", "_is_over", "_peer", "initial_metadata", "trailing_metadata")

    def __init__(self) -> None:
        self._is_busy = self._is_over = False
        self._changed: asyncio.Future[None] | None = None
        self._peer: Any = None  # of several servers, the address of that to which the last try was sent
        self.emptied()

    async def wait_initial(self) -> Metadata:
        """Wait until initial metadata has come, or the call has its answer without. Returns what has come.

        Cancelling it ends only the wait.
        """
        while not (self.initial_metadata or self._is_over):
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)
        return self.initial_metadata

    def emptied(self) -> Self:
        """Forget everything: a try of the call begins."""
        self.initial_metadata: Metadata = {}
        self.trailing_metadata: Metadata = {}
        return self

    @contextmanager
    def during_call(self) -> Iterator[None]:
        """A block in which the call runs.

        :raises RuntimeError: another one does
        """
        if self._is_busy:
            raise RuntimeError(
                "this rpc.Response is of a call that has not ended: give each call a Response of its own"
            )
        self._is_busy, self._is_over = True, False
        self.emptied()
        try:
            yield
        finally:
            self._is_busy, self._is_over = False, True
            self._look()

    def take_initial(self, raw: Any, limits: Limits) -> None:
        """Initial metadata has come.

        :raises Error: it is none, or with what has come before more than the limit; the same holds for the next
        """
        found, _ = decoded(raw, limits)
        self.initial_metadata = checked_metadata(self.initial_metadata | found, limits.metadata_bytes) or {}
        self._look()

    def take_trailing(self, raw: Any, limits: Limits) -> None:
        """Trailing metadata has come."""
        self.trailing_metadata, _ = decoded(raw, limits)

    def take(self, other: Response) -> None:
        """This call has ended as that of another Response."""
        self.initial_metadata, self.trailing_metadata = other.initial_metadata, other.trailing_metadata
        self._peer = other._peer

    def _look(self) -> None:
        if self._changed is not None:
            changed, self._changed = self._changed, None
            if not changed.done():
                changed.set_result(None)

    def __repr__(self) -> str:
        return f"<rpc.Response {self.initial_metadata} {self.trailing_metadata}>"
