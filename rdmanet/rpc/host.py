"""A server, as its connections see it (callee.py): what they share, and what they tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, Protocol

from rdmanet.rpc.builtin import Served
from rdmanet.rpc.first_steps import FirstSteps
from rdmanet.rpc.interceptors import Interceptor
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.method import Method
from rdmanet.rpc.running import Running
from rdmanet.rpc.shares import Shares


class Host(Protocol):
    """What a connection needs of its server."""

    loop: asyncio.AbstractEventLoop
    services: dict[str, Served]
    builtin: dict[str, Served]
    limits: Limits
    shares: Shares
    send_tracebacks: bool
    keepalive: float | None
    interceptors: Sequence[Interceptor]
    intercept_builtin: bool
    carry: Sequence[ContextVar[Any]]
    executor: Executor | None
    refusal: str | None
    callees: set[Any]
    """The connections."""
    unheard: set[Any]
    """Those whose clients may not have heard that the server takes no new calls."""
    running: set[Running]
    first_steps: FirstSteps

    @property
    def is_closing(self) -> bool: ...

    def methods_for(self, callee: Any, served: Served) -> list[tuple[Method, Callable[..., Any]]]:
        """The methods of a service, with the functions to call, for a connection."""

    def is_idle(self) -> None:
        """The task of the last call of `running` is in its last step."""

    def has_heard(self, callee: Any) -> None:
        """A connection takes no more calls, or is gone."""
