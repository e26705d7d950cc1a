"""A method of a service: its parameters and results, and how they are encoded.

Theory
------
Arguments are an array, in the order of the parameters. Arguments left out at the end have the server's defaults. A
parameter that is annotated as an asynchronous iterator is not in the array: it is the caller's stream. It may have any
place among the parameters, also after ``*``, so that parameters with defaults can be added to any method. A client
whose class has ``...`` as the default of a parameter does not send it, and the server's own default counts.

    async def m(self, x: A) -> R                            UNARY
    def m(self, x: A) -> AsyncIterator[R]                   SERVER_STREAM; as a rule ``async def`` with ``yield``
    async def m(self, x: A, items: AsyncIterator[T]) -> R   CLIENT_STREAM
    both                                                    BOTH

The types are read when the class is defined, and what cannot be served is refused then. Each has a decoder of its own,
and a `Scale`, which says what a message is going to make before it is decoded.
"""

from __future__ import annotations

import copy
import datetime  # noqa: F401  before msgspec, see credit.py
import functools
import inspect
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.annotations import stream_item
from rdmanet.rpc.array_types import ArrayType, declared
from rdmanet.rpc.arrays import array_in, bytes_in, described, is_buffer, wire_type
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.coded import Coded
from rdmanet.rpc.describe import BUFFER, Description, Structs, describe, has_arrays
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error
from rdmanet.rpc.method_options import Options
from rdmanet.rpc.packing import Packed, Unpacking, unpacked
from rdmanet.rpc.service_types import NUMBER, has_service, may_lack, service_in
from rdmanet.rpc.service_types import described as described_object
from rdmanet.rpc.weights import DETAILS_BYTES, Scale


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
    is_array: bool = False
    by_keyword: bool = False
    service: Any = None
    """The class, if it is a service object: the type is then what is sent for it (service_types.py)."""
    may_be_none: bool = False


