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


class Reported:
    """An owner that has closed, and lost nothing, or has something left that may be lost."""

    has_ended = False

    def __init__(self, clean: bool) -> None:
        self.clean = clean
        self.errors: list[OSError] = []

    def ends_cleanly(self) -> bool:
        return self.clean

    def on_connection_error(self, error: OSError) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("clean", [True, False])
def test_no_error_is_made_of_a_clean_end(clean: bool):
    """Each connection that both sides have closed ends so."""

    async def disconnecting() -> None:
        context, owner = Context(), Reported(clean)
        nothing: Any = SimpleNamespace(qp=None, has_heard=False)
        event = SimpleNamespace(
            type=CMEventType.DISCONNECTED, error=lambda: ConnectionResetError("the peer has disconnected")
        )
        endpoint = Endpoint(Role.SERVER, context, StreamConfig(), nothing, owner)  # type: ignore[arg-type]
        endpoint._cm_event(event)  # type: ignore[arg-type]
        assert bool(owner.errors) is not clean

    asyncio.run(disconnecting())
