"""What the two ends of a tensors connection say to each other, and how it lies in the byte stream. No I/O.

Theory
------
A connection carries the operations of the side that has made it, on the memory of the side that has accepted it. Each
side begins with a Hello. Then the first claims grants, lets go of them, and notifies; the second says why a claim is
refused. A claim that is granted has no answer here: the memory is put on offer on the connection (stream/regions.py),
and the offer's name is the claim's number.

A message is its length, in 4 bytes, and a tagged array in msgpack. None is longer than MESSAGE_BYTES_MOST, so no peer
makes us keep more than that.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import enum
import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from rdmanet.errors import ProtocolError
from rdmanet.tensors.descriptor import Id

VERSION: Final = 1
NOTIFICATION_BYTES_MOST: Final = 16 << 10
"""Of what goes with a WRITE: a name, a number, a small message. Tensors go by READ and WRITE."""
MESSAGE_BYTES_MOST: Final = NOTIFICATION_BYTES_MOST + 64
_LENGTH: Final = struct.Struct("!I")
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Why(enum.IntEnum):
    """Why a claim is refused."""

    ENDED = 1
    TOO_MANY = 2
    FAILED = 3


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message of each side: its endpoint, as it says."""

    version: int
    endpoint: Id


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The peer's memory of this grant is to be put on offer."""

    number: _Number
    grant: Id


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The answer to a claim, if it is not granted."""

    number: _Number
    why: Why


class Release(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """What this claim was granted is not used any more."""

    number: _Number


class Notify(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """What was claimed by this number has been written to; and a word of the program's."""

    number: _Number
    payload: Annotated[bytes, msgspec.Meta(max_length=NOTIFICATION_BYTES_MOST)]


Message = Hello | Claim | Refused | Release | Notify
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Message).decode


def packed(message: Message) -> bytes:
    """A message as it lies in the byte stream."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Framer:
    """Takes messages out of a byte stream."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with these bytes.

        :raises ProtocolError: the peer has sent something else
        """
        self._bytes += data
        begin = 0
        try:
            while len(self._bytes) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._bytes, begin)
                if length > MESSAGE_BYTES_MOST:
                    raise ProtocolError(
                        f"a message of {length} bytes: at most {MESSAGE_BYTES_MOST} are allowed"
                    )
                end = begin + _LENGTH.size + length
                if len(self._bytes) < end:
                    break
                body = bytes(self._bytes[begin + _LENGTH.size : end])
                begin = end
                try:
                    message = _decode(body)
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise ProtocolError(f"{length} bytes that are no message: {exc}") from None
                yield message
        finally:
            del self._bytes[:begin]
