"""The first step of a method: taken when its call comes, without a task of its own. Mostly it is the last one, too."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from rdmanet.rpc.running import Running

class FirstSteps:
    """Takes the first steps of a server's methods, one after another.

    :param loop: it runs them
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def enter(self, running: Running) -> bool:
        """Begin a call, whose task and context are the current ones from now on. False: there is no task for it now."""

    def first(self, coroutine: Any) -> Any:
        """Take the first step of a method. Returns its result, or a `Rest`, which is to be awaited."""

    def go_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine of the call, until it waits for something: from then on the task runs it."""

    def leave(self) -> None:
        """The first step is over."""

class Rest:
    """What is to be awaited of a method whose first step has been taken.

    :param coroutine: its iterator
    :param yielded: what that has yielded, if it waits
    :param error: what the method has raised
    """

    def __init__(self, coroutine: Any, yielded: Any = ..., error: BaseException | None = None) -> None: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...