class Method(Coded):
    """A method of a service, and how its arguments and results are encoded.

    :ivar function: the function of the class
    :ivar hints: its annotations, as they were resolved where it is defined
    :ivar parameters: without self and the stream
    :ivar positional: how many of the parameters can be given by position
    :ivar stream: the name of the parameter that is the caller's stream, and the type of its items
    :ivar stream_at: how many of the positional parameters are before it; None: it is given by keyword only
    :ivar result: the type of the result, or of the items that the callee streams
    :ivar inline: which parameters go in the message, whatever their length
    :ivar objects: which parameters are service objects
    :ivar stream_brings: whether there are arrays inside of the caller's items
    :ivar item_scale: weighs the caller's items
    """

    inline: frozenset[int] = frozenset()
    objects: Sequence[int] = ()
    stream_brings = False

    def __init__(self, service: str, name: str, function: Any, hints: dict[str, Any]) -> None:
        super().__init__(f"{service}.{name}", name)
        self.function = function
        self.hints = hints
        self.options: Options = getattr(function, "__rpc_options__", Options())
        self.is_limited = self.options.timeout is not None or self.options.calls is not None
        self.parameters: list[Parameter] = []
        self.stream: tuple[str, Any] | None = None
        self.stream_at: int | None = None
        self._read(hints, inspect.signature(function))
        if self.options.thread:
            self._check_thread()
        self.buffers = [i for i, parameter in enumerate(self.parameters) if parameter.is_buffer]
        self.result_is_buffer = is_buffer(self.result) and self.kind not in (Kind.SERVER_STREAM, Kind.BOTH)
        self.result_is_array = isinstance(self.result, ArrayType)
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
                " its name with an underscore if it is not to be called by others, or mark it with"
                " @rpc.method(thread=True) if it computes, and is to run in a thread"
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
            if (service := service_in(type_)) is not None:
                self._check_lendable(service, where)
                may_be_none = may_lack(type_)
                type_ = NUMBER | None if may_be_none else NUMBER
            self.parameters.append(
                Parameter(
                    parameter.name,
                    type_,
                    parameter.default if has_default else msgspec.NODEFAULT,
                    is_buffer(type_),
                    isinstance(type_, ArrayType),
                    parameter.kind == parameter.KEYWORD_ONLY,
                    service,
                    service is not None and may_be_none,
                )
            )
        required_last = [p.name for p in self.parameters if p.by_keyword and p.default is msgspec.NODEFAULT]
        if required_last and any(p.default is not msgspec.NODEFAULT for p in self.parameters):
            raise TypeError(
                f"{self.label}: parameter {required_last[0]} must have a default, since one before it has"
            )
        self.result = declared(result, f"{self.label}: the result") if streamed is None else streamed
        self.kind = Kind((streamed is not None) * Kind.SERVER_STREAM + (self.stream is not None) * 2)

    def _check_thread(self) -> None:
        """Raise TypeError if a method that runs in a thread takes what only a coroutine can use."""
        if self.stream is not None:
            text = f"parameter {self.stream[0]} is a stream, which a thread cannot take: take a list"
            raise TypeError(f"{self.label}: thread=True: {text}, or write `async def`")
        for parameter in self.parameters:
            if parameter.type is Buffer:
                text = f"parameter {parameter.name} is an rpc.Buffer, which a thread cannot read: take a memoryview"
                raise TypeError(f"{self.label}: thread=True: {text}, or write `async def`")
            if parameter.service is not None:
                text = f"parameter {parameter.name} is a service object, whose methods a thread cannot await"
                raise TypeError(f"{self.label}: thread=True: {text}: write `async def`")

    def _check_lendable(self, service: Any, where: str) -> None:
        schema = service.__rpc_schema__
        if not schema.methods:
            raise TypeError(f"{where}: {service.__name__} has no methods that could be called")
        for name, method in schema.methods.items():
            if method.objects:
                text = f"{name} of {service.__name__} takes a service object itself, which its caller cannot lend"
                raise TypeError(f"{where}: {text}")

    def _make_codecs(self) -> None:
        for parameter in self.parameters:
            self._checked(parameter.type, f"parameter {parameter.name}", parameter.is_buffer)
        self._checked(self.result, "the result", self.result_is_buffer)
        if self.options.details is not None:
            self._checked(self.options.details, "the details of its errors", False)
            if has_arrays(self.options.details):
                text = "the details of its errors cannot have arrays in them: have a list, or bytes"
                raise TypeError(f"{self.label}: {text}")
        if self.stream is not None:
            self._checked(self.stream[1], f"parameter {self.stream[0]}", False)
        self.objects = [index for index, each in enumerate(self.parameters) if each.service is not None]
        self.brings = any(has_arrays(each.type) for each in self.parameters if not each.is_buffer)
        if len(self.buffers) == 1 and not self.brings and not self.parameters[self.buffers[0]].is_array:
            self.bytes_at = self.buffers[0]
        self.result_brings = not self.result_is_buffer and has_arrays(self.result)
        self.stream_brings = self.stream is not None and has_arrays(self.stream[1])
        self.result_is_apart = self.result_is_buffer or self.result_brings
        is_streamed = self.kind in (Kind.SERVER_STREAM, Kind.BOTH)
        self.result_is_memory = self.result_is_apart and self.result is not bytes and not is_streamed
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
        self.exact = _decoder(exact)
        self._lenient = _decoder(msgspec.defstruct(self.name, fields, array_like=True, frozen=True))
        self.scale = Scale(*types)
        self.weighed_bytes = self.scale.least
        result = wire_type(self.result) if self.result_is_buffer else self.result
        self.read_result(_decoder(result), Scale(result))
        item = Any if self.stream is None else self.stream[1]
        self._item, self.item_scale = _decoder(item), Scale(item)
        details = Any if self.options.details is None else self.options.details
        self._details, self._details_scale = _decoder(details), Scale(details)

    def fitted(self, there: Any) -> Method:
        """The same method, as it is called at a server that has another version of it.

        Bytes and arrays in a union go in the message. So those by themselves do, where the server has that; and where
        the server has one by itself, its result is read as one.
        """
        found = copy.copy(self)
        _, _, parameters, _, result = there
        found.inline = frozenset(
            index
            for index in self.buffers
            if index < len(parameters)
            and parameters[index][1] != BUFFER
            and parameters[index][1][0] != "array"
        )
        if self.kind in (Kind.UNARY, Kind.CLIENT_STREAM) and not self.result_is_buffer:
            if result == BUFFER:
                found._read_apart(bytes_in(self.result), memoryview)
            elif result[0] == "array" and (array := array_in(self.result)) is not None:
                found._read_apart(array, array)
        return found

    def _read_apart(self, result: Any, come: Any) -> None:
        """Read the result as a buffer or an array by itself."""
        self.result, self.result_is_buffer, self.result_is_apart = result, True, True
        self.result_is_array, self.result_brings = isinstance(result, ArrayType), False
        self.read_result(_decoder(wire_type(come)), Scale(wire_type(come)))

    def _checked(self, type_: Any, what: str, is_buffer: bool) -> None:
        if type_ is Buffer and not is_buffer:
            raise TypeError(f"{self.label}: {what}: a stream has no rpc.Buffer: stream bytes or memoryview")
        if has_service(type_):
            raise TypeError(
                f"{self.label}: {what}: a service object is an argument by itself, or None, and not {shown(type_)}"
            )
        try:
            if not is_buffer:
                msgspec.msgpack.Decoder(type_)
                describe(type_, {})
        except TypeError as exc:
            instead = ""
            if "custom type" in str(exc):
                instead = ": an array may be in a union with None, and with others as the field of a struct"
            raise TypeError(f"{self.label}: {what}: {exc}{instead}") from None

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
                raise TypeError(f"{self.label}() has no parameter {shown(name)}")
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
        return self._sent(found), stream

    def _sent(self, arguments: list[Any]) -> tuple[Any, ...]:
        """Without those at the end that are the server's: their default is ``...`` here.

        :raises TypeError: there are such before others
        """
        while arguments and arguments[-1] is ...:
            arguments.pop()
        for index, argument in enumerate(arguments):
            if argument is ...:
                name, later = self.parameters[index].name, self.parameters[len(arguments) - 1].name
                text = f"its default is the server's, and {later!r}, which is behind it, is given"
                raise TypeError(f"{self.label}() lacks the argument {name!r}: {text}")
        return tuple(arguments)

    def decode_arguments(self, raw: Any) -> tuple[Any, ...]:
        """A call's arguments, which may lack some at the end, or have more. `exact` is tried before.

        A buffer is bytes, a memoryview or a `Lent`, an array an `Array`.

        :raises Error: INVALID_ARGUMENT; the text names the parameter
        """
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

    # -- with the memory of arrays -------------------------------------------------------------------------

    def unpack_arguments(self, packed: Packed) -> Unpacking:
        """A call's arguments, whose arrays are still to be filled. They were weighed.

        :raises Error: INVALID_ARGUMENT; the text names the parameter
        """
        unpacking = Unpacking(packed)
        try:
            unpacking.decode(self.exact)
        except Exception:
            unpacking.decode(self.decode_arguments)
        return unpacking

    def wrong_argument(self, exc: BaseException) -> Error:
        """The error for an array in the arguments that is refused."""
        return Error(Code.INVALID_ARGUMENT, f"{self.label}: an argument: {exc}")

    def unpack_result(self, packed: Packed, most: int) -> Unpacking:
        """A call's result, whose arrays are still to be filled.

        :raises Error: as for `decode_result`
        """
        unpacking = Unpacking(packed)
        unpacking.decode(functools.partial(self.decode_result, most=most))
        return unpacking

    def decode_streamed(self, item: bytes | Packed, most: int) -> Any:
        """An item that the callee streams, with the memory of its arrays.

        :raises Error: as for `decode_result`
        """
        if not isinstance(item, Packed):
            return self.decode_result(item, most)
        try:
            return self.unpack_result(item, most).fill()
        except ValueError as exc:
            raise self.wrong_result(exc) from None

    def decode_sent_item(self, raw: bytes | Packed) -> Any:
        """An item of the caller's stream.

        :raises Error: INVALID_ARGUMENT
        """
        try:
            if isinstance(raw, Packed):
                unpacking = Unpacking(raw)
                unpacking.decode(self._item)
                return unpacking.fill()
            return self._item(raw)
        except (msgspec.MsgspecError, ValueError) as exc:
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
            [
                [
                    p.name,
                    of(p.type, p.is_buffer)
                    if p.service is None
                    else described_object(p.service.__rpc_schema__.name, p.may_be_none),
                    p.default is msgspec.NODEFAULT,
                ]
                for p in self.parameters
            ],
            None if self.stream is None else of(self.stream[1]),
            of(self.result, self.result_is_buffer),
        ]


def _same(value: Any) -> Any:
    return value


def _decoder(type_: Any) -> Callable[[Any], Any]:
    return msgspec.msgpack.Decoder(type_, dec_hook=unpacked).decode
