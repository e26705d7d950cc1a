"""uvloop's own tests of TCP, TLS and contexts, from its source distribution, with every loop switched.

`make libraries` unpacks them into build/libraries/uvloop. tests/loop/suite.py runs them, and says what a relay is for.
TLS over RDMA is asyncio's on every loop, so tests that uvloop leaves out for asyncio's TLS are left out here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests/loop/suite.py"
OPENED_TWICE = "sock_connect() and then sock_sendall() on the socket: the server sees two connections"
NO_WAIT = "it cancels create_connection(sock=), which does not wait here"

# {(module, case, options): (at least so many tests and connections by RDMA, {one that is left out: why})}
SUITES: dict[tuple[str, ...], tuple[int, int, dict[str, str]]] = {
    ("test_tcp", "Test_UV_TCP"): (
        29, 100,
        {
            "test_create_server_1": OPENED_TWICE,
            "test_create_server_buffered_1": OPENED_TWICE,
            "test_create_connection_sock_cancel_fd_leak": NO_WAIT,
            "test_tcp_handle_abort_in_connection_made": "it expects no socket of a transport that ended",
            "test_transport_get_extra_info": "it looks at attributes of uvloop's transport",
        },
    ),
    ("test_tcp", "Test_AIO_TCP"): (
        20, 100,
        {
            "test_create_server_1": OPENED_TWICE,
            "test_create_connection_sock_cancel_fd_leak": NO_WAIT,
        },
    ),
    ("test_tcp", "Test_UV_TCPSSL", "--relay", "--asyncio-tls"): (
        25, 20,
        {
            "test_remote_shutdown_receives_trailing_data": "it looks at attributes of uvloop's TLS",
            "test_ssl_connect_accepted_socket": "it looks at the name of the transport's class",
        },
    ),
    ("test_tcp", "Test_AIO_TCPSSL", "--relay"): (
        25, 20, {"test_remote_shutdown_receives_trailing_data": "it looks at asyncio's transport below TLS"},
    ),
    ("test_context", "Test_UV_Context", "--relay"): (
        12, 10,
        {
            "test_create_connection_protocol": "pause_writing() comes in the context of the write(), as asyncio's",
            "test_create_ssl_server_connection_protocol": "the same of TLS",
            "test_create_ssl_server_manual_connection_lost": "it expects what only uvloop's TLS does",
        },
    ),
    ("test_context", "Test_AIO_Context", "--relay"): (15, 10, {}),
}  # fmt: skip


@pytest.mark.parametrize("suite", SUITES, ids="-".join)
def test_those_of_uvloop(suite):
    module, case, *options = suite
    tests, connections, left_out = SUITES[suite]
    sources = ROOT / "build/libraries/uvloop/tests"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SUITE, module, "--case", case, *options]
        + [f"--omit={name}" for name in left_out],
        env={**os.environ, "PYTHONASYNCIODEBUG": "0", "PYTHONPATH": f"{ROOT}:{sources}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ran, made = (int(word) for word in done.stdout.splitlines()[-1].split()[1:])
    assert ran >= tests and made >= connections
