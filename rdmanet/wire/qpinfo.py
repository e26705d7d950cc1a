"""The address of a queue pair, for connecting two of them without a connection manager.

Each side calls `QP.info()`, sends the result to the peer by any means (a TCP connection, a file), and passes what it
received to `QP.connect()`. A QPInfo has three external forms: 28 bytes; a line of text; and JSON or msgpack, because it
is a msgspec.Struct.

The text is what ibv_rc_pingpong(1) and its variants for UC and SRQ exchange, so that a program can talk to them:

    lid:qp_num:psn:gid    0000:000011:8f3a21:00000000000000000000ffff0a000001

That format has no field for the MTU, which is 1024 unless both programs are told otherwise; here another MTU is a fifth
field. This module is pure: numbers in, numbers out.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see bodies.py
import re
import struct
from typing import Final, Self

import msgspec

from rdmanet.errors import shown

__all__ = ["QPInfo"]

_FORM: Final = struct.Struct("!16sIIHH")
_TEXT: Final = r"([0-9a-f]{1,4}):([0-9a-f]{1,6}):([0-9a-f]{1,6}):([0-9a-f]{32})(?::(\d{3,4}))?"
_MTUS: Final = (256, 512, 1024, 2048, 4096)
_PINGPONG_MTU: Final = 1024


class QPInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the peer of a queue pair must know to connect to it.

    :param qp_num: its number, 24 bits
    :param psn: the sequence number of the first packet that it will send, 24 bits
    :param gid: the address of its port, 16 bytes; all zero if there is only the lid
    :param lid: the port's address in its InfiniBand subnet; 0 on Ethernet
    :param mtu: the largest packet, in bytes: 256, 512, 1024, 2048 or 4096; the smaller one of both sides is used
    :raises ValueError: a number does not fit; when msgspec decodes, a ValidationError
    """

    qp_num: int
    psn: int = 0
    gid: bytes = bytes(16)
    lid: int = 0
    mtu: int = _PINGPONG_MTU

    def __post_init__(self) -> None:
        for name, value, bits in (("qp_num", self.qp_num, 24), ("psn", self.psn, 24), ("lid", self.lid, 16)):
            if not isinstance(value, int):
                raise TypeError(f"{name} {shown(value)} is not an integer")
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} {value} does not fit in {bits} bits")
        if len(self.gid) != 16:
            raise ValueError(f"gid: {len(self.gid)} bytes, a GID has 16")
        if self.mtu not in _MTUS:
            raise ValueError(f"mtu {self.mtu} is not one of {', '.join(map(str, _MTUS))}")

    def __bytes__(self) -> bytes:
        """28 bytes in network byte order: gid; qp_num and psn, 4 bytes each; lid and mtu, 2 bytes each."""
        return _FORM.pack(self.gid, self.qp_num, self.psn, self.lid, self.mtu)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The reverse of bytes().

        :raises ValueError: data has not 28 bytes, or a number is out of range
        """
        if len(data) != _FORM.size:
            raise ValueError(f"{len(data)} bytes, a QPInfo has {_FORM.size}")
        gid, qp_num, psn, lid, mtu = _FORM.unpack(data)
        return cls(qp_num, psn, gid, lid, mtu)

    def __str__(self) -> str:
        """The text of ibv_rc_pingpong, 51 characters; that program sends a zero byte after them."""
        text = f"{self.lid:04x}:{self.qp_num:06x}:{self.psn:06x}:{self.gid.hex()}"
        return text if self.mtu == _PINGPONG_MTU else f"{text}:{self.mtu}"

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The reverse of str(). The zero byte of a C program may be included.

        :raises ValueError: the text has another format
        """
        if isinstance(text, bytes):
            text = text.decode("ascii", "replace")
        found = re.fullmatch(_TEXT, text.rstrip("\0\r\n "), re.I)
        if found is None:
            raise ValueError(
                f"{text[:100]!r} is not lid:qp_num:psn:gid, or lid:qp_num:psn:gid:mtu, in hexadecimal digits"
            )
        lid, qp_num, psn, gid, mtu = found.groups()
        return cls(int(qp_num, 16), int(psn, 16), bytes.fromhex(gid), int(lid, 16), int(mtu or _PINGPONG_MTU))
