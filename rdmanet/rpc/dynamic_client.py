"""A client without the service's class: it learns the schema from the server, and takes arguments as plain data.

A server sends its schema to a client that has another one (messages.py: Hello). So this client says that it has none,
and makes its methods from the answer. Types are checked by the server alone. What plain data, such as JSON has, does
not have is converted by the schema: bytes, keys of maps that are no texts, structs that go as arrays. An array is given
as on the wire, [dtype, shape, bytes], or by what the user takes for one, also inside of others; the result of a method
that returns one is its bytes. Arrays within a result are in it as dynamic_results.py has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final

import msgspec

from rdmanet.errors import ProtocolError, shown
from rdmanet.rpc import endpoints
from rdmanet.rpc.array_types import has_array
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.coded import Coded
from rdmanet.rpc.describe import BUFFER, Description, Structs, decode_description, text
from rdmanet.rpc.dynamic_results import ArrayWithin, Finder, Reading, without_limits
from rdmanet.rpc.limits import DEFAULT
from rdmanet.rpc.messages import Array, Lent, Placed
from rdmanet.rpc.method import Kind, Method, Parameter
from rdmanet.rpc.method_options import Options
from rdmanet.rpc.packing import Packed, Unpacking
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.weights import Scale

BytesOf = Callable[[str], bytes]
ArrayOf = Callable[[Any, Any, str], Any]

_any: Final = msgspec.msgpack.Decoder().decode
_buffer: Final = msgspec.msgpack.Decoder(memoryview | Lent).decode
_array: Final = msgspec.msgpack.Decoder(Array).decode


class Discovered(Schema):
    """The schema of a server, which is empty until the server has said Hello.

    :ivar described: the methods, as they came
    :ivar structs: the structs that these refer to
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, [])
        self.described: list[Any] = []
        self.structs: Structs = {}
        vars(self)["digest"] = bytes(32)

    def fitted(self, raw: Any) -> list[Method]:
        return self.numbered

    def understands(self, raw: Any, server_name: str = "", who: str = "server") -> dict[str, int]:
        """Take the server's schema for ours."""
        self.described, self.structs = decode_description(raw)
        _check(self.described, self.structs)
        methods: list[Method] = [DiscoveredMethod(self.name, each, self.structs) for each in self.described]
        super().__init__(self.name, methods)
        return {each[0]: number for number, each in enumerate(self.described)}


_ANY_SCALE: Final = Scale(Any)


