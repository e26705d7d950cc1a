"""TLS: ssl= in the four functions, start_tls on transports and writers; what a stranger can do to a server with it."""

import asyncio
import contextlib
import ssl
from asyncio.sslproto import SSLProtocol

import pytest
from harness import HOST, Echo, Net, Recorder

import rdmanet
from rdmanet._core import stream_half_open_bytes
from rdmanet.stream import admission
from tests.support.certificates import CERTIFICATES, of_client, of_server
from tests.support.waiting import begin, until_seen

pytestmark = pytest.mark.once

MIB = 1 << 20
MUCH = bytes(range(256)) * 4096 * 3

SERVER, CLIENT = of_server(), of_client()
TO_SERVER = {"ssl": CLIENT, "server_hostname": "localhost"}


def below(face) -> rdmanet.RdmaTransport:
    """The RDMA transport under TLS's."""
    return face._ssl_protocol._transport


class ByHand(Recorder):
    """The server's side of TLS, one step at a time.

    :ivar plain: what it has read
    :ivar clear: how many bytes are yet to come in the clear
    :ivar ended: the peer has ended TLS
    """

    def __init__(self) -> None:
        super().__init__()
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = SERVER.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.plain, self.clear, self.ended = bytearray(), 0, False

    def keep(self, data: bytes) -> None:
        clear, data = data[: self.clear], data[self.clear :]
        self.plain += clear
        self.clear -= len(clear)
        self.incoming.write(data)
        if not data:
            return
        try:
            self.tls.do_handshake()
            while True:
                self.plain += self.tls.read(MIB)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        self.transport.write(self.outgoing.read())


async def tls_pair(net: Net, client=Recorder, server=Recorder, context=SERVER, **options):
    """Both ends of one connection, the handshake done."""
    _, port = await net.serve(server, ssl=context)
    near = await net.connect(port, client, **TO_SERVER | options)
    await net.until(lambda: any(recorder is not near and recorder.events for recorder in net.recorders))
    [far] = [recorder for recorder in net.recorders if recorder is not near]
    return near, far


async def tls_streams(net: Net, **options):
    """(reader, writer) of the connecting side, then of the accepting side."""
    accepted = net.loop.create_future()
    _, port = await net.serve_streams(lambda r, w: accepted.set_result((r, w)), ssl=SERVER)
    near = await net.open(port, **TO_SERVER | options)
    far = await accepted
    net.writers.append(far[1])
    return (*near, *far)


# ---- bytes


async def test_bytes_in_both_directions(net: Net):
    client, server = await tls_pair(net, server=Echo)
    client.transport.write(MUCH)
    assert await client.until_received(len(MUCH)) == MUCH
    client.transport.close()
    assert await client.until_lost() is None
    assert await server.until_lost() is None
    assert server.events[-2:] == ["eof", "lost"]


async def test_nothing_of_it_is_readable_below(net: Net, monkeypatch):
    """The bytes that reach the connection are not those of the program."""
    client, server = await tls_pair(net)
    seen = []
    write = below(client.transport).write
    monkeypatch.setattr(
        below(client.transport), "write", lambda data: (seen.append(bytes(data)), write(data))
    )
    client.transport.write(b"secret" * 100)
    assert await server.until_received(600) == b"secret" * 100
    assert seen and not any(b"secret" in data for data in seen)


@pytest.mark.parametrize("size", [1, 64, 16 << 10, 3 * MIB])
async def test_streams(net: Net, size):
    reader, writer, far_reader, far_writer = await tls_streams(net)
    data = MUCH[:size]
    [reading] = await begin(far_reader.readexactly(size))
    writer.write(data)
    await writer.drain()
    assert await reading == data
    far_writer.writelines([data, b"line\n", data])
    assert await reader.readexactly(size) == data
    assert await reader.readline() == b"line\n"
    into = bytearray(size)
    assert await reader.readinto_exactly(into) == size
    assert into == data
    writer.close()
    await writer.wait_closed()
    assert await far_reader.read() == b""


