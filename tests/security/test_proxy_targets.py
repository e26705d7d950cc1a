"""What `rdmanet proxy` passes on to a Unix socket goes to nobody who has only taken its name."""

import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tests.security.conftest import ATTACKER, ROOT, VICTIM, unfit
from tests.support.processes import Process

SECRET = b"for the server only\n"


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid() != 0:
        unfit("only root can be another user")


@pytest.fixture
def folder():
    """A directory of the attacker's, in one that everybody may write, as /tmp is."""
    with tempfile.TemporaryDirectory() as everybodys:
        os.chmod(everybodys, 0o1777)
        its = Path(everybodys, "its")
        its.mkdir(mode=0o755)
        os.chown(its, ATTACKER, ATTACKER)
        yield its


def reply_through_proxy(target, *options):
    command = [sys.executable, "-m", "rdmanet", "proxy", "--loop", "asyncio", *options, "tcp://127.0.0.1:0"]
    with Process(
        *command, f"unix:{target}", env=os.environ | {"PYTHONPATH": str(ROOT)}, keep_errors=True
    ) as proxy:
        port = int(proxy.line().partition(" ->")[0].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(60)
            try:
                client.sendall(SECRET)
                return client.recv(100), proxy.errors()
            except ConnectionResetError:
                return b"", proxy.errors()


@pytest.mark.parametrize("kind", ["abstract", "everybody's directory", "its directory in everybody's"])
def test_a_name_of_another_users_is_nobodys_server(stage, guarded, folder, kind):
    target = {
        "abstract": f"@{secrets.token_hex(8)}",
        "everybody's directory": str(folder.parent / "server"),
        "its directory in everybody's": str(folder / "server"),
    }[kind]
    attacker = stage.start("unix_listener", target, user=ATTACKER)
    attacker.hear()
    reply, errors = reply_through_proxy(target, *(() if guarded else ("--server-user", ATTACKER)))
    attacker.tell()
    heard = attacker.hear()["heard"].encode()
    if guarded:
        assert (reply, heard) == (b"", b"")
        assert f"user {ATTACKER} listens there" in errors and f"--server-user {ATTACKER}" in errors
    else:
        assert (reply, heard) == (b"the listener\n", SECRET)


@pytest.mark.parametrize("user", [None, VICTIM], ids=["root", "the directory's owner"])
def test_who_keeps_the_path_is_the_server(stage, user):
    """As PostgreSQL's server is of its own user, in a directory of its own."""
    directory = f"/run/rdmanet-test-{secrets.token_hex(8)}"
    os.mkdir(directory, 0o775)
    os.chown(directory, VICTIM, VICTIM)
    path = f"{directory}/server"
    try:
        stage.start("unix_listener", path, user=user).hear()
        assert reply_through_proxy(path)[0] == b"the listener\n"
        os.chmod(directory, 0o777)
        reply, errors = reply_through_proxy(path)
        assert reply == (b"the listener\n" if user is None else b"")
        assert (f"user {user} listens there" in errors) is (user is not None)
    finally:
        os.unlink(path)
        os.rmdir(directory)
