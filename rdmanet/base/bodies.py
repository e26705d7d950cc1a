"""The bodies of Credits, which msgspec packs and unpacks; credit.py says what they mean, and has the smaller bodies.

To import msgspec takes a tenth of the processor time of a program that connects, says something short and ends. Such a
program needs none of this. A server imports this module when it begins to listen, a client with the first Credit that
has a body: it tells of memory that a long read wants, or that is on offer. (What tells of a slot's size alone, the
engine packs and reads itself: _pyx/ownring.pxi.)
"""

# datetime before msgspec: msgspec imports it from C, and does not look whether that fails. If Ctrl-C interrupts it, the
# interrupt is lost, and every Decoder that is made later crashes (msgspec 0.22). What is already imported cannot be
# interrupted: no Python code runs then.
import datetime  # noqa: F401
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from rdmanet.errors import ProtocolError, printable

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U64 = Annotated[int, Meta(ge=0)]  # msgpack has no integer above 2**64 - 1


class Region(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Memory that its owner allows the peer to read or write by RDMA."""

    id: U32
    address: U64
    length: Annotated[int, Meta(ge=1)]
    rkey: U32
    access: U32
    name: str


class Want(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Memory that bytes of the stream may be written to; placement.py has the rules."""

    serial: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]
    position: U64
    address: U64
    length: U64
    rkey: U32
    flags: U32


class Credit(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A grant with news of memory regions, of direct placement, and of the sender's slots. Its tag is its `Kind`.

    A grant alone needs no body: the header contains it. 0 means that nothing is said. ``unwanted`` counts before
    ``wants``. From receive number ``slots_from`` on a slot of the sender's holds ``slot_bytes`` bytes.
    """

    granted: U32
    regions: tuple[Region, ...] = ()
    revoked: tuple[U32, ...] = ()
    acked: tuple[U32, ...] = ()
    wants: tuple[Want, ...] = ()
    unwanted: U32 = 0
    answered: U32 = 0
    slots_from: U32 = 0
    slot_bytes: U32 = 0


_credit_decoder: "msgspec.msgpack.Decoder[Credit]" = msgspec.msgpack.Decoder(Credit)
pack: Final = msgspec.msgpack.encode


def unpack_credit(body: bytes | memoryview) -> Credit:
    """Parse a Credit's body; a ProtocolError says what is wrong with it."""
    return _decode(_credit_decoder, body, Credit)


def unpack_fields(kind: Any, bounds: tuple[tuple[int, int] | None, ...], body: bytes, tag: int | None) -> Any:
    """The same of a body with these fields, a named tuple: numbers within bounds, and texts."""
    decoder, struct = _decoder_of(kind, bounds, tag)
    return kind(*msgspec.structs.astuple(_decode(decoder, body, struct)))


@cache
def _decoder_of(
    kind: Any, bounds: tuple[tuple[int, int] | None, ...], tag: int | None
) -> "tuple[msgspec.msgpack.Decoder[Any], type[msgspec.Struct]]":
    fields: list[Any] = []
    for name, bound in zip(kind._fields, bounds, strict=True):
        type_ = str if bound is None else Annotated[int, Meta(ge=bound[0], le=bound[1])]
        fields.append((name, type_, kind._field_defaults.get(name, msgspec.NODEFAULT)))
    struct = msgspec.defstruct(kind.__name__, fields, tag=tag, array_like=True, forbid_unknown_fields=True)
    return msgspec.msgpack.Decoder(struct), struct


_Body = TypeVar("_Body", bound=msgspec.Struct)


def _decode(decoder: "msgspec.msgpack.Decoder[_Body]", body: bytes | memoryview, kind: type[_Body]) -> _Body:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names a field of an array by its index, counting the tag.
        reason = str(error)
        first = 0 if kind.__struct_config__.tag is None else 1
        for index, field in enumerate(kind.__struct_fields__, first):
            reason = reason.replace(f"$[{index}]", field)
    raise ProtocolError(f"{kind.__name__.lower()}: {printable(reason)}")
