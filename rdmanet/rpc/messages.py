"""The messages of a connection, and how they become bytes. docs/reference/rpc-protocol.md is the same for readers of
other languages, with test vectors.

A frame is a length of four bytes, in network order, and a body of that many bytes: an array of msgpack, whose first
item is the kind of message. Arguments and results are inside the body, as msgpack. They are decoded later, when it is
known which types they are to have, so here they are `Raw`.

Everything that comes from the peer passes through `Framer`. It refuses what is longer than the limit before it takes
memory for it, and what is not exactly one of these messages. Everything that it refuses is a ProtocolError, which ends
the connection. It gives no more messages at a time than its user lets it, and keeps the rest: 256 KiB may contain
20,000 of them.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from rdmanet.errors import ProtocolError
from rdmanet.rpc.framing import HEADER_BYTES, Frames
from rdmanet.wire.offers import ACCEPTED_MAX

VERSION: Final = 1
MAGIC: Final = "rdmanet.rpc"
MESSAGE_BYTES_LEAST: Final = 256
"""Each side accepts messages of this length, so a failure without its text, a Cancel or a Window can always be sent."""
HELLO_BYTES: Final = 4096
"""The longest Hello of a client. Before it nobody knows who the client is."""
TEXT_MOST: Final = 4096
"""Characters of a failure's text; longer ones are cut by the side that sends them."""

NAMES_MOST: Final = 256
"""Services that a server tells of in its Hello."""
DIMENSIONS_MOST: Final = 32

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U53 = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""What every language has exact numbers for."""
_Text = Annotated[str, Meta(max_length=TEXT_MOST)]
_Name = Annotated[str, Meta(max_length=256)]
_ItemName = Annotated[str, Meta(max_length=32)]


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


NIL: Final = Raw(b"\xc0")


class Lent(msgspec.Struct, array_like=True, frozen=True):
    """In place of the bytes of a buffer: they are in memory that the sender has on offer on this connection."""

    offer: U32
    length: U53


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A part of the memory of a message's arrays: that of one array, or of several that follow each other.

    The parts of an offer follow each other there, from its beginning.
    """

    place: U53
    """Where it begins in the memory."""
    length: U53
    offer: U32


PARTS_MOST: Final = 1024


class Parts(Lent, array_like=True, frozen=True):
    """The memory of arrays on loan. With `parts` it is these, in this order, and `offer` says nothing."""

    parts: Annotated[list[Part], Meta(min_length=1, max_length=PARTS_MOST)] | None = None


class Hello(_Message, tag=0):
    """The first message in each direction: who speaks, and what the other side has to keep to."""

    magic: _Name
    version: U32
    service: _Name
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """Of the schema (schema.py)."""
    message_bytes: U32
    calls: U32
    stream_bytes: U53
    methods: Raw = Raw(b"\xc0")
    """From the server: its schema, if the digests differ."""
    services: Annotated[list[_Name], Meta(max_length=NAMES_MOST)] | None = None
    """From a server that does not have the service: the names of those that it has, as many as it likes to tell."""
    offers: U32 = 0
    """How many offers the sender accepts at a time, if it knows `Parts`."""


class Call(_Message, tag=1):
    """From the caller: begin a call."""

    number: U32
    method: U32
    """Its place in the schema of the server."""
    timeout_us: U53 | None
    """What is left of the caller's time; None: no limit."""
    arguments: Raw
    metadata: Raw = NIL
    """A map from names to texts or bytes."""
    memory: memoryview | Parts | None = None
    """That of arrays inside of the arguments, or the loan of it; see `Placed`."""
    asks: bool = False
    """The caller takes Initial, and metadata with the answer."""


class Reply(_Message, tag=2):
    """From the callee: the result. Ends the call."""

    number: U32
    result: Raw
    returned: bool = False
    """The callee reads nothing of the call's arguments on loan any more, and will not."""
    memory: memoryview | Parts | None = None
    metadata: Raw = NIL
    """What the method says beside its result, as that of a Call."""


