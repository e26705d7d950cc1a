"""From the arguments to the exit status.

0: measured, and every limit kept. 1: it could not be measured, or the other side has failed. 2: the arguments are
wrong. 3: a limit of --require is not kept. 130: Ctrl-C; what was measured until then was printed.
"""

import argparse
import contextlib
import csv
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rdmanet.cli.fabrics import loop_factory
from rdmanet.cli.perf import tables
from rdmanet.cli.perf.client import Session, machine, on_this_machine, to_host
from rdmanet.cli.perf.conditions import Machine, far, pinned_to, standing
from rdmanet.cli.perf.control import Gone, PerfError, check_run
from rdmanet.cli.perf.guard import Limits
from rdmanet.cli.perf.limits import broken
from rdmanet.cli.perf.pairs import Place
from rdmanet.cli.perf.plan import Line, lines_of
from rdmanet.cli.perf.results import SCHEMA, Report, Result, csv_rows, middle, read_report
from rdmanet.cli.perf.server import listen

NOT_KEPT = 3
INTERRUPTED = 130
NAMED = 4
"""So many tests are named in a note."""


def run(args: argparse.Namespace) -> int:
    place = Place(args.ib_dev, args.ib_port, args.gid_index)
    try:
        factory, loop_name = loop_factory(args.loop)
        if args.words[:1] == ["server"]:
            return _serve(args, place, factory)
        host, lines = lines_of(args)
        old = None if args.compare is None else read_report(args.compare)
        return _measure(args, place, host, lines, old, factory, loop_name)
    except ValueError as exc:
        print(f"perf: {exc}", file=sys.stderr)
        return 2
    except (PerfError, Gone, ImportError) as exc:
        print(f"perf: {exc}", file=sys.stderr)
        return 1


def _serve(args: argparse.Namespace, place: Place, factory: Callable[[], Any]) -> int:
    if len(args.words) > 1:
        raise ValueError(f"server takes no tests: the client says what is measured, not {args.words[1]!r}")
    cpus = _cpus(args, 1)
    limits = Limits(args.most_seconds, args.most_memory, args.most_session)
    listen(args.port, place, pinned_to(cpus[0] if cpus else None), factory, limits)
    return 0


def _cpus(args: argparse.Namespace, processes: int) -> list[int]:
    """The server's and the client's; empty if nothing is pinned."""
    if args.cpus is not None:
        cpus: list[int] = args.cpus
        return cpus * 2 if len(cpus) == 1 and processes == 2 else cpus[:processes]
    allowed = sorted(os.sched_getaffinity(0))
    if processes == 1:
        return []
    return allowed[:2] if len(allowed) > 1 else []


def _measure(
    args: argparse.Namespace,
    place: Place,
    host: str | None,
    lines: list[Line],
    old: Report | None,
    factory: Callable[[], Any],
    loop_name: str,
) -> int:
    for line in lines:
        for run_ in line.runs:
            check_run(run_)
    _check_places(args)
    cpus = _cpus(args, 1 if host else 2)
    shows_tables = not (args.json or args.csv)
    whole = Machine()
    if host is None:
        opened = on_this_machine(place, cpus, args.loop, factory)
    else:
        opened = to_host(host, args.port, place, cpus[0] if cpus else None, factory)
    failure = None
    with opened as session:
        report = Report(SCHEMA, machine(session, host, loop_name), lines[0].runs[0].settings, [])
        report.wrong = standing(cpus, report.machine.cache_line_ns)
        interrupted = False
        try:
            for turn in range(args.turns):
                _run_all(session, lines, report, shows_tables, turn, args.turns)
                if report.results[-1].interrupted:
                    break
            interrupted = bool(report.results) and report.results[-1].interrupted
        except KeyboardInterrupt:
            interrupted = True
        except (PerfError, Gone, OSError) as exc:
            if not report.results:
                raise
            failure = exc
    report.wrong += whole.wrong(cpus)
    _show(args, report, old)
    if failure is not None:
        print(f"perf: {failure}", file=sys.stderr)
        return 1
    if interrupted:
        return INTERRUPTED
    missed = broken(args.require, middle(report.results), old)
    for words in missed:
        print(f"perf: {words}", file=sys.stderr)
    return NOT_KEPT if missed else 0


def _run_all(
    session: Session, lines: list[Line], report: Report, shows_tables: bool, turn: int, turns: int
) -> None:
    if shows_tables and turns > 1:
        print(f"{tables.LINE}\n turn {turn + 1} of {turns}")
    for line in lines:
        titled = ""
        for run_ in line.runs:
            cache_line_ns = session.probe()
            result = session.measure(run_)
            result.turn, result.cache_line_ns = turn, cache_line_ns
            result.wrong += far(cache_line_ns)
            report.results.append(result)
            if shows_tables:
                family = tables.family_of(run_.kind)
                if family != titled:
                    alike = [each for each in line.runs if each.kind == run_.kind]
                    print("\n".join(tables.head(alike, result.device, line.text)))
                    titled = family
                print(tables.row(result), flush=True)
            if result.interrupted:
                return


def _show(args: argparse.Namespace, report: Report, old: Report | None) -> None:
    text = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    if args.save is not None:
        _write(args.save, text + "\n")
    if args.hgrm is not None:
        from rdmanet.cli.perf.hgrm import write

        write(args.hgrm, report.results)
    if args.plot is not None:
        from rdmanet.cli.perf.plot import drawing

        _write(args.plot, drawing(report))
    if args.json:
        print(text)
    elif args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(csv_rows(report.results))
    elif report.results:
        print(tables.LINE)
        for part in (
            tables.beside_sockets(middle(report.results)),
            "" if old is None else tables.compared(old, middle(report.results)),
        ):
            if part:
                print(part)
                print(tables.LINE)
    if not args.json:  # which has them
        for words in wrongs(report):
            print(f" note: {words}", file=sys.stderr if args.csv else sys.stdout)


def wrongs(report: Report) -> list[str]:
    """All that was wrong, each said once: with the tests that it was in."""
    where: dict[str, list[Result]] = {}
    for result in report.results:
        for words in result.wrong:
            where.setdefault(words, []).append(result)
    said = list(report.wrong)
    for words, results in where.items():
        names = [f"{result.test} {result.size} B" for result in results[:NAMED]]
        more = len(results) - len(names)
        said.append(f"{', '.join(names)}{f' and {more} more' if more else ''}: {words}")
    return said


def _check_places(args: argparse.Namespace) -> None:
    """Before anything is measured, which may take hours: whether what is found can be written.

    :raises OSError: it cannot
    """
    for path in (args.save, args.plot):
        if path is None:
            continue
        beside = _beside(path)
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            beside.touch(exist_ok=False)
            beside.unlink()
        except OSError as exc:
            raise OSError(exc.errno, f"{path}: {exc.strerror}") from None
    if args.hgrm is not None:
        args.hgrm.mkdir(parents=True, exist_ok=True)


def _beside(path: Path) -> Path:
    """What becomes that file when it is complete: nobody has a file of this name."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}")


def _write(path: Path, text: str) -> None:
    """The whole file, or none of it: who draws over an old one keeps that if the disk is full."""
    beside = _beside(path)
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(exc.errno, f"{path}: {exc.strerror}") from None
