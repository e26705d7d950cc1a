"""A call that has one result, as its caller awaits it."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from rdmanet.rpc.calls import CallerBook
from rdmanet.rpc.fetching import Fetching
from rdmanet.rpc.link import Link
from rdmanet.rpc.pending import CallDetails, Pending
from rdmanet.rpc.stats import Counter
from rdmanet.rpc.turns import Turns

class Calling:
    loop: asyncio.AbstractEventLoop
    link: Link
    book: CallerBook
    fetching: Fetching
    _counters: list[Counter]
    _places: Turns
    def _is_full(self) -> bool: ...
    def _has_to_wait(self, call: CallDetails) -> bool: ...
    def _abandon(self, pending: Pending) -> bool: ...
    def _time_is_over(self, pending: Pending) -> None: ...
    def _gives_up(self, pending: Pending) -> None: ...
    def _release(self, number: int) -> None: ...

class Unary(Coroutine[Any, Any, Any]):
    def __init__(
        self,
        calling: Calling,
        call: CallDetails,
        arguments: Any,
        memory: Any = None,
        apart: bool = False,
        tail: bytes | memoryview | None = None,
    ) -> None: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...
    def send(self, value: Any) -> Any: ...
    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any: ...
    def close(self) -> None: ...
