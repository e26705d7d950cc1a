"""What is read of a TLS connection at a time: _core.decrypted()."""

import ssl
from asyncio.sslproto import SSLAgainErrors
from pathlib import Path

import pytest

from rdmanet import _core

CERTIFICATES = Path(__file__).parents[1] / "streams" / "certificates"
RECORD = 16384


class Pair:
    """Two ends of TLS, whose handshake is done. `sent` is what the client has said, encrypted."""

    def __init__(self) -> None:
        server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server_context.load_cert_chain(CERTIFICATES / "server.pem")
        client_context = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
        self.incoming, answers, to_client, self.sent = (ssl.MemoryBIO() for _ in range(4))
        self.server = server_context.wrap_bio(self.incoming, answers, server_side=True)
        self.client = client_context.wrap_bio(to_client, self.sent, server_hostname="localhost")
        for end in (self.client, self.server, self.client, self.server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            self.incoming.write(self.sent.read())
            to_client.write(answers.read())

    def read(self) -> tuple[bytes, bool]:
        return _core.decrypted(self.server, self.incoming, SSLAgainErrors)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("size", [1, RECORD, RECORD + 1, 20 * RECORD])
def test_all_records_are_one_object(pair, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pair.client.write(data)
    pair.incoming.write(pair.sent.read())
    assert pair.read() == (data, False)
    assert pair.read() == (b"", False)


@pytest.mark.parametrize("step", [1, 5, 1000, RECORD, RECORD + 100])
def test_a_record_comes_in_pieces(pair, step):
    data = bytes(2 * RECORD + 100)
    pair.client.write(data)
    sent, got = pair.sent.read(), b""
    for at in range(0, len(sent), step):
        pair.incoming.write(sent[at : at + step])
        piece, is_closed = pair.read()
        assert not is_closed
        got += piece
    assert got == data


def test_many_small_records(pair):
    for number in range(1000):
        pair.client.write(b"%d," % number)
    pair.incoming.write(pair.sent.read())
    got = b""
    while (read := pair.read()) != (b"", False):
        got += read[0]
    assert got == b"".join(b"%d," % number for number in range(1000))


def test_the_peer_closes(pair):
    pair.client.write(b"the end")
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.incoming.write(pair.sent.read())
    assert pair.read() == (b"the end", True)
    assert pair.read() == (b"", True)


def test_what_is_no_record(pair):
    pair.incoming.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        pair.read()
