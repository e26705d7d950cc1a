"""What the kernel says about listeners, addresses and processes."""

import contextlib
import errno
import os
import socket

import pytest

from rdmanet.loop import kernel
from tests.support.descriptors import descriptors_left


@pytest.fixture(params=["netlink", "proc"])
def source(request, monkeypatch):
    """Who tells: without the kernel's modules for the question, /proc."""
    if request.param == "proc":
        ask = kernel._ask
        monkeypatch.setattr(kernel, "_tells", False)
        monkeypatch.setattr(
            kernel,
            "_ask",
            lambda family, *args, **kwds: (
                None if family == kernel._NETLINK_SOCK_DIAG else ask(family, *args, **kwds)
            ),
        )


@pytest.mark.usefixtures("source")
def test_a_listener_has_its_user_its_address_and_its_inode():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        inode = os.fstat(listener.fileno()).st_ino
        assert kernel.tcp_listener("127.0.0.1", port) == (os.geteuid(), "127.0.0.1", inode)
        assert kernel.tcp_listener("127.0.0.2", port) is None
    assert kernel.tcp_listener("127.0.0.1", port) is None


@pytest.mark.usefixtures("source")
def test_an_address_comes_before_a_wildcard():
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        assert kernel.tcp_listener("127.0.0.1", port)[:2] == (os.geteuid(), "0.0.0.0")
        with socket.socket() as here:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            everywhere.close()
            here.bind(("127.0.0.1", port))
            here.listen()
            with socket.socket() as again:
                again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                again.bind(("127.0.0.3", port))
                again.listen()
                assert kernel.tcp_listener("127.0.0.1", port)[:2] == (os.geteuid(), "127.0.0.1")
                assert kernel.tcp_listener("127.0.0.3", port)[:2] == (os.geteuid(), "127.0.0.3")


@pytest.mark.usefixtures("source")
def test_a_listener_of_both_families_is_found_by_either():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert kernel.tcp_listener("127.0.0.1", port)[:2] == (os.geteuid(), "::")
        assert kernel.tcp_listener("::1", port)[:2] == (os.geteuid(), "::")


@pytest.mark.usefixtures("source")
def test_a_listener_on_a_mapped_address():
    for place in ("::ffff:127.0.0.1", "::ffff:0.0.0.0"):
        with socket.create_server((place, 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
            port = listener.getsockname()[1]
            assert kernel.tcp_listener("127.0.0.1", port)[:2] == (os.geteuid(), place)


def test_a_listener_of_ipv6_alone_is_none_of_ipv4():
    """The kernel says so; /proc does not know it."""
    with socket.create_server(("::", 0), family=socket.AF_INET6) as listener:
        assert kernel.tcp_listener("127.0.0.1", listener.getsockname()[1]) is None


@pytest.mark.usefixtures("source")
def test_a_bound_socket_is_no_listener():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert kernel.tcp_listener("127.0.0.1", bound.getsockname()[1]) is None


@pytest.mark.parametrize(
    ("address", "is_here"), [("127.0.0.1", True), ("127.9.9.9", True), ("192.0.2.77", False)]
)
def test_whose_address_it_is(address, is_here):
    assert kernel.is_of_this_host(address) is is_here


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::ffff:127.0.0.1"])
def test_several_sockets_listen_on_one_port(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        first, second, other = (
            stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(3)
        )
        for listener in (first, second):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((address, 0 if listener is first else first.getsockname()[1]))
        other.bind((address, 0))
        for listener in (first, second, other):
            listener.listen()
        port = first.getsockname()[1]
        assert (found := kernel.tcp_listener(address, port)) is not None
        both = {os.fstat(listener.fileno()).st_ino for listener in (first, second)}
        assert kernel.sockets_beside(found, port) == both


def test_there_is_a_number_for_nobody():
    assert kernel.overflow_user() > 0


def test_a_file_is_read_to_its_end(tmp_path):
    """The kernel gives files of /proc in pieces; such as a process's status, which has a list of its groups."""
    file = tmp_path / "status"
    text = b"".join(b"%d: a line\n" % number for number in range(50_000))
    file.write_bytes(text)
    assert kernel.read(str(file)) == text
    assert kernel.first_line(str(file)) == b"0: a line"
    file.write_bytes(text * 2)
    with pytest.raises(OSError) as failed:
        kernel.read(str(file))
    assert failed.value.errno == errno.EFBIG
    file.write_bytes(b"1" * 10_000)
    assert kernel.first_line(str(file)) == b"1" * 10_000


QUESTIONS = {
    "listener": lambda port: kernel.tcp_listener("127.0.0.1", port),
    "beside": lambda port: kernel.sockets_beside(kernel.Listener(0, "127.0.0.1", 1), port),
    "address": lambda port: kernel.is_of_this_host("127.0.0.1"),
    "names": lambda port: kernel.names_in("/proc"),
    "overflow user": lambda port: kernel.overflow_user.__wrapped__(),
}


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_descriptor_to_ask_with_is_no_answer(question):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with descriptors_left(0), pytest.raises(OSError) as failed:
            QUESTIONS[question](port)
        assert failed.value.errno == errno.EMFILE
        assert QUESTIONS[question](port)
