"""The UDP port of a queue pair is its process's, from before its number is known."""

import socket
import struct
from pathlib import Path

from tests.security.conftest import ATTACKER, VICTIM

ADDRESSES = ("127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1")


def frame(number, text):
    """As another host's device sends it: ud_wire.h."""
    return struct.pack("!IBBHIIII", 0x524E5544, 1, 0, len(text), number, 1234 << 8, 0x1234, 0) + text


def rows(port):
    """Of UDP sockets with this port: number, local address, remote address, state, and so on."""
    tables = Path("/proc/net/udp"), Path("/proc/net/udp6")
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return [words for words in lines if words[1].endswith(f":{port:04X}")]


def test_no_other_user_has_the_port(stage, guarded):
    thief = stage.start("udp_port_thief", *ADDRESSES, user=ATTACKER)
    thief.hear()
    victim = stage.start("ud_victim", user=VICTIM, without="" if guarded else "datagram-port")
    known = victim.hear()
    thief.tell(port=known["port"])
    result = thief.hear()
    victim.tell()
    ready = victim.hear()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(frame(known["number"], b"for the victim"), ("127.0.0.1", known["port"]))
    thief.tell()
    read = thief.hear()["read"]
    assert result["tried"] >= len(ADDRESSES) * 4
    assert ready["errno"] == 0
    if guarded:
        assert (result["got"], read) == ([], [])
    else:
        assert result["got"]
        assert "for the victim" in read


def test_a_reserved_port_hears_nobody(stage):
    """It is no open door before a queue pair for datagrams is ready."""
    victim = stage.start("ud_victim", user=VICTIM)
    port = victim.hear()["port"]
    reserved = rows(port)
    assert reserved
    assert {words[3] for words in reserved} == {"01"}, "connected"
    peers = {words[2] for words in reserved}
    assert peers == {words[1].partition(":")[0] + ":0009" for words in reserved}, "where nobody speaks"
    victim.tell()
    assert victim.hear()["errno"] == 0
    assert {words[3] for words in rows(port)} == {"01", "07"}
    assert len([words for words in rows(port) if words[3] == "07"]) == len(reserved), (
        "it hears at each address"
    )
