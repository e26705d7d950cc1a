"""Types as plain data, which can be sent, hashed and compared.

Theory
------
A description says what msgpack a type is encoded as, and nothing of the classes that have it in Python:

    "int", "str", ...               a kind of value (`_SCALARS`), "any"; "buffer" is what may go by reference
    ["list", T]                     also sets, and tuples of any length
    ["tuple", T, ...]               of these items
    ["dict", K, V]
    ["one of", value, ...]          enums and literals
    ["flags", bits]                 combinations of these bits
    ["within", T, {limit: value}]   T with msgspec's constraints: "ge", "max_length", ...
    ["union", T, ...]
    ["array", T]                    of one type of items, a family of them, or "any" (array_types.py)
    ["struct", name]                its fields are in the table of structs, so that a type may contain itself

An entry of the table is [form, tag, closed, fields]. `form` is "map" or "array". `tag` is None, or [field, value]: what
tells the struct from the others of a union. `closed` says that unknown fields are refused, as a NamedTuple does. A
field is [name, T, required], and what follows if it says something: `left_out`, `default`. `left_out` says of who
writes it that the field may lack: if it has its default (LEFT_OUT_DEFAULT, of ``omit_defaults``), or as the program
likes (LEFT_OUT, of UNSET and of a TypedDict). `default` is [value], or [] if that is not known.

`differences` says why a reader would not understand a writer. Both may be at different versions: a field that the
writer does not have must be optional for the reader, one that the reader does not have is skipped, and a union of the
reader may have more members, as long as msgspec does not give the value to another of them. What the writer leaves out
must be optional, and if it stands for the writer's default, of the same default. The reader's constraints must follow
from the writer's. What it accepts, msgspec decodes, and a value that both know does not change on the way. Bytes read a
buffer, since a client sees to it that it does not go by reference (`Method.fitted`); so does an array in a union read
one. Nothing but an array reads an array: not even "any".

Structs may contain themselves. A pair of structs fits if nothing speaks against it while it is assumed to fit. What
does not fit under assumptions does not fit at all, and is remembered. What fits is forgotten when the assumption on
which it stood has failed.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import enum
import functools
import operator
import types
import typing
from typing import Annotated, Any, Final

import msgspec
from msgspec import inspect

from rdmanet.errors import ProtocolError, shown
from rdmanet.rpc.array_types import array_of, has_array
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.errors import Error
from rdmanet.rpc.hints import fields as field_hints
from rdmanet.rpc.hints import member, part
from rdmanet.rpc.weights import SCHEMA_BYTES, Scale

Description = Any
"""A str, or a list as above."""
Structs = dict[str, list[Any]]

BUFFER: Final = "buffer"
_SCALARS: Final[dict[type, str]] = {
    inspect.AnyType: "any",
    inspect.NoneType: "none",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.ByteArrayType: "bytes",
    inspect.MemoryViewType: "bytes",
    inspect.DateTimeType: "datetime",
    inspect.TimeType: "time",
    inspect.DateType: "date",
    inspect.TimeDeltaType: "timedelta",
    inspect.UUIDType: "uuid",
    inspect.DecimalType: "decimal",
    inspect.ExtType: "ext",
    inspect.RawType: "any",
}
_LISTS: Final = (
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.CollectionType,
)


METHODS_MOST: Final = 4096
FLAGS_MOST: Final = 16
LIMITS: Final = ("ge", "gt", "le", "lt", "max_length", "min_length", "multiple_of", "pattern", "tz")
"""In the order of their names."""
LEFT_OUT_DEFAULT: Final = 1
LEFT_OUT: Final = 2


def describe(annotation: Any, structs: Structs) -> Description:
    """The description of a type; the structs in it are added to the table.

    :raises TypeError: msgspec does not encode it
    """
    return _Describer(structs).of(inspect.type_info(annotation), annotation)


def has_arrays(annotation: Any) -> bool:
    """Whether there are arrays in a type, which `describe` accepts."""
    describer = _Describer({})
    describer.of(inspect.type_info(annotation), annotation)
    return describer.has_arrays


class _Describer:
    """:ivar has_arrays: there was one in what was described"""

    def __init__(self, structs: Structs) -> None:
        self._structs = structs
        self._names: dict[type, str] = {}
        self.has_arrays = False

    def of(self, info: Any, hint: Any) -> Description:
        """The description of a type, of which msgspec says this, and whose annotation this is."""
        limits = {name: limit for name in LIMITS if (limit := getattr(info, name, None)) is not None}
        found = self._without_limits(info, hint)
        return ["within", found, limits] if limits else found

    def _without_limits(self, info: Any, hint: Any) -> Description:
        kind = type(info)
        if kind in _SCALARS:
            return _SCALARS[kind]
        if isinstance(info, _LISTS):
            return ["list", self.of(info.item_type, part(hint))]
        if isinstance(info, inspect.TupleType):
            return ["tuple", *(self.of(item, part(hint, at)) for at, item in enumerate(info.item_types))]
        if isinstance(info, inspect.DictType):
            return ["dict", self.of(info.key_type, part(hint)), self.of(info.value_type, part(hint, 1))]
        if isinstance(info, inspect.EnumType):
            if issubclass(info.cls, enum.Flag):
                return ["flags", _bits(info.cls)]
            return ["one of", *sorted((member.value for member in info.cls), key=_order)]
        if isinstance(info, inspect.LiteralType):
            return ["one of", *sorted(info.values, key=_order)]
        if isinstance(info, inspect.UnionType):
            return ["union", *sorted((self.of(each, member(hint, each)) for each in info.types), key=_order)]
        if isinstance(info, inspect.Metadata):
            return self.of(info.type, hint)
        if hasattr(info, "fields"):
            return ["struct", self._struct(info)]
        if isinstance(info, inspect.CustomType) and (array := array_of(info.cls, hint)) is not None:
            self.has_arrays = True
            return array.description
        cls, hints = getattr(info, "cls", info), ""
        if cls is Buffer:
            hints = ": an rpc.Buffer is an argument or a result by itself, an array may be anywhere"
        raise TypeError(f"{cls!r} is not a type that msgspec encodes by itself{hints}")

    def _struct(self, info: Any) -> str:
        """The name in the table of a Struct, dataclass, TypedDict or NamedTuple. Names of two classes may be equal."""
        if (known := self._names.get(info.cls)) is not None:
            return known
        name = _name(info.cls)
        as_array = isinstance(info, inspect.NamedTupleType) or getattr(info, "array_like", False)
        tag = getattr(info, "tag", None)
        head = [
            "array" if as_array else "map",
            None if tag is None else [info.tag_field, tag],
            getattr(info, "forbid_unknown_fields", False) or isinstance(info, inspect.NamedTupleType),
        ]
        self._names[info.cls] = name
        table: list[Any] = [*head, []]
        taken = self._structs.setdefault(name, table)
        left_out = _left_out(info) if head[0] == "map" else {}
        fields, hints = [], field_hints(info.cls)
        for field in info.fields:
            described = self.of(field.type, hints.get(field.name, Any))
            fields.append([field.encode_name, described, field.required])
            how, default = left_out.get(field.name, 0), _default(field)
            if how or default:
                fields[-1] += [how, default]
        if taken is table:
            table[3] = fields
        elif taken != [*head, fields]:  # another one of this name
            raise TypeError(f"two types that differ are both named {name!r}: give one of them another name")
        return name


def _name(type_: Any) -> str:
    """The name of a class, with the types that it was made generic for."""
    if arguments := typing.get_args(type_):
        origin = typing.get_origin(type_)
        if origin in (typing.Union, types.UnionType):
            return " | ".join(map(_name, arguments))
        return f"{_name(origin)}[{', '.join(map(_name, arguments))}]"
    return str(getattr(type_, "__name__", type_))


def _bits(flags: type[enum.Flag]) -> int:
    """All bits of flags. Their class keeps each combination that it has seen, so there may not be very many.

    :raises TypeError: there may be
    """
    if flags._boundary_ is enum.KEEP:  # type: ignore[attr-defined]
        text = f"write `class {flags.__name__}(enum.IntFlag, boundary=enum.STRICT)`, or send an int"
        raise TypeError(f"{flags.__name__} keeps bits that it has no names for: {text}")
    bits = functools.reduce(operator.or_, (flag.value for flag in flags), 0)
    if bits.bit_count() > FLAGS_MOST:
        text = f"{flags.__name__} has {bits.bit_count()} bits, and may have {FLAGS_MOST}"
        raise TypeError(f"{text}: send an int, or a set of an enum")
    return bits


def _left_out(info: Any) -> dict[str, int]:
    """The fields that may lack where a value of this type is written."""
    if isinstance(info, inspect.TypedDictType):
        return {field.name: LEFT_OUT for field in info.fields if not field.required}
    found: dict[str, int] = {}
    if isinstance(info, inspect.StructType):
        hints = {field.name: field.type for field in msgspec.structs.fields(info.cls)}
        if (typing.get_origin(info.cls) or info.cls).__struct_config__.omit_defaults:
            found = {
                field.name: LEFT_OUT_DEFAULT
                for field in info.fields
                if _default(field) and _is_left_out(field.default_factory)
            }
    else:
        hints = typing.get_type_hints(typing.get_origin(info.cls) or info.cls)
    return found | {
        name: found.get(name, 0) | LEFT_OUT for name, hint in hints.items() if _may_be_unset(hint)
    }


def _may_be_unset(hint: Any) -> bool:
    hint = getattr(hint, "__value__", hint)  # of `type X = ...`
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        return any(map(_may_be_unset, typing.get_args(hint)))
    return hint is msgspec.UnsetType


def _default(field: Any) -> list[Any]:
    """The default of a field as plain data, in a list; an empty one if it has none that can be known."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory in _FACTORIES:
        value = field.default_factory()
    else:
        return []
    try:
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(value, order="deterministic"))]
    except Exception:  # what msgspec does not encode
        return []


