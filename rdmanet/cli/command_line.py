"""The `rdmanet` command: reads its arguments, calls the module of the command, and makes its exit status."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any

from rdmanet.cli.interrupts import hear_once

COMMANDS = (
    "devices",
    "gids",
    "doctor",
    "ss",
    "run",
    "call",
    "demo",
    "perf",
    "proxy",
    "secret",
    "soft-run",
    "trace",
)
"""Each is a module, or a package, beside this one."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as in a shell."""
UNREAD = 141
"""The exit status after the reader of the output has gone: `... | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    :param argv: its name and arguments; by default those of the process, in which case the command handles Ctrl-C
    """
    try:
        try:
            if argv is None:
                hear_once()
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _let_go_of_output()
        return UNREAD


def _run(argv: Sequence[str] | None) -> int:
    import rdmanet

    words = sys.argv[1:] if argv is None else argv
    names = (
        [words[0]] if words and words[0] in COMMANDS else COMMANDS
    )  # a command does not wait for the others
    try:
        if PathFinder.find_spec("rdmanet._core", rdmanet.__path__) is None:  # not all commands import it
            raise ModuleNotFoundError(name="rdmanet._core")
        modules = [importlib.import_module(f"rdmanet.cli.{name.replace('-', '_')}") for name in names]
    except ModuleNotFoundError as exc:
        if exc.name != "rdmanet._core":
            raise
        print(rdmanet.NOT_BUILT, file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="rdmanet", description="asyncio over RDMA")
    parser.add_argument("--version", action="version", version=f"rdmanet {rdmanet.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_WordsAnywhere
    )
    for name, module in zip(names, modules, strict=True):
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        print(f"{args.name}: {exc}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # this was the error, for example a full disk
            _let_go_of_output()
        return 1
    return status


class _WordsAnywhere(argparse.ArgumentParser):
    """Takes words before, between and after options; argparse takes those of one place, and refuses the others.

    A command that passes all its words on to a program (REMAINDER) takes them as they are.
    """

    _is_within = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._is_within or any(action.nargs == argparse.REMAINDER for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._is_within = True  # until Python 3.12 the other calls this one, for each half
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_within = False


def _let_go_of_output() -> None:
    """Discard buffered output, so that the interpreter does not complain about it at exit."""
    with contextlib.suppress(OSError, ValueError):  # standard output is not a file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
