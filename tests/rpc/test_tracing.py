"""Spans of OpenTelemetry around calls: what belongs together, what they are named, and what is an error."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from net import HOST, Net
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import rpc_attributes
from opentelemetry.semconv._incubating.metrics import rpc_metrics
from opentelemetry.trace import SpanKind, StatusCode

from rdmanet import rpc
from rdmanet.rpc import Code, tracing
from rdmanet.rpc.context import CallInfo
from tests.support.waiting import begin, until_seen


class Work(rpc.Service):
    behind: Any = None
    begun = 0

    async def parent(self) -> str:
        return str(rpc.metadata()["traceparent"])

    async def through(self) -> str:
        return await self.behind.parent()  # type: ignore[no-any-return]

    async def fail(self, code: int) -> None:
        raise rpc.Error(Code(code), "there is none")

    async def err(self) -> None:
        raise LookupError("a mistake")

    async def count(self, until: int) -> AsyncIterator[int]:
        for number in range(until):
            yield number
            await asyncio.sleep(0)

    async def wait(self) -> None:
        self.begun += 1
        await asyncio.Event().wait()


class Nobody:
    """Who calls."""

    peer = rpc.Peer(None, "unix")


class Traced:
    """A client and a server that are traced, and what they export."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("the program")
        self.work = Work()

    async def pair(self) -> Work:
        server = await self.net.serve(self.work, interceptors=[tracing.server(self.provider)])
        return await self.net.connect(Work, server, interceptors=[tracing.client(self.provider)])

    async def ended(self, count: int) -> list[ReadableSpan]:
        """So many spans, when these have ended; and no more."""
        await until_seen(lambda: len(self.exporter.get_finished_spans()) >= count)
        spans = list(self.exporter.get_finished_spans())
        assert len(spans) == count
        self.exporter.clear()
        return spans

    async def sides(self) -> tuple[ReadableSpan, ReadableSpan]:
        """The spans of one call, the client's first."""
        spans = {span.kind: span for span in await self.ended(2)}
        return spans[SpanKind.CLIENT], spans[SpanKind.SERVER]


@pytest.fixture
def traced(net: Net) -> Iterator[Traced]:
    found = Traced(net)
    yield found
    assert trace.get_current_span() is trace.INVALID_SPAN
    found.provider.shutdown()


def code_of(span: ReadableSpan) -> Any:
    assert span.attributes is not None
    return span.attributes[rpc_attributes.RPC_RESPONSE_STATUS_CODE]


async def test_a_call_is_a_span_at_either_side(traced: Traced):
    work = await traced.pair()
    said = await work.parent()
    client, server = await traced.sides()
    ids = client.get_span_context()
    assert said == f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
    assert re.fullmatch(r"[\da-f-]{55}", said)
    assert client.parent is None and server.parent is not None
    assert (server.parent.trace_id, server.parent.span_id) == (ids.trace_id, ids.span_id)
    for span in (client, server):
        assert span.name == "Work/parent" and span.attributes is not None
        assert span.attributes[rpc_attributes.RPC_METHOD] == "Work/parent"
        assert span.attributes[rpc_attributes.RPC_SYSTEM_NAME] == "rdmanet"
        assert code_of(span) == "OK" and span.status.status_code is StatusCode.UNSET
    if not traced.net.is_by_name:
        assert client.attributes is not None and server.attributes is not None
        assert client.attributes["server.address"] == server.attributes["network.peer.address"] == HOST
        assert client.attributes["server.port"] != server.attributes["network.peer.port"]


class Listener(rpc.Service):
    async def parent(self) -> str:
        return str(rpc.metadata().get("traceparent"))

    async def count(self, until: int) -> AsyncIterator[int]:
        for number in range(until):
            yield number

    async def err(self) -> None:
        raise LookupError("a mistake")


class Caller(rpc.Service):
    async def call(self, listener: Listener) -> str:
        assert [number async for number in listener.count(3)] == [0, 1, 2]
        with pytest.raises(rpc.Error):
            await listener.err()
        return await listener.parent()


