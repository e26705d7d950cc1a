"""How much memory a message may make when it is decoded, by the types that it is decoded to. No I/O.

Theory
------
`weighing.weigh` goes through msgpack, and adds up what each value makes at least: an array a list, a map a dictionary.
Types may make more of them. A map of a few bytes becomes an object with all the defaults of its class, and a text a
UUID. So a `Scale` has the weight of the heaviest container that its types have, and that of the heaviest text: an
estimate from above, which no sender can exceed by choosing the worst of them each time. The value of a factory
counts as well: it is called when the class of the service is read.

The hashes of texts are randomized, those of what is made of them may not be: of UUIDs and decimals. So `weigh` is told
whether the types have keys of these; it computes the hashes of UUIDs, and allows few decimals or frozensets in a map.

A short message need not be weighed: one of fewer than `least` bytes makes no more than UNWEIGHED_BYTES of these types.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import enum
import sys
from typing import Any, Final

import msgspec
from msgspec import inspect

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.limits import exceeded
from rdmanet.rpc.weighing import weigh

UNWEIGHED_BYTES: Final = 32 << 10
DETAILS_BYTES: Final = 1 << 20
SCHEMA_BYTES: Final = 64 << 20
"""What the objects of an error's details may take, and those of a server's schema."""
_FLAGS_BYTES: Final = 300
"""A combination of flags: its class keeps those that it has seen, but takes some microseconds to find one again."""
_SLOT_BYTES: Final = 8
_ENTRY_BYTES: Final = 104
_LIST_BYTES: Final = 72
_SET_BYTES: Final = 216
_PAIR_BYTES: Final = 344
"""A dictionary of one pair, beside what each container takes."""
_OBJECT_BYTES: Final = 64
_FIELD_BYTES: Final = 40  # of a dataclass, beside the slot
_FACTORY_BYTES: Final = 240
"""An empty list, dictionary or set, or a small object."""
_TEXT_BYTES: Final = 56
_TEXT_OBJECT_BYTES: Final = 160
_VIEW_BYTES: Final = 184
_ARRAY_BYTES: Final = 512
"""An array, its memory's object, and a part of its type; in a message it is two containers, and a field is one."""
_ANY_VALUE: Final = {inspect.DecimalType: 104, inspect.RawType: 64}
"""What any value may become, a small number or nil too."""
_OF_TEXT: Final = (
    inspect.DateTimeType,
    inspect.DateType,
    inspect.TimeType,
    inspect.TimeDeltaType,
    inspect.UUIDType,
    inspect.DecimalType,
)
_WITH_FIELDS: Final = (
    inspect.StructType,
    inspect.DataclassType,
    inspect.TypedDictType,
    inspect.NamedTupleType,
)
_OF_ITEMS: Final = (
    inspect.AnyType,
    inspect.UnionType,
    inspect.CollectionType,
    inspect.TupleType,
)
_SETS: Final = (inspect.SetType, inspect.FrozenSetType)
_DICTS: Final = (inspect.AnyType, inspect.DictType, inspect.TypedDictType)


