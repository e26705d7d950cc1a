"""Random types, another version of each, random values, and whether what has arrived is what was sent.

A `Node` describes a type without Python's classes, so that it can be copied and changed. `build` makes the type. A
`Value` remembers by which node each part of it was made, so `arrived` need not ask msgspec what it is.
"""

import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import math
import operator
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

Random = random.Random

SCALARS: dict[str, tuple[Any, str]] = {
    "none": (None, "none"),
    "bool": (bool, "bool"),
    "int": (int, "int"),
    "float": (float, "float"),
    "str": (str, "text"),
    "bytes": (bytes, "text"),
    "bytearray": (bytearray, "text"),
    "memoryview": (memoryview, "text"),
    "datetime": (datetime.datetime, "text"),
    "date": (datetime.date, "text"),
    "time": (datetime.time, "text"),
    "timedelta": (datetime.timedelta, "text"),
    "uuid": (uuid.UUID, "text"),
    "decimal": (decimal.Decimal, "text"),
    "any": (Any, "any"),
}
"""The type, and the group of which a union has one member at most."""
GROUPS = {
    **{kind: group for kind, (_, group) in SCALARS.items()},
    **dict.fromkeys(("list", "sequence", "set", "frozenset", "items", "tuple"), "array"),
    **dict.fromkeys(("dict", "mapping"), "map"),
    "flags": "int",
}
KEYS = ("int", "str", "date", "uuid", "one of")
FORMS = ("struct", "array", "data", "typed", "named")
LIMITED = {
    "int": ("ge", "gt", "le", "lt", "multiple_of"),
    "float": ("ge", "le"),
    "str": ("min_length", "max_length"),
    "bytes": ("min_length", "max_length"),
    "list": ("min_length", "max_length"),
}


@dataclasses.dataclass(eq=False)
class Field:
    name: str
    node: "Node"
    mode: str = "required"
    """Or "default", or "absent": UNSET, or not required in a TypedDict."""
    default: "Value | None" = None


@dataclasses.dataclass(eq=False)
class Node:
    kind: str
    parts: list["Node"] = dataclasses.field(default_factory=list)
    values: list[Any] = dataclasses.field(default_factory=list)
    fields: list[Field] = dataclasses.field(default_factory=list)
    form: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: dict[str, Any] = dataclasses.field(default_factory=dict)
    built: Any = None
    is_key: bool = False

    @property
    def group(self) -> str:
        if self.kind == "one of":
            return "int" if isinstance(self.values[0], int) else "text"
        if self.kind == "struct":
            group = "array" if self.form in ("array", "named") else "map"
            return (
                f"{group} Struct{self.options.get('tag', '')}" if self.form in ("struct", "array") else group
            )
        return GROUPS.get(self.kind, self.kind)

    def name_of(self, field: Field) -> str:
        """Its name in msgpack."""
        return field.name.upper() if self.options.get("rename") else field.name

    def nodes(self) -> list["Node"]:
        inner = [*self.parts, *(field.node for field in self.fields)]
        return [self, *(node for part in inner for node in part.nodes())]


@dataclasses.dataclass(eq=False)
class Value:
    node: Node
    value: Any
    parts: list["Value"] = dataclasses.field(default_factory=list)
    fields: dict[str, "Value"] = dataclasses.field(default_factory=dict)
    """Those that are given."""


# ---- Types ---------------------------------------------------------------------------------------------------


def a_node(rng: Random, depth: int = 3) -> Node:
    """A random type."""
    if depth == 0 or rng.random() < 0.35:
        return a_scalar(rng)
    kind = rng.choice(
        ("list", "sequence", "items", "tuple", "set", "dict", "mapping", "union", *["struct"] * 5)
    )
    if kind == "struct":
        return a_struct(rng, depth)
    if kind == "union":
        node = Node("union", [a_node(rng, depth - 1) for _ in range(rng.randint(2, 4))])
        make_valid(node)
        return node
    if kind == "set":
        return Node(rng.choice(("set", "frozenset")), [a_key(rng)])
    if kind in ("dict", "mapping"):
        return Node(kind, [a_key(rng), a_node(rng, depth - 1)])
    count = rng.randint(0, 3) if kind == "tuple" else 1
    found_node = Node(kind, [a_node(rng, depth - 1) for _ in range(count)])
    limit(found_node, rng)
    return found_node


def a_scalar(rng: Random) -> Node:
    kind = rng.choice((*SCALARS, "one of", "flags"))
    if kind in ("one of", "flags"):
        return a_choice(rng, kind)
    node = Node(kind)
    limit(node, rng)
    return node