class Failure(_Message, tag=3):
    """From the callee: the error. Ends the call."""

    number: U32
    code: U32
    text: _Text
    details: Raw = Raw(b"\xc0")
    traceback: str | None = None
    begun: bool = True
    """False: the callee did not take the call."""
    metadata: Raw = NIL


class Item(_Message, tag=4):
    """From either: an item of its stream."""

    number: U32
    item: Raw
    memory: memoryview | None = None


class End(_Message, tag=5):
    """From either: its stream is complete. From the callee it ends the call."""

    number: U32
    metadata: Raw = NIL
    """From the callee."""


class Window(_Message, tag=6):
    """From the receiver of a stream: how many bytes may have been sent, since the call began."""

    number: U32
    total: U53


class Cancel(_Message, tag=7):
    """From the caller: end the call. The answer is still due."""

    number: U32


class Release(_Message, tag=8):
    """From the caller: the memory of a result is not needed any more."""

    number: U32


class Goaway(_Message, tag=9):
    """From the server: no new calls."""

    reason: _Text
    taken: U53 | None = None
    """How many Calls of this connection it has taken: later ones have not begun. None: it does not say."""


class Ping(_Message, tag=10):
    """From either: answer with Pong."""

    token: U53


class Pong(_Message, tag=11):
    token: U53


class Initial(_Message, tag=12):
    """From the callee, if the Call asks: metadata before the answer, and before the items of its stream."""

    number: U32
    metadata: Raw


class Carry(_Message, tag=13):
    """From either: bytes of an inner connection (inner.py)."""

    number: U32
    """Of the object that was lent."""
    data: bytes


class More(_Message, tag=14):
    """From either: how many bytes of an inner connection the other side may have sent, since it began."""

    number: U32
    total: U53


class Drop(_Message, tag=15):
    """From either: an inner connection has ended."""

    number: U32


class Field(msgspec.Struct, array_like=True, frozen=True):
    """A field of the items of an array of records. One without a name is what lies between two of them."""

    name: _Name
    type: _ItemName | Annotated[list[Field], Meta(max_length=256)]
    shape: Annotated[list[U53], Meta(max_length=DIMENSIONS_MOST)] = []


ItemType = _ItemName | Annotated[list[Field], Meta(max_length=256)]
"""The type of the items of an array (item_types.py)."""


class Array(msgspec.Struct, array_like=True, frozen=True):
    """An argument or a result that is an array: what its bytes mean, and the bytes, or the loan of them."""

    dtype: ItemType
    shape: Annotated[list[U53], Meta(max_length=DIMENSIONS_MOST)]
    data: memoryview | Lent


class Placed(msgspec.Struct, array_like=True, frozen=True):
    """An array inside of a list, a struct, ...: what its bytes mean, and where they begin in the message's memory."""

    dtype: ItemType
    shape: Annotated[list[U53], Meta(max_length=DIMENSIONS_MOST)]
    place: U53 | bytes
    """The offset. Or the bytes themselves, from a client that has an array of its own where the server has a union."""