class DiscoveredMethod(Method):
    """A method that the server has.

    Its calls need not have all `arguments`: those at the end may be left out, if they have defaults.

    :ivar array: its last result, if that is an array: what its bytes mean
    :ivar arrays: those within its last result, or item
    :ivar wants: says which of these are read; at first, none is
    """

    array: Array

    def __init__(self, service: str, described: Any, structs: Structs) -> None:
        name, kind, self.described, stream, result = described
        Coded.__init__(self, f"{service}.{name}", name)
        self.options, self.is_limited = Options(), False
        self.kind = Kind(kind)
        self.parameters = [
            Parameter(name, memoryview if type_ == BUFFER else Any, msgspec.NODEFAULT, type_ == BUFFER)
            for name, type_, _ in self.described
        ]
        self.stream = None if self.kind in (Kind.UNARY, Kind.SERVER_STREAM) else ("the stream", stream)
        self.result_description = result
        self.arrays: list[ArrayWithin] = []
        self.wants: Callable[[Placed], bool] = lambda _: False
        self._structs = structs
        self._reading: Reading | None = None
        is_streamed = self.kind in (Kind.SERVER_STREAM, Kind.BOTH)
        self.result_is_buffer = not is_streamed and (result == BUFFER or _kind(result) == "array")
        self.result_brings = not self.result_is_buffer and has_array(result, structs, set())
        self.result_is_apart = self.result_is_buffer or self.result_brings
        self.result = Buffer if self.result_is_buffer else Any
        self.buffers = [index for index, parameter in enumerate(self.parameters) if parameter.is_buffer]
        decode: Callable[[Any], Any] = self._with_arrays if self.result_brings else _any
        if self.result_is_buffer:
            decode = _buffer if result == BUFFER else self._bytes_of_array
        self.read_result(decode, _ANY_SCALE)
        self._item = self._details = _any
        self.scale = self.item_scale = self._details_scale = _ANY_SCALE

    def _bytes_of_array(self, raw: Any) -> memoryview | Lent:
        self.array = _array(raw)
        return self.array.data

    def _with_arrays(self, raw: Any) -> Any:
        reading = self._reading or Reading(Packed(raw, memoryview(b"")), self.wants)
        self.arrays = []

        def found(placed: Placed, where: str) -> ArrayWithin:
            self.arrays.append(array := reading.found(placed, where))
            return array

        return Finder(self._structs, found)(_any(raw), self.result_description)

    def unpack_result(self, packed: Packed, most: int) -> Unpacking:
        reading = self._reading = Reading(packed, self.wants)
        try:
            reading.value = self.decode_result(packed.raw, most)
        finally:
            self._reading = None
        return reading

    def arguments_of(
        self, given: dict[str, Any], structs: Structs, bytes_of: BytesOf, array_of: ArrayOf
    ) -> list[Any]:
        """Arguments by name, in the order of the parameters, and as they are encoded.

        :param bytes_of: from what stands for bytes to these
        :param array_of: as `Converter` has it
        :raises ValueError: they do not fit; the text says how
        """
        names = [name for name, _, _ in self.described]
        for name in given:
            if name not in names:
                raise ValueError(
                    f"there is no parameter {shown(name)}; there are: {', '.join(names) or 'none'}"
                )
        convert = Converter(structs, bytes_of, array_of)
        found: list[Any] = []
        for index, (name, type_, required) in enumerate(self.described):
            if name in given:
                found.append(convert(given[name], type_, name))
            elif required:
                raise ValueError(f"the parameter {name!r} is missing: it is {text(type_)}")
            elif later := [other for other in names[index:] if other in given]:
                raise ValueError(f"the parameter {name!r} is before {later[0]!r}, and has to be given, too")
            else:
                break
        return found

    def __str__(self) -> str:
        """As it would be declared."""
        parameters = [
            f"{n}: {text(type_)}{'' if required else ' = ...'}" for n, type_, required in self.described
        ]
        if self.stream is not None:
            parameters.append(f"stream of {text(self.stream[1])}")
        streams = "stream of " if self.kind in (Kind.SERVER_STREAM, Kind.BOTH) else ""
        return f"{self.name}({', '.join(parameters)}) -> {streams}{text(self.result_description)}"


class Converter:
    """From plain data to what msgpack has for a type.

    :param bytes_of: from what stands for bytes to these
    :param array_of: from what stands for an array, the type of its items and the place, to [dtype, shape, bytes]; it is
        not asked for what has this form
    """

    def __init__(self, structs: Structs, bytes_of: BytesOf, array_of: ArrayOf) -> None:
        self._structs = structs
        self._bytes_of = bytes_of
        self._array_of = array_of

    def __call__(self, value: Any, type_: Description, where: str) -> Any:
        """The value; what does not fit its type is left for the server to refuse.

        :raises ValueError: a field is unknown or missing
        """
        type_ = without_limits(type_)
        kind, *parts = [type_] if isinstance(type_, str) else type_
        if kind == "object":
            raise ValueError(f"{where} is an object of the service {parts[0]}: only a program can lend one")
        if kind in ("bytes", BUFFER) and isinstance(value, str):
            return self._bytes_of(value)
        if kind == "list" and isinstance(value, list):
            return [self(item, parts[0], f"{where}[]") for item in value]
        if kind == "tuple" and isinstance(value, list) and len(value) == len(parts):
            return [self(item, part, f"{where}[]") for item, part in zip(value, parts, strict=True)]
        if kind == "dict" and isinstance(value, dict):
            return {
                _key(k, parts[0]): self(item, parts[1], f"{where}[{shown(k)}]") for k, item in value.items()
            }
        if kind == "array" and isinstance(value, list) and len(value) == 3 and isinstance(value[2], str):
            return [*value[:2], self(value[2], "bytes", f"{where}[2]")]
        if kind == "array":
            return self._array_of(value, parts[0], where)
        if kind == "struct" and isinstance(value, dict):
            return self._struct(value, parts[0], where)
        if kind == "union":
            return self._member(value, parts, where)
        return value

    def _struct(self, value: dict[str, Any], name: str, where: str) -> Any:
        form, tag, _, fields = self._structs[name]
        known = {field: type_ for field, type_, *_ in fields}
        for field, _, required, *_ in fields:
            if required and field not in value:
                raise ValueError(f"{where}: {name} lacks {field!r}, which is {text(known[field])}")
        if form == "map":
            tagged = {} if tag is None else {tag[0]: tag[1]}
            return tagged | {
                f: self(v, known[f], f"{where}.{f}") if f in known else v for f, v in value.items()
            }
        found = [] if tag is None else [tag[1]]
        for field, type_, *_ in fields:
            if field not in value:
                break
            found.append(self(value[field], type_, f"{where}.{field}"))
        return found

    def _member(self, value: Any, types: list[Description], where: str) -> Any:
        types = [without_limits(each) for each in types]
        kinds = {
            "bytes" if each == BUFFER else each if isinstance(each, str) else each[0]: each for each in types
        }
        if isinstance(value, str) and "str" not in kinds and "bytes" in kinds:
            return self._bytes_of(value)
        for kind in ("array", "object"):
            if kind in kinds and value is not None:
                return self(value, kinds[kind], where)
        for type_, kind in ((list, "list"), (list, "tuple"), (dict, "dict"), (dict, "struct")):
            if isinstance(value, type_) and sum(_kind(each) == kind for each in types) == 1:
                return self(value, kinds[kind], where)
        return value


