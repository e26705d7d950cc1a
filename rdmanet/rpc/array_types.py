"""What annotations say about arrays, what is taken for one, and how one that has come is checked.

Theory
------
An array is sent as the type of its items (item_types.py), its shape, and its bytes in C order. The receiver gets an
array of its own, which it may change. Before it takes memory for one, it checks that

    there is such a type of items      numbers, booleans, times, bytes and texts of a fixed length, records of these
    the method's annotation allows it  NDArray[numpy.float32] is exactly that type; ndarray is any of them
    there are few enough dimensions    DIMENSIONS_MOST, as the wire format says
    the shape fits the length          the product of the dimensions and of the item's size is the number of bytes

NumPy is not imported here. Whoever annotates a method with numpy.ndarray has imported it. The same holds for PyTorch:
torch.Tensor stands for an array, and the receiver gets a tensor that has the array's memory.
"""

from __future__ import annotations

import math
import sys
import typing
from typing import Any, Final

from rdmanet._core import REUSED_BYTES, unfilled
from rdmanet.rpc.buffer import check_plain
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.hints import unwrapped
from rdmanet.rpc.item_types import ANY, dtype_of, is_of, is_of_ml_dtypes, item_bytes, item_type, named_in
from rdmanet.rpc.messages import Array, ItemType, Placed

BYTES_MOST: Final = 1 << 53


class ArrayType:
    """What an annotation says about an array.

    :ivar dtype: the type of its items, or a family of them, as its description has it; None: any of them
    :ivar is_tensor: whether the program gets a torch.Tensor
    """

    def __init__(self, dtype: str | None, is_tensor: bool = False) -> None:
        self.dtype = dtype
        self.is_tensor = is_tensor

    @property
    def description(self) -> list[Any]:
        """It as plain data (describe.py)."""
        return ["array", self.dtype or ANY]

    def checked(self, value: Any, what: str) -> Any:
        """An array that the program hands over, as one of NumPy.

        :raises TypeError: it is none, one of another type, or more than an array; the text says where
        """
        array, items = taken(value, what)
        if self.dtype is not None and not is_of(items, self.dtype):
            text = f"an array of {shown(items)}, where the annotation says {self.dtype!r}"
            raise TypeError(f"{what}: {text}: pass array.astype()")
        return array

    def nbytes_of(self, array: Array | Placed) -> int:
        """How many bytes an array has that a peer has sent. It is checked, but for its bytes.

        :raises ValueError: it is refused, and why
        """
        nbytes = self._nbytes_of(array)
        _check_shape(array, nbytes)
        return nbytes

    def check(self, array: Array, nbytes: int, code: Code, what: str) -> None:
        """Check what a peer has sent for an argument or a result, before memory is taken for it.

        :param nbytes: how many bytes of data there are
        :raises Error: with this code; the text begins with `what`
        """
        try:
            wanted = self._nbytes_of(array)
            if wanted != nbytes:
                text = f"an array of the shape {array.shape} and {shown(array.dtype)}"
                raise ValueError(f"{text} does not have {nbytes} bytes")
            _check_shape(array, nbytes)
        except (ValueError, RecursionError) as exc:
            raise Error(code, f"{what}: {exc}") from None

    def _nbytes_of(self, array: Array | Placed) -> int:
        items = array.dtype
        size = item_bytes(items)
        if self.dtype is not None and not is_of(items, self.dtype):
            raise ValueError(f"an array of {shown(items)}, where {self.dtype!r} is expected")
        return math.prod(array.shape) * size

    def empty(self, array: Array | Placed) -> Any:
        """Memory for an array that was checked.

        :raises ValueError: NumPy has no such type
        """
        numpy, dtype = _numpy(), dtype_of(array.dtype)
        nbytes = math.prod(array.shape) * dtype.itemsize
        if nbytes < REUSED_BYTES:
            return numpy.empty(array.shape, dtype)
        return numpy.ndarray(array.shape, dtype, unfilled(nbytes))

    def over(self, array: Array | Placed, memory: Any, offset: int) -> Any:
        """An array that was checked, in memory that is there.

        :raises ValueError: as for `empty`
        """
        return _numpy().ndarray(array.shape, dtype_of(array.dtype), memory, offset)

    def where(self, array: Array, data: memoryview) -> Any:
        """An array that was checked, where its bytes are. It refers to their memory itself (snapshot.py).

        :raises ValueError: as for `empty`
        """
        views = [_numpy().frombuffer(each, "u1") for each in (data, data.obj)]
        start, first = (view.__array_interface__["data"][0] for view in views)
        return self.over(array, data.obj, start - first)

    def given(self, array: Any) -> Any:
        """What the program gets for an array.

        :raises ValueError: there are no tensors of this type
        """
        if not self.is_tensor:
            return array
        torch, name = sys.modules["torch"], array.dtype.name
        try:
            if is_of_ml_dtypes(name):
                return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, name))
            return torch.from_numpy(array)
        except (TypeError, AttributeError) as exc:
            raise ValueError(f"an array of {array.dtype} makes no tensor: {exc}") from None


