"""The annotation of each part of a type: of the items of a list, of a field of a class, ... No I/O.

msgspec's account of a type (``msgspec.inspect``) says of an array that it is one, and not of what. So whoever reads
that account has the annotation beside it, and asks here for that of a part.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import inspect


def unwrapped(annotation: Any) -> Any:
    """The type itself, without ``Annotated``, ``NewType``, ``Final`` and the names of `type` statements."""
    while True:
        origin = typing.get_origin(annotation)
        if origin in (Annotated, typing.Final):
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(origin or annotation, _ALIAS):
            arguments = typing.get_args(annotation)
            annotation = origin.__value__[arguments] if origin is not None else annotation.__value__
        else:
            return annotation


_ALIAS: Any = getattr(typing, "TypeAliasType", ())  # new in Python 3.12


def part(annotation: Any, index: int = 0) -> Any:
    """That of the items of a list, of one item of a tuple, or of the keys and values of a dict."""
    arguments = typing.get_args(unwrapped(annotation))
    return arguments[index] if index < len(arguments) else Any


def member(annotation: Any, info: inspect.Type) -> Any:
    """That of a member of a union, of which msgspec says this. A union has one of each kind at most."""
    for each in members(annotation):
        if type(inspect.type_info(each)) is type(info):
            return each
    return Any


def members(annotation: Any) -> Iterator[Any]:
    """Those of the members of a union; of another type its own."""
    plain = unwrapped(annotation)
    if typing.get_origin(plain) in (typing.Union, types.UnionType):
        for each in typing.get_args(plain):
            yield from members(each)
    else:
        yield annotation


def fields(cls: Any) -> dict[str, Any]:
    """Those of the fields of a Struct, dataclass, TypedDict or NamedTuple, which may be generic."""
    origin = typing.get_origin(cls) or cls
    if issubclass(origin, msgspec.Struct):
        return {field.name: field.type for field in msgspec.structs.fields(cls)}
    known = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(cls), strict=False))
    hints = typing.get_type_hints(origin, include_extras=True)
    return {name: _made_for(known, hint) for name, hint in hints.items()}


def _made_for(known: dict[Any, Any], hint: Any) -> Any:
    """The annotation of a field of a class that was made generic for these types."""
    if hint in known:
        return known[hint]
    if known and (parameters := getattr(hint, "__parameters__", ())):
        return hint[tuple(known.get(each, each) for each in parameters)]
    return hint
