"""Servers by their addresses: how a client tells them apart, and connects to the first of several that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rdmanet.errors import endpoint
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.errors import Code, Error

Address = tuple[str, int | None]
"""(host, port); of a Unix socket (path, None)."""
Weighted = tuple[Address, float]
"""A server, and how much of the calls it gets beside the others."""
Dial = Callable[[Address], Awaitable[Channel]]


async def first_of(addresses: list[Address], dial: Dial, seconds: float) -> Channel:
    """Connect to the first of several servers that answers.

    :param seconds: how long each may take
    :raises OSError: none does
    :raises Error: none does, and one has refused; this is why
    """
    failed: list[OSError | Error] = []
    for address in addresses:
        try:
            async with asyncio.timeout(seconds):
                return await dial(address)
        except TimeoutError as exc:
            failed.append(exc if str(exc) else TimeoutError(f"no answer in {seconds:g} s"))
        except (OSError, Error) as exc:
            failed.append(exc)
    try:
        for found in failed:
            if isinstance(found, Error) and (found.code is not Code.UNAVAILABLE or len(addresses) == 1):
                raise found
        if len(addresses) == 1:
            raise failed[0]
        each = zip(addresses, failed, strict=True)
        reasons = "; ".join(f"{named([address])}: {exc}" for address, exc in each)
        raise ConnectionError(f"none of {len(addresses)} servers answers: {reasons}") from failed[-1]
    finally:
        del failed, found  # whose tracebacks have this frame


def named(addresses: list[Address]) -> str:
    """Addresses as text."""
    return " or ".join(
        address[0] if address[1] is None else endpoint((address[0], address[1])) for address in addresses
    )
