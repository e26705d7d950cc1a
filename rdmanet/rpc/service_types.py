"""Parameters that are service objects: how they are declared, what is sent for them, and how that is described.

A method says by its annotation that it takes an object of a service (`listener: Listener`), or perhaps one (`Listener |
None`). In the message is the object's number on this connection (inner.py), or nil.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
import typing
from typing import Annotated, Any, Final

import msgspec

from rdmanet.rpc.hints import members, unwrapped

NUMBER: Final[Any] = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""What is decoded for an object."""


def service_in(annotation: Any) -> Any:
    """The class of the service, if a parameter of this type takes an object of one; else None."""
    found = [each for each in map(unwrapped, members(annotation)) if each not in (None, type(None))]
    return found[0] if len(found) == 1 and is_service(found[0]) else None


def is_service(annotation: Any) -> bool:
    """Whether it is the class of a service: the schema is its mark, as the class is defined above this."""
    return isinstance(annotation, type) and hasattr(annotation, "__rpc_schema__")


def has_service(annotation: Any) -> bool:
    """Whether there is one anywhere in a type that is written out."""
    plain = unwrapped(annotation)
    return is_service(plain) or any(map(has_service, typing.get_args(plain)))


def may_lack(annotation: Any) -> bool:
    """Whether None may be given in the place of an object."""
    return any(unwrapped(each) in (None, type(None)) for each in members(annotation))


def described(name: str, may_be_none: bool) -> Any:
    """The type as plain data (describe.py)."""
    return ["union", ["object", name], "none"] if may_be_none else ["object", name]