_DEPTH_MOST: Final = 50
_Struct = tuple[
    str, tuple[str, str | int] | None, bool, list[Annotated[list[Any], msgspec.Meta(min_length=3)]]
]


def _check(methods: list[Any], structs: Structs) -> None:
    """Raise ProtocolError, unless all types are as docs/reference/rpc-protocol.md has them."""
    try:
        for _, _, parameters, stream, result in methods:
            for type_ in (*(parameter[1] for parameter in parameters), stream or "none", result):
                _check_type(type_, structs, 0)
        for name, struct in structs.items():
            _, _, _, fields = structs[name] = list(msgspec.convert(struct, _Struct))
            for field in fields:
                _, type_, *_ = msgspec.convert(field[:3], tuple[str, Any, bool])
                _check_type(type_, structs, 0)
    except (msgspec.MsgspecError, ValueError, TypeError) as exc:
        raise ProtocolError(f"the server sent what is no schema: {exc}") from None


def _check_type(type_: Any, structs: Structs, depth: int) -> None:
    if isinstance(type_, str):
        return
    kind, *parts = type_
    wanted = {"list": 1, "dict": 2, "struct": 1, "array": 1, "object": 1, "flags": 1, "within": 2}.get(
        kind, len(parts)
    )
    if not isinstance(type_, (list, tuple)) or not isinstance(kind, str) or len(parts) != wanted:
        raise ValueError("there is a type of an unknown form")
    if kind == "struct":
        if parts[0] not in structs:
            raise ValueError("there is a struct that is not described")
    elif kind == "flags":
        msgspec.convert(parts[0], int)
    elif kind != "one of":
        if depth > _DEPTH_MOST:
            raise ValueError("there is a type that is nested too deep")
        if kind == "within":
            msgspec.convert(parts.pop(), dict[str, Any])
        for part in parts:
            _check_type(part, structs, depth + 1)


def _kind(type_: Description) -> str:
    return type_ if isinstance(type_, str) else str(type_[0])


def _key(key: str, type_: Description) -> Any:
    return int(key) if without_limits(type_) == "int" and key.lstrip("-").isdecimal() else key


@contextlib.asynccontextmanager
async def discover(
    service: str, host: str, port: int | None, transport: str, **transport_options: Any
) -> AsyncIterator[tuple[Channel, Discovered]]:
    """Connect to a service of which only the name is known.

    :raises OSError: there is no connection
    :raises Error: as for `connect`
    """
    schema = Discovered(service)
    channel = Channel(schema, DEFAULT)
    await endpoints.connect(lambda: channel.link, host, port, transport, transport_options)
    try:
        await channel.greeted()
        yield channel, schema
    finally:
        await channel.close()