def a_key(rng: Random) -> Node:
    kind = rng.choice(KEYS)
    node = a_choice(rng, kind) if kind == "one of" else Node(kind)
    node.is_key = True
    return node


def a_choice(rng: Random, kind: str) -> Node:
    if kind == "flags":
        return Node(kind, values=sorted(rng.sample((1, 2, 4, 8), rng.randint(1, 4))))
    values = ("a", "b", "c", "d") if rng.random() < 0.5 else (1, 2, 3, 4)
    return Node(kind, values=rng.sample(values, rng.randint(1, 4)), form=rng.choice(("enum", "literal")))


def a_struct(rng: Random, depth: int) -> Node:
    node = Node("struct", form=rng.choice(FORMS))
    for name in rng.sample("abcdef", rng.randint(0, 4)):
        field = Field(name, a_node(rng, depth - 1))
        node.fields.append(field)
        set_mode(field, node, rng)
    if node.form in ("struct", "array"):
        for option, often in (("omit_defaults", 0.4), ("forbid_unknown_fields", 0.2), ("tag", 0.2)):
            if rng.random() < often:
                node.options[option] = True if option != "tag" else rng.choice(("A", "B"))
        if rng.random() < 0.2:
            node.options["rename"] = "upper"
    return node


def set_mode(field: Field, node: Node, rng: Random) -> None:
    modes = ["required", "absent"] if node.form == "typed" else ["required", "default"]
    if node.form in ("struct", "data"):
        modes.append("absent")
    field.mode, field.default = rng.choice(modes), None
    if field.mode == "default":
        field.default = a_default(field.node, rng)
        if field.default is None:
            field.mode = "required"


def a_default(node: Node, rng: Random) -> Value | None:
    """One that a class may have: nothing that can be changed, but an empty list or dict."""
    if node.kind == "union":
        return a_default(rng.choice(node.parts), rng)
    if node.kind in ("list", "dict") and "min_length" not in node.limits:
        return Value(node, [] if node.kind == "list" else {})
    if node.kind in ("none", "bool", "int", "float", "str", "bytes", "date", "one of", "uuid"):
        return a_value(node, rng)
    return None


def limit(node: Node, rng: Random) -> None:
    node.limits = {}
    for name in rng.sample(LIMITED.get(node.kind, ()), rng.randint(0, 1) if node.kind in LIMITED else 0):
        node.limits[name] = rng.randint(1, 3)


# ---- Another version -----------------------------------------------------------------------------------------


def another(node: Node, rng: Random) -> Node:
    """The same type, with some changes."""
    node = copy.deepcopy(node)
    for each in node.nodes():
        each.built = None
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        change(rng.choice(node.nodes()), rng)
    for each in reversed(node.nodes()):
        if each.kind == "union":
            make_valid(each)
    for each in node.nodes():
        for field in each.fields:
            if field.default is not None:
                renew_default(field, each, rng)
    return node


def make_valid(union: Node) -> None:
    """Leave only what msgspec knows apart. It may crash some time after it has refused a type."""
    found: dict[str, Node] = {}
    parts = union.parts
    while parts:
        part, *parts = parts
        if part.kind == "union":
            parts += part.parts
        elif part.kind != "any" and not any(_are_alike(part.group, group) for group in found):
            found[part.group] = part
    union.parts = list(found.values()) or [Node("int")]
    for part in union.parts:  # msgspec 0.22 crashes, if one of the others is a tuple
        part.limits = {}
    if len(union.parts) == 1:
        become(union, union.parts[0])


def _are_alike(one: str, other: str) -> bool:
    """Whether members of these groups cannot be in one union. Structs of the same form with different tags can."""
    (form, *struct), (other_form, *other_struct) = one.split(), other.split()
    if form == other_form:
        return ["Struct"] in (struct, other_struct) or [] in (struct, other_struct) or struct == other_struct
    return bool(struct and other_struct)


def renew_default(field: Field, node: Node, rng: Random) -> None:
    """The default is of the version's own type, and the same one if it can be."""
    assert field.default is not None
    value = field.default.value
    for part in field.node.parts if field.node.kind == "union" else [field.node]:
        if part is field.default.node or part.kind == field.default.node.kind != "one of":
            with contextlib.suppress(msgspec.ValidationError):
                plain = value.value if isinstance(value, enum.Enum) else value
                renewed = msgspec.convert(plain, build(part))
                if isinstance(value, enum.Enum) or type(renewed) is type(value):
                    field.default = Value(part, renewed)
                    return
    set_mode(field, node, rng)


