"""Fixtures of the libraries' tests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

import rdmanet
from rdmanet import transport as transports
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
    connect = transports.connect

    async def counted(*args):
        made.append(await connect(*args))
        return made[-1]

    monkeypatch.setattr(transports, "connect", counted)
    return made
