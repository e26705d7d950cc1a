"""What a service offers, read from its class: methods, parameters, results, and how they are encoded.

Theory
------
A service is a class. Its coroutine functions and asynchronous generators are its methods, unless their names begin with
an underscore. Client and server read the same class, so both know the types, and so does mypy. What cannot be served is
refused when the class is defined, with the names of method and parameter.

Arguments are an array, in the order of the parameters. Arguments left out at the end have the server's defaults. A
parameter that is annotated as an asynchronous iterator is not in the array: it is the caller's stream. It may have any
place among the parameters, also after ``*``, so that parameters with defaults can be added to any method.

    async def m(self, x: A) -> R                            UNARY
    def m(self, x: A) -> AsyncIterator[R]                   SERVER_STREAM; as a rule ``async def`` with ``yield``
    async def m(self, x: A, items: AsyncIterator[T]) -> R   CLIENT_STREAM
    both                                                    BOTH

A `Schema` is those methods in the order of their names; the place of a method is its number on the wire. Its
`description` is plain data (describe.py), and its `digest` the SHA-256 of that. Two sides with the same digest need
not compare. `Schema.understands` compares otherwise.
"""

from __future__ import annotations

import copy
import datetime  # noqa: F401  before msgspec, see credit.py
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, ClassVar

import msgspec

from rdmanet.errors import ProtocolError, shown
from rdmanet.rpc.annotations import defining_frame, owner_of, resolved, stream_item
from rdmanet.rpc.arrays import ArrayType, bytes_in, declared, described, is_buffer, wire_type
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.describe import (
    BUFFER,
    METHODS_MOST,
    Description,
    Structs,
    decode_description,
    describe,
    differences,
)
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error
from rdmanet.rpc.method_options import Options
from rdmanet.rpc.weights import DETAILS_BYTES, Scale

__all__ = ["Schema", "Service"]


