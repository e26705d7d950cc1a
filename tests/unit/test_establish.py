"""Connecting, step by step, with an identifier that answers when the test says so."""

import asyncio
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from rdmanet._core import CMEventType
from rdmanet.stream.establish import Endpoint, Role
from rdmanet.stream.options import StreamConfig
from rdmanet.stream.waits import Waits

PEER = ("10.0.0.1", 7471)


class Identifier:
    """The device has not answered yet."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def resolve_at_once(self, *_: Any) -> None:
        """An adapter cannot."""

    def resolve_addr(self, *_: Any) -> None:
        self.asked.append("address")

    def resolve_route(self, *_: Any) -> None:
        self.asked.append("route")


class Context:
    """As much of a loop context as connecting needs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waits = Waits(self.loop)
        self.id = Identifier()

    def create_id(self, _: Any) -> Identifier:
        return self.id


def endpoint_of(context: Context, timeout: float) -> Any:
    nothing: Any = SimpleNamespace(has_ended=False)
    return Endpoint(Role.CLIENT, context, StreamConfig(connect_timeout=timeout), nothing, nothing)  # type: ignore[arg-type]


def test_the_time_for_connecting_may_be_up_between_two_steps():
    async def connecting() -> None:
        context = Context()
        endpoint = endpoint_of(context, 3600.0)

        def answer_and_be_late() -> None:
            endpoint._cm_event(SimpleNamespace(type=CMEventType.ADDR_RESOLVED))
            endpoint._overdue(PEER)

        context.loop.call_soon(answer_and_be_late)
        with pytest.raises(TimeoutError, match=r"no connection to 10\.0\.0\.1:7471 within 3600\.0 s"):
            await endpoint.connect(PEER, None, copy_context())
        assert context.id.asked == ["address"]

    asyncio.run(connecting())


def test_the_time_for_connecting_is_up_during_a_step():
    async def connecting() -> None:
        context = Context()
        with pytest.raises(TimeoutError, match=r"within 0\.0 s"):
            await endpoint_of(context, 0.0).connect(PEER, None, copy_context())
        assert context.id.asked == ["address"]

    asyncio.run(connecting())