async def test_callbacks_are_spans_below_the_methods(traced: Traced):
    """In which the server is the client."""
    server = await traced.net.serve(
        Caller(),
        interceptors=[tracing.server(traced.provider)],
        callback_interceptors=[tracing.client(traced.provider)],
    )
    client = await traced.net.connect(
        Caller,
        server,
        interceptors=[tracing.client(traced.provider)],
        callback_interceptors=[tracing.server(traced.provider)],
    )
    said = await client.call(Listener())
    spans = await traced.ended(8)
    found = {(span.name, span.kind): span for span in spans}
    method = found["Caller/call", SpanKind.SERVER]
    for name, code in (("count", "OK"), ("err", "INTERNAL"), ("parent", "OK")):
        above, below = found[f"Listener/{name}", SpanKind.CLIENT], found[f"Listener/{name}", SpanKind.SERVER]
        assert above.parent is not None and below.parent is not None
        assert above.parent.span_id == method.get_span_context().span_id
        assert below.parent.span_id == above.get_span_context().span_id
        assert code_of(above) == code_of(below) == code
    ids = found["Listener/parent", SpanKind.CLIENT].get_span_context()
    assert said == f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"


async def test_the_server_that_a_call_went_to_is_named(traced: Traced):
    """Of several, also when another call has gone to another one meanwhile."""
    net, works = traced.net, [Work(), Work()]
    if net.is_by_name:
        return
    places = [net.address(await net.serve(work)) for work in works]
    how: Any = {"policy": "spread", "transport": net.transport}
    async with rpc.connect(Work, places, interceptors=[tracing.client(traced.provider)], **how) as client:
        pool: Any = client._caller.inner  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        (first,) = await begin(client.wait())
        await until_seen(lambda: any(work.begun for work in works))
        asked = next(place for work, place in zip(works, places, strict=True) if work.begun)
        (second,) = await begin(client.wait())
        await until_seen(lambda: all(work.begun for work in works))
        first.cancel()
        [span] = await traced.ended(1)
        assert span.attributes is not None and span.attributes["server.port"] == asked[1]
        second.cancel()


async def test_how_long_calls_take(net: Net):
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    server = await net.serve(Work(), interceptors=[tracing.server(meter_provider=meters)])
    work = await net.connect(Work, server, interceptors=[tracing.client(meter_provider=meters)])
    with pytest.raises(rpc.Error):
        await work.fail(int(Code.UNAVAILABLE))
    assert [number async for number in work.count(2)] == [0, 1]
    await until_seen(lambda: not server.running)
    found = reader.get_metrics_data()
    assert found is not None
    metrics = found.resource_metrics[0].scope_metrics[0].metrics
    assert {(metric.name, metric.unit) for metric in metrics} == {
        (rpc_metrics.RPC_CLIENT_CALL_DURATION, "s"), (rpc_metrics.RPC_SERVER_CALL_DURATION, "s"),
    }  # fmt: skip
    for metric in metrics:
        points = {point.attributes["rpc.method"]: point for point in metric.data.data_points}
        assert {name: point.count for name, point in points.items()} == {"Work/fail": 1, "Work/count": 1}
        assert all(0 < point.sum < 60 for point in points.values())
        said = points["Work/fail"].attributes
        assert said["rpc.response.status_code"] == said["error.type"] == "UNAVAILABLE"
        assert points["Work/count"].attributes["rpc.response.status_code"] == "OK"
    meters.shutdown()


async def test_calls_of_a_method_are_below_it(traced: Traced):
    inner = await traced.pair()
    traced.work.behind = inner
    outer = await traced.pair()
    with traced.tracer.start_as_current_span("program") as program:
        said = await outer.through()
    spans = await traced.ended(5)
    assert {span.get_span_context().trace_id for span in spans} == {program.get_span_context().trace_id}
    parents = {span.get_span_context().span_id: span for span in spans}
    chain = [next(span for span in spans if f"-{span.get_span_context().span_id:016x}-" in said)]
    while (above := chain[-1].parent) is not None:
        chain.append(parents[above.span_id])
    assert [(span.name, span.kind.name) for span in chain] == [
        ("Work/parent", "CLIENT"),
        ("Work/through", "SERVER"),
        ("Work/through", "CLIENT"),
        ("program", "INTERNAL"),
    ]