def _check_shape(array: Array | Placed, nbytes: int) -> None:
    """Raise ValueError if an array is too large for NumPy, perhaps although it has no items."""
    if (nbytes or math.prod(filter(None, array.shape)) * item_bytes(array.dtype)) >= BYTES_MOST:
        raise ValueError(f"an array of the shape {array.shape} is too large")


def shown(items: ItemType) -> str:
    """A type of items as text."""
    return repr(items) if isinstance(items, str) else "records"


# ---- Annotations ---------------------------------------------------------------------------------------------


def declared(annotation: Any, where: str) -> Any:
    """An annotation, or its `ArrayType` if it is one of an array.

    :raises TypeError: it is of arrays that cannot be sent; the text begins with `where`
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is None:
        return annotation
    plain = unwrapped(annotation)
    if plain is numpy.ndarray:
        return ArrayType(None)
    if torch is not None and plain is getattr(torch, "Tensor", None):
        return ArrayType(None, is_tensor=True)
    if typing.get_origin(plain) is not numpy.ndarray:
        return annotation
    items = (*typing.get_args(typing.get_args(plain)[-1]), Any)[0]
    if items is Any or isinstance(items, typing.TypeVar):  # NDArray by itself
        return ArrayType(None)
    try:
        return ArrayType(named_in(items))
    except TypeError:
        name = getattr(items, "__name__", items)
        raise TypeError(
            f"{where}: arrays of {name} cannot be sent: name one plain type of number, or leave it open (ndarray)"
        ) from None


def array_of(cls: Any, annotation: Any) -> ArrayType | None:
    """What an annotation inside of another type says of an array; None if its class is no array's.

    :raises TypeError: it is of arrays that cannot be sent
    """
    found = declared(annotation, "inside of another type")
    if not isinstance(found, ArrayType):
        found = declared(cls, "")  # the annotation does not say more
    return found if isinstance(found, ArrayType) else None


def has_array(description: Any, structs: dict[str, list[Any]], seen: set[str]) -> bool:
    """Whether a described type (describe.py) has an array in it, or an object: nothing else reads one, not even "any".

    :param seen: the structs that need not be looked at; more are added
    """
    if isinstance(description, str):
        return False
    kind, *parts = description
    if kind == "struct":
        if parts[0] in seen:
            return False
        seen.add(parts[0])
        return any(has_array(field[1], structs, seen) for field in structs[parts[0]][3])
    if kind == "within":
        return has_array(parts[0], structs, seen)
    if kind in ("one of", "flags"):
        return False
    return kind in ("array", "object") or any(has_array(part, structs, seen) for part in parts)


# ---- What is taken for an array ------------------------------------------------------------------------------


def taken(value: Any, what: str) -> tuple[Any, ItemType]:
    """What the program hands over as an array: one of NumPy with the same memory, and the type of its items.

    :raises TypeError: it is none, one that cannot be sent, or more than an array; the text begins with `what`
    """
    check_plain(value, what)
    array = value if isinstance(value, _numpy().ndarray) else _of_another_library(value, what)
    try:
        return array, item_type(array.dtype)
    except TypeError as exc:
        raise TypeError(f"{what}: {exc}") from None


def _of_another_library(value: Any, what: str) -> Any:
    """What is not an array of NumPy, but has the memory of one."""
    try:
        if hasattr(value, "__array_interface__"):
            if value.__array_interface__.get("mask") is not None:  # which NumPy ignores
                raise TypeError("it has a mask")
            return _numpy().asarray(value)
        if hasattr(value, "__dlpack__"):
            found = _of_bits(value)
            return _numpy().from_dlpack(value) if found is None else found
    except Exception as exc:
        raise TypeError(f"{what}: {type(value).__name__!r} has no memory that NumPy can use: {exc}") from None
    raise TypeError(f"{what}: {type(value).__name__!r} is no array: pass numpy.asarray() of it")


def _of_bits(tensor: Any) -> Any:
    """A tensor of PyTorch whose items only ml_dtypes has for NumPy, such as bfloat16; None if it is another one.

    :raises ValueError: the package is not installed
    """
    torch, name = sys.modules.get("torch"), str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if torch is None or not isinstance(tensor, torch.Tensor) or not is_of_ml_dtypes(name):
        return None
    if tensor.requires_grad:
        raise TypeError("it needs a gradient: pass tensor.detach()")
    bits = tensor.view(torch.int8 if item_bytes(name) == 1 else torch.int16)
    return _numpy().from_dlpack(bits).view(dtype_of(name))


def _numpy() -> Any:
    return sys.modules["numpy"]
