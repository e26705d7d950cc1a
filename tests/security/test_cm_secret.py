"""The secret is asked for before anything else: of strangers nothing reaches the program, and nothing of the program's
reaches them. What is wrong is said at once, on both sides."""

import errno
import re

import pytest

from tests.security.conftest import ATTACKER
from tests.support.versions import WIRE

SECRET = "0123456789abcdef" * 4
ANOTHER = "fedcba9876543210" * 4
PRIVATE = "for who has the secret"
WANTED, WRONG, UNKNOWN = 0x5301, 0x5302, 0x5303


def secret(text):
    return {"RDMANET_SOFT_SECRET": text} if text else {}


class Service:
    """A server that is reached by TCP, by name, or asked for a queue pair for datagrams."""

    def __init__(self, stage, way, text, **options):
        program = stage.start("port_holder", "127.0.0.1", "listen") if way == "name" else None
        port = program.hear()["port"] if program else 0
        if way == "datagrams":
            self.server = stage.start("datagram_server", "127.0.0.1", **options, **secret(text))
        else:
            self.server = stage.start("cm_server", "127.0.0.1", port, "welcome", **options, **secret(text))
        self.port = self.server.hear()["port"]
        self.client_script = "datagram_client" if way == "datagrams" else "cm_client"
        self.stage = stage

    def ask(self, text):
        """What a client with this secret is told, and what it writes on standard error."""
        client = self.stage.start(self.client_script, **secret(text))
        client.hear()
        client.tell(to=["127.0.0.1", self.port], data=PRIVATE)
        answer = client.hear()
        return answer, client.finish()

    def end(self):
        """What it heard of requests, and its standard error."""
        errors = self.server.finish()
        return self.server.rest(), errors


@pytest.fixture(params=["tcp", "name", "datagrams"])
def way(request):
    return request.param


def test_who_has_it_gets_in(stage, way):
    service = Service(stage, way, SECRET)
    for _ in range(2):
        answer, errors = service.ask(SECRET)
        assert answer["reply"] in ("welcome", "a number")
        assert errors == ""
        assert service.server.hear()["request"] == PRIVATE
    assert service.end() == ("", "")


@pytest.mark.parametrize(
    ("here", "there", "client_hears", "server_says"),
    [
        (None, SECRET, "requires a secret, and none is set here .RDMANET_SOFT_SECRET.", "proves no secret"),
        (ANOTHER, SECRET, "has another secret", "has another secret"),
        (SECRET, None, "has no secret, and one is set here", "RDMANET_SOFT_SECRET is not set here"),
    ],
    ids=["none", "another", "needless"],
)
def test_a_wrong_one_is_said_at_once(stage, way, here, there, client_hears, server_says):
    service = Service(stage, way, there)
    answer, errors = service.ask(here)
    assert answer["error"] == "ConnectionRefusedError"
    assert re.search(client_hears, answer["text"])
    assert answer["seconds"] < 1
    heard, said = service.end()
    assert heard == "", "the program never knew"
    assert re.search(f"refused the connection with .*: .*{server_says}", said)
    assert (way == "name") == ("of this host" in said), "it says who it was"
    assert PRIVATE not in errors + said


def test_strangers_get_nothing(stage, guarded):
    times = 100
    server = stage.start(
        "cm_server", "127.0.0.1", 0, "welcome", without="" if guarded else "cm-secret", **secret(SECRET)
    )
    port = server.hear()["port"]
    ends = stage.start("cm_stranger", port, times).hear()
    if not guarded:
        assert ends["asks"] == {"REP": times}
        assert server.hear()["request"] == ""
        return
    assert ends == {
        "asks": {f"REJ {WANTED:#x}": times},
        "guesses": {f"REJ {WRONG:#x}": times},
        "mirrors": {f"REJ {WRONG:#x}": times},
        "mirrors the nonce": {f"REJ {WRONG:#x}": times},
        "asks unproven": {"nothing": times},
        "proves unasked": {"nothing": times},
    }
    client = stage.start("cm_client", **secret(SECRET))
    client.hear()
    client.tell(to=["127.0.0.1", port], data=PRIVATE)
    assert client.hear()["reply"] == "welcome"
    assert server.hear()["request"] == PRIVATE
    errors = server.finish()
    assert server.rest() == "", "the honest one was the only one that it heard of"
    assert "proves no secret" in errors


def test_what_was_heard_is_of_no_use_again(stage):
    """A process between them may relay an introduction; it is valid for that connection only."""
    times = 20
    server = stage.start("cm_server", "127.0.0.1", 0, "welcome", **secret(SECRET))
    port = server.hear()["port"]
    recorder = stage.start("cm_recorder", port, times)
    client = stage.start("cm_client", **secret(SECRET))
    client.hear()
    client.tell(to=["127.0.0.1", recorder.hear()["port"]], data=PRIVATE)
    assert client.hear()["reply"] == "welcome"
    assert server.hear()["request"] == PRIVATE
    heard = recorder.hear()
    assert PRIVATE.encode().hex() in heard["client"]
    answers = recorder.hear()["answers"]
    refusal = b"RDMC" + bytes([WIRE]) + b"\4\0\xa0" + WRONG.to_bytes(2, "big")
    assert len(answers) == times
    assert all(refusal.hex() in answer for answer in answers)
    assert len({answer[16:80] for answer in answers}) == times, "a nonce of its own for each"
    server.finish()
    assert server.rest() == ""


def test_the_request_stays_at_home(stage):
    """The listener must prove the secret first: it gets a nonce, and not one byte of the program's data."""
    recorder = stage.start("listener_of_all")
    client = stage.start("cm_client", **secret(SECRET))
    client.hear()
    client.tell(to=["127.0.0.1", recorder.hear()["port"]], data=PRIVATE)
    heard = bytes.fromhex(recorder.hear()["heard"])
    assert len(heard) == 40
    assert heard[:8] == b"RDMC" + bytes([WIRE]) + b"\x09\0\x28"
    answer = client.hear()
    assert answer["error"] == "ConnectionRefusedError"
    assert "another secret" in answer["text"]
    assert bytes.fromhex(recorder.hear()["heard"])[:8] == b"RDMC" + bytes([WIRE]) + b"\4\0\xa0"


def test_a_group_asks_for_no_secret(stage, guarded):
    """So a process with a secret joins no group: any process may send there."""
    group, qkey = "239.7.8.9", 0x01234567
    rules = {"RDMANET_SOFT_RULES": "roce"}  # iWARP has no datagrams
    member = stage.start(
        "group_member", group, without="" if guarded else "cm-secret", **rules, **secret(SECRET)
    )
    refused = member.hear()["refused"]
    stage.start("group_sender", group, 21070, qkey, "a stranger's", user=ATTACKER).hear()
    if guarded:
        assert refused == errno.EPERM
        assert "multicast datagrams cannot prove" in member.finish()
    else:
        assert refused == 0
        assert member.hear()["heard"] == "a stranger's"
