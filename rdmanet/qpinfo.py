"""What two queue pairs have to know of each other, when no connection manager introduces them.

Each side says it of its own (`QP.info()`), sends it to the other by whatever there is, a TCP connection or a file,
and connects with what it got (`QP.connect()`). Three forms go over the wire: 28 bytes; a line of text; and
JSON or msgpack, since it is a msgspec.Struct.

The text is what ibv_rc_pingpong(1) and its sisters for UC and SRQ exchange, so a program can talk to them:

    lid:qp_num:psn:gid    0000:000011:8f3a21:00000000000000000000ffff0a000001

They have no word for the MTU, which is 1024 unless both are told otherwise; another one is a fifth part here. This
module is pure: numbers in, numbers out.
"""

from __future__ import annotations

import re
import struct
from typing import Final, Self

import msgspec

__all__ = ["QPInfo"]

_FORM: Final = struct.Struct("!16sIIHH")
_TEXT: Final = re.compile(
    r"([0-9a-f]{1,4}):([0-9a-f]{1,6}):([0-9a-f]{1,6}):([0-9a-f]{32})(?::(\d{3,4}))?", re.I
)
_MTUS: Final = (256, 512, 1024, 2048, 4096)
_PINGPONG_MTU: Final = 1024


class QPInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue pair, as its peer has to know it.

    :param qp_num: its number, 24 bits
    :param psn: the number of the first packet that it will send, 24 bits
    :param gid: the address of its port, 16 bytes; all zero where the lid is all there is
    :param lid: the port's address in its InfiniBand subnet; 0 on Ethernet
    :param mtu: the largest packet, in bytes: 256, 512, 1024, 2048 or 4096; the smaller of both sides' counts
    :raises ValueError: a number does not fit; msgspec says ValidationError when it decodes
    """

    qp_num: int
    psn: int = 0
    gid: bytes = bytes(16)
    lid: int = 0
    mtu: int = _PINGPONG_MTU

    def __post_init__(self) -> None:
        for name, value, bits in (("qp_num", self.qp_num, 24), ("psn", self.psn, 24), ("lid", self.lid, 16)):
            if not isinstance(value, int):
                raise TypeError(f"{name} {value!r} is no whole number")
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name} {value} is not a number of {bits} bits")
        if len(self.gid) != 16:
            raise ValueError(f"gid: {len(self.gid)} bytes, a GID has 16")
        if self.mtu not in _MTUS:
            raise ValueError(f"mtu {self.mtu} is none of {', '.join(map(str, _MTUS))}")

    def __bytes__(self) -> bytes:
        """28 bytes in network order: gid, qp_num and psn of 4 bytes, lid and mtu of 2."""
        return _FORM.pack(self.gid, self.qp_num, self.psn, self.lid, self.mtu)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """The reverse of bytes().

        :raises ValueError: these are not 28 bytes, or not of a queue pair
        """
        if len(data) != _FORM.size:
            raise ValueError(f"{len(data)} bytes, a QPInfo has {_FORM.size}")
        gid, qp_num, psn, lid, mtu = _FORM.unpack(data)
        return cls(qp_num, psn, gid, lid, mtu)

    def __str__(self) -> str:
        """As ibv_rc_pingpong says it, in 51 characters; it sends a zero byte after them."""
        text = f"{self.lid:04x}:{self.qp_num:06x}:{self.psn:06x}:{self.gid.hex()}"
        return text if self.mtu == _PINGPONG_MTU else f"{text}:{self.mtu}"

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """The reverse of str(). What C sends may have its zero byte.

        :raises ValueError: this is no such text
        """
        if isinstance(text, bytes):
            text = text.decode("ascii", "replace")
        found = _TEXT.fullmatch(text.rstrip("\0\r\n "))
        if found is None:
            raise ValueError(
                f"{text[:100]!r} is not lid:qp_num:psn:gid in hexadecimal digits, with or without :mtu"
            )
        lid, qp_num, psn, gid, mtu = found.groups()
        return cls(int(qp_num, 16), int(psn, 16), bytes.fromhex(gid), int(lid, 16), int(mtu or _PINGPONG_MTU))
