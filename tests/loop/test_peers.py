"""The patterns of peers= and RDMANET_PEERS."""

import pytest

from rdmanet.loop.peers import Peers, Selection
from rdmanet.loop.settings import Settings


@pytest.mark.parametrize(
    ("patterns", "host", "address", "port", "says"),
    [
        (None, "x", "10.0.0.1", 80, "auto"),
        ("", "x", "10.0.0.1", 80, "auto"),
        ("auto", "x", "10.0.0.1", 80, "auto"),
        ("!*", "x", "10.0.0.1", 80, "excluded"),
        ("!*:80", "x", "10.0.0.1", 80, "excluded"),
        ("!*:80", "x", "10.0.0.1", 81, "auto"),
        ("*", "x", "10.0.0.1", 80, "named"),
        ("*:80", "x", "10.0.0.1", 81, "excluded"),
        ("auto, *:80", "x", "10.0.0.1", 81, "auto"),
        ("10.0.0.0/8", "x", "10.9.8.7", 1, "named"),
        ("10.0.0.0/8", "10.9.8.7", "11.9.8.7", 1, "excluded"),
        ("10.0.0.0/8:6379 !10.1.0.0/16", "x", "10.1.0.1", 6379, "excluded"),
        ("10.0.0.0/8:6379 !10.1.0.0/16", "x", "10.2.0.1", 6379, "named"),
        ("10.0.0.0/8", "x", "::1", 1, "excluded"),
        ("db*.example.org:5432", "DB7.example.org", "10.0.0.1", 5432, "named"),
        ("db*.example.org:5432", "web.example.org", "10.0.0.1", 5432, "excluded"),
        ("::1", "localhost", "::1", 9, "named"),
        ("[::1]:9", "localhost", "::1", 9, "named"),
        ("[fe80::/10]:*", "x", "fe80::1%2", 9, "named"),
        ("[::1]:9", "localhost", "::1", 8, "excluded"),
        (["127.0.0.1:7", "!localhost"], "localhost", "127.0.0.1", 7, "excluded"),
        (["127.0.0.1:7"], "localhost", "127.0.0.1", 7, "named"),
    ],
)
def test_who_is_selected(patterns, host, address, port, says):
    assert Peers(patterns).select(host, address, port) is Selection(says)


@pytest.mark.parametrize(
    "wrong", [":80", "!", "x:0", "x:70000", "x:http", "10.0.0.0/99", "[::1", "[::1]80", ":::", "a:b:c"]
)
def test_what_makes_no_sense_is_an_error(wrong):
    with pytest.raises(ValueError, match="peers: "):
        Peers(wrong)


def test_a_server_asks_only_for_exclusions():
    assert not Peers("10.0.0.0/8").exclude("0.0.0.0", 80)
    assert Peers("!*:80").exclude("0.0.0.0", 80)
    assert not Peers("!*:80").exclude("0.0.0.0", 81)


def test_the_environment_has_the_default(monkeypatch):
    monkeypatch.setenv("RDMANET_PEERS", "!*")
    assert Settings().patterns.select("x", "10.0.0.1", 1) is Selection.EXCLUDED
    assert Settings(peers="*").patterns.select("x", "10.0.0.1", 1) is Selection.NAMED
    monkeypatch.setenv("RDMANET_PEERS", "x:y:z:80")
    with pytest.raises(ValueError, match="lost_peer='never'"):
        Settings(lost_peer="never")
