"""What `rdmanet proxy` passes on to a Unix socket goes to nobody who has only taken its name."""

import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from rdmanet.cli.unix_owner import keeper
from rdmanet.loop import kernel
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


@pytest.fixture
def home():
    """A directory of the attacker's, in which nobody else may write, nor in one above it."""
    place = Path(f"/run/rdmanet-test-{secrets.token_hex(8)}")
    place.mkdir(mode=0o755)
    os.chown(place, ATTACKER, ATTACKER)
    yield place
    shutil.rmtree(place)


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


@pytest.mark.parametrize("kind", ["directory", "socket", "link"])
def test_a_link_is_not_vouched_for_by_its_target(stage, guarded, folder, home, kind):
    """The target is in a good directory, but the link to it is in one that everybody may write."""
    everybodys = folder.parent
    where, target, leads_to = {
        "directory": (everybodys / "its-link", everybodys / "its-link" / "server", home),
        "socket": (everybodys / "server", everybodys / "server", home / "server"),
        # The path's own link is root's, and leads there by another.
        "link": (everybodys / "its-link", home.with_name(f"{home.name}-roots") / "server", home),
    }[kind]
    where.symlink_to(os.path.relpath(leads_to, everybodys) if kind == "directory" else leads_to)
    os.chown(where, ATTACKER, ATTACKER, follow_symlinks=False)
    roots = target.parent if kind == "link" else None
    if roots is not None:
        roots.symlink_to(where)
    try:
        attacker = stage.start("unix_listener", home / "server", user=ATTACKER)
        attacker.hear()
        reply, errors = reply_through_proxy(target, *(() if guarded else ("--server-user", ATTACKER)))
        attacker.tell()
        heard = attacker.hear()["heard"].encode()
    finally:
        if roots is not None:
            roots.unlink()
    if guarded:
        assert (reply, heard) == (b"", b"") and f"user {ATTACKER} listens there" in errors
    else:
        assert (reply, heard) == (b"the listener\n", SECRET)


def test_links_of_who_keeps_the_path_are_followed(stage, home):
    """As that of /var/run is: each is in a directory of root's, or of the server's user."""
    link = home.with_name(f"{home.name}-link")
    (home / "versions").mkdir()
    os.chown(home / "versions", ATTACKER, ATTACKER)
    (home / "current").symlink_to("../" + home.name + "/./versions")
    link.symlink_to(home / "current" / "..")
    try:
        stage.start("unix_listener", home / "versions" / "server", user=ATTACKER).hear()
        assert reply_through_proxy(link / "current" / "server")[0] == b"the listener\n"
    finally:
        link.unlink()


def test_links_that_never_end_lead_to_nobody(home):
    (home / "link").symlink_to("link")
    assert keeper(str(home / "link" / "server")) is None


def test_the_user_of_all_who_have_no_number_keeps_no_path(home):
    path = home / "server"
    path.touch()
    assert keeper(str(path)) == ATTACKER
    os.chown(home, kernel.overflow_user(), -1)
    assert keeper(str(path)) is None


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