async def test_a_reader_that_does_not_read_stops_the_writer(net: Net):
    reader, writer, _, far_writer = await tls_streams(net, limit=1000)
    chunk, chunks = bytes(64 << 10), 0

    async def flood():
        nonlocal chunks
        while True:
            far_writer.write(chunk)
            await far_writer.drain()
            chunks += 1

    [flooding] = await begin(flood())
    await until_seen(lambda: far_writer._protocol._paused and not below(writer.transport).is_reading())
    assert reader._paused
    flooding.cancel()
    far_writer.close()
    expected = (chunks + 1) << 16
    assert len(await reader.read()) == expected


async def test_writing_is_paused_and_resumed(net: Net):
    client, server = await tls_pair(net)
    server.transport.pause_reading()
    assert not server.transport.is_reading()
    while not client.writing_paused:
        client.transport.write(MUCH)
    buffered = client.transport.get_write_buffer_size()
    assert buffered > client.transport.get_write_buffer_limits()[1]
    server.transport.resume_reading()
    await client.until(lambda: not client.writing_paused)
    assert client.transport.get_write_buffer_size() < buffered


async def test_memory_that_changes_is_encrypted_at_once(net: Net):
    client, server = await tls_pair(net)
    memory = bytearray(b"a" * MIB)
    client.transport.write(memoryview(memory))
    memory[:] = b"b" * MIB
    assert await server.until_received(MIB) == b"a" * MIB


async def test_a_buffered_protocol(net: Net):
    class Buffered(asyncio.BufferedProtocol):
        def __init__(self):
            self.room, self.got, self.lost = bytearray(5000), bytearray(), net.loop.create_future()

        def get_buffer(self, hint):
            return memoryview(self.room)

        def buffer_updated(self, count):
            self.got += self.room[:count]

        def connection_lost(self, exc):
            self.lost.set_result(exc)

    _, port = await net.serve(lambda: Greets(MUCH), ssl=SERVER)
    _, protocol = await rdmanet.create_rdma_connection(Buffered, HOST, port, **TO_SERVER)
    assert await protocol.lost is None
    assert protocol.got == MUCH


class Greets(Recorder):
    """Writes as soon as it may, and closes."""

    def __init__(self, greeting: bytes) -> None:
        super().__init__()
        self.greeting = greeting

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.write(self.greeting)
        transport.close()


class ClosesTwice(Recorder):
    """asyncio's TLS transport forgets its protocol at the second close()."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        transport.close()
        transport.close()


@pytest.mark.parametrize("who", ["client", "server"])
async def test_who_closes_twice_at_once(net: Net, who):
    made: list[Recorder] = []

    def of_the_server() -> Recorder:
        made.append(ClosesTwice() if who == "server" else Recorder())
        return made[-1]

    _, port = await net.serve(of_the_server, ssl=SERVER)
    of_the_client = ClosesTwice if who == "client" else Recorder
    _, protocol = await rdmanet.create_rdma_connection(of_the_client, HOST, port, **TO_SERVER)
    assert isinstance(protocol, of_the_client)
    await protocol.until_lost()
    await made[0].until_lost()


# ---- what is asked for


async def test_extra_info(net: Net):
    client, server = await tls_pair(net)
    near, far = client.transport.get_extra_info, server.transport.get_extra_info
    assert near("sslcontext") is CLIENT and far("sslcontext") is SERVER
    assert isinstance(near("ssl_object"), ssl.SSLObject)
    assert near("peercert")["subject"] == ((("commonName", "server"),),)
    assert near("cipher") == far("cipher")
    assert near("compression", "?") is None
    assert near("peername") == far("sockname")
    assert near("rdma_device") == far("rdma_device")
    assert near("rdma_qp") and near("rdma_pd") is not None
    assert near("rdma_stats")["bytes_sent"] == far("rdma_stats")["bytes_received"] > 0
    assert near("socket").getpeername()[:2] == far("sockname")[:2]
    assert near("no such key", "default") == "default"


async def test_alpn(net: Net):
    there, here = of_server(), of_client()
    there.set_alpn_protocols(["h2", "http/1.1"])
    here.set_alpn_protocols(["http/1.1"])
    client, server = await tls_pair(net, context=there, ssl=here)
    for end in (client, server):
        assert end.transport.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"


async def test_a_client_with_a_certificate(net: Net):
    here = of_client()
    here.load_cert_chain(CERTIFICATES / "client.pem")
    _, server = await tls_pair(net, context=of_server(verify_mode=ssl.CERT_REQUIRED), ssl=here)
    assert server.transport.get_extra_info("peercert")["subject"] == ((("commonName", "client"),),)


async def test_a_client_that_lacks_a_certificate(net: Net):
    """By TLS 1.3 it learns that after its own handshake is done. asyncio's server would only reset it."""
    _, port = await net.serve(Recorder, ssl=of_server(verify_mode=ssl.CERT_REQUIRED))
    client = await net.connect(port, **TO_SERVER)
    lost = await client.until_lost()
    assert isinstance(lost, ssl.SSLError)
    assert lost.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert [recorder for recorder in net.recorders if recorder.events] == [client]


