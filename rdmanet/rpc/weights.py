"""How much memory a message may make when it is decoded, by the types that it is decoded to. No I/O.

Theory
------
`weighing.weigh` goes through msgpack, and adds up what each value makes at least: an array a list, a map a dictionary.
Types may make more of them. A map of a few bytes becomes an object with all the defaults of its class, and a text a
UUID. So a `Scale` has the weight of the heaviest container that its types have, and that of the heaviest text: an
estimate from above, which no sender can exceed by choosing the worst of them each time.

The hashes of texts are randomized, those of what is made of them may not be: of UUIDs, decimals and durations. So
`weigh` is told whether the types have them; it computes the hashes of UUIDs, and allows few of the others in a map.

A message of less than LEAST_BYTES is not weighed: it makes no more than what each call makes anyway.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any, Final

import msgspec
from msgspec import inspect

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.limits import exceeded
from rdmanet.weighing import weigh

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
_OF_TEXT: Final = (inspect.DateTimeType, inspect.DateType, inspect.TimeType)
_OF_TEXT_WITH_KNOWN_HASHES: Final = (inspect.UUIDType, inspect.DecimalType, inspect.TimeDeltaType)
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
        "_text_bytes",
        "_seen",
        "_texts_are_objects",
    )

    def __init__(self, *types: Any) -> None:
        self._container_bytes = _LIST_BYTES
        self._text_bytes = _TEXT_BYTES
        self._has_sets = 0
        self._has_float_keys = self._texts_are_objects = False
        self._seen: set[Any] = set()
        for info in inspect.multi_type_info(types):
            self._add(info)

    def _add(self, info: Any) -> None:
        if isinstance(info, _SETS):
            is_plain = not isinstance(info.item_type, _WITH_FIELDS + _OF_ITEMS)
            self._has_sets = max(self._has_sets, 1 if is_plain else 2)
            self._container_bytes = max(self._container_bytes, _SET_BYTES)
        elif isinstance(info, _OF_TEXT + _OF_TEXT_WITH_KNOWN_HASHES):
            self._text_bytes = max(self._text_bytes, _TEXT_OBJECT_BYTES)
            self._texts_are_objects |= isinstance(info, _OF_TEXT_WITH_KNOWN_HASHES)
        elif isinstance(info, inspect.FloatType):
            self._has_float_keys = True  # perhaps; it costs nothing to think so
        elif isinstance(info, inspect.MemoryViewType):
            self._text_bytes = max(self._text_bytes, _VIEW_BYTES)
        elif isinstance(info, _WITH_FIELDS):
            if info.cls in self._seen:
                return
            self._seen.add(info.cls)
            self._container_bytes = max(self._container_bytes, _weight_of(info))
        for part in _parts_of(info):
            self._add(part)

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
                texts_are_objects=self._texts_are_objects,
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
