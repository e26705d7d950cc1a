"""Spans and durations of OpenTelemetry around calls: interceptors for clients and for servers.

    from rdmanet.rpc import tracing

    server = await rpc.serve(Store(), host, port, interceptors=[tracing.server()])
    client = rpc.connect(Store, host, port, interceptors=[tracing.client()])

It needs ``opentelemetry-api`` (``pip install rdmanet[opentelemetry]``), and nothing else of rdmanet.rpc imports it.

Theory
------
A client's span is a child of the one that is current where the call is made. Its name goes along in the call's
metadata, as W3C's ``traceparent`` (or as the global propagator says), and the server's span becomes its child. That one
is current while the method runs, so calls that the method makes are below it. A client's is never current: the items of
a stream are taken between the steps of the interceptor, where it would be the program's.

How long each call took goes into the histogram ``rpc.client.call.duration`` or ``rpc.server.call.duration``, with its
method and how it ended, but without addresses of clients, of which there may be any number.

Names and attributes are those of the semantic conventions for RPC. What fails at a server is an error of its span only
if it is the server's fault, as there for gRPC, whose codes these are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context, propagate
from opentelemetry.metrics import Histogram, MeterProvider, get_meter
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_tracer,
    set_span_in_context,
)

from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.interceptors import Interceptor, Proceed

__all__ = ["client", "server"]

_OF_CLIENT: Final = set(Code)
_OF_SERVER: Final = {
    Code.UNKNOWN, Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED, Code.INTERNAL, Code.UNAVAILABLE, Code.DATA_LOSS,
}  # fmt: skip
_BUCKETS: Final = [
    base * exponent for exponent in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0) for base in (1, 2.5, 5)
]  # fmt: skip
"""Of durations, in seconds: a call over RDMA takes tens of microseconds, for which the conventions have no buckets."""


def client(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Interceptor:
    """An interceptor for ``connect()``: a span for each call, whose name goes along, and its duration.

    :param tracer_provider: whose spans they are; by default the global one's
    :param meter_provider: whose histogram ``rpc.client.call.duration`` is, in seconds; by default the global one's
    """
    tracer = get_tracer("rdmanet.rpc", tracer_provider=tracer_provider)
    durations = _histogram("client", meter_provider)

    async def traced(call: CallInfo, proceed: Proceed) -> Any:
        span = tracer.start_span(_method(call), kind=SpanKind.CLIENT, attributes=_attributes(call))
        propagate.inject(call.metadata, set_span_in_context(span))
        with _ended(span, call, _OF_CLIENT, durations):
            try:
                return await proceed()
            finally:
                span.set_attributes(_address("server", call.peer))

    return traced


def server(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Interceptor:
    """An interceptor for ``serve()``: a span for each call, below its caller's, and current while the method runs.

    What the metadata says of the caller's span comes from the peer, and is believed.

    :param tracer_provider: whose spans they are; by default the global one's
    :param meter_provider: whose histogram ``rpc.server.call.duration`` is, in seconds; by default the global one's
    """
    tracer = get_tracer("rdmanet.rpc", tracer_provider=tracer_provider)
    durations = _histogram("server", meter_provider)

    async def traced(call: CallInfo, proceed: Proceed) -> Any:
        above = propagate.extract(
            {name: said for name, said in call.metadata.items() if isinstance(said, str)}
        )
        attributes = _attributes(call) | _address("network.peer", call.peer.address)
        span = tracer.start_span(_method(call), above, SpanKind.SERVER, attributes)
        token = context.attach(set_span_in_context(span, above))
        try:
            with _ended(span, call, _OF_SERVER, durations):
                return await proceed()
        finally:
            context.detach(token)

    return traced


@contextmanager
def _ended(span: Span, call: CallInfo, faults: set[Code], durations: Histogram) -> Iterator[None]:
    """The span ends with what is done in here, and says how.

    :param faults: the codes that are errors of this side
    """
    begun_s, said = time.perf_counter(), {"rpc.response.status_code": "OK"}
    try:
        yield
    except Error as exc:
        said = _failed(span, exc.code.name, exc if exc.code in faults else None)
        raise
    except Exception as exc:  # a server's caller gets INTERNAL for it
        span.record_exception(exc)
        said = _failed(span, Code.INTERNAL.name, exc)
        raise
    except BaseException as exc:  # cancelled, or a stream of which no more is wanted
        is_late = isinstance(exc, asyncio.CancelledError) and _is_late(call)
        code = Code.DEADLINE_EXCEEDED if is_late else Code.CANCELLED
        said = _failed(span, code.name, Error(code) if is_late else None)
        raise
    finally:
        span.set_attributes(said)
        span.end()
        durations.record(time.perf_counter() - begun_s, {**_attributes(call), **said})


def _histogram(side: str, meter_provider: MeterProvider | None) -> Histogram:
    return get_meter("rdmanet.rpc", meter_provider=meter_provider).create_histogram(
        f"rpc.{side}.call.duration",
        unit="s",
        description=f"How long calls take, as a {side} sees it.",
        explicit_bucket_boundaries_advisory=_BUCKETS,
    )


def _is_late(call: CallInfo) -> bool:
    return call.deadline is not None and asyncio.get_running_loop().time() >= call.deadline


def _failed(span: Span, code: str, fault: Exception | None) -> dict[str, str]:
    """How a call has ended, as attributes."""
    said = {"rpc.response.status_code": code}
    if fault is not None:
        said["error.type"] = code if isinstance(fault, Error) else type(fault).__qualname__
        span.set_status(Status(StatusCode.ERROR, str(fault)))
    return said


def _method(call: CallInfo) -> str:
    return f"{call.service}/{call.method}"


def _attributes(call: CallInfo) -> dict[str, str | int]:
    return {"rpc.system.name": "rdmanet", "rpc.method": _method(call)}


def _address(of: str, address: Any) -> dict[str, str | int]:
    """A peer's address as attributes: with a port, or the path of a Unix socket."""
    if isinstance(address, tuple):
        return {f"{of}.address": address[0], f"{of}.port": address[1]}
    return {f"{of}.address": address} if isinstance(address, str) and address else {}
