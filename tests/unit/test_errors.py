"""From the fabric's numbers to exceptions: their classes, their texts, and that they travel between processes."""

import errno
import pickle

import pytest

import rdmanet
from rdmanet import errors

PEER = ("10.0.0.1", 7471)
PEER6 = ("fe80::1", 7471, 0, 2)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (PEER, "10.0.0.1:7471"),
        (("::1", 80, 0, 0), "[::1]:80"),
        (PEER6, "[fe80::1%2]:7471"),
        (("fe80::1%eth0", 80, 0, 2), "[fe80::1%eth0]:80"),
    ],
)
def test_an_address_as_one_writes_it(address, text):
    assert errors.endpoint(address) == text


@pytest.mark.parametrize(
    ("event", "status", "kind"),
    [
        ("REJECTED", 8, ConnectionRefusedError),
        ("REJECTED", 28, ConnectionRefusedError),
        ("REJECTED", 0x5301, ConnectionRefusedError),
        ("REJECTED", -errno.ECONNREFUSED, ConnectionRefusedError),
        ("UNREACHABLE", 0, TimeoutError),
        ("UNREACHABLE", -errno.EHOSTUNREACH, OSError),
        ("ADDR_ERROR", -errno.ENODEV, OSError),
        ("ROUTE_ERROR", -errno.EHOSTUNREACH, OSError),
        ("CONNECT_ERROR", -errno.ECONNRESET, ConnectionResetError),
        ("DISCONNECTED", 0, ConnectionResetError),
        ("ADDR_RESOLVED", -errno.EMFILE, OSError),
    ],
)
def test_an_error_of_a_connection_names_the_peer(event, status, kind):
    error = errors.cm_error(event, status, PEER6)
    assert isinstance(error, kind) and error.errno
    assert "[fe80::1%2]:7471" in str(error)
    unnamed = errors.cm_error(event, status)
    assert type(unnamed) is type(error)
    assert str(unnamed) in (
        str(error).replace(f"{before} [fe80::1%2]:7471", "") for before in ("", " to", " for")
    )


def test_a_peer_whose_process_is_gone():
    """The device knows better than the completion, and than the event."""
    for status in (5, 12, 13):
        plain = errors.completion_error(status, "send", 0, 0x11)
        gone = errors.completion_error(status, "send", 0, 0x11, peer_gone=True)
        assert isinstance(gone, errors.CompletionResetError) and gone.peer_gone and not plain.peer_gone
        assert "(the peer's process is gone)" in str(gone) and "process" not in str(plain)
        assert str(gone).partition(" (")[0] == str(plain).partition(" (")[0]
        again = pickle.loads(pickle.dumps(gone))
        assert (str(again), again.peer_gone) == (str(gone), True)
    refused = errors.completion_error(10, "RDMA_READ", 0, 0x11, (0, 8, 1), peer_gone=True)
    assert isinstance(refused, errors.RemoteAccessError) and "process" not in str(refused)
    error = errors.cm_error("DISCONNECTED", 0, PEER, peer_gone=True)
    assert str(error) == f"[Errno {errno.ECONNRESET}] the peer's process is gone: 10.0.0.1:7471"


def test_every_class_is_the_packages_own():
    """To catch one needs no other import."""
    for name in errors.__all__:
        if isinstance(kind := getattr(errors, name), type):
            assert getattr(rdmanet, name) is kind
