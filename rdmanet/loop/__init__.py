"""Any asyncio program over RDMA: an event loop that takes RDMA where both sides can, and TCP elsewhere.

The switch is one of `run`, `loop_factory` and `patch_loop`. A program may be switched and have no network, so it loads
nothing but mixin.py, settings.py and tcp_alone.py, which serves it if it cannot read the others any more. The rest is
imported with the loop's first connection or server, and the device with the first connection that may take RDMA, or the
first server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect

from rdmanet.loop.mixin import class_over, switch_on
from rdmanet.loop.settings import Settings

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Any, TypeVar

    _T = TypeVar("_T")
    Base = Callable[[], asyncio.AbstractEventLoop]

__all__ = ["loop_factory", "patch_loop", "run"]


def run(
    main: Coroutine[Any, Any, _T],
    *,
    debug: bool | None = None,
    loop_factory: Base | None = None,
    peers: str | Iterable[str] | None = None,
    lost_peer: str = "eof",
    reference_writes: bool = False,
    fallback: bool = True,
) -> _T:
    """asyncio.run() on a loop whose connections take RDMA where both sides can, and TCP elsewhere.

    ``loop_factory`` makes the loop that is switched, as with asyncio.run(): by default uvloop's where uvloop is
    installed, else asyncio's. The other options are those of ``rdmanet.loop_factory``.

    Raises what ``main`` raises; RuntimeError if a loop is running already; what ``rdmanet.loop_factory`` raises.
    """
    try:
        settings = Settings(peers, lost_peer, reference_writes, fallback)
        with asyncio.Runner(
            debug=debug, loop_factory=functools.partial(_new_loop, loop_factory, settings)
        ) as runner:
            return runner.run(main)
    finally:
        if inspect.iscoroutine(main) and inspect.getcoroutinestate(main) == inspect.CORO_CREATED:
            main.close()  # it will not run, and would warn of that


def loop_factory(
    base: Base | None = None,
    *,
    peers: str | Iterable[str] | None = None,
    lost_peer: str = "eof",
    reference_writes: bool = False,
    fallback: bool = True,
) -> asyncio.AbstractEventLoop:
    """A new event loop whose connections take RDMA where both sides can, and TCP elsewhere.

    It needs no arguments, so it can be given to whatever asks for a loop factory: ``asyncio.Runner(loop_factory=)``,
    ``uvicorn --loop rdmanet:loop_factory``. With arguments, give it a function that calls this one. ``base`` is the
    class of a loop, or what makes the loop: by default uvloop's where uvloop is installed, else asyncio's.

    ``peers`` says who may be reached by RDMA, as RDMANET_PEERS does: "auto" (the default), or patterns, separated by
    spaces or commas, of hosts or networks with or without ports, such as "10.0.0.0/8 db.example.org:6379". With "!"
    before it, a pattern excludes.

    ``lost_peer`` is what the reader gets when the peer was killed or has aborted, and nothing that was written is lost:
    "eof", as over TCP, or "error", as from the direct calls. ``reference_writes=True`` sends a large memoryview of
    memory that may change from where it lies, as ``RdmaTransport.write`` does; otherwise it is copied, because
    programs for TCP expect that.

    ``fallback=False`` makes it an error if only TCP reaches a peer (ConnectionRefusedError), or if a server cannot
    listen for RDMA (OSError), as RDMANET_REQUIRE=no-tcp does. The embedded device counts as RDMA.

    Raises ValueError for a pattern or an option that makes no sense, TypeError for a base that is neither one of
    asyncio's selector loops nor one of uvloop's, and OSError (EINVAL) for an environment variable that keeps RDMA from
    being used: the program would take TCP instead.
    """
    return _new_loop(base, Settings(peers, lost_peer, reference_writes, fallback))


def patch_loop(
    loop: asyncio.AbstractEventLoop,
    *,
    peers: str | Iterable[str] | None = None,
    lost_peer: str = "eof",
    reference_writes: bool = False,
    fallback: bool = True,
) -> None:
    """Have the connections that this loop makes from now on take RDMA where both sides can.

    For loops that somebody else has made: a test framework, a notebook. The options and errors are those of
    ``rdmanet.loop_factory``. A loop that is switched already keeps its connections, servers and sockets, and has the
    options of the last call from then on.
    """
    switch_on(loop, Settings(peers, lost_peer, reference_writes, fallback))


def _new_loop(base: Base | None, settings: Settings) -> asyncio.AbstractEventLoop:
    make = base or _default_base()
    if isinstance(make, asyncio.AbstractEventLoop):
        raise TypeError(
            f"{make!r} is a loop, not what makes one: give its class, or a function that makes it"
        )
    if isinstance(make, type):
        # To give a loop another class later makes each attribute of it slower. switch_on() says what is no loop.
        with contextlib.suppress(TypeError):
            make = class_over(make)
    loop = make()
    try:
        switch_on(loop, settings)
    except BaseException:
        loop.close()
        raise
    return loop


def _default_base() -> Base:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop
