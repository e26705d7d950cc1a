"""`rdmanet call --pyi`: the services of a server as classes of Python, with all their types.

Theory
------
A schema says what goes over the wire, not which classes a server has for it. So what is written here is the same on the
wire, and by the names of the server's structs: each of them is a `msgspec.Struct`, or a NamedTuple, also one that is a
dataclass there, and enums are literals. The text is a stub for type checkers and a module for clients at once: its
methods have no bodies. Where the server has a default, there is ``= ...``, for which a client sends nothing. A field
whose default is not known is `msgspec.UNSET`, which is not sent, either.

The schema comes from a peer, and somebody will run the text. So each name in it is checked to be a name of Python, and
each value is written by `repr`. Methods that take service objects are left out.
"""

from __future__ import annotations

import keyword
import math
import re
from typing import Any, Final

from rdmanet.errors import shown
from rdmanet.rpc.describe import FLAGS_MOST, LIMITS, Structs
from rdmanet.rpc.method import Kind

_MODULES: Final = {
    "datetime": "datetime.datetime",
    "time": "datetime.time",
    "date": "datetime.date",
    "timedelta": "datetime.timedelta",
    "uuid": "uuid.UUID",
    "decimal": "decimal.Decimal",
    "ext": "msgspec.msgpack.Ext",
}
_PLAIN: Final = {"bool", "int", "float", "str", "bytes"}
_BUILTINS: Final = {
    "bool",
    "int",
    "float",
    "str",
    "bytes",
    "list",
    "tuple",
    "dict",
    "memoryview",
    "bytearray",
}
_FROM: Final = {
    "Any": "typing",
    "Annotated": "typing",
    "Literal": "typing",
    "NamedTuple": "typing",
    "AsyncIterator": "collections.abc",
    "NDArray": "numpy.typing",
    "rpc": "rdmanet",
}
_ITEMS: Final = {
    "b1": "numpy.bool_", "i1": "numpy.int8", "i2": "numpy.int16", "i4": "numpy.int32", "i8": "numpy.int64",
    "u1": "numpy.uint8", "u2": "numpy.uint16", "u4": "numpy.uint32", "u8": "numpy.uint64",
    "f2": "numpy.float16", "f4": "numpy.float32", "f8": "numpy.float64", "c8": "numpy.complex64",
    "c16": "numpy.complex128", "S": "numpy.bytes_", "U": "numpy.str_", "M8": "numpy.datetime64",
    "m8": "numpy.timedelta64", "record": "numpy.void",
}  # fmt: skip
"""Types of arrays' items, without the order of the bytes: annotations are of the machine's own."""
_OF_ML_DTYPES: Final = re.compile(r"bfloat16|float[468]_e\dm\d[a-z]*|u?int[24]")


class Unwritable(ValueError):
    """A service that has no class of Python."""


def classes(services: dict[str, tuple[list[Any], Structs]]) -> str:
    """The text of a module with these services.

    :param services: their schemas, which were checked, by their names
    :raises Unwritable: one has a name that Python cannot have; the text says which
    """
    return _Writer(services).text()


