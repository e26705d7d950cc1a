"""The types of the items of arrays: their names on the wire, and NumPy's dtypes. No I/O.

Theory
------
Most types have the names that ``__array_interface__`` has for them: the order of the bytes, the kind and the size.

    "<f4", "|b1", ...           numbers and booleans: ITEM_BYTES
    "|S16", "<U16"              bytes and texts of a fixed length; a text has four bytes for each character
    "<M8[ns]", "<m8[25us]"      moments and spans of time, in this unit
    "bfloat16", ...             what the package ml_dtypes adds: _OF_ML_DTYPES
    [Field, ...]                records: their fields in order, with what is between them

The rest is refused, since its items are not their bytes (objects, texts of any length), or differ between machines
(long double).

What comes from a peer is checked before NumPy sees it: a name has to be one of these, and a record may have FIELDS_MOST
fields in all, so that what it makes is bounded. The characters of texts are checked when they are here: NumPy does not.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from rdmanet.rpc.messages import Field, ItemType

_SIZES: Final = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
ITEM_BYTES: Final = {
    f"{order}{kind}{size}": size
    for kind, sizes in _SIZES.items()
    for size in sizes
    for order in ("|" if size == 1 else "<>")
}
"""Numbers and booleans, as ``__array_interface__`` names them, and their sizes."""
_OF_ML_DTYPES: Final = {"bfloat16": 2} | dict.fromkeys(
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    " float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 uint4 int2 uint2".split(),
    1,
)
"""The sizes of types of the package ml_dtypes."""
ANY: Final = "any"
RECORD: Final = "record"
_FAMILIES: Final = {"bytes_": "S", "str_": "U", "datetime64": "M8", "timedelta64": "m8", "void": RECORD}
"""What an annotation says that names one of these types of NumPy: no length, no unit and no fields."""
FIELDS_MOST: Final = 256
_PIECE_BYTES: Final = 1 << 20
"""The characters of so many bytes are checked at a time."""
_ITEM_BYTES_MOST: Final = (1 << 31) - 1
_TEXT: Final = re.compile(r"(?:\|S|[<>]U)([1-9][0-9]{0,9})")
_TIME: Final = re.compile(r"[<>][Mm]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_PADDING: Final = re.compile(r"\|V([1-9][0-9]{0,9})")
_LAST_CHARACTER: Final = sys.maxunicode
_TEXT_SHOWN: Final = 300


def item_type(dtype: Any) -> ItemType:
    """What is sent for a dtype.

    :raises TypeError: arrays of it cannot be sent; the text says what to do instead
    """
    if dtype.names is not None:
        return _fields(dtype)
    if dtype.isbuiltin == 2:  # of another package than NumPy
        if dtype.name in _OF_ML_DTYPES and dtype.type.__module__.startswith("ml_dtypes"):
            return str(dtype.name)
    elif _named_bytes(dtype.str):
        return str(dtype.str)
    raise TypeError(
        f"an array of {_text_of(dtype)} cannot be sent: {_INSTEAD.get(dtype.kind, _INSTEAD['other'])}"
    )


def _text_of(dtype: Any) -> str:
    text = str(dtype)  # of all its fields, and there may be many
    return text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}..."


_INSTEAD: Final = {
    "O": "its items are objects of Python. Send a list, or array.astype() of a plain type",
    "T": "its texts have no fixed length. Send array.astype('U'), or a list of texts",
    "f": "machines differ in it. Send array.astype('f8')",
    "c": "machines differ in it. Send array.astype('c16')",
    "V": "its items are plain memory. Send array.view('u1'), or name the fields",
    "other": "its items are no plain numbers, texts, times or records. Send array.astype() of one of these",
}


def _fields(dtype: Any) -> list[Field]:
    found: list[Field] = []
    end = 0
    for name in dtype.names:
        type_, offset, *title = dtype.fields[name]
        if title or offset < end:
            raise TypeError(
                f"an array of {_text_of(dtype)} cannot be sent: its fields have titles, or are not one after the other."
                " Send numpy.lib.recfunctions.repack_fields(array)"
            )
        if offset > end:
            found.append(Field("", f"|V{offset - end}"))
        plain, shape = type_.subdtype or (type_, ())
        found.append(Field(name, item_type(plain), list(shape)))
        end = offset + type_.itemsize
    if dtype.itemsize > end:
        found.append(Field("", f"|V{dtype.itemsize - end}"))
    if _has_many(found) or not dtype.itemsize:
        raise TypeError(
            f"an array of {_text_of(dtype)} cannot be sent: a record has 1 to {FIELDS_MOST} fields"
        )
    return found


def named_in(items: Any) -> str:
    """What the description of an array says of the class of NumPy's that its annotation names.

    :raises TypeError: it names no type, or one that cannot be sent
    """
    numpy = sys.modules["numpy"]
    if items.__module__ == "numpy" and (family := _FAMILIES.get(items.__name__)) is not None:
        return family
    dtype = numpy.dtype(items)
    if dtype.type is not items:
        raise TypeError("it is not one type")
    return str(item_type(dtype))


def is_of(type_: ItemType, wanted: str) -> bool:
    """Whether arrays of this type may stand where the description of an array says so."""
    if isinstance(type_, str):
        return wanted in (ANY, type_, type_[1:2], type_[1:3])
    return wanted in (ANY, RECORD)


# ---- What has come from a peer ---------------------------------------------------------------------------------


def is_of_ml_dtypes(name: str) -> bool:
    """Whether this is the name of a type that NumPy itself does not have. PyTorch has the same names."""
    return name in _OF_ML_DTYPES


def item_bytes(type_: ItemType) -> int:
    """The size of an item.

    :raises ValueError: there is no such type
    """
    if isinstance(type_, str):
        if found := _named_bytes(type_):
            return found
        raise ValueError(f"an array of {type_!r} is not accepted")
    if _has_many(type_):
        raise ValueError(f"an array of records of more than {FIELDS_MOST} fields is not accepted")
    return _record_bytes(type_)


def _record_bytes(fields: list[Field]) -> int:
    size = sum(_field_bytes(field) for field in fields)
    if not 1 <= size <= _ITEM_BYTES_MOST:
        raise ValueError(f"an array of records of {size} bytes is not accepted")
    return size


def _field_bytes(field: Field) -> int:
    if not field.name:
        padding = _PADDING.fullmatch(field.type) if isinstance(field.type, str) else None
        if padding is None or field.shape:
            raise ValueError("an array of records is not accepted in which a field has no name")
        return int(padding[1])
    type_ = field.type
    return math.prod(field.shape) * (item_bytes(type_) if isinstance(type_, str) else _record_bytes(type_))


def dtype_of(type_: ItemType) -> Any:
    """The dtype that NumPy has for a type, which `item_bytes` has accepted.

    :raises ValueError: NumPy has none, or its package is not installed
    """
    numpy = sys.modules["numpy"]
    if isinstance(type_, str):
        if type_ not in _OF_ML_DTYPES:
            return numpy.dtype(type_)
        try:
            return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), type_))
        except (ImportError, AttributeError):
            raise ValueError(f"an array of {type_!r} needs the package ml_dtypes") from None
    names, formats, offsets, at = [], [], [], 0
    for field in type_:
        if not field.name:
            at += _field_bytes(field)
            continue
        items = dtype_of(field.type)
        names.append(field.name)
        formats.append((items, tuple(field.shape)))
        offsets.append(at)
        at += math.prod(field.shape) * items.itemsize  # not asked again of each record in it
    try:
        return numpy.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": at})
    except (TypeError, ValueError, OverflowError) as exc:
        raise ValueError(f"an array of such records is not accepted: {exc}") from None


def has_texts(dtype: Any) -> bool:
    """Whether there are characters to be checked."""
    if dtype.names is None:
        return bool(dtype.kind == "U")
    return any(has_texts(dtype[name].base) for name in dtype.names)


def text_checks(array: Any) -> list[Callable[[], None]]:
    """What checks the characters of an array that has come, in pieces: NumPy would make a str of anything.

    :param array: is C-contiguous. Each piece raises ValueError if it has a character that does not exist
    """
    if not array.nbytes or not has_texts(array.dtype):
        return []
    items, step = array.reshape(-1), max(1, _PIECE_BYTES // array.itemsize)
    return [functools.partial(_check, items[start : start + step]) for start in range(0, len(items), step)]


def check_texts(array: Any) -> None:
    """Do all of these.

    :raises ValueError: there is a character that does not exist
    """
    for check in text_checks(array):
        check()


def _check(array: Any) -> None:
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            _check(array[name])
    elif dtype.kind == "U" and array.size:
        codes = sys.modules["numpy"].ascontiguousarray(array).view(f"{dtype.byteorder}u4")
        if int(codes.max()) > _LAST_CHARACTER:
            raise ValueError("an array of texts has a character that does not exist")


def _has_many(type_: list[Field]) -> bool:
    """Whether a record has more fields than it may, with those of the records in it."""
    count, left = 0, [type_]
    while left and count <= FIELDS_MOST:
        fields = left.pop()
        count += len(fields)
        left += (field.type for field in fields if not isinstance(field.type, str))
    return count > FIELDS_MOST


@functools.lru_cache(512)
def _named_bytes(name: str) -> int:
    """The size of a type that has a name; 0 if there is none."""
    if (found := ITEM_BYTES.get(name) or _OF_ML_DTYPES.get(name)) is not None:
        return found
    if (match := _TEXT.fullmatch(name)) is not None:
        size = int(match[1]) * (1 if name[1] == "S" else 4)
        return size if size <= _ITEM_BYTES_MOST else 0
    return 8 if _TIME.fullmatch(name) else 0