async def test_the_name_is_the_host_unless_another_is_given(net: Net):
    server, port = await net.serve(Recorder, ssl=SERVER)
    with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
        await net.connect(port, ssl=CLIENT, server_hostname="elsewhere")
    unchecked = of_client()
    unchecked.check_hostname = False
    client = await net.connect(port, ssl=unchecked, server_hostname="")
    assert client.events == ["made"]
    _, port = await net.serve(Recorder, ssl=of_server("stranger"))
    with pytest.raises(ssl.SSLCertVerificationError, match=r"certificate"):
        await net.connect(port, **TO_SERVER)


@pytest.mark.embedded_only("only the embedded device has loopback's addresses")
async def test_the_hosts_own_name(net: Net):
    server = await rdmanet.start_rdma_server(net.remember(Recorder), "localhost", 0, ssl=SERVER)
    net.servers.append(server)
    port = server.sockets[0].getsockname()[1]
    transport, recorder = await rdmanet.create_rdma_connection(
        net.remember(Recorder), "localhost", port, ssl=CLIENT, connect_timeout=60.0
    )
    assert transport is recorder.transport
    assert transport.get_extra_info("ssl_object").server_hostname == "localhost"


async def test_true_is_the_default_context(net: Net):
    _, port = await net.serve(Recorder, ssl=SERVER)
    with pytest.raises(ssl.SSLCertVerificationError):
        await net.connect(port, ssl=True, server_hostname="localhost")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"server_hostname": "x"}, ValueError, "server_hostname is only meaningful with ssl"),
        ({"ssl_handshake_timeout": 1}, ValueError, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"ssl_shutdown_timeout": 1}, ValueError, "ssl_shutdown_timeout is only meaningful with ssl"),
        ({"ssl": object()}, TypeError, "SSLContext"),
        ({"ssl": CLIENT, "ssl_handshake_timeout": 0}, ValueError, "positive"),
        ({"ssl": CLIENT, "ssl_shutdown_timeout": -1}, ValueError, "positive"),
        ({"ssl": SERVER}, ssl.SSLError, "PROTOCOL_TLS_SERVER"),
    ],
)
async def test_wrong_arguments_of_a_client(net: Net, arguments, error, text):
    _, port = await net.serve(Recorder)
    with pytest.raises(error, match=text):
        await rdmanet.create_rdma_connection(Recorder, HOST, port, **arguments)
    with pytest.raises(error, match=text):
        await rdmanet.open_rdma_connection(HOST, port, **arguments)


async def test_a_name_is_needed(net: Net):
    with pytest.raises(ValueError, match="server_hostname"):
        await rdmanet.create_rdma_connection(Recorder, "", 1, ssl=CLIENT)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"ssl_handshake_timeout": 1}, ValueError, "ssl_handshake_timeout is only meaningful with ssl"),
        ({"ssl_shutdown_timeout": 1}, ValueError, "ssl_shutdown_timeout is only meaningful with ssl"),
        ({"ssl": True}, TypeError, "must be an SSLContext or None"),
        ({"ssl": SERVER, "ssl_handshake_timeout": 0}, ValueError, "positive"),
        ({"ssl": SERVER, "ssl_shutdown_timeout": -1}, ValueError, "positive"),
        ({"ssl": CLIENT}, ssl.SSLError, "PROTOCOL_TLS_CLIENT"),
    ],
)
async def test_wrong_arguments_of_a_server(net: Net, arguments, error, text):
    with pytest.raises(error, match=text):
        await rdmanet.start_rdma_server(Recorder, HOST, 0, **arguments)
    with pytest.raises(error, match=text):
        await rdmanet.start_rdma_stream_server(lambda r, w: None, HOST, 0, **arguments)


