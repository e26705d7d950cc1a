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
from rdmanet.rpc.dialing import Address, Weighted
from rdmanet.rpc.messenger import logger

Servers = Sequence[str | tuple[str, int | None] | tuple[str, int | None, float]]
"""As programs give them: [(host, port), ...], or paths of Unix sockets; with weights [(host, port, weight), ...]."""

AGAIN_S: Final = 1.0
"""A client that has to connect asks again when the last answer is so old."""


class Resolver:
    """Says which servers there are: ``rpc.connect(Store, rpc.Resolver(function), policy="spread")``.

    It may give them weights, as ``rpc.connect`` takes them; they may change with each answer.

    ``Resolver.name(host, port)`` looks a name up again, ``Resolver.file(path)`` reads a file again. One resolver may be
    of several clients.

    :param servers: a function without parameters, or a coroutine function, that returns ``[(host, port), ...]``, or
        paths of Unix sockets, which may be ``(path, None)``, or these with weights: ``[(host, port, weight), (path,
        None, weight)]``
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

        A line may end with a weight: ``host port weight=2``. Write another file and rename it, so that nobody reads
        half of one.
        """

        def servers() -> Servers:
            with open(path, encoding="utf-8") as file:
                return _of_text(file.read(), os.fspath(path))

        return cls(servers, every=every)

    async def addresses(self) -> list[Weighted]:
        """Ask: the servers, and their weights. One that is there twice counts once. Cancelling it cancels the function.

        :raises ValueError: the answer is empty, or is none; and whatever the function raises
        """
        found: Any = self._servers()
        if inspect.isawaitable(found):
            found = await found
        known: dict[Address, float] = {}
        for address, weight in addresses_of(found, "Resolver"):
            known.setdefault(address, weight)
        return list(known.items())


def addresses_of(servers: Any, who: str) -> list[Weighted]:
    """A program's list of servers.

    :raises ValueError: it is empty, or is none, or a weight is none
    """
    found: list[Weighted] = []
    try:
        for each in servers:
            host, port, *weights = (each, None) if isinstance(each, str) else each
            if not isinstance(host, str) or len(weights) > 1:
                raise TypeError
            address = host, None if port is None else operator.index(port)
            found.append((address, _weight(weights[0], who, host) if weights else 1.0))
    except (TypeError, IndexError, KeyError):
        raise ValueError(
            f"{who}: {shown(servers)} is no list [(host, port), ...], nor one of paths; with weights it is"
            " [(host, port, weight), ...] or [(path, None, weight), ...]"
        ) from None
    if not found:
        raise ValueError(f"{who}: the list of servers is empty")
    return found


def _weight(given: Any, who: str, host: str) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 1e-9 <= given <= 1e9:
        raise ValueError(
            f"{who}: the weight of {shown(host)} is {shown(given)}, not a number from 1e-9 to 1e9: leave out a server "
            "that is to get no calls"
        )
    return float(given)


def _of_text(text: str, path: str) -> Servers:
    found: list[str | tuple[str, int | None, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words, weight = line.partition("#")[0].split(), 1.0
        try:
            if words and words[-1].startswith("weight="):
                weight = float(words.pop().removeprefix("weight="))
            if len(words) == 2 and words[1].isascii() and words[1].isdecimal():
                found.append((words[0], int(words[1]), weight))
            elif len(words) == 1:
                found.append((words[0], None, weight))
            elif words:
                raise ValueError
        except ValueError:
            text = f"{shown(line)} is neither `host port` nor a path, nor one of these and `weight=NUMBER`"
            raise ValueError(f"{path}:{number}: {text}") from None
    return found


class Resolving:
    """A client's use of a resolver.

    :param on_found: is told each answer
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resolver: Resolver,
        on_found: Callable[[list[Weighted]], None],
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
