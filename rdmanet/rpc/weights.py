"""How much memory a message may make when it is decoded, by the types that it is decoded to. No I/O.

Theory
------
`weighing.weigh` goes through msgpack, and adds up what each value makes at least: an array a list, a map a dictionary.
Types may make more of them. A map of a few bytes becomes an object with all the defaults of its class, and a text a
UUID. So a `Scale` has the weight of the heaviest container that its types have, and that of the heaviest text: an
estimate from above, which no sender can exceed by choosing the worst of them each time.

The hashes of texts are randomized, those of what is made of them may not be: of UUIDs and decimals. So `weigh` is told
whether the types have keys of these; it computes the hashes of UUIDs, and allows few decimals in a map.

A message of less than LEAST_BYTES is not weighed: it makes no more than what each call makes anyway.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any, Final

import msgspec
from msgspec import inspect

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.limits import exceeded
from rdmanet.rpc.weighing import weigh

LEAST_BYTES: Final = 512
DETAILS_BYTES: Final = 1 << 20
SCHEMA_BYTES: Final = 64 << 20
"""What the objects of an error's details may take, and those of a server's schema."""
_SLOT_BYTES: Final = 8
_LIST_BYTES: Final = 72
_SET_BYTES: Final = 216
_OBJECT_BYTES: Final = 64
_FIELD_BYTES: Final = 40  # of a dataclass, beside the slot
_FACTORY_BYTES: Final = 240
"""An empty list, dictionary or set, or a small object."""
_TEXT_BYTES: Final = 56
_TEXT_OBJECT_BYTES: Final = 160
_VIEW_BYTES: Final = 184
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


class Scale:
    """Weighs what is to be decoded to these types.

    :param types: as msgspec decodes them
    """

    __slots__ = (
        "_container_bytes",
        "_has_float_keys",
        "_has_sets",
        "_seen",
        "_text_bytes",
        "_text_keys",
        "_value_bytes",
    )

    def __init__(self, *types: Any) -> None:
        self._container_bytes = _LIST_BYTES
        self._text_bytes = _TEXT_BYTES
        self._value_bytes = 0
        self._has_sets = 0
        self._text_keys = 0
        self._has_float_keys = False
        self._seen: set[Any] = set()
        for info in inspect.multi_type_info(types):
            self._add(info, is_key=False)

    def _add(self, info: Any, is_key: bool) -> None:
        self._value_bytes = max(self._value_bytes, _ANY_VALUE.get(type(info), 0))
        if isinstance(info, _SETS):
            is_plain = not isinstance(info.item_type, _WITH_FIELDS + _OF_ITEMS)
            self._has_sets = max(self._has_sets, 1 if is_plain else 2)
            self._container_bytes = max(self._container_bytes, _SET_BYTES)
        elif isinstance(info, _OF_TEXT):
            self._text_bytes = max(self._text_bytes, _TEXT_OBJECT_BYTES)
            if is_key and isinstance(info, inspect.DecimalType):
                self._text_keys = 2
            elif is_key and isinstance(info, inspect.UUIDType):
                self._text_keys = max(self._text_keys, 1)
        elif isinstance(info, inspect.FloatType):
            self._has_float_keys |= is_key
        elif isinstance(info, inspect.MemoryViewType):
            self._text_bytes = max(self._text_bytes, _VIEW_BYTES)
        elif isinstance(info, _WITH_FIELDS):
            if (info.cls, is_key) in self._seen:
                return
            self._seen.add((info.cls, is_key))
            self._container_bytes = max(self._container_bytes, _weight_of(info))
        for part in _parts_of(info):
            is_its_key = isinstance(info, _SETS) or part is getattr(info, "key_type", None)
            self._add(part, is_key or is_its_key)

    def weigh(self, raw: Any, most: int) -> int:
        """How many bytes of memory its objects will take, beside its texts and bytes. What is short counts as nothing.

        :raises Error: RESOURCE_EXHAUSTED if it is more than `most`, INVALID_ARGUMENT if it would take very long
        """
        if len(raw) < LEAST_BYTES:
            return 0
        try:
            return weigh(
                raw,
                most,
                self._container_bytes,
                self._text_bytes,
                value_bytes=self._value_bytes,
                text_keys=self._text_keys,
                has_float_keys=self._has_float_keys,
                has_sets=self._has_sets,
            )
        except OverflowError:
            text = f"a message of {len(raw)} bytes makes too many objects"
            raise exceeded("decoded_bytes", most, text) from None
        except (ValueError, RecursionError) as exc:
            raise Error(Code.INVALID_ARGUMENT, f"a message of {len(raw)} bytes is refused: {exc}") from None


def _weight_of(info: Any) -> int:
    fields = info.fields
    factories = sum(
        field.default_factory is not msgspec.NODEFAULT
        for field in fields
        if hasattr(field, "default_factory")
    )
    each = _SLOT_BYTES + (0 if isinstance(info, inspect.StructType) else _FIELD_BYTES)
    return _OBJECT_BYTES + _LIST_BYTES + len(fields) * each + factories * _FACTORY_BYTES


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
