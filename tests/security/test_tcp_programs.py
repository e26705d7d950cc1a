"""A TCP program of this host gets no byte of a connection request, whatever keeps a client from the port's name."""

import pytest

from tests.security.conftest import ATTACKER, VICTIM

REQUEST = 88  # bytes


def ask(stage, guarded, port, user=VICTIM, environment=None, **order):
    """A client asks for a connection to the program's port."""
    without = "" if guarded else "tcp-program"
    client = stage.start("cm_client", user=user, without=without, **(environment or {}))
    client.hear()
    client.tell(to=["127.0.0.1", port], **order)
    return client


def all_that_came(program):
    program.tell()
    return program.hear()


def until_asked(program):
    program.tell(came=REQUEST)
    assert program.hear()["came"] >= REQUEST


@pytest.mark.parametrize("user", [VICTIM, None], ids=["the server's user", "root"])
def test_the_name_has_no_room(stage, guarded, user):
    """An RDMA program listens beside it by the name, and others have filled its queue."""
    program = stage.start("tcp_program", "full", user=VICTIM)
    port = program.hear()["port"]
    client = ask(stage, guarded, port, user, {"RDMANET_SOFT_CM_TIMEOUT": "3000"})
    if not guarded:
        until_asked(program)
        return
    failed = client.hear()
    assert failed["error"] == "TimeoutError"
    assert failed["seconds"] > 1, "there may be room again: by TCP it would wait, too"
    assert all_that_came(program) == {"came": 0, "connections": 0}
    assert f"port {port}: too many wait to be accepted there" in client.finish()


@pytest.mark.parametrize("end", ["", "/0123456789abcdef"], ids=["the name", "with an end"])
def test_another_user_marks_the_port(stage, guarded, end):
    """Who has a name of the port poses as the RDMA program that has it: only the port's user is believed."""
    program = stage.start("tcp_program", user=VICTIM)
    port = program.hear()["port"]
    stage.start("name_binder", f"::ffff:127.0.0.1/{port}{end}", user=ATTACKER).hear()
    client = ask(stage, guarded, port)
    if not guarded:
        until_asked(program)
        return
    assert client.hear()["error"] == "ConnectionRefusedError"
    assert all_that_came(program) == {"came": 0, "connections": 0}


def test_a_sandbox_of_the_programs_user_marks_the_port(stage):
    """The kernel tells no process of a name that is only bound. So the program hears a request, and nothing else is
    won: who sends it knows the program as an RDMA program by its user alone (docs/security.md)."""
    program = stage.start("tcp_program", user=VICTIM)
    port = program.hear()["port"]
    stage.start("name_binder", f"::ffff:127.0.0.1/{port}", "landlock", user=VICTIM).hear()
    ask(stage, True, port)
    until_asked(program)


def test_the_client_has_no_descriptors(stage, guarded):
    """It cannot look for the name, but it has a TCP socket already, which is bound to the address it chose."""
    program = stage.start("tcp_program", user=VICTIM)
    port = program.hear()["port"]
    client = ask(stage, guarded, port, local=["127.0.0.1", 0], exhausted=True)
    if not guarded:
        until_asked(program)
        return
    failed = client.hear()
    assert "no file descriptor left" in failed["text"], failed
    assert all_that_came(program) == {"came": 0, "connections": 0}
