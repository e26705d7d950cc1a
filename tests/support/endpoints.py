"""What connections hear of the connection manager, for tests that hold it back."""

from collections.abc import Callable
from typing import Any

from rdmanet._core import CMEvent
from rdmanet.stream.establish import Endpoint
from rdmanet.stream.loop_context import LoopContext

Hear = Callable[[CMEvent], None]


def hears(monkeypatch: Any, cm_event: Callable[[Endpoint, CMEvent, Hear], None]) -> None:
    """Have this called in place of each endpoint that hears an event; its third argument lets it hear."""

    def instead_of(handler: Hear) -> Hear:
        endpoint = getattr(handler, "__self__", None)
        if not isinstance(endpoint, Endpoint):
            return handler
        return lambda event: cm_event(endpoint, event, handler)

    create, adopt = LoopContext.create_id, LoopContext.adopt_id
    monkeypatch.setattr(LoopContext, "create_id", lambda self, handler: create(self, instead_of(handler)))
    monkeypatch.setattr(
        LoopContext, "adopt_id", lambda self, cm_id, handler: adopt(self, cm_id, instead_of(handler))
    )
