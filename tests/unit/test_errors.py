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


@pytest.mark.parametrize(
    ("opcode", "address", "text"),
    [
        ("ATOMIC_FETCH_AND_ADD", 0x1004, "the address of an atomic operation is a multiple of 8, and 0x1004 is not"),
        ("ATOMIC_FETCH_AND_ADD", 0x1008, "has no REMOTE_ATOMIC in its qp_access_flags, or its max_dest_rd_atomic is 0"),
        ("RDMA_READ", 0x1004, "has no REMOTE_READ in its qp_access_flags, or its max_dest_rd_atomic is 0"),
        ("RDMA_WRITE", 0x1004, "has no REMOTE_WRITE in its qp_access_flags"),
    ],
)  # fmt: skip
def test_why_the_peer_refuses_a_request(opcode, address, text):
    """Where the memory is known, each cause has a text of its own; it survives a pickle."""
    error = errors.completion_error(9, opcode, 0, 0x11, (address, 8, 0x77))
    assert f"{opcode} on queue pair 0x11: remote invalid request for 8 bytes at {address:#x} (" in str(error)
    assert text in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.status, again.errno) == (type(error), str(error), 9, errno.EINVAL)


@pytest.mark.parametrize(
    ("opcode", "text"),
    [
        ("RECV", "longer than the posted receive)"),
        ("receive", "longer than the posted receive)"),
        ("ATOMIC_CMP_AND_SWP", "the local buffer of an atomic operation has 8 bytes"),
        ("RDMA_READ", "longer than max_msg_sz of the port)"),
        ("send", "or an atomic operation whose local buffer is not of 8 bytes)"),
    ],
)
def test_what_has_the_wrong_length(opcode, text):
    assert text in str(errors.completion_error(1, opcode, 0, 0x11))


@pytest.mark.parametrize("name", ["RDMANET_SOFT_SECRET", "RDMANET_SOFT_SECRET_FILE"])
def test_an_error_about_secrets_names_the_variable_that_is_set(name, monkeypatch):
    for each in ("RDMANET_SOFT_SECRET", "RDMANET_SOFT_SECRET_FILE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "anything")
    assert str(errors.cm_error("REJECTED", 0x5302)).endswith(
        f"the server has another secret than {name} here"
    )
    assert str(errors.cm_error("REJECTED", 0x5303)).endswith(f"and one is set here ({name})")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "the peer aborted the connection"),
        errors.ProtocolError("a frame of kind 9"),
        errors.completion_error(5, "send", 0, 0x11, peer_gone=True),
        errors.completion_error(10, "read", 0, 0x11, (0x1000, 8, 0x22)),
        errors.completion_error(4, "send"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_peer_is_named_once_and_its_name_travels(error):
    before = str(error)
    errors.name_peer(error, None)
    assert str(error) == before
    for _ in range(2):
        errors.name_peer(error, PEER)
    assert str(error) == f"{before} (peer 10.0.0.1:7471)"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno) == (type(error), str(error), error.errno)


def test_a_lost_device_is_named_and_no_peer():
    error = errors.DeviceLostError("mlx5_0", "DEVICE_FATAL")
    errors.name_peer(error, PEER)
    assert "mlx5_0" in str(error) and "10.0.0.1" not in str(error)


def test_aborted_by_another_version():
    """The device answers so to a peer of another version, too, and not only to one without its secret."""
    assert "the peer has another version of rdmanet, or not the same secret" in str(
        errors.completion_error(16, "send", 0, 0x11)
    )
