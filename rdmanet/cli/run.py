"""run any asyncio program over RDMA where its peers can, and over TCP elsewhere

usage: rdmanet run SCRIPT ARGUMENT ...        a file of Python
       rdmanet run -m MODULE ARGUMENT ...     a module, as by python -m
       rdmanet run PROGRAM ARGUMENT ...       a program that is written in Python, or starts one: uvicorn, make

Every event loop that the program makes, asyncio's or uvloop's, is switched as by rdmanet.run(); so are those of the
processes that it starts. RDMANET_PEERS says which peers are to be reached by RDMA, and RDMANET_REQUIRE=no-tcp makes it
an error to fall back to TCP.

The program replaces this process. It finds a sitecustomize module of rdmanet first on PYTHONPATH, so Pythons that
ignore that (-I, -E) are not switched.
"""

import argparse
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rdmanet run [-m MODULE | SCRIPT | PROGRAM] [ARGUMENT ...]"
    parser.prefix_chars = "\0"  # whatever looks like an option is the program's, or Python's
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="...", help="the program, with its arguments"
    )
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    words: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if words[:1] in (["-h"], ["--help"]):
        args.print_help()
        return 0
    if (
        not words
        or not words[0]
        or words == ["-m"]
        or (words[0].startswith("-") and words[0] not in ("-m", "-c"))
    ):
        print("run: no program given; for example: rdmanet run -m http.server", file=sys.stderr)
        return 2
    command = command_of(words)
    try:
        sys.stdout.flush()
        os.execvpe(command[0], command, environment())
    except OSError as exc:
        print(f"run: {command[0]}: {exc.strerror}", file=sys.stderr)
        return 127 if isinstance(exc, FileNotFoundError) else 126


def command_of(words: list[str]) -> list[str]:
    """The command to execute: with this Python in front, unless the first word is a program."""
    script = Path(words[0])
    is_python = words[0] in ("-m", "-c") or script.suffix == ".py"
    is_script = script.is_file() and not os.access(script, os.X_OK)
    return [sys.executable, *words] if is_python or is_script else words


def environment() -> dict[str, str]:
    """PROGRAM's environment: ours, with the directory of our sitecustomize first on PYTHONPATH."""
    from rdmanet.cli.everywhere import SITE

    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in inherited if entry != str(SITE)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), *others])}