class Kind(IntEnum):
    """Who streams. The numbers are in descriptions."""

    UNARY = 0
    SERVER_STREAM = 1
    CLIENT_STREAM = 2
    BOTH = 3


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of a method, other than its stream."""

    name: str
    type: Any
    """The annotation; an `ArrayType` for arrays."""
    default: Any = msgspec.NODEFAULT
    is_buffer: bool = False
    by_keyword: bool = False


class Method:
    """A method of a service, and how its arguments and results are encoded.

    :ivar number: its place in the schema
    :ivar name: its name in the class
    :ivar kind: who streams
    :ivar function: the function of the class
    :ivar hints: its annotations, as they were resolved where it is defined
    :ivar parameters: without self and the stream
    :ivar count: how many positional arguments make a complete call; -1 if there are keywords or a stream, too
    :ivar positional: how many of the parameters can be given by position
    :ivar stream: the name of the parameter that is the caller's stream, and the type of its items
    :ivar stream_at: how many of the positional parameters are before it; None: it is given by keyword only
    :ivar result: the type of the result, or of the items that the callee streams
    :ivar inline: which parameters go in the message, whatever their length
    :ivar scale: weighs arguments before they are decoded, `item_scale` the caller's items
    """

    inline: frozenset[int] = frozenset()

    def __init__(self, service: str, name: str, function: Any, hints: dict[str, Any]) -> None:
        self.number = -1
        self.name = name
        self.label = f"{service}.{name}"
        self.function = function
        self.hints = hints
        self.options: Options = getattr(function, "__rpc_options__", Options())
        self.parameters: list[Parameter] = []
        self.stream: tuple[str, Any] | None = None
        self.stream_at: int | None = None
        self._read(hints, inspect.signature(function))
        self.buffers = [i for i, parameter in enumerate(self.parameters) if parameter.is_buffer]
        self.result_is_buffer = is_buffer(self.result) and self.kind not in (Kind.SERVER_STREAM, Kind.BOTH)
        self.by_keyword = [parameter.name for parameter in self.parameters if parameter.by_keyword]
        self.positional = len(self.parameters) - len(self.by_keyword)
        self.count = -1 if self.by_keyword or self.stream is not None else self.positional
        self._make_codecs()

    # -- reading the class ---------------------------------------------------------------------------------

    def _read(self, hints: dict[str, Any], signature: inspect.Signature) -> None:
        result = hints.get("return", inspect.Parameter.empty)
        streamed = stream_item(result)
        if result is inspect.Parameter.empty:
            raise TypeError(f"{self.label}: the result has no annotation (-> None, if there is none)")
        if inspect.iscoroutinefunction(self.function):
            if streamed is not None:
                raise TypeError(
                    f"{self.label}: a coroutine function cannot return a stream: use `yield` in it, or write `def`"
                )
        elif streamed is None:
            raise TypeError(
                f"{self.label} is not a coroutine function (`async def`), nor does it return an AsyncIterator; begin"
                " its name with an underscore if it is not to be called by others"
            )
        _, *parameters = signature.parameters.values()
        for parameter in parameters:
            where = f"{self.label}: parameter {parameter.name}"
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{where}: a method has no * or ** parameters; take a list or a dict")
            if parameter.name not in hints:
                raise TypeError(f"{where} has no annotation")
            type_ = declared(hints[parameter.name], where)
            if (item := stream_item(type_)) is not None:
                if self.stream is not None:
                    raise TypeError(
                        f"{where}: a method takes one stream, and {self.stream[0]} is one already"
                    )
                self.stream = parameter.name, item
                if parameter.kind != parameter.KEYWORD_ONLY:
                    self.stream_at = len(self.parameters)
                continue
            has_default = parameter.default is not parameter.empty
            self.parameters.append(
                Parameter(
                    parameter.name,
                    type_,
                    parameter.default if has_default else msgspec.NODEFAULT,
                    is_buffer(type_),
                    parameter.kind == parameter.KEYWORD_ONLY,
                )
            )
        required_last = [p.name for p in self.parameters if p.by_keyword and p.default is msgspec.NODEFAULT]
        if required_last and any(p.default is not msgspec.NODEFAULT for p in self.parameters):
            raise TypeError(
                f"{self.label}: parameter {required_last[0]} must have a default, since one before it has"
            )
        self.result = declared(result, f"{self.label}: the result") if streamed is None else streamed
        self.kind = Kind((streamed is not None) * Kind.SERVER_STREAM + (self.stream is not None) * 2)

    def _make_codecs(self) -> None:
        for parameter in self.parameters:
            self._checked(parameter.type, f"parameter {parameter.name}", parameter.is_buffer)
        self._checked(self.result, "the result", self.result_is_buffer)
        if self.stream is not None:
            self._checked(self.stream[1], f"parameter {self.stream[0]}", False)
        types = [wire_type(p.type) for p in self.parameters]
        fields = [
            (f"_{index}", type_)
            if parameter.default is msgspec.NODEFAULT
            else (
                f"_{index}",
                type_,
                msgspec.field(default_factory=functools.partial(_same, parameter.default)),
            )
            for index, (type_, parameter) in enumerate(zip(types, self.parameters, strict=True))
        ]
        exact: Any = tuple[tuple(types)] if types else tuple[()]  # type: ignore[misc]
        self._exact = msgspec.msgpack.Decoder(exact).decode
        self._lenient = msgspec.msgpack.Decoder(
            msgspec.defstruct(self.name, fields, array_like=True, frozen=True)
        ).decode
        self._result = _decoder(wire_type(self.result) if self.result_is_buffer else self.result)
        self._item = _decoder(Any if self.stream is None else self.stream[1])
        self._details = _decoder(Any if self.options.details is None else self.options.details)
        self.scale, self.item_scale = Scale(*types), Scale(Any if self.stream is None else self.stream[1])
        self._result_scale = Scale(wire_type(self.result) if self.result_is_buffer else self.result)
        self._details_scale = Scale(Any if self.options.details is None else self.options.details)

    def fitted(self, there: Any) -> Method:
        """The same method, as it is called at a server that has another version of it.

        Bytes inside of a union go in the message. So a buffer does, where the server has that; and where the server has
        a buffer, its result is read as one.
        """
        found = copy.copy(self)
        _, _, parameters, _, result = there
        found.inline = frozenset(
            index
            for index in self.buffers
            if index < len(parameters)
            and parameters[index][1] != BUFFER
            and not isinstance(self.parameters[index].type, ArrayType)
        )
        if result == BUFFER and not self.result_is_buffer and self.kind in (Kind.UNARY, Kind.CLIENT_STREAM):
            found.result, found.result_is_buffer = bytes_in(self.result), True
            found._result = _decoder(wire_type(memoryview))
            found._result_scale = Scale(wire_type(memoryview))
        return found

    def _checked(self, type_: Any, what: str, is_buffer: bool) -> None:
        if type_ is Buffer and not is_buffer:
            raise TypeError(f"{self.label}: {what}: a stream has no rpc.Buffer: stream bytes or memoryview")
        try:
            if not is_buffer:
                msgspec.msgpack.Decoder(type_)
                describe(type_, {})
        except TypeError as exc:
            raise TypeError(f"{self.label}: {what}: {exc}") from None

    # -- calls ---------------------------------------------------------------------------------------------

    def bind(self, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments of a call in the order of the parameters, and the stream.

        :raises TypeError: they do not fit the parameters
        """
        names = [parameter.name for parameter in self.parameters if not parameter.by_keyword]
        others = self.by_keyword
        if self.stream is not None:
            if self.stream_at is None:
                others = [*others, self.stream[0]]
            else:
                names.insert(self.stream_at, self.stream[0])
        if len(arguments) > len(names):
            raise TypeError(f"{self.label}() takes {len(names)} positional arguments, not {len(arguments)}")
        given = dict(zip(names, arguments, strict=False))
        for name, value in by_name.items():
            if name in given:
                raise TypeError(f"{self.label}() got two values for {name!r}")
            if name not in names and name not in others:
                raise TypeError(f"{self.label}() has no parameter {name!r}")
            given[name] = value
        stream = None
        if self.stream is not None:
            if self.stream[0] not in given:
                raise TypeError(f"{self.label}() lacks the argument {self.stream[0]!r}")
            stream = given.pop(self.stream[0])
        found = []
        for parameter in self.parameters:
            if parameter.name in given:
                found.append(given[parameter.name])
            elif parameter.default is msgspec.NODEFAULT:
                raise TypeError(f"{self.label}() lacks the argument {parameter.name!r}")
            else:
                found.append(parameter.default)
        return tuple(found), stream

    def decode_arguments(self, raw: Any) -> tuple[Any, ...]:
        """A call's arguments. A buffer is bytes, a memoryview or a `Lent`, an array an `Array`.

        :raises Error: INVALID_ARGUMENT; the text names the parameter
        """
        try:
            return self._exact(raw)  # type: ignore[no-any-return]
        except Exception:
            pass
        try:
            return msgspec.structs.astuple(self._lenient(raw))
        except RecursionError:
            raise Error(Code.INVALID_ARGUMENT, f"{self.label}: an argument is nested too deep") from None
        except msgspec.MsgspecError as exc:
            raise Error(Code.INVALID_ARGUMENT, f"{self.label}: {self._named(str(exc))}") from None
        except Exception:  # text that is no UTF-8, or what the constructor of a class has raised
            raise Error(Code.INVALID_ARGUMENT, f"{self.label}: an argument cannot be decoded") from None

    def _named(self, message: str) -> str:
        """msgspec's message, with the names of parameters in place of `$[0]`."""
        for index, parameter in enumerate(self.parameters):
            message = message.replace(f"`$[{index}]", f"`{parameter.name}")
        return message

    def decode_result(self, raw: Any, most: int) -> Any:
        """A call's result, or an item that the callee streams. A buffer or an array is as in `decode_arguments`.

        :raises Error: INTERNAL; it is not of its type. RESOURCE_EXHAUSTED; its objects take more bytes than `most`
        """
        if len(raw) >= self._result_scale.least:
            self._result_scale.weigh(raw, most)
        try:
            return self._result(raw)
        except Exception as exc:
            text = f"{self.label}: the server's result is not of its type: {exc}"
            raise Error(Code.INTERNAL, text) from None

    def decode_sent_item(self, raw: Any) -> Any:
        """An item of the caller's stream.

        :raises Error: INVALID_ARGUMENT
        """
        try:
            return self._item(raw)
        except msgspec.MsgspecError as exc:
            raise Error(Code.INVALID_ARGUMENT, f"{self.label}: an item of the stream: {exc}") from None
        except Exception:
            raise Error(
                Code.INVALID_ARGUMENT, f"{self.label}: an item of the stream cannot be decoded"
            ) from None

    def decode_details(self, raw: Any) -> Any:
        """The details of an error; None, if they are not of their type."""
        try:
            self._details_scale.weigh(raw, DETAILS_BYTES)
            return self._details(raw)
        except ENDS_THE_PROGRAM:
            raise
        except BaseException:  # which the constructor of a class has raised
            return None

    def describe(self, structs: Structs) -> list[Any]:
        """[name, kind, parameters, stream, result], each type as describe.py has it."""

        def of(type_: Any, is_buffer: bool = False) -> Description:
            return (is_buffer and described(type_)) or describe(type_, structs)

        return [
            self.name,
            int(self.kind),
            [[p.name, of(p.type, p.is_buffer), p.default is msgspec.NODEFAULT] for p in self.parameters],
            None if self.stream is None else of(self.stream[1]),
            of(self.result, self.result_is_buffer),
        ]