Message = (
    Hello | Call | Reply | Failure | Item | End | Window | Cancel | Release | Goaway | Ping | Pong | Initial
    | Carry | More | Drop
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class OutHello(_Message, tag=0):
    """Hello of a client, or of a server that has the service."""

    magic: str
    version: int
    service: str
    digest: bytes
    message_bytes: int
    calls: int
    stream_bytes: int
    methods: Raw = NIL
    services: None = None
    offers: int = ACCEPTED_MAX


class OutCall(_Message, tag=1):
    """A Call whose arguments are not encoded yet: one step encodes both."""

    number: int
    method: int
    timeout_us: int | None
    arguments: Any

    def extended(self, metadata: Any, memory: Any, asks: bool) -> OutCall:
        """The same with what is not None or False."""
        given = self.number, self.method, self.timeout_us, self.arguments
        if asks:
            return OutCallAsking(*given, metadata or {}, memory)
        if memory is None:
            return OutCallWith(*given, metadata)
        return OutCallBringing(*given, metadata or {}, memory)


class OutCallWith(OutCall, tag=1):
    """The same with metadata."""

    metadata: Any


class OutCallBringing(OutCall, tag=1):
    """The same with the memory of arrays, and perhaps metadata."""

    metadata: Any
    memory: Any


class OutCallAsking(OutCall, tag=1):
    """The same of who takes metadata back."""

    metadata: Any
    memory: Any
    asks: bool = True


class OutReply(_Message, tag=2):
    number: int
    result: Any


class OutReplyReturning(OutReply, tag=2):
    """The same from a callee that has let go of the arguments on loan."""

    returned: bool = True


class OutReplyBringing(OutReply, tag=2):
    """The same with the memory of arrays."""

    returned: bool
    memory: Any


class OutReplySaying(OutReply, tag=2):
    """The same with metadata, and perhaps the memory of arrays."""

    returned: bool
    memory: Any
    metadata: Any


class OutFailure(_Message, tag=3):
    """Failure without metadata."""

    number: int
    code: int
    text: str
    details: Raw
    traceback: str | None
    begun: bool


class OutEnd(_Message, tag=5):
    """End without metadata."""

    number: int


class OutGoaway(_Message, tag=9):
    """Goaway without a number."""

    reason: str


class OutItem(_Message, tag=4):
    number: int
    item: Any


class OutItemBringing(OutItem, tag=4):
    """The same with the memory of arrays."""

    memory: Any


def frame(message: msgspec.Struct) -> bytes:
    """A message as bytes, ready to be sent.

    :raises TypeError: an argument, or the result, has a type that msgspec does not encode
    :raises OverflowError: the message needs a length of more than 32 bits
    """
    body = encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Apart:
    """Long memory in place of bytes: it is not copied into the message, and nobody changes it any more."""

    __slots__ = ("memory",)

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory


def parts_of(message: msgspec.Struct) -> list[bytes | bytearray | memoryview]:
    """The body of a message in parts, which follow each other. An `Apart` in it is one of them.

    :raises TypeError: as for `frame`
    """
    values = msgspec.structs.astuple(message)
    parts: list[Any] = [bytearray(_array_head(len(values) + 1) + encode(message.__struct_config__.tag))]
    for name, value in zip(message.__struct_fields__, values, strict=True):
        if name == "arguments" and not isinstance(value, Raw):
            parts[-1] += _array_head(len(value))
            for argument in value:
                _add(parts, argument)
        else:
            _add(parts, value)
    if not parts[-1]:
        parts.pop()
    return parts


def _add(parts: list[Any], value: Any) -> None:
    if isinstance(value, Array) and isinstance(value.data, Apart):
        parts[-1] += _array_head(3) + encode(value.dtype) + encode(value.shape)
        value = value.data
    if isinstance(value, Apart):
        parts[-1] += bin_head(value.memory.nbytes)
        parts += (value.memory, bytearray())
    else:
        parts[-1] += encode(value)


def bin_head(nbytes: int) -> bytes:
    """What msgpack has before so many bytes; before fewer than 64 KiB it could be shorter."""
    return b"\xc6" + nbytes.to_bytes(4, "big")


def _array_head(length: int) -> bytes:
    return bytes([0x90 + length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")


def check_hello(hello: Hello) -> None:
    """Raise ProtocolError if a peer's Hello is of something else."""
    if hello.magic != MAGIC:
        raise ProtocolError("the peer does not speak the protocol of rdmanet.rpc")
    if hello.version != VERSION:
        raise ProtocolError(f"the peer speaks version {hello.version} of the protocol, this side {VERSION}")
    if hello.message_bytes < MESSAGE_BYTES_LEAST:
        raise ProtocolError(
            f"the peer accepts {hello.message_bytes} bytes, which is less than any message may have"
        )


def raw(value: Any) -> Raw:
    """A value as msgpack, to be put into a message.

    :raises TypeError: msgspec does not encode it
    """
    return Raw(encode(value))


class Framer(Frames):
    """Takes what a connection receives, and gives the messages in it.

    :param message_bytes: the longest body that is accepted
    :param first_bytes: the same for the first message
    """

    __slots__ = ()

    def __init__(self, message_bytes: int, first_bytes: int | None = None) -> None:
        super().__init__(_decode, message_bytes, first_bytes)
