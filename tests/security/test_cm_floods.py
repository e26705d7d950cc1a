"""A peer that sends without end, or asks and falls silent, takes neither the connection manager's time nor its room."""

import sys
from pathlib import Path

from tests.security.conftest import ATTACKER, unfit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import two_hosts  # noqa: E402

TIMES, MIB = 10, 16  # more than sockets' buffers take


def test_one_connection_talks_without_end(stage, guarded):
    """The engine reads a little of it at a time, and ends it as soon as it repeats itself."""
    server = stage.start("echo_server", "127.0.0.1", 0, without="" if guarded else "cm-flood")
    port = server.hear()["port"]
    told = stage.start("cm_flooder", port, TIMES, "ready", MIB).hear()
    assert told == ({"through": 0, "ended": TIMES} if guarded else {"through": TIMES, "ended": 0})
    crowd = stage.start("crowd", port, 3, 0)
    crowd.hear()
    crowd.tell(connect="in turn")
    assert crowd.hear()["accepted"] == 3
    errors = server.finish()
    assert ("out of turn" in errors) == guarded


def test_who_was_refused_talks_on(stage):
    """It was told so, and the connection is closed: however much comes behind."""
    secret = {"RDMANET_SOFT_SECRET": "5eed" * 16}
    server = stage.start("echo_server", "127.0.0.1", 0, **secret)
    port = server.hear()["port"]
    assert stage.start("cm_flooder", port, TIMES, "refused", MIB).hear() == {"through": 0, "ended": TIMES}
    crowd = stage.start("crowd", port, 3, 0, **secret)
    crowd.hear()
    crowd.tell(connect="in turn")
    assert crowd.hear()["accepted"] == 3
    server.finish()


def test_who_was_accepted_falls_silent(stage, guarded):
    """It keeps its place until others need it; what the program hears of it is what it hears of any that is lost."""
    server = stage.start(
        "patient_server", 256, without="" if guarded else "half-open", RDMANET_SOFT_SILENCE="1000"
    )
    port = server.hear()["port"]
    strangers = stage.start("half_asker", port, 5000 if guarded else 500)
    told = strangers.hear()
    assert told["accepted"] > 50
    assert told["accepted"] + told["refused"] == told["attempts"]
    assert bool(told["shown_out"]) == guarded
    client = stage.start("cm_client")
    client.hear()
    answers = []
    for _ in range(5):
        client.tell(to=["127.0.0.1", port])
        answers.append(client.hear())
    if not guarded:
        server.tell()
        counts = server.hear()
        assert all("no descriptors left" in answer["text"] for answer in answers), answers
        assert counts == {"standing": 0, "lost": 0}
        return
    assert [answer.get("reply") for answer in answers] == ["welcome"] * 5
    server.tell(standing=5, lost=told["shown_out"])
    assert server.hear()["standing"] == 5
    assert "were admitted but make no progress" in server.finish()


def test_valid_requests_of_one_user(stage, guarded):
    """They ask a stream server without end by TCP, and go no further. All of that user's are one source."""
    crowd, honest = 500, 5
    server = stage.start("echo_server", "127.0.0.1", 1024, without="" if guarded else "tcp-user")
    port = server.hear()["port"]
    clients = stage.start("crowd", port, honest, 0)
    clients.hear()
    flood = stage.start("half_flooder", port, crowd, user=ATTACKER)
    flood.hear()
    clients.tell(connect="in turn")
    told = clients.hear()
    flood.tell(how=True)
    counts = flood.hear()
    assert counts["made"] >= crowd and counts["accepted"] and counts["ended"]
    if not guarded:
        assert told["accepted"] < honest and told["errors"]
        return
    assert (told["accepted"], told["errors"]) == (honest, {})
    clients.tell(echo=True)
    assert clients.hear() == {"echoes": honest, "others": []}


def test_silence_from_all_addresses_of_this_host(stage, guarded):
    """A client with 3,000 loopback addresses is one source, and displaces no client from elsewhere."""
    secret, slow, silent = "5eed" * 16, 20, 3000
    try:
        with two_hosts.two_hosts() as (here, other):
            prefix, limited = tuple(here.prefix), ("prlimit", f"--nofile={silent + 100}")
            server = stage.start(
                "echo_server",
                "0.0.0.0",
                1024,
                prefix=prefix,
                without="" if guarded else "own-source,tcp-user",
                RDMANET_SOFT_SECRET=secret,
                RDMANET_SOFT_SILENCE="60000",
            )
            port = server.hear()["port"]
            where = (here.addresses[4], port, slow, secret)
            askers = stage.start("slow_asker", *where, prefix=tuple(other.prefix))
            assert askers.hear()["challenged"] == slow
            crowd = stage.start("silent_crowd", port, silent, "127.0.0.0", prefix=(*prefix, *limited))
            assert crowd.hear()["there"] == silent
            askers.tell()
            ended = askers.hear()["ended"]
            if guarded:
                assert ended == {"asked and answered": slow}
            else:
                assert ended.get("refused", 0) >= slow // 2
            stage.end()
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))