def change(node: Node, rng: Random) -> None:
    if node.kind == "struct":
        return change_struct(node, rng)
    if node.is_key:
        return become(node, a_key(rng))
    choice = rng.random()
    if node.kind == "union" and choice < 0.7:
        if choice < 0.3 and len(node.parts) > 2:
            node.parts.pop(rng.randrange(len(node.parts)))
        else:
            added = a_node(rng, 1)
            if added.kind not in ("union", "any") and added.group not in [part.group for part in node.parts]:
                node.parts.append(added)
    elif node.kind in ("one of", "flags") and choice < 0.7:
        node.values = (
            a_choice(rng, node.kind).values if choice < 0.2 else sorted({*node.values, node.values[0]})
        )
        if choice > 0.4:
            node.values = ["a", "b", "c", "d"] if isinstance(node.values[0], str) else [1, 2, 4, 8]
    elif node.kind in LIMITED and choice < 0.3:
        limit(node, rng)
    elif node.kind in ("list", "sequence", "items") and choice < 0.5:
        node.kind = rng.choice(("list", "sequence", "items"))
        node.limits = {}
    elif node.kind == "tuple" and choice < 0.5:
        node.parts.append(a_scalar(rng))
    elif choice < 0.85 and node.kind not in ("union", "any"):
        old = copy.copy(node)
        added = rng.choice((Node("none"), Node("float"), Node("str"), Node("list", [Node("int")])))
        if added.group != old.group:
            become(node, Node("union", [old, added]))
    else:
        become(node, a_node(rng, 1))


def become(node: Node, other: Node) -> None:
    vars(node).update(vars(other))


def change_struct(node: Node, rng: Random) -> None:
    what = rng.choice(("add", "add", "remove", "mode", "mode", "option", "form", "order"))
    if what == "add":
        if free := [name for name in "abcdefgh" if name not in [field.name for field in node.fields]]:
            field = Field(rng.choice(free), a_node(rng, 1))
            node.fields.append(field)
            set_mode(field, node, rng)
    elif what == "remove" and node.fields:
        node.fields.pop(rng.choice((-1, rng.randrange(len(node.fields)))))
    elif what == "mode" and node.fields:
        set_mode(rng.choice(node.fields), node, rng)
    elif what == "option" and node.form in ("struct", "array"):
        option = rng.choice(("omit_defaults", "forbid_unknown_fields"))
        node.options[option] = not node.options.get(option, False)
    elif what == "form":
        same = ("array", "named") if node.form in ("array", "named") else ("struct", "data", "typed")
        node.form, node.options = rng.choice(same), {}
        for field in node.fields:
            allowed = {"typed": ("required", "absent"), "struct": ("required", "default", "absent"),
                       "data": ("required", "default", "absent")}.get(node.form, ("required", "default"))  # fmt: skip
            if field.mode not in allowed:
                set_mode(field, node, rng)
    elif what == "order":
        rng.shuffle(node.fields)


# ---- Python's types ------------------------------------------------------------------------------------------


def build(node: Node) -> Any:
    """The type. It is made once."""
    if node.built is None:
        node.built = _build(node)
        if node.limits:
            node.built = Annotated[node.built, Meta(**node.limits)]
    return node.built


def _build(node: Node) -> Any:
    if node.kind in SCALARS:
        return SCALARS[node.kind][0]
    if node.kind == "union":
        return Union[tuple(build(part) for part in node.parts)]  # noqa: UP007  it is made at run time
    if node.kind == "one of" and node.form == "literal":
        return Literal[tuple(node.values)]
    if node.kind in ("one of", "flags"):
        names = {f"V{value}": value for value in node.values}
        if node.kind == "flags":
            return enum.IntFlag(_name(node), names, boundary=enum.STRICT)
        return enum.Enum(_name(node), names)
    if node.kind == "struct":
        return _struct(node)
    parts = [build(part) for part in node.parts]
    if node.kind == "tuple":
        return tuple[tuple(parts)] if parts else tuple[()]  # type: ignore[misc]
    if node.kind in ("dict", "mapping"):
        return (dict if node.kind == "dict" else Mapping)[tuple(parts)]  # type: ignore[index]
    if node.kind == "items":
        return tuple[parts[0], ...]
    return {"list": list, "sequence": Sequence, "set": set, "frozenset": frozenset}[node.kind][parts[0]]  # type: ignore[index]


def _name(node: Node) -> str:
    return f"T{id(node):x}"


