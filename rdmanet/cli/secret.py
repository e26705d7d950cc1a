"""create a secret for the embedded device: a random key of 256 bits, for RDMANET_SOFT_SECRET or a file

usage: rdmanet secret           print it: export RDMANET_SOFT_SECRET=$(rdmanet secret)
       rdmanet secret FILE      write it to a new file that only this user can read, for
                                RDMANET_SOFT_SECRET_FILE

Give the same secret to all processes that are to talk to each other by TCP.
"""

import argparse
import os
import secrets
import sys
from pathlib import Path

from rdmanet.cli.text import file_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=file_path,
        metavar="FILE",
        help="write the secret to this new file (default: print it)",
    )


def run(args: argparse.Namespace) -> int:
    line = secrets.token_hex(32) + "\n"
    if args.file is None:
        print(line, end="")
        return 0
    try:
        _write(args.file, line)
    except FileExistsError:
        print(f"secret: {args.file} already exists, and was not changed", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"secret: {args.file}: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


def _write(path: Path, line: str) -> None:
    # O_EXCL: neither an old secret nor the target of a symbolic link is overwritten.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink()  # half a secret is useless
            raise
