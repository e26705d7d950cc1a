"""When a client connects again, or makes a call again, and how long it waits before: no I/O."""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import random
from collections.abc import Collection
from typing import Final

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.errors import Code

__all__ = ["Retry"]

OF_SEVERAL: Final = ("hedge_seconds", "eject_failures", "eject_seconds", "eject_most_seconds")
"""Options that say something only where calls are spread."""


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How a client reconnects: ``rpc.connect(..., retry=rpc.Retry())``.

    It connects when a call needs it. The first time it does so at once. If that fails, or the connection is lost before
    it has served a call, it waits: about ``first_seconds``, then ``factor`` times longer each time, up to
    ``most_seconds``.

    :ivar first_seconds: how long it waits before the second try
    :ivar factor: how many times longer it waits each time
    :ivar most_seconds: how long it waits at most
    :ivar jitter: which part of a wait is random, from 0 to 1, so that the clients of a server do not come together
    :ivar attempts: after how many failures a call, or `connect`, gives up. None: only at its deadline
    :ivar connect_seconds: how long one address may take to answer
    :ivar codes: errors after which a call is made again, though its connection lives, if it may be: its method is
        idempotent, or has not begun. It waits before as before connecting, and goes to a server that it has not been
        to, if there is one. `attempts` is for all tries of a call
    :ivar methods: names of methods that are idempotent, though their class does not say so
    :ivar hedge_seconds: with ``policy="spread"``, a call of an idempotent method that has no result after so long is
        made at another server, too. The first result counts, and the other call is cancelled. None: it is not
    :ivar eject_failures: with ``policy="spread"``, after how many failures in a row a server gets no calls for a while.
        None: it always gets some
    :ivar eject_seconds: for how long; twice as long each time that its first call after that fails
    :ivar eject_most_seconds: for how long at most
    :raises TypeError: one of `codes` is no `Code`, or of `methods` no text
    """

    first_seconds: float = 0.1
    factor: float = 2.0
    most_seconds: float = 10.0
    jitter: float = 0.5
    attempts: int | None = 8
    connect_seconds: float = 10.0
    codes: Collection[Code] = frozenset()
    methods: Collection[str] = frozenset()
    hedge_seconds: float | None = None
    eject_failures: int | None = 5
    eject_seconds: float = 1.0
    eject_most_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, type_ in (("codes", Code), ("methods", str)):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(each, type_) for each in given):
                raise TypeError(f"Retry: {name}={shown(given)} is no collection of {type_.__name__}")
            msgspec.structs.force_setattr(self, name, frozenset(given))
        for name in self.__struct_fields__:
            given = getattr(self, name)
            if name.endswith("_seconds") and (name, given) != ("hedge_seconds", None) and not given > 0:
                raise ValueError(f"Retry: {name}={shown(given)} is not more than 0 seconds")
        if not self.factor >= 1:
            raise ValueError(f"Retry: factor={shown(self.factor)} is not 1 or more")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"Retry: jitter={shown(self.jitter)} is not between 0 and 1")
        for name in ("attempts", "eject_failures"):
            if (given := getattr(self, name)) is not None and not given >= 1:
                raise ValueError(f"Retry: {name}={shown(given)} is not 1 or more")

    def delay(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row: 0 after none."""
        if failures == 0:
            return 0.0
        seconds = self.first_seconds
        for _ in range(failures - 1):
            if seconds >= self.most_seconds:
                break
            seconds *= self.factor
        return min(seconds, self.most_seconds) * (1 - self.jitter * random.random())
