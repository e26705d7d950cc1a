"""run a program of anybody's on the embedded device

PROGRAM finds the embedded device where it looks for libibverbs.so.1 and librdmacm.so.1, linked or dlopened, and
so do the programs that it starts. It takes this process's place: signals, descriptors and the exit status are
its own.

Some programs look for files that the kernel has of each device, below /dev/infiniband and /sys/class/infiniband.
Of the embedded device there are none, so a small library is preloaded (LD_PRELOAD) that answers for them; with
--no-files it is not.

Nothing has to be cleaned up after it. The library path leads to a directory with symbolic links, two to the
device, one for each of the names, and one to that library; it lies in the user's cache, and serves every later
run. A program that changes user (set-user-ID) ignores the library path, as the loader wants it.
"""

import argparse
import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

NAMES = ("libibverbs.so.1", "librdmacm.so.1")
FILES = "librdmanet_files.so"

# ARM: programs written for adapters take an event for what was completed before they armed the queue; mlx5 gives
# one, the standard doesn't, and the device is strict unless it is told otherwise. ADOPT: their memory comes from
# malloc, and peers should map it all the same.
DEFAULTS = {"RDMANET_SOFT_ARM": "lenient", "RDMANET_SOFT_ADOPT": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rdmanet soft-run [--show-path] [--no-files] -- PROGRAM [ARGUMENT ...]"
    parser.add_argument(
        "--show-path",
        action="store_true",
        help="print the library directory, for an LD_LIBRARY_PATH of your own",
    )
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="preload nothing: the device has no files below /dev/infiniband and /sys/class/infiniband then",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM ARGUMENTS", help="what to run")


def run(args: argparse.Namespace) -> int:
    from rdmanet import _core

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command and not args.show_path:
        print("soft-run: which program? For example: rdmanet soft-run -- ibv_devinfo", file=sys.stderr)
        return 2
    try:
        directory = library_directory(Path(_core.Library.embedded().path))
    except OSError as exc:
        print(f"soft-run: {exc}", file=sys.stderr)
        return 1
    if args.show_path:
        print(directory)
        return 0
    try:
        os.execvpe(command[0], command, environment(directory, files=not args.no_files))
    except OSError as exc:
        print(f"soft-run: {command[0]}: {exc.strerror}", file=sys.stderr)
        return 127 if isinstance(exc, FileNotFoundError) else 126


def environment(directory: Path, files: bool = True) -> dict[str, str]:
    """What PROGRAM sees: ours, with the directory first on the library path, and defaults that don't overrule."""
    inherited = os.environ.get("LD_LIBRARY_PATH")
    path = f"{directory}:{inherited}" if inherited else str(directory)
    variables = DEFAULTS | os.environ | {"LD_LIBRARY_PATH": path}
    preloaded = str(directory / FILES)
    if files and not set(" :") & set(preloaded):  # which separate the list's members
        # Last: a sanitizer's run-time has to be first.
        variables["LD_PRELOAD"] = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), preloaded)))
    return variables


def library_directory(library: Path) -> Path:
    """The directory with the links to this library, made if it isn't there.

    :raises OSError: there is no place for it
    """
    library = library.resolve()
    name = f"rdmanet-soft-run-{hashlib.sha256(bytes(library)).hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    try:
        return _fill(cache / name, library)
    except OSError:  # no home, or one that can't be written to
        return _fill(Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}", library)


def _fill(directory: Path, library: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The loader goes where we have looked: no link on the way there can be changed meanwhile.
    directory = directory.parent.resolve() / directory.name
    state = directory.lstat()
    # Whoever can put a library there runs code in our name.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} is not this user's alone")
    for parent in directory.parents:
        above = parent.stat()
        # Its owner can rename what is in it, sticky or not: root under another's HOME (sudo -E) must not trust him.
        if above.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{parent} belongs to another user, who could replace {directory}")
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{parent} lets others put another directory in place of {directory}")
    targets = dict.fromkeys(NAMES, library) | {FILES: library.with_name(FILES)}
    for name, target in targets.items():
        link = directory / name
        if link.is_symlink() and link.readlink() == target:
            continue
        # Renamed into place: another run may be doing the same, or loading from here.
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / name
            made.symlink_to(target)
            made.replace(link)
    return directory