class _Writer:
    def __init__(self, services: dict[str, tuple[list[Any], Structs]]) -> None:
        self._services = services
        self._imports: set[str] = set()
        self._members = {"self"}  # names inside of classes, which hide those outside
        for methods, structs in services.values():
            self._members |= {_checked(method[0], "a method") for method in methods}
            self._members |= {field[0] for struct in structs.values() for field in struct[3]}
        self._taken = self._members | _BUILTINS | {*_FROM, "msgspec", "numpy", "datetime", "builtins", "enum"}
        self._taken |= {"uuid", "decimal", "ml_dtypes"}
        self._flags: dict[int, str] = {}
        self._names: dict[str, str] = {}  # of the structs of the service that is being written

    def text(self) -> str:
        found: list[str] = []
        names = {name: self._name(name.partition("/")[0]) for name in self._services}
        written: dict[str, tuple[str, str]] = {}  # structs that several services have are written once
        for service, (methods, structs) in self._services.items():
            known = {name: written[name][0] for name in structs if name in written}
            self._names = {name: known.get(name) or self._name(name) for name in structs}
            for name, struct in structs.items():
                text = self._struct(self._names[name], struct)
                if name in written and written[name][1] != text:  # another one of this name
                    self._names[name] = self._name(name)
                    text = self._struct(self._names[name], struct)
                elif name in written:
                    continue
                written[name] = self._names[name], text
                found.append(text)
            found.append(self._service(names[service], service, methods))
        flags = [self._flags_class(bits, name) for bits, name in self._flags.items()]
        head = '"""Classes for clients, as `rdmanet call --pyi` has written them: a stub and a module at once."""\n'
        imports = [f"import {name}\n" for name in sorted(self._imports - {*_FROM}) if name != "rpc"]
        imports += sorted(f"from {_FROM[name]} import {name}\n" for name in self._imports & {*_FROM})
        head += "\nfrom __future__ import annotations\n\n" + "".join(imports)
        return "\n\n".join([head, *flags, *found])

    def _name(self, wanted: str) -> str:
        """A name of the module that nothing else has."""
        plain = re.sub(r"\W+", "_", wanted, flags=re.ASCII).strip("_") or "Type"
        plain = f"Type{plain}" if plain[0].isdigit() or keyword.iskeyword(plain) else plain
        name, number = plain, 2
        while name in self._taken:
            name, number = f"{plain}{number}", number + 1
        self._taken.add(name)
        return name

    def _use(self, name: str) -> str:
        """A name that is imported, or built in."""
        root = name.partition(".")[0]
        if root in _BUILTINS:
            if root not in self._members:
                return name
            self._imports.add("builtins")
            root, name = "builtins", f"builtins.{name}"
        if root in self._members:
            text = f"has a method or a field of the name {root!r}, which hides a module that its types need"
            raise Unwritable(f"the server {text}")
        self._imports.add(root)
        return name

    # -- types -----------------------------------------------------------------------------------------------

    def _type(self, type_: Any) -> str:
        if isinstance(type_, str):
            if type_ in ("none", "any"):
                return "None" if type_ == "none" else self._use("Any")
            if type_ not in _PLAIN | {"buffer", *_MODULES}:
                raise Unwritable(f"there is a type {shown(type_)}, which this version does not know")
            return self._use("memoryview" if type_ == "buffer" else _MODULES.get(type_, type_))
        kind, *parts = type_
        if kind == "struct":
            return self._names[parts[0]]
        if kind == "array":
            return f"{self._use('NDArray')}[{self._items(parts[0])}]"
        if kind == "one of":
            return self._literal(parts)
        if kind == "flags":
            return self._flags_name(parts[0])
        if kind == "within":
            limits = ", ".join(f"{name}={limit!r}" for name, limit in parts[1].items() if name in LIMITS)
            return f"{self._use('Annotated')}[{self._type(parts[0])}, {self._use('msgspec')}.Meta({limits})]"
        inside = [self._type(part) for part in parts]
        if kind == "union":
            return " | ".join(dict.fromkeys(inside)) or "None"
        if kind in ("list", "dict", "tuple"):
            return f"{self._use(kind)}[{', '.join(inside) or '()'}]"
        raise Unwritable(f"there is a type of the kind {shown(kind)}, which this version does not know")

    def _by_itself(self, type_: Any) -> str:
        """The type of a parameter or a result. There `bytes` are a buffer, and a bytearray is not."""
        return self._use("bytearray") if type_ == "bytes" else self._type(type_)

    def _items(self, name: Any) -> str:
        plain = str(name).lstrip("<|")
        if plain in _ITEMS:
            return self._use(_ITEMS[plain])
        return self._use(f"ml_dtypes.{plain}") if _OF_ML_DTYPES.fullmatch(plain) else self._use("Any")

    def _literal(self, values: list[Any]) -> str:
        if values and all(each is None or isinstance(each, (str, int, bool)) for each in values):
            return f"{self._use('Literal')}[{', '.join(map(repr, values))}]"
        return self._use("Any")

    def _flags_name(self, bits: int) -> str:
        if not 0 < bits < 1 << 63 or bits.bit_count() > FLAGS_MOST:
            return self._use("int")
        if bits not in self._flags:
            self._flags[bits] = self._name("Flags")
        return self._flags[bits]

    def _flags_class(self, bits: int, name: str) -> str:
        each = [f"    BIT_{at} = {1 << at}\n" for at in range(bits.bit_length()) if bits >> at & 1]
        enum = self._use("enum")
        return f"class {name}({enum}.IntFlag, boundary={enum}.STRICT):\n{''.join(each)}"

    # -- structs ---------------------------------------------------------------------------------------------

    def _struct(self, name: str, struct: Any) -> str:
        form, tag, is_closed, fields = struct
        is_array = form == "array"
        defaults = [self._given(is_array, *field[1:3], *field[4:5]) for field in fields]
        gaps = any(here and not later for here, later in zip(defaults, defaults[1:], strict=False))
        if (
            is_array
            and is_closed
            and tag is None
            and not gaps
            and all(_is_public(field[0]) for field in fields)
        ):
            base, options = self._use("NamedTuple"), []  # which a union may have beside a struct
        else:
            base, options = f"{self._use('msgspec')}.Struct", ["array_like=True"] * is_array
            if tag is not None:
                options += [f"tag_field={str(tag[0])!r}", f"tag={tag[1]!r}"]
            options += ["forbid_unknown_fields=True"] * bool(is_closed) + ["kw_only=True"] * gaps
        lines = [
            self._field(at, field[0], self._type(field[1]), default)
            for at, (field, default) in enumerate(zip(fields, defaults, strict=True))
        ]
        return f"class {name}({', '.join([base, *options])}):\n{''.join(lines) or '    pass' + chr(10)}"

    def _given(self, is_array: bool, type_: Any, required: bool, default: Any = None) -> str:
        """The default of a field; empty if there is none.

        One that is not known, of a struct that goes as a map, is not sent.
        """
        if required:
            return ""
        known = None
        if isinstance(default, list) and default:
            known, (kind, *others) = _default(default[0], type_), _kinds(type_)
            if known is None and kind in _MODULES and not others and isinstance(default[0], str):
                known = f"{self._use('msgspec')}.convert({default[0]!r}, {self._use(_MODULES[kind])})"
        return known or ("" if is_array else f"{self._use('msgspec')}.UNSET")

    def _field(self, at: int, name: str, annotation: str, default: str) -> str:
        if default.endswith(".UNSET"):
            annotation += f" | {default}Type".replace("UNSETType", "UnsetType")
        if _is_name(name) and not name.startswith("__"):
            return f"    {name}: {annotation}{f' = {default}' if default else ''}\n"
        if re.search(r'[\0-\x1f"\\]', name):
            raise Unwritable(f"the server has a field of the name {shown(name)}, which msgspec cannot have")
        own = re.sub(r"\W", "_", name, flags=re.ASCII)
        given = [f"default={default}"] * bool(default) + [f"name={name!r}"]
        return f"    field_{at}_{own}: {annotation} = {self._use('msgspec')}.field({', '.join(given)})\n"

    # -- services --------------------------------------------------------------------------------------------

    def _service(self, own: str, full: str, methods: list[Any]) -> str:
        name, _, version = full.partition("/")
        options = "" if name == own else f", name={name!r}"
        options += f", version={int(version)}" if version.isdecimal() else ""
        lines = [self._method(*method) for method in methods]
        head = f"class {own}({self._use('rpc')}.Service{options}):\n"
        is_empty = all(line.lstrip().startswith("#") for line in lines)
        return head + "\n".join([*lines, "    pass\n"] if is_empty else lines)

    def _method(self, name: str, kind: int, parameters: list[Any], stream: Any, result: Any) -> str:
        given, names = ["self"], {"self"}
        for parameter, type_, required in parameters:
            if (service := _object_in(type_)) is not None:
                text = f"an object of the service {service!r}, of which a schema has the name alone"
                return f"    # {name} is left out: it takes {text}\n"
            if _checked(parameter, f"a parameter of {name}") in names:
                raise Unwritable(
                    f"the server's {name} has two parameters {parameter!r}, or one of the name self"
                )
            names.add(parameter)
            given.append(f"{parameter}: {self._by_itself(type_)}{'' if required else ' = ...'}")
        if stream is not None:
            items = "items"
            while items in names:
                items += "_"
            if any(not required for _, _, required in parameters):
                given.append("*")
            given.append(f"{items}: {self._use('AsyncIterator')}[{self._type(stream)}]")
        if kind in (Kind.SERVER_STREAM, Kind.BOTH):
            returned, is_async = f"{self._use('AsyncIterator')}[{self._type(result)}]", ""
        else:
            returned, is_async = self._by_itself(result), "async "
        line = f"    {is_async}def {name}({', '.join(given)}) -> {returned}:\n"
        return f"{line}        raise NotImplementedError\n"


def _object_in(type_: Any) -> str | None:
    """The name of the service of which a parameter is an object; None if it is none."""
    each = type_[1:] if isinstance(type_, list) and type_[0] == "union" else [type_]
    return next((str(part[1]) for part in each if isinstance(part, list) and part[0] == "object"), None)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def _is_public(name: Any) -> bool:
    return _is_name(name) and not name.startswith("_")


def _checked(name: Any, what: str) -> str:
    """The name of something that keeps it.

    :raises Unwritable: Python has no such names
    """
    if not _is_public(name):
        raise Unwritable(f"the server has {what} of the name {shown(name)}, which Python cannot have")
    return str(name)


def _default(value: Any, type_: Any) -> str | None:
    """How the default of a field is written; None if it cannot be."""
    kinds = _kinds(type_)
    if value is None:
        return "None" if kinds & {"none", "any", "one of"} else None
    plain = {bool: {"bool"}, int: {"int", "float"}, float: {"float"}, str: {"str"}, bytes: {"bytes"}}
    for cls, known in plain.items():
        if type(value) is cls and (not isinstance(value, float) or math.isfinite(value)):
            return repr(value) if kinds & {*known, "one of", "any"} else None
    if value in ([], {}):
        return repr(value) if ("list" if value == [] else "dict") in kinds else None
    return None


def _kinds(type_: Any) -> set[str]:
    if isinstance(type_, str):
        return {type_}
    kind, *parts = type_
    if kind in ("union", "within"):
        return set().union(*(_kinds(part) for part in (parts if kind == "union" else parts[:1])))
    return {kind}
