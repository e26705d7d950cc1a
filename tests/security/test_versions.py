"""Two versions of the device's protocol (soft/base/version.h): each side learns both numbers with the first message.

A device of the next version is built here, and a process of each version meets one of the other.
"""

import socket
import struct

import pytest

from tests.support.versions import WIRE

PSN = 100
BETWEEN_DEVICES = "version {} of the device's protocol, this side speaks version {}"


@pytest.fixture(params=["server", "client"])
def newer(request, another_version):
    """Which side is newer, and what each has in its environment: the server's, and the client's."""
    environment = {"RDMANET_SOFT_LIBRARY": str(another_version)}
    return (environment, {}) if request.param == "server" else ({}, environment)


def versions(newer):
    return (WIRE + 1, WIRE) if newer[0] else (WIRE, WIRE + 1)


@pytest.mark.parametrize(
    "secret",
    [
        pytest.param({}, id="plain"),
        pytest.param({"RDMANET_SOFT_SECRET": "5e" * 32}, id="secret", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", ["cm", "datagram"])
def test_the_connection_manager_refuses_it(stage, newer, kind, secret):
    more = ["0", "welcome"] if kind == "cm" else []
    server = stage.start(f"{kind}_server", "127.0.0.1", *more, **newer[0], **secret)
    client = stage.start(f"{kind}_client", **newer[1], **secret)
    client.hear()
    client.tell(to=["127.0.0.1", server.hear()["port"]], data="")
    answer = client.hear()
    its, ours = versions(newer)
    assert answer["error"] == "ConnectionRefusedError"
    assert f"speaks version {its} of the protocol, this side speaks version {ours}" in answer["text"]
    words = "its device speaks version {} of the protocol, this side speaks version {}"
    assert words.format(its, ours) in client.finish()
    assert words.format(ours, its) in server.finish()
    assert server.rest() == "", "the program hears of no request"


@pytest.mark.parametrize("transport", ["stream", "auto"])
def test_queue_pairs_fail(stage, newer, transport):
    """By hand connected: nobody has asked a connection manager. On one host there is no link, either."""
    ends = [stage.start("pair_end", RDMANET_SOFT_TRANSPORT=transport, **some) for some in newer]
    numbers = [end.hear()["number"] for end in ends]
    for end, number in zip(ends, reversed(numbers), strict=True):
        end.tell(number=number, psn=PSN)
        assert end.hear() == {"connected": True}
    for end in ends:
        end.tell(send="hello")
    # The other's refusal fails it, with its first request or before it.
    statuses = [end.hear()["status"] for end in ends]
    assert set(statuses) <= {"REM_ABORT_ERR", "WR_FLUSH_ERR"}
    said = [end.finish() for end in ends]
    for errors, pair in zip(said, (versions(newer)[::-1], versions(newer)), strict=True):
        assert BETWEEN_DEVICES.format(*pair) in errors


def test_a_hello_of_any_length_is_answered(stage):
    """What follows the version may be shorter in another version: the answer does not wait for it."""
    ends = [stage.start("pair_end", RDMANET_SOFT_TRANSPORT="stream") for _ in range(2)]
    numbers = [end.hear()["number"] for end in ends]
    ends[0].tell(number=numbers[1], psn=PSN)
    assert ends[0].hear() == {"connected": True}
    with socket.create_connection(("127.0.0.1", numbers[0] >> 8)) as peer:
        peer.sendall(struct.pack("<4sHH", b"RNRS", WIRE + 7, 0))
        answer = peer.recv(72, socket.MSG_WAITALL)
    assert struct.unpack_from("<4sBxH", answer) == (b"RNRS", 5, WIRE)
    assert BETWEEN_DEVICES.format(WIRE + 7, WIRE) in ends[0].finish()
