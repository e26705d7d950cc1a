"""Which servers there are, where that changes: `Resolver`.

Theory
------
A client asks its resolver before it connects for the first time, and again when a call comes `every` seconds or more
after the last time, or when it has to connect and some time has passed. So a client that nobody uses asks nothing. It
asks in a task of its own, for which no call waits except those that find no connection. An answer that fails, or that
is empty, changes nothing: the servers that were known stay.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self

from rdmanet.base import log_rate
from rdmanet.errors import shown
from rdmanet.rpc.beginning import BEGINNING
from rdmanet.rpc.dialing import Address
from rdmanet.rpc.messenger import logger

Servers = Sequence[str | tuple[str, int]]
"""As a program gives them: [(host, port), ...], or paths of Unix sockets."""

AGAIN_S: Final = 1.0
"""A client that has to connect asks again when the last answer is so old."""


class Resolver:
    """Says which servers there are: ``rpc.connect(Store, rpc.Resolver(function), policy="spread")``.

    ``Resolver.name(host, port)`` looks a name up again, ``Resolver.file(path)`` reads a file again. One resolver may be
    of several clients.

    :param servers: a function without parameters, or a coroutine function, that returns ``[(host, port), ...]``, or
        paths of Unix sockets
    :param every: ask again when a call is made so many seconds after the last time
    :raises TypeError: it is no function, or `every` is no number
    :raises ValueError: `every` is not more than 0
    """

    def __init__(self, servers: Callable[[], Servers | Awaitable[Servers]], *, every: float = 30.0) -> None:
        if not callable(servers):
            raise TypeError(f"Resolver: {shown(servers)} is no function")
        if not isinstance(every, (int, float)):
            raise TypeError(f"Resolver: every={shown(every)} is no number of seconds")
        if not every > 0:
            raise ValueError(f"Resolver: every={shown(every)} is not more than 0 seconds")
        self.every = every
        self._servers = servers

    @classmethod
    def name(cls, host: str, port: int, *, every: float = 30.0) -> Self:
        """All addresses that a name has now."""

        async def servers() -> Servers:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [(str(each[4][0]), int(each[4][1])) for each in found]

        return cls(servers, every=every)

    @classmethod
    def file(cls, path: str | os.PathLike[str], *, every: float = 5.0) -> Self:
        """The servers of a text file, one a line: ``host port``, or the path of a Unix socket. ``#`` begins a comment.

        Write another file and rename it, so that nobody reads half of one.
        """

        def servers() -> Servers:
            with open(path, encoding="utf-8") as file:
                return _of_text(file.read(), os.fspath(path))

        return cls(servers, every=every)

    async def addresses(self) -> list[Address]:
        """Ask. Cancelling it cancels the function.

        :raises ValueError: the answer is empty, or is none; and whatever the function raises
        """
        found: Any = self._servers()
        if inspect.isawaitable(found):
            found = await found
        return list(dict.fromkeys(addresses_of(found, "Resolver")))


def addresses_of(servers: Any, who: str) -> list[Address]:
    """A program's list of servers.

    :raises ValueError: it is empty, or is none
    """
    found: list[Address] = []
    try:
        for each in servers:
            host, port = (each, None) if isinstance(each, str) else (each[0], operator.index(each[1]))
            if not isinstance(host, str):
                raise TypeError
            found.append((host, port))
    except (TypeError, IndexError, KeyError):
        raise ValueError(
            f"{who}: {shown(servers)} is no list [(host, port), ...], nor one of paths"
        ) from None
    if not found:
        raise ValueError(f"{who}: the list of servers is empty")
    return found


def _of_text(text: str, path: str) -> Servers:
    found: list[str | tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) == 2 and words[1].isascii() and words[1].isdecimal():
            found.append((words[0], int(words[1])))
        elif len(words) == 1:
            found.append(words[0])
        elif words:
            raise ValueError(f"{path}:{number}: {shown(line)} is neither `host port` nor a path")
    return found


class Resolving:
    """A client's use of a resolver.

    :param on_found: is told each answer
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resolver: Resolver,
        on_found: Callable[[list[Address]], None],
    ) -> None:
        self._loop = loop
        self._resolver = resolver
        self._on_found = on_found
        self._asked_at = loop.time()
        self._task: asyncio.Task[None] | None = None

    def look(self, has_to_connect: bool = False) -> None:
        """A call is made: ask, if it is time to."""
        seconds = min(AGAIN_S, self._resolver.every) if has_to_connect else self._resolver.every
        if self._task is None and self._loop.time() - self._asked_at >= seconds:
            work = self._ask()
            work.send(None)
            task = self._loop.create_task(work, name="rpc resolver")
            self._task = None if task.done() else task

    async def _ask(self) -> None:
        try:
            await BEGINNING
            try:
                found = await self._resolver.addresses()
            except Exception as exc:
                log_rate.warn(logger, f"rpc resolver {id(self)}", "the servers stay as they were: %s", exc)
                return
            self._on_found(found)
        finally:
            self._asked_at = self._loop.time()
            self._task = None

    async def close(self) -> None:
        """Ask no more."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
