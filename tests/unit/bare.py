"""bare.py MODULE TYPE: use an object that was never made, in every way there is.
bare.py: the same for each such line of its input, in a process of its own; answer with how it ended and what it said.

It comes of `X.__new__(X)`, or of a subclass whose __init__ forgets its base, where the type permits that. Whatever
raises is fine; what does not come back is what tests/unit/test_bare_objects.py is looking for. Copies are printed:
a second owner of what is destroyed once.
"""

import copy
import gc
import importlib
import itertools
import json
import logging
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

OTHERS = (None, 0, 1, -1, b"8 bytes.", "text", [], [None])
ARGUMENTS = [
    *itertools.chain(*(itertools.product(OTHERS, repeat=n) for n in range(3))),
    *((other,) * n for n in range(3, 9) for other in OTHERS),
    (None, 0, 0, 0, 0, 0, 0),
]
# Slots that dir() shows under no name of their own, or that have more to them than a call.
USES: list[Callable[[Any], object]] = [
    bytes,
    bool,
    gc.get_referents,
    hash,
    iter,
    len,
    memoryview,
    next,
    repr,
    lambda bare: bare[0],
    lambda bare: bare[:1],
    lambda bare: bare == bare,
    lambda bare: bare < bare,
    lambda bare: bare.__setitem__(0, 1),
    lambda bare: bare.__setitem__(slice(0, 1), b"1"),
    lambda bare: bare.__enter__(),
    lambda bare: bare.__exit__(None, None, None),
]
COPIES: list[Callable[[Any], object]] = [copy.copy, copy.deepcopy, pickle.dumps]
# Of every object, and about its type.
NOT_ASKED = {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "__init__"}


def compiled(module: Any) -> list[type]:
    """The types of a module that are C's: others can be changed."""
    immutable = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
    own = (thing for thing in vars(module).values() if isinstance(thing, type))
    return [kind for kind in own if kind.__module__ == module.__name__ and kind.__flags__ & immutable]


def bare(kind: type) -> Iterator[Any]:
    """What can be had of the type without its constructor."""
    try:
        yield kind.__new__(kind)
    except TypeError:
        pass
    try:
        forgetful = type("Forgetful", (kind,), {"__init__": lambda self, *args, **options: None})
        yield forgetful()
    except TypeError:
        pass


def attempt(use: Callable[..., Any], *args: object) -> None:
    print(use, args, file=sys.stderr)  # of a crash, this is what is known
    try:
        use(*args)
    except SystemError:  # an answer without an exception, or the other way round
        raise
    except Exception:
        pass


def use_all(thing: Any, kinds: list[type]) -> None:
    for use in USES:
        attempt(use, thing)
    for name in sorted({*dir(thing)} - NOT_ASKED):
        attempt(getattr, thing, name)
        for other in OTHERS:
            attempt(setattr, thing, name, other)
        try:
            method = getattr(thing, name)
        except Exception:
            continue
        if callable(method):
            for arguments in [*ARGUMENTS, (thing,), (thing, thing)]:
                attempt(method, *arguments)
    for kind in kinds:
        for count in range(1, 5):
            for place in range(count):
                attempt(kind, *(thing if i == place else 1 for i in range(count)))
    for arguments in ARGUMENTS:
        attempt(thing.__init__, *arguments)


def serve() -> None:
    """A fork for each line: importing the modules takes longer than the use of what they have."""
    for line in sys.stdin:
        module, kind = line.split()
        importlib.import_module(module)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            if not (child := os.fork()):
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                use_type(module, kind)
                sys.stdout.flush()
                os._exit(0)  # what ends with an exception has exited with 1 by itself
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = [file.seek(0) or file.read() for file in (out, err)]
        print(json.dumps([status, *said]), flush=True)


def use_type(module_name: str, name: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    module = importlib.import_module(module_name)
    kind = getattr(module, name)
    for thing in bare(kind):
        for make_copy in COPIES:
            try:
                print(make_copy, make_copy(thing))
            except TypeError:
                pass
        use_all(thing, compiled(module))
        del thing
        gc.collect()


if __name__ == "__main__":
    use_type(*sys.argv[1:]) if sys.argv[1:] else serve()
