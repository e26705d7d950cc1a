"""What the annotations of a method mean.

Theory
------
An annotation may be a text: written as one, or because of ``from __future__ import annotations``. It means what it
means where the method is defined. A class may inherit that method, or borrow the function, from another module, where
the same name is another class. So each text is looked up

    among the type parameters of the method
    among the type parameters, and in the body, of the class that defines the method
    among the local names of the function that this class is in
    in the module of the method

A subclass of a service takes what its base has found. Methods of the class do not count as names of its body: one that
is called ``list`` does not change what ``list[int]`` means.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from types import FrameType
from typing import Any, Final

_STREAMS: Final = (
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


def defining_frame(cls: type, frame: FrameType) -> FrameType:
    """Where the `class` statement is, from a frame that it has called.

    Between them are metaclasses, and what bases do when they have a new subclass.
    """
    while frame.f_back is not None and (
        frame.f_code.co_name == "__init_subclass__" or frame.f_globals.get("__name__") != cls.__module__
    ):
        frame = frame.f_back
    return frame


def owner_of(cls: type, name: str) -> type:
    """The class that a class has an attribute from."""
    return next(each for each in cls.__mro__ if name in vars(each))


def resolved(cls: type, owner: type, function: Any, frame: FrameType) -> dict[str, Any]:
    """The annotations of a method.

    :param owner: the class that `cls` has it from
    :param frame: where `cls` is defined
    :raises TypeError: one is not defined
    """
    written = inspect.unwrap(function, stop=lambda each: not inspect.isfunction(vars(each)["__wrapped__"]))
    names: dict[str, Any] = {}
    if written.__globals__ is frame.f_globals and _scope(owner) == _scope(cls):
        names |= frame.f_locals
    if (written.__module__, _scope(written)) == (owner.__module__, owner.__qualname__):
        names[owner.__name__] = owner
        names |= {each.__name__: each for each in getattr(owner, "__type_params__", ())}
        names |= {key: value for key, value in vars(owner).items() if not inspect.isroutine(value)}
    # typing does this itself in Python 3.13, and not in each release of 3.12.
    names |= {each.__name__: each for each in getattr(written, "__type_params__", ())}
    try:
        return typing.get_type_hints(function, localns=names, include_extras=True)
    except NameError as exc:
        raise TypeError(
            f"{cls.__name__}.{function.__name__}: an annotation is not defined yet: {exc}. Types of a service must be"
            " defined above it, and not only under TYPE_CHECKING"
        ) from None


def stream_item(annotation: Any) -> Any:
    """The type of the items of a stream; None if it is none."""
    if typing.get_origin(annotation) in _STREAMS:
        return typing.get_args(annotation)[0]
    return Any if annotation in _STREAMS else None


def _scope(defined: Any) -> str:
    """The name of the function or class in which something is defined."""
    return str(defined.__qualname__.rpartition(".")[0])
