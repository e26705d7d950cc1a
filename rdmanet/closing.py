"""`with` and `async with`, for what has a `close()` that does not wait."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Closed at the end of a `with`, however it ends.

    `async with` is the same, for those who write it by habit: nothing is waited for, since the buffers of what is
    in flight are kept by the core until the device is done with them.
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
