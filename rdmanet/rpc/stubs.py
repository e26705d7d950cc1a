# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The methods of a client's object: each makes `CallDetails` of what it is given, and has the caller make that call.

Of each, inspect.signature() and help() say what they say of the method of the service's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdmanet.rpc.awaiting import heard, heard_items
from rdmanet.rpc.call_metadata import Metadata
from rdmanet.rpc.context import CURRENT, deadline_in
from rdmanet.rpc.lending import Into
from rdmanet.rpc.method import Kind, Method
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.response import Response

_current = CURRENT.get


class Options:
    """What `rpc.options` can change in the calls of a client."""

    def __init__(
        self,
        timeout: float | None = None,
        wait: bool = False,
        metadata: Metadata | None = None,
        into: Into | None = None,
        response: Response | None = None,
    ) -> None:
        self.timeout = timeout
        self.wait = wait
        self.metadata = metadata
        self.into = into
        self.response = response


class Bound:
    """A client's object, as far as its methods need it.

    :param caller: makes its calls
    """

    def __init__(self, caller: Any, options: Options) -> None:
        self._caller = caller
        self._options = options


def stub(method: Method) -> Callable[..., Any]:
    """What a client's class has for a method. It is a function of a `Bound`."""
    streams_back = method.kind in (Kind.SERVER_STREAM, Kind.BOTH)

    def call(self: Bound, /, *arguments: Any, **by_name: Any) -> Any:
        return _called(method, streams_back, self, arguments, by_name)

    call.__name__, call.__qualname__, call.__doc__ = method.name, method.label, method.function.__doc__
    call.__wrapped__ = method.function  # type: ignore[attr-defined]  # inspect.signature() asks for it
    return call


def _called(
    method: Method, streams_back: bool, client: Bound, arguments: tuple[Any, ...], by_name: dict[str, Any]
) -> Any:
    options, stream, deadline = client._options, None, None
    if by_name or len(arguments) != method.count:
        arguments, stream = method.bind(arguments, by_name)
    if options.into is not None:
        options.into.check(method)
    if options.timeout is not None or _current() is not None:
        deadline = deadline_in(options.timeout)
    metadata, into, wait, response = options.metadata, options.into, options.wait, options.response
    details = CallDetails(method, arguments, stream, deadline, metadata, into, wait, response)
    if response is not None:
        hear = heard_items if streams_back else heard
        return hear(client._caller, details, response)
    return client._caller.stream(details) if streams_back else client._caller.unary(details)
