"""Whether the dynamic loader will give a program the embedded device, as far as its file tells.

The loader does so by its environment (LD_LIBRARY_PATH, LD_PRELOAD). So a program escapes that has no loader (it is
static), that has a loader for other libraries (of another machine, or musl's), or whose loader ignores the environment,
because the program runs with more rights than its user has.
"""

import os
import shutil
import stat
import struct
from pathlib import Path

_PT_INTERP = 3
_LEVELS = 4  # of scripts that are run by scripts: as many as the kernel follows


def why_it_escapes(program: str, library: Path) -> str:
    """Why the embedded device, which is this library, is out of reach for a program; "" if it is not.

    A script is judged by its interpreter. A file that cannot be read or is no program is not judged: the kernel will
    say what is wrong.
    """
    path = shutil.which(program)
    for _ in range(_LEVELS):
        if path is None:
            return ""
        try:
            with open(path, "rb") as file:
                state, begin = os.fstat(file.fileno()), file.read(4096)
        except OSError:
            return ""
        if not begin.startswith(b"#!"):
            return _judge(path, state, begin, library)
        path = _interpreter(begin)
    return ""


def _interpreter(begin: bytes) -> str | None:
    words = os.fsdecode(begin[2:].partition(b"\n")[0]).split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return shutil.which(words[0]) if words else None


def _judge(path: str, state: os.stat_result, begin: bytes, library: Path) -> str:
    if not begin.startswith(b"\x7fELF") or len(begin) < 64:
        return ""
    with library.open("rb") as file:
        ours = file.read(64)
    if (begin[4:6], begin[18:20]) != (ours[4:6], ours[18:20]):
        return f"{path} is for another machine than the embedded device"
    try:
        loader = _loader(path, begin)
    except (OSError, struct.error):
        return ""
    if not loader:
        return f"{path} is statically linked: it loads no libraries"
    if "musl" in os.path.basename(loader) and not _is_musl():
        return f"{path} uses the C library musl, and the embedded device another one"
    if _gets_rights(path, state):
        return (
            f"{path} runs with more rights than its user has, so the dynamic loader ignores LD_LIBRARY_PATH and "
            "LD_PRELOAD; run it as the user whose rights it gets"
        )
    return ""


def _loader(path: str, begin: bytes) -> str:
    """The dynamic loader that a program names in its header; "" if none."""
    wide = begin[4] == 2
    order = "<" if begin[5] == 1 else ">"
    [table] = struct.unpack_from(order + ("Q" if wide else "I"), begin, 32 if wide else 28)
    size, count = struct.unpack_from(f"{order}HH", begin, 54 if wide else 42)
    with open(path, "rb") as file:
        for index in range(count):
            file.seek(table + index * size)
            header = file.read(size)
            if struct.unpack_from(f"{order}I", header)[0] != _PT_INTERP:
                continue
            place = struct.unpack_from(order + ("Q" if wide else "I"), header, 8 if wide else 4)[0]
            length = struct.unpack_from(order + ("Q" if wide else "I"), header, 32 if wide else 16)[0]
            file.seek(place)
            return os.fsdecode(file.read(min(length, 4096)).rstrip(b"\0"))
    return ""


def _is_musl() -> bool:
    try:
        return not os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return True


def _gets_rights(path: str, state: os.stat_result) -> bool:
    if state.st_mode & stat.S_ISUID and state.st_uid != os.getuid():
        return True
    if state.st_mode & stat.S_ISGID and state.st_mode & stat.S_IXGRP and state.st_gid != os.getgid():
        return True
    try:
        os.getxattr(path, "security.capability")
    except OSError:  # it has none, or its file system knows of none
        return False
    return os.getuid() != 0