class Scale:
    """Weighs what is to be decoded to these types.

    :param types: as msgspec decodes them
    :ivar least: a message of fewer bytes need not be weighed
    """

    __slots__ = (
        "_container_bytes",
        "_has_dicts",
        "_has_float_keys",
        "_has_set_keys",
        "_has_sets",
        "_number_bytes",
        "_seen",
        "_tags",
        "_text_bytes",
        "_text_keys",
        "_value_bytes",
        "least",
    )

    def __init__(self, *types: Any) -> None:
        self._container_bytes = _LIST_BYTES
        self._text_bytes = _TEXT_BYTES
        self._value_bytes = 0
        self._number_bytes = 0
        self._has_sets = 0
        self._text_keys = 0
        self._has_float_keys = False
        self._has_set_keys = False
        self._has_dicts = False
        self._seen: set[Any] = set()
        self._tags = b""
        for info in inspect.multi_type_info(types):
            self._add(info, is_key=False)
        item = max(self._container_bytes, self._text_bytes, self._number_bytes)
        heaviest = item + (_ENTRY_BYTES if self._has_sets else _SLOT_BYTES)
        if self._has_dicts:  # within each other, each has two bytes in a message: its head, and its key
            heaviest = max(heaviest, (self._container_bytes + _PAIR_BYTES + item + 1) // 2)
        self.least = UNWEIGHED_BYTES // (heaviest + self._value_bytes)

    def _add(self, info: Any, is_key: bool) -> None:
        self._value_bytes = max(self._value_bytes, _ANY_VALUE.get(type(info), 0))
        if isinstance(info, _SETS):
            is_plain = not isinstance(info.item_type, _WITH_FIELDS + _OF_ITEMS)
            self._has_sets = max(self._has_sets, 1 if is_plain else 2)
            self._has_set_keys |= is_key
            self._container_bytes = max(self._container_bytes, _SET_BYTES)
        elif isinstance(info, _OF_TEXT):
            self._text_bytes = max(self._text_bytes, _TEXT_OBJECT_BYTES)
            if is_key and isinstance(info, inspect.DecimalType):
                self._text_keys = 2
            elif is_key and isinstance(info, inspect.UUIDType):
                self._text_keys = max(self._text_keys, 1)
        elif isinstance(info, inspect.FloatType):
            self._has_float_keys |= is_key
        elif isinstance(info, inspect.CustomType):  # an array, which may be anything until it is checked
            self._container_bytes = max(self._container_bytes, _ARRAY_BYTES)
            self._has_dicts = True
        elif isinstance(info, inspect.MemoryViewType):
            self._text_bytes = max(self._text_bytes, _VIEW_BYTES)
        elif isinstance(info, inspect.EnumType) and issubclass(info.cls, enum.Flag):
            self._number_bytes = _FLAGS_BYTES
        elif isinstance(info, _WITH_FIELDS):
            if (info.cls, is_key) in self._seen:
                return
            self._seen.add((info.cls, is_key))
            self._container_bytes = max(self._container_bytes, _weight_of(info))
            if (name := getattr(info, "tag_field", None)) is not None:
                self._add_tag(name.encode())
        self._has_dicts |= isinstance(info, _DICTS)
        for part in _parts_of(info):
            is_its_key = isinstance(info, _SETS) or part is getattr(info, "key_type", None)
            self._add(part, is_key or is_its_key)

    def _add_tag(self, name: bytes) -> None:
        tag = len(name).to_bytes(4, sys.byteorder) + name
        if tag not in self._tags:
            self._tags += tag

    def weigh(self, raw: Any, most: int) -> int:
        """How many bytes of memory its objects will take, beside its texts and bytes.

        :raises Error: RESOURCE_EXHAUSTED if it is more than `most`, INVALID_ARGUMENT if it would take very long
        """
        try:
            return weigh(
                raw,
                most,
                self._container_bytes,
                self._text_bytes,
                value_bytes=self._value_bytes,
                number_bytes=self._number_bytes,
                text_keys=self._text_keys,
                has_float_keys=self._has_float_keys,
                has_sets=self._has_sets,
                has_set_keys=self._has_set_keys,
                tags=self._tags,
            )
        except OverflowError:
            text = f"a message of {len(raw)} bytes makes too many objects"
            raise exceeded("decoded_bytes", most, text) from None
        except (ValueError, RecursionError) as exc:
            raise Error(Code.INVALID_ARGUMENT, f"a message of {len(raw)} bytes is refused: {exc}") from None


def _weight_of(info: Any, within: tuple[Any, ...] = ()) -> int:
    """What an object takes that has all its defaults.

    :param within: the classes of the objects that it is made for
    """
    each = _SLOT_BYTES + (0 if isinstance(info, inspect.StructType) else _FIELD_BYTES)
    made = 0
    for field in info.fields:
        factory = getattr(field, "default_factory", msgspec.NODEFAULT)
        if factory is not msgspec.NODEFAULT:
            made += _FACTORY_BYTES if factory in _EMPTY else _made_by(factory, (*within, info.cls))
    return _OBJECT_BYTES + _LIST_BYTES + len(info.fields) * each + made


def _made_by(factory: Any, within: tuple[Any, ...]) -> int:
    """What the value of a factory takes."""
    try:
        if isinstance(factory, type) and isinstance(info := inspect.type_info(factory), _WITH_FIELDS):
            return 0 if factory in within else _weight_of(info, within)  # nothing makes itself for ever
        made = msgspec.msgpack.encode(factory())
        return max(_FACTORY_BYTES, len(made) + weigh(made, 1 << 62))  # its texts and bytes are in no message
    except Exception:  # it is the program's, and need not succeed now
        return _FACTORY_BYTES


_EMPTY: Final = (list, dict, set, bytearray)


def _parts_of(info: Any) -> list[Any]:
    """The types that a type consists of."""
    if isinstance(info, _WITH_FIELDS):
        return [field.type for field in info.fields]
    parts: list[Any] = []
    for name in ("item_type", "key_type", "value_type", "type"):
        part = getattr(info, name, None)
        if isinstance(part, inspect.Type):
            parts.append(part)
    for name in ("types", "item_types"):
        parts += getattr(info, name, ())
    return parts
