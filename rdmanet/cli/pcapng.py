"""A trace as a pcapng file, which Wireshark and tshark show with wireshark.lua: `rdmanet trace --output FILE.pcapng`.

Theory
------
A packet is what the trace knows of an event of a connection: a frame that was sent or received, or what happened
meanwhile, such as that credits were lacking. It is not the frame as it was on the wire: a trace has no bytes of
anybody's data. What is gained is Wireshark's filters, columns and statistics, and tshark in scripts.

The link type is USER0, which means what the two ends agree on. Each process is an interface, whose name is its command.
The times are those of CLOCK_MONOTONIC, in nanoseconds, so they begin when the machine did.

    offset  bytes
    0       1     FORMAT
    1       1     direction: 0 none, 1 sent, 2 received
    2       2     length of the name
    4       4     process
    8       4     queue pair of the connection; 0: of the engine
    12      4     queue pair of the peer; 0: not known
    16      4     credits
    20      4     zero
    24      8     number of the data frame; 0: it has none
    32      8     bytes
    40      8     how long it took, in nanoseconds
    48            name of the event, in UTF-8

All numbers are little-endian. Names may be a stranger's: what tshark prints of them has no control characters.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rdmanet.cli.columns import printable

DISSECTOR = Path(__file__).with_name("wireshark.lua")
FORMAT = 1

_SECTION, _INTERFACE, _PACKET = 0x0A0D0D0A, 1, 6  # types of blocks
_BLOCK = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_SECTION_HEAD = struct.Struct("<IHHq")
_INTERFACE_HEAD = struct.Struct("<HHI")
_PACKET_HEAD = struct.Struct("<IIIII")
_OPTION = struct.Struct("<HH")
_EVENT = struct.Struct("<BBHIIIIIQQQ")
_MAGIC, _ANY_LENGTH = 0x1A2B3C4D, -1
_USER0 = 147
_NAME_OF_INTERFACE, _RESOLUTION, _FLAGS = 2, 9, 2  # options
_NANOSECONDS = b"\x09"
_INBOUND, _OUTBOUND = 1, 2
_NAME_MOST = 200  # characters
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_PEER = re.compile(r"connection 0x[0-9a-f]{1,8}, peer's (0x[0-9a-f]{1,8})")
_NO_PACKETS = ("M", "s", "f")  # names, and the ends of arrows


def blocks(events: Iterable[dict[str, Any]], names: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """The file, in pieces.

    :param events: in the order of their times, as `rdmanet trace` has checked them
    :param names: of processes and of their connections
    """
    commands: dict[Any, str] = {}
    peers: dict[tuple[Any, int], int] = {}
    for each in names:
        text = str(each.get("args", {}).get("name", ""))
        if each["name"] == "process_name":
            commands[each["pid"]] = text
        elif found := _PEER.fullmatch(text):
            peers[each["pid"], each["tid"]] = int(found[1], 16)
    yield _block(_SECTION, _SECTION_HEAD.pack(_MAGIC, 1, 0, _ANY_LENGTH))
    interfaces: dict[Any, int] = {}
    for event in events:
        pid = event["pid"]
        if event["ph"] in _NO_PACKETS:
            continue
        if pid not in interfaces:
            interfaces[pid] = len(interfaces)
            yield _interface(f"{pid} {commands.get(pid, '')}".rstrip())
        yield _packet(interfaces[pid], event, peers.get((pid, event["tid"]), 0))


def _interface(name: str) -> bytes:
    options = _option(_NAME_OF_INTERFACE, _shown(name)) + _option(_RESOLUTION, _NANOSECONDS) + _option(0, b"")
    return _block(_INTERFACE, _INTERFACE_HEAD.pack(_USER0, 0, 0) + options)


def _packet(interface: int, event: Mapping[str, Any], peer: int) -> bytes:
    name, known = _shown(event["name"]), event.get("args", {})
    direction = {b"sent": _OUTBOUND, b"received": _INBOUND}.get(name.partition(b" ")[0], 0)
    content = (
        _EVENT.pack(
            FORMAT,
            {_OUTBOUND: 1, _INBOUND: 2}.get(direction, 0),
            len(name),
            int(event["pid"]) & _MASK_32,
            event["tid"] if 0 <= event["tid"] <= _MASK_32 else 0,
            peer,
            _number(known, "credits") & _MASK_32,
            0,
            _number(known, "frame"),
            _number(known, "bytes"),
            _nanoseconds(event.get("dur", 0)),
        )
        + name
    )
    at = _nanoseconds(event["ts"])
    head = _PACKET_HEAD.pack(interface, at >> 32, at & _MASK_32, len(content), len(content))
    options = _option(_FLAGS, _LENGTH.pack(direction)) + _option(0, b"") if direction else b""
    return _block(_PACKET, head + _padded(content) + options)


def _number(known: Mapping[str, Any], name: str) -> int:
    """A number of a stranger's; 0 if it is none."""
    value = known.get(name, 0)
    return value & _MASK_64 if isinstance(value, int) else 0


def _nanoseconds(microseconds: float) -> int:
    return min(max(0, round(microseconds * 1000)), _MASK_64)


def _shown(text: str) -> bytes:
    return printable(text, _NAME_MOST).encode()


def _option(code: int, value: bytes) -> bytes:
    return _OPTION.pack(code, len(value)) + _padded(value)


def _block(kind: int, body: bytes) -> bytes:
    length = _BLOCK.size + len(body) + _LENGTH.size
    return _BLOCK.pack(kind, length) + body + _LENGTH.pack(length)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
