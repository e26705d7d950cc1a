"""`python -m rdmanet`: the command line, which is `rdmanet` where the package is installed."""

import sys


def main() -> int:
    """Run one command and return its exit status. Ctrl-C may come before its modules have been imported."""
    try:
        from rdmanet.cli.command_line import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
