"""Strangers at the listening port: each is refused with a logged reason, and the server lives.

What a peer may say wrongly once it is connected is in test_engine_hostile.py.
"""

import asyncio
import logging
import random
import socket

import msgspec
import pytest
from harness import HOST, THERE, Echo, Net

from rdmanet import credit
from rdmanet._core import CMEventType, stream_half_open_bytes
from rdmanet.base import log_rate
from rdmanet.protocol import State
from rdmanet.stream import admission
from tests.support.bare_peer import ABORT, DATA, HELLO, BarePeer, frame
from tests.support.ports import free_port
from tests.support.waiting import begin, loop_turns, readable, until_seen


async def serving(net: Net, port: int) -> None:
    client = await net.connect(port)
    client.transport.write(b"still here")
    assert await client.until_received(10) == b"still here"
    client.transport.abort()


# ---- below the connection manager: bytes of the embedded device's own port


OWN_PORT = pytest.mark.embedded_only("only the embedded device's ports can be spoken to over TCP")


def garbage() -> dict[str, bytes]:
    chance = random.Random(5)
    return {
        "nothing": b"",
        "one byte": b"\0",
        "http": b"GET / HTTP/1.1\r\nHost: rdma\r\n\r\n",
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        **{f"random {n}": chance.randbytes(chance.randrange(1, 3000)) for n in range(10)},
    }


@OWN_PORT
@pytest.mark.parametrize("what", garbage())
async def test_garbage_sent_to_the_port(net: Net, what):
    _, port = await net.serve(Echo)
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(garbage()[what])
    if not garbage()[what] or len(garbage()[what]) < 16:
        writer.write_eof()
    # It hangs up; whether politely depends on what it had not read.
    try:
        assert await reader.read() == b""
    except ConnectionError:
        pass
    writer.close()
    await serving(net, port)


@OWN_PORT
async def test_garbage_is_logged_with_its_reason(net: Net):
    """In another process, because the device logs to that process's stderr."""
    peer = net.spawn("echo.py", env={"RDMANET_SOFT_LOG": "1"}, keep_errors=True)
    port = await peer.port()
    with socket.create_connection((THERE, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        stranger.settimeout(5)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    await serving(net, port)
    assert "not a connection manager's message" in await peer.finish()


@OWN_PORT
async def test_many_strangers_who_say_nothing(net: Net):
    """They wait for their time-out; a correct client is served at once."""
    _, port = await net.serve(Echo)
    strangers = [await asyncio.open_connection(HOST, port) for _ in range(50)]
    for _ in range(5):
        await serving(net, port)
    for _, writer in strangers:
        writer.close()


# ---- through the connection manager: what is no hello of ours


@pytest.fixture
def caller(device):
    """The connecting side, with private data of its own."""
    caller = BarePeer(device.library, receives=0)
    yield caller
    caller.close()


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"RDMN",
        b"RDMN\1",
        b"RDMN\1\0",
        b"GET / HTTP/1.1",
        HELLO.replace(b"RDMN\1", b"RDMN\2"),
        HELLO.replace(b"RDMN\1", b"RDMN\0"),
        HELLO[:9],
        b"RDMN\1\1\xc1",
        b"RDMN\1\x05\x95\0\0\0\0",
        b"\xff" * 56,
    ],
    ids=repr,
)
async def test_what_is_no_hello_is_refused_in_words(net: Net, caller, caplog, monkeypatch, hello):
    monkeypatch.setattr(log_rate, "_said", {})  # each is the first of its second
    _, port = await net.serve(Echo)
    with caplog.at_level(logging.WARNING, "rdmanet"):
        await caller.call(HOST, port, hello)
        event = await caller.event(CMEventType.REJECTED)
    refusal = credit.unpack_refusal(event.private_data)
    assert refusal.code and refusal.reason
    assert any("refused" in record.getMessage() for record in caplog.records)
    await serving(net, port)


async def test_refused_strangers_do_not_fill_the_log(net: Net, device, caplog, monkeypatch):
    """At most one line a second, with the number of those that were left out."""
    monkeypatch.setattr(log_rate, "_said", {})
    now = [0]
    monkeypatch.setattr(log_rate, "_second", lambda: now[0])
    _, port = await net.serve(Echo)
    with caplog.at_level(logging.WARNING, "rdmanet"):
        for now[0] in (100, 100, 100, 101, 101, 103):
            caller = BarePeer(device.library, receives=0)
            await caller.call(HOST, port, b"GET / HTTP/1.1")
            await caller.event(CMEventType.REJECTED)
            caller.close()
    # On a slow machine asyncio says that it is slow.
    messages = [record.getMessage() for record in caplog.records if record.name == "rdmanet"]
    endings = [message.rpartition("peer")[2] for message in messages]
    assert endings == ["", " (and 2 more of this kind)", " (and 1 more of this kind)"]


