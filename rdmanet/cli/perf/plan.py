"""--plan: several measurements in one run. Each line of the file has tests and options, as on the command line.

    # what          how
    stream_lat tcp_lat unix_lat -s 64 --api streams
    stream_bw tcp_bw unix_bw    -s 64k,1m -D 2

Options of the command line hold for each line that does not say otherwise. A line cannot say where and between whom is
measured, or what becomes of the numbers: that is said once.
"""

import argparse
import copy
import shlex
from pathlib import Path
from typing import Final, NamedTuple

from rdmanet.cli.perf.control import Run
from rdmanet.cli.perf.options import add_arguments, settings_of, sizes_of, tests_of, wrong_together

MOST_LINES: Final = 1000
OF_A_LINE: Final = frozenset(
    "words size all iters duration warm_up api in_flight connections rate first connection qp post_list tx_depth"
    " rx_depth cq_mod outs inline_size events bidirectional mtu".split()
)
"""What a line may say, by the names of argparse."""


class Line(NamedTuple):
    """A part of the run.

    :ivar text: what was said; "" if that is the command line
    """

    text: str
    runs: list[Run]


def lines_of(args: argparse.Namespace) -> tuple[str | None, list[Line]]:
    """The host, and what is measured: of the plan's file, or of the command line.

    :raises ValueError: something in it is wrong
    :raises OSError: it cannot be read
    """
    host, _ = tests_of(args.words)
    if args.plan is None:
        return host, [Line("", _runs(args, args.words))]
    if [word for word in args.words if word != host]:
        raise ValueError("either tests or --plan, not both")
    lines = []
    for number, text in enumerate(_read(args.plan).splitlines(), 1):
        try:
            words = shlex.split(text, comments=True)
            if words:
                lines.append(Line(shlex.join(words), _of_line(args, words, host)))
        except ValueError as exc:
            raise ValueError(f"{args.plan}, line {number}: {exc}") from None
    if not 0 < len(lines) <= MOST_LINES:
        raise ValueError(f"{args.plan} has {len(lines)} lines, and 1 to {MOST_LINES} can be measured")
    return host, lines


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as exc:
        raise ValueError(f"{path} is no text: {exc}") from None


def _of_line(args: argparse.Namespace, words: list[str], host: str | None) -> list[Run]:
    parser = argparse.ArgumentParser(prog="rdmanet perf", add_help=False)
    parser.error = _raise  # type: ignore[method-assign,assignment]
    add_arguments(parser)
    own = copy.copy(args)
    own.words = []
    parser.parse_args(words, own)
    for name, value in vars(own).items():
        if name not in OF_A_LINE and value != getattr(args, name):
            raise ValueError(f"{shlex.join(words)}: --{name.replace('_', '-')} is said once, beside --plan")
    if others := [word for word in own.words if word == "server" or tests_of([word])[0] is not None]:
        raise ValueError(f"{others[0]!r} is no test: the host is said once, beside --plan")
    return _runs(own, own.words + ([host] if host else []))


def _raise(message: str) -> None:
    raise ValueError(message)


def _runs(args: argparse.Namespace, words: list[str]) -> list[Run]:
    host, kinds = tests_of(words)
    if wrong := wrong_together(args, kinds, host):
        raise ValueError(wrong)
    return [Run(kind.name, size, settings_of(args, size)) for kind in kinds for size in sizes_of(args, kind)]
