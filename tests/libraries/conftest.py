"""Fixtures of the libraries' tests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

import rdmanet
from rdmanet.stream.lifecycle import Lifecycle
from rdmanet.transport import RdmaTransport

BASES = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}


@pytest.fixture(params=BASES.values(), ids=BASES.keys())
def run(request) -> Callable[..., Any]:
    def run(main: Coroutine[Any, Any, Any], *, limit_s: float = 60, **options: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(limit_s):
                return await main

        return rdmanet.run(limited(), loop_factory=request.param, **options)

    return run


@pytest.fixture
def connections(monkeypatch) -> list[RdmaTransport]:
    """The connecting sides of all connections by RDMA."""
    made = []
    connect = Lifecycle.connect

    async def counted(self, address, local):
        await connect(self, address, local)
        made.append(self.callbacks.transport)

    monkeypatch.setattr(Lifecycle, "connect", counted)
    return made
