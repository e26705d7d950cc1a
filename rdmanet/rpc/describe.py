"""Types as plain data, which can be sent, hashed and compared.

Theory
------
A description says what msgpack a type is encoded as, and nothing of the classes that have it in Python:

    "int", "str", ...               a kind of value (`_SCALARS`), "any"; "buffer" is what may go by reference
    ["list", T]                     also sets, and tuples of any length
    ["tuple", T, ...]               of these items
    ["dict", K, V]
    ["one of", value, ...]          enums and literals
    ["union", T, ...]
    ["array", T]                    of NumPy's types of items, or of "any" (arrays.py)
    ["struct", name]                its fields are in the table of structs, so that a type may contain itself

An entry of the table is [form, tag, closed, fields]. `form` is "map" or "array". `tag` is None, or [field, value]: what
tells the struct from the others of a union. `closed` says that unknown fields are refused. A field is
[name, T, required].

`differences` says why a reader would not understand a writer. Both may be at different versions: a field that the
writer does not have must be optional for the reader, one that the reader does not have is skipped, and a union of the
reader may have more members. What it accepts, msgspec decodes. Nothing but a buffer reads a buffer, and nothing but an
array an array: not even "any", since they may have come by reference.

Structs may contain themselves. A pair of structs fits if nothing speaks against it while it is assumed to fit. What
does not fit under assumptions does not fit at all, and is remembered. What fits is forgotten when the assumption on
which it stood has failed.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any, Final

import msgspec
from msgspec import inspect

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


def describe(annotation: Any, structs: Structs) -> Description:
    """The description of a type; the structs in it are added to the table.

    :raises TypeError: msgspec does not encode it
    """
    return _Describer(structs).of(inspect.type_info(annotation))


class _Describer:
    def __init__(self, structs: Structs) -> None:
        self._structs = structs
        self._names: dict[type, str] = {}

    def of(self, info: Any) -> Description:
        kind = type(info)
        if kind in _SCALARS:
            return _SCALARS[kind]
        if isinstance(info, _LISTS):
            return ["list", self.of(info.item_type)]
        if isinstance(info, inspect.TupleType):
            return ["tuple", *map(self.of, info.item_types)]
        if isinstance(info, inspect.DictType):
            return ["dict", self.of(info.key_type), self.of(info.value_type)]
        if isinstance(info, inspect.EnumType):
            return ["one of", *sorted((member.value for member in info.cls), key=_order)]
        if isinstance(info, inspect.LiteralType):
            return ["one of", *sorted(info.values, key=_order)]
        if isinstance(info, inspect.UnionType):
            return ["union", *sorted(map(self.of, info.types), key=_order)]
        if isinstance(info, inspect.Metadata):
            return self.of(info.type)
        if hasattr(info, "fields"):
            return ["struct", self._struct(info)]
        raise TypeError(f"{getattr(info, 'cls', info)!r} is not a type that msgspec encodes by itself")

    def _struct(self, info: Any) -> str:
        """The name in the table of a Struct, dataclass, TypedDict or NamedTuple. Names of two classes may be equal."""
        if (known := self._names.get(info.cls)) is not None:
            return known
        name: str = info.cls.__name__
        as_array = isinstance(info, inspect.NamedTupleType) or getattr(info, "array_like", False)
        tag = getattr(info, "tag", None)
        head = [
            "array" if as_array else "map",
            None if tag is None else [info.tag_field, tag],
            getattr(info, "forbid_unknown_fields", False),
        ]
        self._names[info.cls] = name
        table: list[Any] = [*head, []]
        taken = self._structs.setdefault(name, table)
        fields = [[field.encode_name, self.of(field.type), field.required] for field in info.fields]
        if taken is table:
            table[3] = fields
        elif taken != [*head, fields]:  # another one of this name
            raise TypeError(f"two types that differ are both named {name!r}: give one of them another name")
        return name


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
        if read == "any" and written != BUFFER and _kind(written) != "array":
            return []
        if isinstance(written, str) and (written == read or [written, read] in _WIDER):
            return []
        kind = _kind(written)
        if kind == "union":
            return [line for member in written[1:] for line in self.compare(member, read, where)]
        if _kind(read) == "union":
            tried = [self.compare(written, member, where) for member in read[1:]]
            if not all(tried):
                return []
            alike = [
                lines for lines, member in zip(tried, read[1:], strict=True) if _kind(member) == kind != ""
            ]
            return alike[0] if len(alike) == 1 else [self._line(written, read, where)]
        if kind != _kind(read) or kind == "":
            return [self._line(written, read, where)]
        if kind == "one of":
            unknown = [value for value in written[1:] if value not in read[1:]]
            return [f"{where}: {unknown[0]!r} is no value of the other side"] if unknown else []
        if kind == "tuple" and len(written) != len(read):
            return [f"{where}: {len(written) - 1} items on one side, {len(read) - 1} on the other"]
        if kind == "struct":
            return self._structs(written[1], read[1], where)
        return [
            line
            for index, (one, other) in enumerate(zip(written[1:], read[1:], strict=True))
            for line in self.compare(one, other, f"{where}[{index if kind == 'tuple' else ''}]")
        ]

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
            lines += self.compare(one[1], other[1], f"{where}.{other[0]}")
        return lines

    def _line(self, written: Description, read: Description, where: str) -> str:
        return f"{where}: {text(written)} is not {text(read)}"


_WIDER: Final = [["int", "float"]]


def _kind(description: Description) -> str:
    return "" if isinstance(description, str) else str(description[0])


def _tag(tag: Any) -> str:
    return "None" if tag is None else f"{tag[0]}={tag[1]!r}"


def text(description: Description) -> str:
    """A description for people."""
    if isinstance(description, str):
        return "None" if description == "none" else description
    kind, *parts = description
    if kind == "struct":
        return str(parts[0])
    if kind == "one of":
        return " | ".join(map(repr, parts))
    if kind == "union":
        return " | ".join(map(text, parts))
    return f"{kind}[{', '.join(map(text, parts))}]"