@functools.cache
def _is_left_out(factory: Any) -> bool:
    """Whether ``omit_defaults`` leaves out what a factory makes: msgspec does so for some of them."""
    if factory is msgspec.NODEFAULT:
        return True
    field = ("x", Any, msgspec.field(default_factory=factory))
    one = msgspec.defstruct("One", [field], omit_defaults=True)()
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode({})


_FACTORIES: Final = (list, dict, set, frozenset, tuple, bytearray, bytes, str, int, float, bool)


def _order(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def differences(
    written: Description, by: Structs, read: Description, of: Structs, where: str = ""
) -> list[str]:
    """Why a reader does not understand everything that a writer may send; empty if it does.

    :param by: the writer's table of structs
    :param of: the reader's
    :param where: what begins each line
    """
    return _Comparer(by, of).compare(written, read, where)


class _Comparer:
    def __init__(self, by: Structs, of: Structs) -> None:
        self._by = by
        self._of = of
        self._assumed: set[tuple[str, str]] = set()
        self._failed: set[tuple[str, str]] = set()

    def compare(self, written: Description, read: Description, where: str) -> list[str]:
        if read == "any" and not has_array(written, self._by, set()):
            return []
        if isinstance(written, str) and (written == read or [written, read] in _WIDER):
            return []
        kind = _kind(written)
        if kind == "union":
            return [line for member in written[1:] for line in self.compare(member, read, where)]
        if _kind(read) == "union":
            members = [member for member in read[1:] if not _is_taken(written, member, read[1:])]
            tried = [self.compare(written, member, where) for member in members]
            if not all(tried):
                return []
            alike = [
                lines for lines, member in zip(tried, members, strict=True) if _kind(member) == kind != ""
            ]
            return alike[0] if len(alike) == 1 else [self._line(written, read, where)]
        if "within" in (kind, _kind(read)):
            return self._within(written, read, where)
        if kind != _kind(read) or kind == "":
            return [self._line(written, read, where)]
        if kind == "flags":
            unknown_bits = written[1] & ~read[1]
            return [f"{where}: the other side has no flags of {unknown_bits:#x}"] if unknown_bits else []
        if kind == "one of":
            unknown = [value for value in written[1:] if value not in read[1:]]
            return [f"{where}: {shown(unknown[0])} is no value of the other side"] if unknown else []
        if kind == "tuple" and len(written) != len(read):
            return [f"{where}: {len(written) - 1} items on one side, {len(read) - 1} on the other"]
        if kind == "struct":
            return self._structs(written[1], read[1], where)
        return [
            line
            for index, (one, other) in enumerate(zip(written[1:], read[1:], strict=True))
            for line in self.compare(one, other, f"{where}[{index if kind == 'tuple' else ''}]")
        ]

    def _within(self, written: Description, read: Description, where: str) -> list[str]:
        _, plain, limits = written if _kind(written) == "within" else ("", written, {})
        _, other, wanted = read if _kind(read) == "within" else ("", read, {})
        if not isinstance(limits, dict) or not isinstance(wanted, dict):
            raise ValueError("limits are a map")
        if lines := self.compare(plain, other, where):
            return lines
        if all(_follows(name, limit, limits) for name, limit in wanted.items()):
            return []
        return [self._line(written, read, where)]

    def _structs(self, writer: str, reader: str, where: str) -> list[str]:
        pair = writer, reader
        if pair in self._assumed:
            return []
        if pair in self._failed:  # and its fields were named then
            return [f"{where}: {writer} is not {reader}"]
        before = set(self._assumed)
        self._assumed.add(pair)
        lines = self._fields(writer, reader, where)
        if lines:
            self._assumed = before
            self._failed.add(pair)
        return lines

    def _fields(self, writer: str, reader: str, where: str) -> list[str]:
        form, tag, _, sent = self._by[writer]
        other_form, other_tag, closed, wanted = self._of[reader]
        if (form, tag) != (other_form, other_tag):
            return [
                f"{where}: {writer} is a {form} with the tag {_tag(tag)}, not a {other_form} with {_tag(other_tag)}"
            ]
        lines = []
        if form == "array":
            pairs: list[tuple[Any, Any]] = list(zip(sent, wanted, strict=False))
            for one, other in pairs:
                if one[0] != other[0]:
                    return [f"{where}: {writer}.{one[0]} is at the place of {reader}.{other[0]}"]
            extra, lacking = sent[len(wanted) :], wanted[len(sent) :]
        else:
            theirs = {field[0]: field for field in sent}
            pairs = [(theirs[field[0]], field) for field in wanted if field[0] in theirs]
            known = {field[0] for field in wanted}
            extra = [field for field in sent if field[0] not in known]
            lacking = [field for field in wanted if field[0] not in theirs]
        for field in lacking:
            if field[2]:
                lines.append(f"{where}: {reader}.{field[0]} is required, and {writer} does not have it")
        if closed and extra:
            lines.append(f"{where}: {writer}.{extra[0][0]} is unknown to {reader}, which forbids that")
        for one, other in pairs:
            if why := _lacks(one, other):
                lines.append(f"{where}: {writer}.{one[0]} is left out {why} {reader}")
            lines += self.compare(one[1], other[1], f"{where}.{other[0]}")
        return lines

    def _line(self, written: Description, read: Description, where: str) -> str:
        return f"{where}: {text(written)} is not {text(read)}"


_WIDER: Final = [["int", "float"], [BUFFER, "bytes"]]


def _is_taken(written: Description, read: Description, others: list[Description]) -> bool:
    """Whether a member of a union reads nothing of what is written, since msgspec gives it to another one.

    An integer is for the member that stands for some integers, and not for a float.
    """
    if _plain(written) != "int" or _plain(read) != "float":
        return False
    return any(
        _kind(other) == "flags" or (_kind(other) == "one of" and _has_integer(other)) for other in others
    )


def _has_integer(choices: Description) -> bool:
    return any(isinstance(value, int) for value in choices[1:])


def _plain(description: Description) -> Description:
    return _plain(description[1]) if _kind(description) == "within" else description


def _lacks(written: Any, read: Any) -> str:
    """What is wrong if a field is left out where it is written; empty if nothing is."""
    how, default = written[3:] or (0, [])
    if how and read[2]:
        return f"{'at times' if how & LEFT_OUT else f'if it is {shown(default[0])}'}, and is required by"
    others = list(read[4:] or ((),))[0]
    if _plain(read[1]) == "float":
        default, others = _as_floats(default), _as_floats(others)
    if how & LEFT_OUT_DEFAULT and _order(default) != _order(others):
        return f"if it is {shown(default[0])}, which is not the default of"
    return ""


def _as_floats(default: Any) -> list[Any]:
    return [float(value) if type(value) is int else value for value in default]


def _follows(name: str, limit: Any, limits: dict[str, Any]) -> bool:
    """Whether a limit of the reader's follows from those of the writer."""
    known = limits.get(name)
    if name in ("ge", "gt"):
        other = limits.get("gt" if name == "ge" else "ge")
        return (known is not None and known >= limit) or (
            other is not None and (other >= limit if name == "ge" else other > limit)
        )
    if name in ("le", "lt"):
        other = limits.get("lt" if name == "le" else "le")
        return (known is not None and known <= limit) or (
            other is not None and (other <= limit if name == "le" else other < limit)
        )
    if known is None:
        return bool(name == "min_length" and limit == 0)
    if name == "max_length":
        return bool(known <= limit)
    if name == "min_length":
        return bool(known >= limit)
    if name == "multiple_of":
        return bool(limit) and known % limit == 0
    return bool(known == limit)


def _kind(description: Description) -> str:
    return "" if isinstance(description, str) else str(description[0])


def _tag(tag: Any) -> str:
    return "None" if tag is None else f"{tag[0]}={shown(tag[1])}"


def text(description: Description) -> str:
    """A description for people."""
    if isinstance(description, str):
        return "None" if description == "none" else description
    kind, *parts = description
    if kind == "struct":
        return str(parts[0])
    if kind == "one of":
        return " | ".join(map(shown, parts))
    if kind == "union":
        return " | ".join(map(text, parts))
    if kind == "flags":
        return f"flags of {parts[0]:#x}"
    if kind == "within":
        return (
            f"{text(parts[0])} with {', '.join(f'{name}={shown(value)}' for name, value in parts[1].items())}"
        )
    return f"{kind}[{', '.join(map(text, parts))}]"


# ---- A schema that a server has sent ---------------------------------------------------------------------------

_Parameters = list[tuple[str, Any, bool]]
_Methods = Annotated[
    list[tuple[str, Annotated[int, msgspec.Meta(ge=0, le=3)], _Parameters, Any, Any]],
    msgspec.Meta(max_length=METHODS_MOST),
]
_decode_schema: Final = msgspec.msgpack.Decoder(tuple[_Methods, Structs]).decode
_scale: Final = Scale(tuple[_Methods, Structs])


def decode_description(raw: Any) -> tuple[list[Any], Structs]:
    """The methods and structs of a server's schema, as it came by the wire.

    :raises ProtocolError: it is no schema
    """
    try:
        _scale.weigh(raw, SCHEMA_BYTES)
        methods, structs = _decode_schema(raw)
    except (msgspec.MsgspecError, RecursionError, Error) as exc:
        raise ProtocolError(f"the server sent what is no schema: {exc}") from None
    return methods, structs