async def test_a_factory_that_raises(net: Net):
    def factory():
        raise ZeroDivisionError

    _, port = await net.serve(Recorder, ssl=SERVER)
    with pytest.raises(ZeroDivisionError):
        await rdmanet.create_rdma_connection(factory, HOST, port, **TO_SERVER)


# ---- handshakes that fail


async def test_a_server_that_says_nothing(net: Net):
    _, port = await net.serve(Recorder)
    with pytest.raises(ConnectionAbortedError, match=r"longer than 0\.1 seconds"):
        await net.connect(port, ssl_handshake_timeout=0.1, **TO_SERVER)
    [server] = [recorder for recorder in net.recorders if recorder.events]
    assert isinstance(await server.until_lost(), ConnectionResetError)


async def test_a_client_that_says_nothing(net: Net):
    server, port = await net.serve(Recorder, ssl=SERVER, ssl_handshake_timeout=0.1)
    client = await net.connect(port)
    assert isinstance(await client.until_lost(), ConnectionResetError)
    await until_seen(lambda: not server._active)
    assert not server._half_open


async def test_what_is_no_tls(net: Net):
    server, port = await net.serve(Recorder, ssl=SERVER)
    client = await net.connect(port)
    client.transport.write(b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(await client.until_lost(), ConnectionResetError)
    await until_seen(lambda: not server._active)
    assert not server._half_open
    assert (await net.connect(port, **TO_SERVER)).events == ["made"]


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_peer_that_goes_away_during_the_handshake(net: Net, how):
    class Leaves(Recorder):
        def data_received(self, data):
            super().data_received(data)
            getattr(self.transport, how)()

    _, port = await net.serve(Leaves)
    says = "it may not expect TLS" if how == "close" else "the peer aborted"
    with pytest.raises(ConnectionResetError, match=says):
        await net.connect(port, **TO_SERVER)


async def test_a_client_that_leaves_during_the_handshake(net: Net):
    server, port = await net.serve(Recorder, ssl=SERVER)
    client = await net.connect(port)
    client.transport.write_eof()
    assert await client.until_lost() is None or isinstance(client.error, ConnectionResetError)
    await until_seen(lambda: not server._active)


async def test_cancelling_a_handshake(net: Net):
    _, port = await net.serve(Recorder)
    [connecting] = await begin(net.connect(port, **TO_SERVER))
    await net.until(lambda: any(recorder.received for recorder in net.recorders))
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    [server] = [recorder for recorder in net.recorders if recorder.events]
    assert isinstance(await server.until_lost(), ConnectionResetError)


# ---- the end


async def test_the_end_is_said_in_tls(net: Net):
    client, server = await tls_pair(net)
    client.transport.write(b"last")
    client.transport.close()
    assert client.transport.is_closing()
    assert await server.until_lost() is None
    assert bytes(server.data) == b"last"
    assert server.events == ["made", "data", "eof", "lost"]
    assert await client.until_lost() is None


async def test_there_is_no_half_close(net: Net):
    client, _ = await tls_pair(net)
    assert not client.transport.can_write_eof()
    with pytest.raises(NotImplementedError):
        client.transport.write_eof()


async def test_a_stream_that_was_cut(net: Net):
    """End of file below without TLS's own: as over TCP, asyncio tells of an end of file."""
    client, server = await tls_pair(net)
    below(client.transport).close()
    assert await server.until_lost() is None
    assert server.events == ["made", "eof", "lost"]


async def test_abort(net: Net):
    client, server = await tls_pair(net)
    client.transport.abort()
    assert await client.until_lost() is None
    assert isinstance(await server.until_lost(), ConnectionResetError)


async def test_a_peer_that_does_not_answer_the_end(net: Net):
    client, server = await tls_pair(net, ssl_shutdown_timeout=0.1)
    below(server.transport).pause_reading()
    client.transport.close()
    assert isinstance(await client.until_lost(), TimeoutError)
    server.transport.abort()


async def test_what_waits_when_the_peer_ends_tls_is_sent(net: Net):
    """TLS closes the transport while it has more to write, and writes that when it may: last bytes, its farewell."""
    _, port = await net.serve(ByHand)
    client = await net.connect(port, **TO_SERVER)
    [server] = [recorder for recorder in net.recorders if recorder is not client]
    client.transport.write(b"ping")
    await server.until(lambda: server.plain == b"ping")
    server.transport.pause_reading()
    sent = 4
    while not client.writing_paused:
        client.transport.write(MUCH)
        sent += len(MUCH)
    with pytest.raises(ssl.SSLWantReadError):
        server.tls.unwrap()
    server.transport.write(server.outgoing.read())
    raw = below(client.transport)
    await client.until(lambda: client.eof)
    await until_seen(raw.is_closing)
    assert not client.lost
    server.transport.resume_reading()
    assert await client.until_lost() is None
    await server.until_lost()
    assert len(server.plain) == sent and server.ended


async def test_closing_below_what_waits_ends_in_time(net: Net):
    client, server = await tls_pair(net, close_timeout=0.2)
    below(server.transport).pause_reading()
    while not below(client.transport)._connection.protocol_paused:
        client.transport.write(MUCH)
    below(client.transport).close()
    assert isinstance(await client.until_lost(), TimeoutError)
    server.transport.abort()


async def test_a_lost_connection_fails_drain_and_reads(net: Net):
    reader, writer, _, far_writer = await tls_streams(net)
    far_writer.transport.abort()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    with pytest.raises(ConnectionResetError):
        await writer.drain()


class Buffered(Recorder, asyncio.BufferedProtocol):
    """Takes what comes by a buffer that is much smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = memoryview(bytearray(1000))  # of a bytearray, asyncio would fill a copy

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.buffer[:nbytes]))


async def test_a_small_buffer_loses_nothing_of_a_lost_connection(net: Net):
    """The client has paused reading. All has arrived when the server aborts."""
    client, server = await tls_pair(net, Buffered)
    client.transport.pause_reading()
    server.transport.write(MUCH[:60_000])
    await until_seen(lambda: not below(server.transport).get_write_buffer_size())
    below(server.transport).abort()
    await client.until_lost()
    assert bytes(client.data) == MUCH[:60_000]


async def test_a_server_closes_its_clients_by_tls(net: Net):
    """close_clients() loses nothing that was written."""
    client, server = await tls_pair(net)
    client.transport.pause_reading()
    server.transport.write(MUCH)
    net.servers[0].close()
    net.servers[0].close_clients()
    client.transport.resume_reading()
    assert await client.until_received(len(MUCH)) == MUCH
    assert await client.until_lost() is None
    assert await server.until_lost() is None
    await net.servers[0].wait_closed()


# ---- start_tls


async def upgrade(net: Net, client, server, **options):
    """Encrypt both ends of a connection; returns the new transports."""
    faces = await asyncio.gather(
        rdmanet.start_tls(client.transport, client, CLIENT, server_hostname="localhost", **options),
        rdmanet.start_tls(server.transport, server, SERVER, server_side=True, **options),
    )
    client.transport, server.transport = faces
    return faces


async def test_start_tls(net: Net):
    client, server = await net.pair()
    client.transport.write(b"in the clear")
    await server.until_received(12)
    near, far = await upgrade(net, client, server)
    near.write(MUCH)
    far.write(MUCH)
    assert (await server.until_received(12 + len(MUCH)))[12:] == MUCH
    assert await client.until_received(len(MUCH)) == MUCH
    assert client.events.count("made") == 1
    near.close()
    assert await server.until_lost() is None
    assert await client.until_lost() is None


async def test_tls_in_tls(net: Net):
    client, server = await tls_pair(net)
    await upgrade(net, client, server)
    client.transport.write(MUCH)
    assert await server.until_received(len(MUCH)) == MUCH
    server.transport.close()
    assert await client.until_lost() is None


async def test_the_loops_own_start_tls(net: Net):
    """asyncio's takes our transports; uvloop's only its own, whence rdmanet.start_tls()."""
    client, server = await net.pair()
    starting = net.loop.start_tls(client.transport, client, CLIENT, server_hostname="localhost")
    if not isinstance(net.loop, asyncio.BaseEventLoop):
        with pytest.raises(TypeError, match="not supported by start_tls"):
            await starting
        return
    client.transport, server.transport = await asyncio.gather(
        starting, rdmanet.start_tls(server.transport, server, SERVER, server_side=True)
    )
    client.transport.write(MUCH)
    assert await server.until_received(len(MUCH)) == MUCH


async def test_wrong_arguments_of_start_tls(net: Net):
    client, _ = await net.pair()
    with pytest.raises(TypeError, match="SSLContext"):
        await rdmanet.start_tls(client.transport, client, None)
    with pytest.raises(TypeError, match="not supported by start_tls"):
        await rdmanet.start_tls(object(), client, CLIENT)
    with pytest.raises(ValueError, match="positive"):
        await rdmanet.start_tls(client.transport, client, CLIENT, ssl_handshake_timeout=0)
    assert not client.transport.is_closing()


async def test_start_tls_fails(net: Net):
    client, server = await net.pair()
    with pytest.raises(ConnectionAbortedError, match="longer"):
        await rdmanet.start_tls(
            client.transport, client, CLIENT, server_hostname="x", ssl_handshake_timeout=0.1
        )
    assert isinstance(await server.until_lost(), ConnectionResetError)
    never_told(client)


def never_told(client: Recorder) -> None:
    """A protocol whose handshake ends without an answer is not told that the connection is lost: asyncio's way."""
    assert client.transport.is_closing() and not client.lost
    client.transport = None


async def test_start_tls_of_streams_fails(net: Net):
    """Streams are told, or their ends would wait for ever."""
    reader, writer, far_reader, _ = await net.stream_pair()
    with pytest.raises(ConnectionAbortedError, match="longer"):
        await writer.start_tls(CLIENT, server_hostname="x", ssl_handshake_timeout=0.1)
    with pytest.raises(ConnectionAbortedError):
        await reader.read()
    with pytest.raises(ConnectionAbortedError):
        await writer.wait_closed()
    with pytest.raises(ConnectionResetError):
        await far_reader.read()


async def test_cancelling_start_tls_of_streams(net: Net):
    reader, writer, far_reader, _ = await net.stream_pair()
    [starting] = await begin(writer.start_tls(CLIENT, server_hostname="x"))
    assert await far_reader.read(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ConnectionAbortedError, match="cancelled"):
        await reader.read()
    with pytest.raises(ConnectionAbortedError, match="cancelled"):
        await writer.wait_closed()
    assert await far_reader.read()


async def test_cancelling_start_tls(net: Net):
    client, server = await net.pair()
    [starting] = await begin(rdmanet.start_tls(client.transport, client, CLIENT, server_hostname="x"))
    await server.until_received(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await server.until_lost() is None
    never_told(client)


async def test_the_connection_is_closed_during_start_tls(net: Net):
    client, server = await net.pair()
    [starting] = await begin(rdmanet.start_tls(client.transport, client, CLIENT, server_hostname="x"))
    client.transport.close()
    with pytest.raises(ConnectionAbortedError, match="during the SSL handshake"):
        await starting
    assert await server.until_lost() is None
    never_told(client)


async def test_start_tls_while_writing_is_paused(net: Net):
    """Both layers tell the program when to write, each at its turn, and nothing is lost."""
    client, server = await net.pair(server=ByHand)
    server.transport.pause_reading()
    while not client.writing_paused:
        client.transport.write(MUCH)
        server.clear += len(MUCH)
    [starting] = await begin(rdmanet.start_tls(client.transport, client, CLIENT, server_hostname="localhost"))
    assert not client.writing_paused
    expected = server.clear
    server.transport.resume_reading()
    client.transport = await starting
    assert len(server.plain) == expected
    client.transport.write(b"and more")
    await server.until(lambda: server.plain[expected:] == b"and more")


@pytest.mark.parametrize("where", ["in its slots", "aside"])
async def test_start_tls_of_streams(net: Net, where):
    """The client does not wait for the server: what is unread when the server starts is TLS's."""
    reader, writer, far_reader, far_writer = await net.stream_pair()
    writer.write(b"STARTTLS\n")
    [starting] = await begin(writer.start_tls(CLIENT, server_hostname="localhost"))
    assert await far_reader.readline() == b"STARTTLS\n"
    await until_seen(lambda: far_writer.transport._connection.unread)
    if where == "aside":
        assert far_reader._buffer
    await far_writer.start_tls(SERVER)
    await starting
    assert writer.get_extra_info("cipher") == far_writer.get_extra_info("cipher")
    writer.write(MUCH)
    [reading] = await begin(far_reader.readexactly(len(MUCH)))
    await writer.drain()
    assert await reading == MUCH
    far_writer.write(b"bye")
    far_writer.close()
    assert await reader.read() == b"bye"
    writer.close()
    await asyncio.gather(writer.wait_closed(), far_writer.wait_closed())


async def test_streams_upgraded_by_the_loop(net: Net):
    """nats-py does this: loop.start_tls() on the writer's transport, with the reader's protocol."""
    if not isinstance(net.loop, asyncio.BaseEventLoop):
        start = rdmanet.start_tls
    else:
        start = net.loop.start_tls
    _, writer, far_reader, far_writer = await net.stream_pair()
    writer.write(b"STARTTLS\n")
    [starting] = await begin(writer.start_tls(CLIENT, server_hostname="localhost"))
    assert await far_reader.readline() == b"STARTTLS\n"
    await until_seen(lambda: far_writer.transport._connection.unread)
    raw = far_writer.transport
    face = await start(raw, raw.get_protocol(), SERVER, server_side=True)
    await starting
    writer.write(b"encrypted\n")
    assert await far_reader.readline() == b"encrypted\n"
    face.write(b"answer")
    face.abort()


async def test_what_was_slipped_in_before_tls_is_not_read(net: Net):
    """Plain text behind the answer to STARTTLS is no answer of what TLS protects."""
    reader, writer, _, far_writer = await net.stream_pair()
    far_writer.write(b"go ahead\ndelete everything\n")
    assert await reader.readline() == b"go ahead\n"
    with pytest.raises(ssl.SSLError):
        await writer.start_tls(CLIENT, server_hostname="localhost")
    with pytest.raises(ssl.SSLError):
        await reader.readline()


async def test_a_read_that_waits_while_tls_starts(net: Net):
    reader, writer, _, far_writer = await net.stream_pair()
    [reading] = await begin(reader.readexactly(5))
    await asyncio.gather(writer.start_tls(CLIENT, server_hostname="localhost"), far_writer.start_tls(SERVER))
    far_writer.write(b"hello")
    assert await reading == b"hello"


async def test_a_read_that_has_some_of_it_while_tls_starts(net: Net):
    """What it was given in the clear is TLS's, too: no read has some bytes from before and others from behind."""
    reader, writer, _, far_writer = await net.stream_pair()
    [reading] = await begin(reader.readexactly(12))
    far_writer.write(b"delete ")
    await until_seen(lambda: writer.transport.get_extra_info("rdma_stats")["bytes_received"])
    with pytest.raises(ssl.SSLError):
        await writer.start_tls(CLIENT, server_hostname="localhost")
    with pytest.raises(ssl.SSLError):
        await reading
    assert not reader._buffer


async def test_a_paused_reader_starts_tls(net: Net):
    """What the reader held back is TLS's, and it holds nothing back any more."""
    reader, writer, _, far_writer = await net.stream_pair(limit=4)
    reader.feed_data(b"")  # nothing
    far_writer.write(b"ok\n")
    assert await reader.readline() == b"ok\n"
    await asyncio.gather(writer.start_tls(CLIENT, server_hostname="localhost"), far_writer.start_tls(SERVER))
    far_writer.write(MUCH)
    await until_seen(lambda: reader._paused)
    assert await reader.readexactly(len(MUCH)) == MUCH


# ---- strangers


async def owes_a_handshake(server):
    """The request of the one connection that is established, and not by TLS."""

    def established():
        return [request for request in server._half_open if request._transport.get_extra_info("peername")]

    await until_seen(established)
    return established()[0]


async def test_strangers_share_the_places_of_half_open_connections(net: Net, monkeypatch):
    """Who connects and then says nothing in TLS holds no more than who does not even connect."""
    monkeypatch.setattr(admission, "OTHERS_WAIT_S", 0.2)
    monkeypatch.setattr(admission, "HANDSHAKE_GRACE_S", 0.1)
    server, port = await net.serve(Echo, ssl=SERVER)
    places = admission.places_for(stream_half_open_bytes(65536, 16, False))
    strangers = [asyncio.ensure_future(net.connect(port)) for _ in range(2 * places)]
    await until_seen(lambda: len(server._half_open) == places)
    client = await net.connect(port, **TO_SERVER)
    client.transport.write(b"hello")
    assert await client.until_received(5) == b"hello"
    assert len(server._half_open) <= places
    connected = await asyncio.gather(*strangers)
    await net.until(lambda: sum(not stranger.lost for stranger in connected) <= places)


async def test_a_slow_handshake_keeps_its_place_while_nobody_waits(net: Net, monkeypatch):
    monkeypatch.setattr(admission, "PATIENCE_S", 0.2)
    monkeypatch.setattr(admission, "HANDSHAKE_GRACE_S", 0.0)
    server, port = await net.serve(Echo, ssl=SERVER)
    slow = await net.connect(port)
    await asyncio.sleep(0.5)  # longer than a stranger may take to connect
    assert len(server._half_open) == 1
    slow.transport = await rdmanet.start_tls(slow.transport, slow, CLIENT, server_hostname="localhost")
    await until_seen(lambda: not server._half_open)
    slow.transport.write(b"hello")
    assert await slow.until_received(5) == b"hello"


@pytest.mark.long  # siw has too few queue pairs
@pytest.mark.parametrize("shared", [False, True])
async def test_a_crowd_all_get_in(net: Net, shared):
    _, port = await net.serve(Echo, ssl=SERVER, shared_receive=shared)
    clients = await asyncio.gather(*(net.connect(port, **TO_SERVER) for _ in range(40)))
    for number, client in enumerate(clients):
        client.transport.write(b"%2d" % number)
    for number, client in enumerate(clients):
        assert await client.until_received(2) == b"%2d" % number


async def test_the_end_of_a_server_amid_handshakes(net: Net):
    server, port = await net.serve(Echo, ssl=SERVER)
    stranger = await net.connect(port)
    await owes_a_handshake(server)
    server.close()
    server.close_clients()
    await server.wait_closed()
    assert isinstance(await stranger.until_lost(), ConnectionResetError)


async def test_an_sslprotocol_that_sees_its_connection_evicted(net: Net, monkeypatch):
    """TLS hears of it, so its timer is stopped and nothing refers to the connection."""
    lost = []
    monkeypatch.setattr(admission, "PATIENCE_S", 0.0)
    monkeypatch.setattr(admission, "HANDSHAKE_GRACE_S", 0.0)
    connection_lost = SSLProtocol.connection_lost
    monkeypatch.setattr(
        SSLProtocol, "connection_lost", lambda tls, exc: (lost.append(exc), connection_lost(tls, exc))
    )
    server, port = await net.serve(Echo, ssl=SERVER, ssl_handshake_timeout=30)
    stranger = await net.connect(port)
    request = await owes_a_handshake(server)
    request.evict()
    assert [type(error) for error in lost] == [ConnectionAbortedError]
    assert isinstance(await stranger.until_lost(), OSError)
    with contextlib.suppress(OSError):
        stranger.transport.write(b"too late")
    assert not server._active