class Schema:
    """The methods of a service.

    :ivar name: the name of its class
    :ivar methods: by their names, in order
    """

    def __init__(self, name: str, methods: list[Method]) -> None:
        self.name = name
        self.methods = {method.name: method for method in sorted(methods, key=lambda method: method.name)}
        self.numbered = list(self.methods.values())
        for number, found in enumerate(self.numbered):
            found.number = number

    @functools.cached_property
    def description(self) -> list[Any]:
        """[methods, structs] as plain data.

        :raises TypeError: two types of the same name differ
        """
        structs: Structs = {}
        methods = [method.describe(structs) for method in self.numbered]
        return [methods, dict(sorted(structs.items()))]

    @functools.cached_property
    def encoded(self) -> bytes:
        """The description in msgpack."""
        return msgspec.msgpack.encode(self.description)

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the description in msgpack."""
        return hashlib.sha256(self.encoded).digest()

    def understands(self, raw: Any) -> dict[str, int]:
        """Compare with the schema of a server, as it came by the wire: the server's numbers of our methods.

        Methods that the server does not have are left out: calling them is UNIMPLEMENTED.

        :raises Error: FAILED_PRECONDITION; the text says what differs
        :raises ProtocolError: it is no schema
        """
        methods, theirs = decode_description(raw)
        ours = self.description[1]
        numbers = {method[0]: number for number, method in enumerate(methods)}
        known = [(found, methods[numbers[found.name]]) for found in self.numbered if found.name in numbers]
        if not known and self.numbered:
            raise Error(
                Code.FAILED_PRECONDITION,
                f"the server has none of the methods of {self.name}; it has {', '.join(sorted(numbers)[:10])}",
            )
        lines: list[str] = []
        try:
            for found, there in known:
                lines += _method_differences(found, there, ours, theirs)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            raise ProtocolError("the server's schema refers to what is not in it") from None
        if lines:
            shown = "; ".join(lines[:5]) + ("; and more" if lines[5:] else "")
            raise Error(Code.FAILED_PRECONDITION, f"the server's {self.name} differs from ours: {shown}")
        return {found.name: numbers[found.name] for found, _ in known}

    def fitted(self, raw: Any) -> list[Method]:
        """Our methods, as they are called at the server whose schema this is (`Method.fitted`)."""
        there = {method[0]: method for method in decode_description(raw)[0]}
        return [each.fitted(there[each.name]) if each.name in there else each for each in self.numbered]


class Service:
    """The base of services. A subclass is read when it is defined, and its instances can be served.

    :raises TypeError: a method cannot be called from elsewhere; the text names it and the parameter. This is raised by
        the `class` statement
    """

    __rpc_schema__: ClassVar[Schema] = Schema("Service", [])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__rpc_schema__ = _read(cls, defining_frame(cls, sys._getframe(1)))


# ---- Reading a class -----------------------------------------------------------------------------------------


def _read(cls: type, frame: FrameType) -> Schema:
    methods = []
    for name in dir(cls):
        if name.startswith("_"):
            continue
        found = inspect.getattr_static(cls, name)
        if not inspect.isfunction(found):
            continue
        owner = owner_of(cls, name)
        base: Schema | None = None if owner is cls else vars(owner).get("__rpc_schema__")
        known = None if base is None else base.methods.get(name)
        if known is not None and known.function is found:
            hints = known.hints
        else:
            hints = resolved(cls, owner, found, frame)
        methods.append(Method(cls.__name__, name, found, hints))
    if len(methods) > METHODS_MOST:
        raise TypeError(f"{cls.__name__} has {len(methods)} methods: {METHODS_MOST} are allowed")
    read = Schema(cls.__name__, methods)
    try:
        _ = read.digest
    except TypeError as exc:
        raise TypeError(f"{cls.__name__}: {exc}") from None
    return read


def _same(value: Any) -> Any:
    return value


def _decoder(type_: Any) -> Callable[[Any], Any]:
    return msgspec.msgpack.Decoder(type_).decode


# ---- Comparing -----------------------------------------------------------------------------------------------


def _method_differences(ours: Method, there: Any, structs: Structs, theirs: Structs) -> list[str]:
    """What makes calls of ours fail there, or its results here."""
    mine: Structs = {}
    name, kind, parameters, stream, result = ours.describe(mine)
    _, kind_there, parameters_there, stream_there, result_there = there
    if kind != kind_there:
        return [f"{name} is {Kind(kind).name} here, {Kind(kind_there).name} there"]
    lines = []
    for index, (here, other) in enumerate(zip(parameters, parameters_there, strict=False)):
        if here[0] != other[0]:
            return [f"{name}: parameter {index + 1} is {here[0]} here, {other[0]} there"]
        lines += differences(here[1], structs, other[1], theirs, f"{name}: parameter {here[0]}")
    for other in parameters_there[len(parameters) :]:
        if other[2]:
            lines.append(f"{name}: parameter {other[0]} is required there")
    for here in parameters[len(parameters_there) :]:
        if here[2]:
            lines.append(f"{name}: parameter {here[0]} is unknown there")
    if stream is not None:
        lines += differences(stream, structs, stream_there, theirs, f"{name}: the caller's stream")
    return lines + differences(result_there, theirs, result, structs, f"{name}: the result")


def schema_of(service: type[Service] | Service) -> Schema:
    """The schema of a service, or of its class.

    :raises TypeError: it is neither
    """
    cls = service if isinstance(service, type) else type(service)
    if not issubclass(cls, Service):
        raise TypeError(f"{shown(service)} is not a rdmanet.rpc.Service")
    return cls.__rpc_schema__


def methods_of(service: Service) -> list[tuple[Method, Callable[..., Any]]]:
    """The methods of a service in the order of their numbers, with the functions to call."""
    return [(method, getattr(service, method.name)) for method in schema_of(service).numbered]
