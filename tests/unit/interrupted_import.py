"""interrupted_import.py MODULE [PLACE...]: imports it again and again, each time in a fork of its own, and interrupts
each import at another moment: when some function, or the body of some module or class, is called for the first time.
With PLACEs, only files whose paths contain one of them count.

A trace function raises KeyboardInterrupt, as Python's handler of Ctrl-C does, and at the same places: where Python code
runs. After that the child imports the module again, as a program does that catches Ctrl-C, and decodes something.

It prints a line of JSON: the place and the exit status of each child.
"""

import asyncio
import enum
import gc
import importlib
import inspect
import json
import os
import sys
import types
import typing

# What other programs have imported long before, except for what msgspec imports.
_ = (asyncio, enum, inspect, typing)
assert not {"datetime", "msgspec", "rdmanet"} & set(sys.modules)

LOST = 1  # the interrupt did not come out of the import
WRONG = 2
NOT_AGAIN = 3  # an extension module refused, with an error, to be imported a second time


def import_interrupted(module: str, places: list[str], nth: int) -> tuple[str | None, bool]:
    """Where it was interrupted, and whether the import said so."""
    seen: set[types.CodeType] = set()
    where = None

    def trace(frame: types.FrameType, event: str, arg: object) -> None:
        nonlocal where
        file = frame.f_code.co_filename
        if frame.f_code not in seen and (not places or any(place in file for place in places)):
            seen.add(frame.f_code)
            if len(seen) == nth:
                where = f"{file}:{frame.f_code.co_name}"
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        importlib.import_module(module)
    except BaseException:  # or what others made of it: a RuntimeError of a class, for example
        return where, True
    finally:
        sys.settrace(None)
    return where, False


def decode_something(module: str) -> None:
    importlib.import_module(module)
    from rdmanet.credit import Credit, Region, pack_credit, unpack_credit
    from rdmanet.wire.remote import RemoteMemory

    credit = Credit(3, (Region(1, 4096, 10, 7, 2, ""),))
    assert unpack_credit(pack_credit(credit), 3) == credit
    memory = RemoteMemory(4096, 10, 7)
    assert RemoteMemory.from_msgpack(memory.to_msgpack()) == memory


def child(module: str, places: list[str], nth: int, tell: int) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # importlib's own callbacks report what they cannot raise
    where, was_told = import_interrupted(module, places, nth)
    gc.collect()
    if where is None:
        return 0
    os.write(tell, where.encode())
    try:
        decode_something(module)
    except SystemError:
        return NOT_AGAIN
    except BaseException:
        return WRONG
    return 0 if was_told else LOST


def main(module: str, *places: str) -> None:
    outcomes = []
    for nth in range(1, sys.maxsize):
        hear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = WRONG
            try:
                status = child(module, list(places), nth, tell)
            finally:
                os._exit(status)
        os.close(tell)
        with os.fdopen(hear) as pipe:
            where = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not where and status == 0:
            break  # the import has no more functions
        outcomes.append((where, status))
    print(json.dumps(outcomes))


main(*sys.argv[1:])