def ordered(node: Node) -> list[Field]:
    """The fields as they are encoded: where the order matters, those without a default are first."""
    return sorted(node.fields, key=lambda field: node.form in ("array", "named") and field.mode != "required")


def _struct(node: Node) -> Any:
    fields = [
        (field.name, build(field.node) | UnsetType if _is_unset(node, field) else build(field.node), field)
        for field in ordered(node)
    ]
    if node.form == "typed":
        return TypedDict(  # type: ignore[operator]
            _name(node), {n: NotRequired[t] if f.mode == "absent" else t for n, t, f in fields}
        )
    if node.form == "named":
        defaults = [f.default.value for _, _, f in fields if f.default is not None]
        made = collections.namedtuple(_name(node), [n for n, _, _ in fields], defaults=defaults)  # noqa: PYI024
        made.__annotations__ = {n: t for n, t, _ in fields}
        return made
    if node.form == "data":
        return dataclasses.make_dataclass(
            _name(node), [(n, t, _data_default(f)) for n, t, f in fields], kw_only=True
        )
    return msgspec.defstruct(
        _name(node),
        [(n, t) if f.mode == "required" else (n, t, _struct_default(f)) for n, t, f in fields],
        kw_only=True,
        array_like=node.form == "array",
        **node.options,
    )


def _is_unset(node: Node, field: Field) -> bool:
    return field.mode == "absent" and node.form != "typed"


def _struct_default(field: Field) -> Any:
    return UNSET if field.default is None else field.default.value


def _data_default(field: Field) -> Any:
    if field.mode == "required":
        return dataclasses.field()
    value = _struct_default(field)
    if isinstance(value, (list, dict)):
        return dataclasses.field(default_factory=type(value))
    return dataclasses.field(default=value)


# ---- Values --------------------------------------------------------------------------------------------------


def a_value(node: Node, rng: Random) -> Value:
    """A random value of a type, as the program has it."""
    if node.kind == "union":
        return a_value(rng.choice(node.parts), rng)
    if node.kind == "struct":
        return _a_struct(node, rng)
    if node.kind == "one of":
        chosen = rng.choice(node.values)
        return Value(node, chosen if node.form == "literal" else build(node)(chosen))
    if node.kind == "flags":
        chosen = functools.reduce(operator.or_, rng.sample(node.values, rng.randint(0, len(node.values))), 0)
        return Value(node, build(node)(chosen))
    if node.kind == "tuple":
        parts = [a_value(part, rng) for part in node.parts]
        return Value(node, tuple(part.value for part in parts), parts)
    if node.kind in ("dict", "mapping"):
        keys = {part.value: part for part in (a_value(node.parts[0], rng) for _ in range(rng.randint(0, 3)))}
        parts = [each for key in keys.values() for each in (key, a_value(node.parts[1], rng))]
        return Value(node, {k.value: v.value for k, v in zip(parts[::2], parts[1::2], strict=True)}, parts)
    if node.kind in ("set", "frozenset"):
        found = {part.value: part for part in (a_value(node.parts[0], rng) for _ in range(rng.randint(0, 3)))}
        return Value(node, (set if node.kind == "set" else frozenset)(found), list(found.values()))
    if node.kind in ("list", "sequence", "items"):
        least = node.limits.get("min_length", 0)
        parts = [
            a_value(node.parts[0], rng) for _ in range(rng.randint(least, node.limits.get("max_length", 3)))
        ]
        return Value(node, (tuple if node.kind == "items" else list)(part.value for part in parts), parts)
    return Value(node, _a_scalar_value(node, rng))


def _a_struct(node: Node, rng: Random) -> Value:
    given = {}
    for field in node.fields:
        if field.mode == "required" or rng.random() < 0.6:
            given[field.name] = a_value(field.node, rng)
    made = build(node)(**{name: part.value for name, part in given.items()})
    return Value(node, made, fields=given)


