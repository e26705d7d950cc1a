"""The command line: `python -m rdmanet COMMAND`.

General layout. devices.py, gids.py, doctor.py, demo.py, secret.py and soft_run.py are the commands; each has
add_arguments(parser) and run(args), which returns the exit status. checks.py is what doctor looks at.
fabrics.py lets one program run over RDMA, TCP and Unix sockets, workloads.py is the traffic that is measured
over each (the benchmarks use both), and text.py prints tables and progress.
"""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    from rdmanet.cli import demo, devices, doctor, gids, secret, soft_run

    parser = argparse.ArgumentParser(prog="python -m rdmanet", description="asyncio over RDMA")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (devices, gids, doctor, demo, secret, soft_run):
        summary = (module.__doc__ or "").partition("\n")[0]
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `… | head`: the reader has what it wanted
        sys.stderr.close()
        status = 141
    return status
