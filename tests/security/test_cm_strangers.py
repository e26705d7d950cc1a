"""Silent connections take a quarter of a server's descriptors, and no more; other clients are not affected."""

import shutil

import pytest

from tests.security.conftest import unfit
from tests.support.versions import WIRE

LIMIT, SILENT = 1024, 3000
SILENCE_S = 60  # then a silent connection is shown out


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["our address", "another"])
def test_silent_connections(stage, guarded, source):
    if shutil.which("prlimit") is None:
        unfit("there is no prlimit")
    server = stage.start(
        "echo_server",
        "127.0.0.1",
        LIMIT,
        without="" if guarded else "strangers",
        RDMANET_SOFT_SILENCE=str(1000 * SILENCE_S),
    )
    port = server.hear()["port"]
    friend = stage.start("crowd", port, 1, 0)
    friend.hear()
    friend.tell(connect="at once")
    assert friend.hear()["accepted"] == 1
    prefix = ("prlimit", f"--nofile={SILENT + 100}")
    strangers = stage.start("silent_crowd", port, SILENT, source, prefix=prefix)
    late = stage.start("crowd", port, 20, 0)
    late.hear()
    assert strangers.hear()["there"] == SILENT
    late.tell(connect="in turn")
    result = late.hear()
    if not guarded:
        assert result["accepted"] == 0
        assert "no descriptors left" in str(result["errors"])
        return
    assert (result["accepted"], result["errors"]) == (20, {})
    assert result["slowest"] < SILENCE_S / 2, "nobody waits for a silent one to go"
    for client, count in ((friend, 1), (late, 20)):
        client.tell(echo=True)
        assert client.hear() == {"echoes": count, "others": []}
    server.tell()
    assert server.hear() == {"connections": 21, "can_open": True}
    strangers.tell()
    told = strangers.hear()
    refusal = b"RDMC" + bytes([WIRE]) + b"\4\0\xa0\0\3"
    assert told["shown_out"] >= SILENT - LIMIT / 4
    assert set(told["told"]) == {refusal.hex()}, "even they are told why"
    assert "have not identified themselves" in server.finish()
