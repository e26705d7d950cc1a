"""`with` and `async with` for objects whose `close()` does not wait."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closable:
    """An object that is closed at the end of a `with` block, however the block ends.

    `async with` does the same, and waits for nothing: the core keeps the buffers of requests in flight until the device
    is done with them.
    """

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
