"""run any program that uses libibverbs and librdmacm on the embedded device

PROGRAM, and each program that it starts, finds the embedded device where it looks for libibverbs and librdmacm:
linked or dlopened, by the usual names or by those that wheels give to libraries of their own. PROGRAM replaces this
process: it gets the signals and the descriptors, and its exit status is the command's.

Two libraries are preloaded (LD_PRELOAD), unless --no-files is given: the device, and a small one. The small library
answers where a program opens a library by such a name, and where it looks for the files that the kernel has for each
device, below /dev/infiniband and /sys/class/infiniband.

There is nothing to clean up afterwards. The library path names a directory in the user's cache with three symbolic
links: two to the device, one for each library name, and one to the small library. Later runs use the same directory.

--namespace mounts the device's files at the kernel's paths, in a mount namespace of PROGRAM's own, for programs that
make system calls themselves.

--faults makes the device fail on purpose, as PROGRAM's environment would by RDMANET_SOFT_CHAOS.

A program that the dynamic loader does not serve, for instance a static one, runs all the same, after a warning.
"""

import argparse
import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from rdmanet.cli import soft_namespace, soft_tree
from rdmanet.cli.soft_program import why_it_escapes

NAMES = ("libibverbs.so.1", "librdmacm.so.1")
FILES = "librdmanet_files.so"
TREE = "RDMANET_SOFT_FILES"  # read by rdmanet/soft/preload/tree.c
PRELOADED = (NAMES[0], FILES)

# ARM: programs written for adapters expect an event also for completions from before they armed the queue. mlx5 gives
# one, the standard does not ask for it, and the device is strict by default. ADOPT: their memory comes from malloc,
# and peers should map it all the same.
DEFAULTS = {"RDMANET_SOFT_ARM": "lenient", "RDMANET_SOFT_ADOPT": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "rdmanet soft-run [--show-path] [--no-files] [--namespace] [--faults TEXT] -- PROGRAM [ARGUMENT ...]"
    )
    parser.add_argument(
        "--show-path",
        action="store_true",
        help="print the library directory, for use in your own LD_LIBRARY_PATH",
    )
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="preload nothing: only the names libibverbs.so.1 and librdmacm.so.1 lead to the device, and it has no "
        "files below /dev/infiniband and /sys/class/infiniband",
    )
    parser.add_argument(
        "--namespace",
        action="store_true",
        help="show the device's files also to programs that make system calls themselves: in a mount namespace",
    )
    parser.add_argument(
        "--faults",
        metavar="TEXT",
        help='inject faults, for example "seed=7, loss=2%%, fail=create_qp:3": RDMANET_SOFT_CHAOS has the same text',
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM ARGUMENT ...",
        help="the program to run, with its arguments",
    )


def run(args: argparse.Namespace) -> int:
    from rdmanet import _core

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if (not command or not command[0]) and not args.show_path:
        print("soft-run: no program given; for example: rdmanet soft-run -- ibv_devinfo", file=sys.stderr)
        return 2
    embedded = _core.Library.embedded()
    if args.faults is not None:
        try:
            embedded.set_faults(args.faults)  # this process's, which ends: it is a check
        except ValueError as exc:
            print(f"soft-run: --faults: {exc}; docs/testing.md has all faults", file=sys.stderr)
            return 2
        embedded.set_faults("")
    library = Path(embedded.path)
    try:
        directory = library_directory(library)
    except OSError as exc:
        print(f"soft-run: {exc}", file=sys.stderr)
        return 1
    if args.show_path:
        print(directory)
        return 0
    if reason := why_it_escapes(command[0], library):
        print(f"soft-run: the embedded device is out of reach: {reason}", file=sys.stderr)
    try:
        variables = environment(directory, files=not args.no_files)
        if args.faults is not None:
            variables["RDMANET_SOFT_CHAOS"] = args.faults
    except OSError as exc:
        print(f"soft-run: the device's files cannot be made: {exc}; --no-files runs without", file=sys.stderr)
        return 1
    if args.namespace:
        try:
            soft_namespace.enter(Path(variables[TREE]))
        except KeyError:
            why = (
                "--no-files asks for none"
                if args.no_files
                else f"a space or colon in {directory} prevents them"
            )
            print(f"soft-run: --namespace shows the device's files, and {why}", file=sys.stderr)
            return 2
        except OSError as exc:
            said = f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
            print(f"soft-run: --namespace: {said}", file=sys.stderr)
            return 1
    try:
        os.execvpe(command[0], command, variables)
    except OSError as exc:
        print(f"soft-run: {command[0]}: {exc.strerror}", file=sys.stderr)
        return 127 if isinstance(exc, FileNotFoundError) else 126


def environment(directory: Path, files: bool = True) -> dict[str, str]:
    """PROGRAM's environment: ours, with the directory first on the library path, and DEFAULTS for what is not set.

    :raises OSError: the tree of the device's files cannot be made
    """
    from rdmanet import _core

    inherited = os.environ.get("LD_LIBRARY_PATH")
    path = f"{directory}:{inherited}" if inherited else str(directory)
    variables = DEFAULTS | os.environ | {"LD_LIBRARY_PATH": path}
    if files and not set(" :") & set(str(directory)):  # these separate the entries of LD_PRELOAD
        # At the end: a sanitizer's run-time has to come first.
        preloaded = (os.environ.get("LD_PRELOAD"), *(str(directory / name) for name in PRELOADED))
        variables["LD_PRELOAD"] = " ".join(filter(None, preloaded))
        [device] = _core.Library.embedded().devices()
        variables[TREE] = str(soft_tree.update(directory, device))
    return variables


def library_directory(library: Path) -> Path:
    """The directory with the links to this library; it is created if it does not exist.

    :raises OSError: it can be created neither in the cache nor in the directory for temporary files
    """
    library = library.resolve()
    name = f"rdmanet-soft-run-{hashlib.sha256(bytes(library)).hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    try:
        return _fill(cache / name, library)
    except OSError:  # no home directory, or one that is not writable
        return _fill(Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}", library)


def _fill(directory: Path, library: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Resolve links now, so that the loader goes where we have looked: none can be changed meanwhile.
    directory = directory.parent.resolve() / directory.name
    state = directory.lstat()
    # Whoever can put a library into it runs code as this user.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(
            f"{directory} can be changed by other users: it must belong to this user, with mode 700"
        )
    for parent in directory.parents:
        above = parent.stat()
        # The owner of a parent can rename its entries, sticky or not: root with another user's HOME (sudo -E) must not
        # trust that user.
        if above.st_uid not in (0, os.getuid()):
            raise PermissionError(
                f"{parent} belongs to another user, who could replace {directory}: set XDG_CACHE_HOME or TMPDIR"
            )
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            raise PermissionError(
                f"{parent} lets other users replace {directory}: set XDG_CACHE_HOME or TMPDIR"
            )
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