# What a peer would like to be a line of our log, and a command of our terminal.
FORGED = "\x1b[2J\nCRITICAL root: hacked\u202e" + "x" * 1000
SHOWN = r"\x1b[2J\nCRITICAL root: hacked\u202e" + "x" * 90


def packed_as_it_is(code, reason):
    """A refusal as a peer packs it that does not shorten the reason."""
    body = msgspec.msgpack.encode([code, reason])
    return b"RDMN\1%c%b" % (len(body), body)


@pytest.fixture
def refuser(device):
    """A listener of our kind that says no."""
    refuser = BarePeer(device.library)
    yield refuser
    refuser.close()


async def test_a_refusals_text_forges_nothing(net: Net, refuser):
    """It reaches the client as one line that can be printed, and has an end."""
    connecting = asyncio.ensure_future(net.connect(refuser.listen(HOST)))
    await refuser.request()
    refuser.id.reject(packed_as_it_is(1, FORGED[:130]))
    with pytest.raises(ConnectionRefusedError) as refused:
        await connecting
    assert str(refused.value).isprintable()
    assert SHOWN[:100] in str(refused.value) and "xxx... (code 1)" in str(refused.value)


@pytest.mark.parametrize("forger", ["client", "server"])
async def test_an_aborts_text_forges_nothing(net: Net, device, caplog, forger):
    """Whichever end says it: in the exception of the other, and in its log."""
    peer = BarePeer(device.library)
    if forger == "client":
        _, port = await net.serve()
        await peer.connect(HOST, port)
    else:
        accepting = asyncio.ensure_future(peer.accept())
        await net.connect(peer.listen(HOST), first_slot_bytes=65536)  # the text is longer than ours are
        await accepting
    await peer.done(frame(DATA, b"x"))
    await net.until(lambda: net.recorders and net.recorders[0].received)
    with caplog.at_level(logging.DEBUG):
        peer.post(frame(ABORT, msgspec.msgpack.encode([6, credit.AbortCode.ABORTED, FORGED])))
        error = str(await net.recorders[0].until_lost())
    peer.close()
    assert error.isprintable() and SHOWN in error and len(error) < 300
    assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_the_reason_of_a_refusal_reaches_the_caller(net: Net, refuser):
    """The refuser's words are the exception's."""
    connecting = asyncio.ensure_future(net.connect(refuser.listen(HOST)))
    await refuser.request()
    refuser.id.reject(credit.pack_refusal(credit.RefusalCode.PROTOCOL, "not on a Sunday"))
    with pytest.raises(ConnectionRefusedError, match="not on a Sunday"):
        await connecting


async def test_a_refusal_that_names_a_port_is_followed_once(net: Net, refuser, caller):
    """And it names no host: the second refusal would send us back, for ever."""
    first_port, second_port = refuser.listen(HOST), caller.listen(HOST)
    connecting = asyncio.ensure_future(net.connect(first_port))
    for peer, goes_on, port in ((refuser, True, second_port), (caller, False, first_port)):
        request = await peer.event(CMEventType.CONNECT_REQUEST)
        peer.id = request.id
        assert request.id.peer_addr[0] == HOST
        features = credit.unpack_hello(request.private_data).features
        assert bool(features & credit.FEATURE_ELSEWHERE) is goes_on
        peer.id.reject(credit.pack_elsewhere(port, f"go to {port}"))
    with pytest.raises(ConnectionRefusedError, match=f"go to {first_port}"):
        await connecting


async def test_a_refusal_that_names_no_port_is_one(net: Net, refuser):
    connecting = asyncio.ensure_future(net.connect(refuser.listen(HOST)))
    await refuser.request()
    refuser.id.reject(credit.pack_elsewhere(0, "nowhere"))
    with pytest.raises(ConnectionRefusedError, match="nowhere"):
        await connecting


