"""Arrays of `rdmanet call`: from lists of numbers and NumPy's files (.npy), and to these. NumPy is not needed.

Arrays within a result go to an archive, as numpy.savez() writes it: a ZIP file with a file of NumPy for each.

An array is [dtype, shape, bytes], as on the wire (docs/reference/rpc-protocol.md). The types of items have the same
names in files of NumPy, but for those of the package ml_dtypes: NumPy writes these as bytes ("|V2").
"""

import ast
import itertools
import math
import re
import struct
import zipfile
from operator import index
from pathlib import Path
from typing import Any, Final

from rdmanet.errors import shown
from rdmanet.rpc.dynamic_results import ArrayWithin
from rdmanet.rpc.item_types import ANY, item_bytes
from rdmanet.rpc.messages import Array, ItemType, Placed

_MAGIC: Final = b"\x93NUMPY"
_HEAD_MOST: Final = 1 << 20
_ALIGN: Final = 64
_ITEMS_SHOWN: Final = 1000
_NAME_MOST: Final = 1000
_SEPARATORS: Final = re.compile(r"[/\\]")
_CODES: Final = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip
"""Of the module struct, for numbers that JSON has."""


def of_list(value: list[Any], items: str, where: str) -> list[Any]:
    """An array of the numbers in nested lists.

    :param items: the type of its items, or "any"
    :raises ValueError: they are none, or do not fit; the text begins with `where`
    """
    shape: list[int] = []
    found: list[Any] = [value]
    while found and isinstance(found[0], list):
        length = len(found[0])
        if not all(isinstance(each, list) and len(each) == length for each in found):
            raise ValueError(f"{where}: lists beside each other have different lengths, so they are no array")
        shape.append(length)
        found = [item for each in found for item in each]
    dtype = _dtype_for(found) if items == ANY else items
    if dtype is None or dtype[1:] not in _CODES:
        raise ValueError(f"{where}: lists stand for numbers; for an array of {shown(items)} give @FILE.npy")
    if dtype == "|b1" and not all(isinstance(each, bool) for each in found):
        raise ValueError(f"{where}: an array of {dtype!r} has true and false")
    try:
        data = struct.pack(_format(dtype, len(found)), *found)
    except (struct.error, OverflowError) as exc:
        raise ValueError(f"{where}: not all of it fits an array of {dtype!r}: {exc}") from None
    return [dtype, shape, data]


def _dtype_for(numbers: list[Any]) -> str | None:
    """What NumPy takes for such numbers; None: they are none."""
    kinds = {type(each) for each in numbers}
    if kinds == {bool}:
        return "|b1"
    if kinds == {int}:
        return "<i8"
    return "<f8" if kinds <= {int, float} else None


def _format(dtype: str, count: int) -> str:
    return f"{'>' if dtype[0] == '>' else '<'}{count}{_CODES[dtype[1:]]}"


def of_file(path: Path) -> list[Any]:
    """The array in a file of NumPy.

    :raises OSError: it cannot be read
    :raises ValueError: it is no such file, and why
    """
    data = memoryview(path.read_bytes())
    try:
        head, begin = _head_of(data)
        descr, shape = head["descr"], head["shape"]
        dtype = descr if isinstance(descr, str) else _fields(descr)
        shape = [index(length) for length in shape]
        in_columns = head["fortran_order"]
    except (LookupError, TypeError, SyntaxError, struct.error, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{path} is no file of NumPy (numpy.save)") from None
    if in_columns:
        raise ValueError(f"{path}: its items are in Fortran's order: save numpy.ascontiguousarray() of it")
    return [dtype, shape, data[begin:]]


def _head_of(data: memoryview) -> tuple[dict[str, Any], int]:
    """What a file says of its array, and where that begins."""
    begin = 10 if data[6] == 1 else 12
    (length,) = struct.unpack_from("<H" if begin == 10 else "<I", data, 8)
    if bytes(data[:6]) != _MAGIC or length > _HEAD_MOST:
        raise ValueError
    text = bytes(data[begin : begin + length]).decode("utf-8" if data[6] >= 3 else "latin-1")
    return dict(ast.literal_eval(text.strip())), begin + length


def _fields(descr: Any) -> list[Any]:
    """The fields of records: NumPy's names for them, as they are sent."""
    found = []
    for name, items, *shape in descr:
        lengths = [list(each) if isinstance(each, tuple) else [int(each)] for each in shape]
        found.append([str(name), items if isinstance(items, str) else _fields(items), *lengths])
    return found


def fits(array: Array, nbytes: int) -> bool:
    """Whether an array that a server has sent has so many bytes."""
    try:
        return math.prod(array.shape) * item_bytes(array.dtype) == nbytes
    except (ValueError, RecursionError):
        return False


def file_head(array: Array | Placed) -> bytes:
    """What begins a file of NumPy with this array."""
    descr, shape = _descr(array.dtype), tuple(array.shape)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    version, form = (b"\x01\x00", "<H") if text.isascii() and len(text) < 60_000 else (b"\x03\x00", "<I")
    line = text.encode()
    before = len(_MAGIC + version) + struct.calcsize(form)
    line += b" " * (-(before + len(line) + 1) % _ALIGN) + b"\n"
    return _MAGIC + version + struct.pack(form, len(line)) + line


def _descr(dtype: ItemType) -> Any:
    if isinstance(dtype, str):
        return dtype if dtype[0] in "<>|" else f"|V{item_bytes(dtype)}"
    return [
        (field.name, _descr(field.type), *([tuple(field.shape)] if field.shape else [])) for field in dtype
    ]


def write_archive(path: Path, arrays: list[ArrayWithin]) -> None:
    """Write arrays within a result: each has the name of its place, as numpy.load() shows it."""
    names, numbers = set[str](), itertools.count(1)
    with zipfile.ZipFile(path, "w") as archive:
        for array in arrays:
            assert array.data is not None
            name = first = _file_name(array.where)
            while name in names:  # one key has a dot, and others are on the way
                name = f"{first}_{next(numbers)}"
            names.add(name)
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                file.write(file_head(array.placed))
                file.write(array.data)


def _file_name(where: str) -> str:
    """Of an array in an archive. A server chooses its keys: whoever unpacks the files finds them in his folder."""
    parts = _SEPARATORS.split(where[:_NAME_MOST].replace("\0", ""))
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "result"


def is_shown(array: Array | Placed) -> bool:
    """Whether the items are printed: a few numbers."""
    is_plain = isinstance(array.dtype, str) and array.dtype[1:] in _CODES
    return is_plain and 0 < math.prod(array.shape) <= _ITEMS_SHOWN


def shown_array(array: Array | Placed, nbytes: int, data: memoryview | bytes | None) -> dict[str, Any]:
    """An array, as it is printed.

    :param data: its bytes, if it `is_shown`
    """
    found = {"dtype": array.dtype, "shape": array.shape, "bytes": nbytes}
    return found if data is None else found | {"items": _items_of(array, data)}


def _items_of(array: Array | Placed, data: memoryview | bytes) -> Any:
    """The items of an array that `is_shown`, as nested lists."""
    assert isinstance(array.dtype, str)
    found: list[Any] = list(struct.unpack(_format(array.dtype, math.prod(array.shape)), data))
    for length in reversed(array.shape):
        found = [found[start : start + length] for start in range(0, len(found), length)]
    return found[0]