def _a_scalar_value(node: Node, rng: Random) -> Any:
    limits = node.limits
    length = rng.randint(limits.get("min_length", 0), limits.get("max_length", 4))
    match node.kind:
        case "none":
            return None
        case "bool":
            return rng.random() < 0.5
        case "int":
            least = limits.get("ge", limits.get("gt", -2) + 1)
            most = limits.get("le", limits.get("lt", 1 << 40) - 1)
            return rng.choice((least, most, rng.randint(min(least, most), most))) * limits.get(
                "multiple_of", 1
            )
        case "float":
            low, high = limits.get("ge", -9), limits.get("le", 9)
            return rng.choice((float(low) if "ge" in limits else float(high), (low + high) / 2))
        case "str":
            return "".join(rng.choices("aé€\x00", k=length))
        case "bytes" | "bytearray" | "memoryview":
            return SCALARS[node.kind][0](rng.randbytes(length))
        case "datetime":
            zone = rng.choice((None, datetime.UTC, datetime.timezone(datetime.timedelta(hours=2))))
            return datetime.datetime(rng.randint(1, 9998), 2, 3, 4, 5, 6, rng.randint(0, 999_999), zone)
        case "date":
            return datetime.date(rng.randint(1, 9999), 2, 3)
        case "time":
            return datetime.time(1, 2, 3, rng.randint(0, 999_999), rng.choice((None, datetime.UTC)))
        case "timedelta":
            return datetime.timedelta(rng.randint(-999, 999), rng.randint(0, 999), rng.randint(0, 999_999))
        case "uuid":
            return uuid.UUID(int=rng.getrandbits(128))
        case "decimal":
            return decimal.Decimal(rng.randint(-9999, 9999)).scaleb(rng.randint(-3, 3))
        case _:
            return rng.choice((None, 1, "a", 1.5, [1, "b"], {"c": b"d"}, True))


# ---- What has arrived ----------------------------------------------------------------------------------------


def arrived(sent: Value, read: Node, got: Any) -> bool:
    """Whether this is what was sent, as the type that the reader declares."""
    if read.kind == "union":
        return any(arrived(sent, part, got) for part in read.parts)
    if read.kind == "any":
        return same(got, msgspec.msgpack.decode(msgspec.msgpack.encode(sent.value)))
    if sent.node.kind == "any":
        return False
    if read.kind == "struct":
        return sent.node.kind == "struct" and _struct_arrived(sent, read, got)
    if read.kind in ("one of", "flags"):
        plain_value = sent.value.value if isinstance(sent.value, enum.Enum) else sent.value
        if read.form == "literal":
            return same(got, plain_value)
        return type(got) is build(read) and got.value == plain_value
    if GROUPS.get(read.kind) in ("array", "map") and GROUPS.get(sent.node.kind) != GROUPS[read.kind]:
        return False
    if read.kind in ("dict", "mapping"):
        keys = list(zip(sent.parts[::2], sent.parts[1::2], strict=True))
        return (
            type(got) is dict
            and len(got) == len(keys)
            and all(
                arrived(key, read.parts[0], found) and arrived(value, read.parts[1], item)
                for (key, value), (found, item) in zip(keys, got.items(), strict=True)
            )
        )
    if read.kind == "tuple":
        return type(got) is tuple and len(got) == len(read.parts) == len(sent.parts) and all(
            map(arrived, sent.parts, read.parts, got)
        )  # fmt: skip
    if read.kind in ("set", "frozenset"):
        return type(got) is (set if read.kind == "set" else frozenset) and all(
            any(arrived(part, read.parts[0], item) for item in got) for part in sent.parts
        )
    if read.kind in ("list", "sequence", "items"):
        return (
            type(got) is (tuple if read.kind == "items" else list)
            and len(got) == len(sent.parts)
            and _all_arrived(sent, read.parts[0], got)
        )
    if read.kind == "float" and sent.node.kind == "int":
        return type(got) is float and got == float(sent.value)
    if GROUPS[read.kind] == "text" and read.kind in ("bytes", "bytearray", "memoryview"):
        return type(got) is SCALARS[read.kind][0] and bytes(got) == bytes(sent.value)
    return sent.node.kind == read.kind and same(got, sent.value)


def _all_arrived(sent: Value, part: Node, got: Any) -> bool:
    if sent.node.kind in ("set", "frozenset"):  # in any order
        return all(any(arrived(each, part, item) for item in got) for each in sent.parts)
    return all(arrived(each, part, item) for each, item in zip(sent.parts, got, strict=True))


def _struct_arrived(sent: Value, read: Node, got: Any) -> bool:
    if read.form == "typed":
        if type(got) is not dict:
            return False
        has = dict(got)
    else:
        if type(got) is not build(read):
            return False
        has = {field.name: getattr(got, field.name) for field in read.fields}
    written = {sent.node.name_of(field): field for field in sent.node.fields}
    for field in read.fields:
        found = has.get(field.name, UNSET)
        origin = written.get(read.name_of(field))
        value = None if origin is None else sent.fields.get(origin.name) or origin.default
        if value is not None:
            if found is UNSET or not arrived(value, field.node, found):
                return False
        elif field.default is not None:
            if not same(found, field.default.value):
                return False
        elif found is not UNSET:
            return False
    return True


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)