async def test_a_server_sends_only_those_elsewhere_who_go(net: Net, caller):
    server, port = await net.serve(Echo)
    _, other_port = await net.serve(Echo)
    server.elsewhere = lambda _: other_port
    there = await net.connect(port)
    assert there.transport.get_extra_info("peername")[1] == other_port
    await caller.call(HOST, port, HELLO)  # which does not say that it goes elsewhere
    await caller.event(CMEventType.ESTABLISHED)


async def test_a_refusal_of_another_version_is_understood(net: Net, refuser):
    """A server of the next version refuses us: we learn why, though its refusal is of that version."""
    connecting = asyncio.ensure_future(net.connect(refuser.listen(HOST)))
    await refuser.request()
    ours = bytes([credit.VERSION])
    refusal = credit.pack_refusal(credit.RefusalCode.VERSION, "hello: the peer speaks version 1, this side 2")
    refuser.id.reject(refusal.replace(b"RDMN" + ours, b"RDMN" + bytes([credit.VERSION + 1]), 1))
    with pytest.raises(ConnectionRefusedError, match="speaks version 1, this side 2") as caught:
        await connecting
    assert f"code {credit.RefusalCode.VERSION:d}" in str(caught.value)


async def test_a_caller_of_another_version_is_told_both(net: Net, caller):
    _, port = await net.serve(Echo)
    await caller.call(HOST, port, HELLO.replace(b"RDMN\1", b"RDMN\2"))
    event = await caller.event(CMEventType.REJECTED)
    refusal = credit.unpack_refusal(event.private_data)
    assert refusal.code == credit.RefusalCode.VERSION
    assert refusal.reason == "hello: the peer speaks version 2, this side speaks version 1"


@pytest.mark.not_on_siw("lets go of an identifier that connects when it is answered, or after ten seconds")
async def test_a_caller_that_connects_and_dies(net: Net, device):
    """Between request and established, and right after: the server gives everything back."""
    _, port = await net.serve(Echo)
    for turns in range(10):
        caller = BarePeer(device.library, receives=0)
        await caller.call(HOST, port, HELLO)
        await loop_turns(turns)
        caller.close()
    await serving(net, port)
    await net.until(lambda: all(recorder.lost for recorder in net.recorders if recorder.transport))


@pytest.mark.not_on_siw("transports no such number")
async def test_who_would_have_us_send_for_ever(net: Net, caller):
    """A stream posts receives before it grants them, so only a hostile peer would ask for RNR retries."""
    _, port = await net.serve(Echo)
    await caller.call(HOST, port, HELLO, rnr_retry_count=7)
    event = await caller.event(CMEventType.REJECTED)
    assert b"RNR retries" in event.private_data
    await serving(net, port)


@pytest.mark.embedded_only("only the embedded device has ports of queue pairs")
async def test_callers_whose_queue_pairs_are_nowhere(net: Net, device):
    """Our queue pairs fail to reach their peers while they are taken down again."""
    _, port = await net.serve(Echo)
    its_port = free_port()
    for _ in range(20):
        callers = [BarePeer(device.library, receives=0) for _ in range(10)]
        for number, caller in enumerate(callers):
            await caller.call(HOST, port, HELLO, qp_num=its_port << 8 | number)
        await callers[0].event(CMEventType.CONNECT_RESPONSE)
        for caller in callers:
            caller.close()
    await serving(net, port)


@pytest.fixture
def crowd(device):
    callers = [BarePeer(device.library, receives=0) for _ in range(20)]
    yield callers
    for caller in callers:
        caller.close()


@pytest.mark.not_on_siw("lets a connection stand when it is accepted")
async def test_who_asks_and_never_goes_on(net: Net, crowd, monkeypatch):
    """All of them together get a few places, 16 MiB in all, and not for long."""
    for limit in ("PATIENCE_S", "OTHERS_WAIT_S"):
        monkeypatch.setattr(admission, limit, 3600.0)  # the places are full however slowly they come
    server, port = await net.serve(Echo)
    places = admission.places_for(stream_half_open_bytes(65536, 16, False))
    assert places < len(crowd)
    for caller in crowd:
        await caller.call(HOST, port, HELLO)  # and nothing more: it does not even look at what comes back
    await until_seen(lambda: len(server._half_open) >= places)
    monkeypatch.setattr(admission, "PATIENCE_S", 1.0)
    monkeypatch.setattr(admission, "OTHERS_WAIT_S", 0.2)
    next(iter(server._half_open)).admission._set_timer()
    for _ in range(3):
        await serving(net, port)
        assert len(server._half_open) <= places
    while server._half_open:
        await loop_turns()
        assert len(server._half_open) <= places