async def test_what_fails(traced: Traced):
    work = await traced.pair()
    for code, is_fault in ((Code.NOT_FOUND, False), (Code.UNAVAILABLE, True)):
        with pytest.raises(rpc.Error):
            await work.fail(code)
        client, server = await traced.sides()
        assert code_of(client) == code_of(server) == code.name
        assert client.status.status_code is StatusCode.ERROR and "there is none" in str(
            client.status.description
        )
        assert (server.status.status_code is StatusCode.ERROR) == is_fault
        assert client.attributes is not None and client.attributes["error.type"] == code.name


async def test_a_mistake_of_the_service(traced: Traced, caplog):
    work = await traced.pair()
    with pytest.raises(rpc.Error, match="INTERNAL"):
        await work.err()
    client, server = await traced.sides()
    assert code_of(client) == code_of(server) == "INTERNAL"
    assert server.attributes is not None and server.attributes["error.type"] == "LookupError"
    assert [event.name for event in server.events] == ["exception"] and not client.events
    caplog.clear()


async def test_the_span_of_a_stream_ends_with_it(traced: Traced):
    work = await traced.pair()
    with traced.tracer.start_as_current_span("program") as program:
        seen = []
        async for number in work.count(3):
            seen.append(number)
            assert trace.get_current_span() is program  # and not the call's
            assert "Work/count" not in {
                span.name for span in traced.exporter.get_finished_spans() if span.kind is SpanKind.CLIENT
            }
    spans = {span.kind: span for span in await traced.ended(3)}
    assert seen == [0, 1, 2] and code_of(spans[SpanKind.CLIENT]) == code_of(spans[SpanKind.SERVER]) == "OK"


async def test_a_stream_of_which_no_more_is_wanted(traced: Traced):
    work = await traced.pair()
    items = work.count(1 << 30)
    assert await anext(items) == 0
    await items.aclose()  # type: ignore[attr-defined]
    client, server = await traced.sides()
    assert code_of(client) == code_of(server) == "CANCELLED"
    assert client.status.status_code is server.status.status_code is StatusCode.UNSET


async def test_cancelled_and_late(traced: Traced):
    work = await traced.pair()
    [call] = await begin(work.wait())
    await until_seen(lambda: traced.work.begun)
    call.cancel()
    client, server = await traced.sides()
    assert code_of(client) == code_of(server) == "CANCELLED"
    with pytest.raises(rpc.Error, match="DEADLINE_EXCEEDED"):
        await rpc.options(work, timeout=0.2).wait()
    client, server = await traced.sides()
    assert code_of(client) == "DEADLINE_EXCEEDED" and client.status.status_code is StatusCode.ERROR
    assert code_of(server) in ("DEADLINE_EXCEEDED", "CANCELLED")  # whichever of the two clocks is first


@pytest.mark.parametrize(("is_late", "code"), [(True, "DEADLINE_EXCEEDED"), (False, "CANCELLED")])
async def test_a_method_that_is_cancelled(traced: Traced, is_late, code):
    async def proceed() -> None:
        raise asyncio.CancelledError

    now = asyncio.get_running_loop().time()
    call = CallInfo("Work", "wait", {}, now if is_late else now + 1000, Nobody())
    with pytest.raises(asyncio.CancelledError):
        await tracing.server(traced.provider)(call, proceed)
    [span] = await traced.ended(1)
    assert code_of(span) == code and (span.status.status_code is StatusCode.ERROR) == is_late


@pytest.mark.parametrize(
    "said", [b"\0\1", "", "00-0-0-0", "x" * 4000, "00-" + "f" * 32 + "-" + "0" * 16 + "-01"]
)
async def test_a_caller_that_names_no_span(traced: Traced, said):
    server = await traced.net.serve(traced.work, interceptors=[tracing.server(traced.provider)])
    work = await traced.net.connect(Work, server)
    with pytest.raises(rpc.Error, match="NOT_FOUND"):
        await rpc.options(work, metadata={"traceparent": said, "tracestate": "," * 100}).fail(Code.NOT_FOUND)
    [span] = await traced.ended(1)
    assert span.parent is None
