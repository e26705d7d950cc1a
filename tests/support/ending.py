"""Connections that a test is done with."""

import asyncio
import contextlib


def abort(transport: asyncio.WriteTransport) -> None:
    """Also if the connection has ended: asyncio's TLS of Python 3.11.2 raises AttributeError then."""
    with contextlib.suppress(AttributeError):
        transport.abort()
