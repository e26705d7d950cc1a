"""The command line: `rdmanet COMMAND`, or `python -m rdmanet COMMAND`.

General layout. devices.py, gids.py, doctor.py, demo.py, secret.py and soft_run.py are the commands; each has
add_arguments(parser) and run(args), which returns the exit status. checks.py is what doctor looks at.
fabrics.py lets one program run over RDMA, TCP and Unix sockets, workloads.py is the traffic that is measured
over each (the benchmarks use both), text.py prints tables and progress, interrupts.py obeys Ctrl-C.

What goes wrong is one line on standard error. A traceback is a bug of ours.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from rdmanet.cli.interrupts import hear_once

INTERRUPTED = 130
"""The exit status after Ctrl-C, as of a shell."""
UNREAD = 141
"""And where nobody reads what is printed any more: `... | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    :param argv: its name and arguments; by default the process's own, whose Ctrl-C is then the command's
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
    from rdmanet.cli import demo, devices, doctor, gids, secret, soft_run

    parser = argparse.ArgumentParser(prog="rdmanet", description="asyncio over RDMA")
    parser.add_argument("--version", action="version", version=f"rdmanet {rdmanet.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (devices, gids, doctor, demo, secret, soft_run):
        summary = (module.__doc__ or "").partition("\n")[0]
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run, name=name)
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
        except OSError:  # that was it: the disk is full, say
            _let_go_of_output()
        return 1
    return status


def _let_go_of_output() -> None:
    """What is left to print goes nowhere, and the interpreter's end does not complain of it."""
    with contextlib.suppress(OSError, ValueError):  # no file of the system's
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