@pytest.mark.embedded_only("only the embedded device's manager takes a refusal after an acceptance")
async def test_who_loses_its_place_learns_why(net: Net, caller, monkeypatch):
    """It was accepted: what comes next is a refusal, and not the end of a program."""
    monkeypatch.setattr(admission, "PATIENCE_S", 0.2)
    _, port = await net.serve(Echo)
    await caller.call(
        HOST, port, HELLO, qp_num=free_port() << 8
    )  # it would go on by itself with a queue pair
    await caller.event(CMEventType.CONNECT_RESPONSE)
    refusal = credit.unpack_refusal((await caller.event(CMEventType.REJECTED)).private_data)
    assert refusal.code == credit.RefusalCode.BUSY
    assert refusal.reason.startswith("the connection was accepted, but the client was slow to go on")


@pytest.mark.not_on_siw("lets a connection stand when it is accepted")
async def test_who_has_gone_on_unread_keeps_its_place(net: Net, device, monkeypatch):
    """A loop with much to read has not come to its word when its time is over: that is read first."""
    caller = BarePeer(device.library)
    try:
        server, port = await net.serve(Echo)
        await caller.call(HOST, port)
        await until_seen(lambda: bool(server._half_open))
        (request,) = server._half_open
        context, loop = request.loop_context, asyncio.get_running_loop()
        loop.remove_reader(context._epoll.fileno())
        await caller.event(CMEventType.ESTABLISHED)
        await readable(context.cm.fd)
        assert server._half_open
        for limit in ("PATIENCE_S", "OTHERS_WAIT_S", "LAST_LOOK_S"):
            monkeypatch.setattr(admission, limit, 0.0)
        monkeypatch.setattr(admission, "LATE_S", 3600.0)
        request.admission._set_timer()
        await until_seen(lambda: not server._half_open)
        assert not request._transport.is_closing()
        loop.add_reader(context._epoll.fileno(), context._rare_events)
        caller.post(frame(DATA, b"who is there?"))
        assert await caller.next_of(DATA) == b"who is there?"
    finally:
        caller.close()


@pytest.mark.not_on_siw("lets a connection stand when it is accepted")
async def test_who_goes_on_when_it_is_to_be_closed_has_the_time_of_a_close(net: Net, caller):
    """Until it goes on it has a second. Then the time of a close begins, and the second is over."""
    server, port = await net.serve(Echo)
    await caller.call(HOST, port, HELLO)
    await until_seen(lambda: len(server._half_open) == 1)
    [request] = server._half_open
    life = request._transport._life
    life.close()
    until_made = life.deadlines.close
    await caller.event(CMEventType.ESTABLISHED)
    await until_seen(lambda: life.machine.state is not State.OPENING)
    assert until_made.cancelled()


@pytest.mark.not_on_siw("lets a connection stand when it is accepted")
async def test_who_never_goes_on_keeps_no_server_from_its_end(net: Net, crowd, monkeypatch):
    """Closing the clients takes a second, and not as long as the server or the device would wait."""
    monkeypatch.setattr(admission, "PATIENCE_S", 3600.0)
    server, port = await net.serve(Echo)
    for caller in crowd[:4]:
        await caller.call(HOST, port, HELLO)
    await until_seen(lambda: len(server._half_open) == 4)
    [serving] = await begin(server.serve_forever())
    serving.cancel()
    began = net.loop.time()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert net.loop.time() - began < 10


@pytest.mark.embedded_only("only the embedded device has the addresses of loopback")
async def test_who_never_goes_on_keeps_nobody_out_elsewhere(net: Net, crowd):
    _, port = await net.serve(Echo)
    for caller in crowd:
        await caller.call(HOST, port, HELLO, source="::1" if ":" in HOST else "127.0.0.2")
    began = net.loop.time()
    await serving(net, port)
    assert net.loop.time() - began < 5  # a quarter of a second, on a machine that has nothing else to do


@pytest.mark.not_on_siw("refuses queue pairs beyond some fifty")
async def test_the_listeners_backlog_is_bounded(net: Net):
    """Requests beyond the backlog are refused or wait; none is lost, and nothing crashes."""
    _, port = await net.serve(Echo, backlog=3)
    outcomes = await asyncio.gather(*(net.connect(port) for _ in range(30)), return_exceptions=True)
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException) or isinstance(outcome, OSError), outcome
    await serving(net, port)
