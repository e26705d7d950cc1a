"""join traces of RDMANET_TRACE, print them, or choose from them

usage: rdmanet trace FILE...                      print the events of all files, in the order of their times
       rdmanet trace FILE... --output ALL.json    write them to one file, for https://ui.perfetto.dev
       rdmanet trace FILE... --output ALL.pcapng  the same for Wireshark and tshark (pcapng.py)
       rdmanet trace FILE... --connection 0x1f    those of one connection, of both its ends; --name sent,credits: of
                                                  these names; --pid PID

A program that is run with RDMANET_TRACE=FILE writes them, one for each of its processes: FILE.PID. A file may be a
stranger's: what is printed of it has no control characters.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rdmanet.cli import pcapng
from rdmanet.cli.columns import printable
from rdmanet.cli.text import file_path
from rdmanet.stream.tracing import ITS_PEER, OF_PAIR

_NAME_MOST = 80
_NUMBER_MOST = 1 << 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=file_path, metavar="FILE", help="what RDMANET_TRACE has written"
    )
    parser.add_argument("--pid", type=int, help="only events of this process")
    parser.add_argument(
        "--connection",
        type=_queue_pair,
        metavar="QP",
        help="only events of this queue pair, and of its peer's: 0x1f, or 31",
    )
    parser.add_argument(
        "--name",
        dest="words",
        metavar="WORD[,WORD]",
        help="only events whose names contain one of these words",
    )
    parser.add_argument(
        "--output",
        type=file_path,
        metavar="FILE",
        help="write the events to this trace, and print nothing; NAME.pcapng is for Wireshark",
    )
    parser.add_argument(
        "--dissector",
        action=_PrintDissector,
        help="print the path of the plugin with which Wireshark shows such a file",
    )


class _PrintDissector(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(pcapng.DISSECTOR)
        parser.exit()


def _queue_pair(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of a queue pair, such as 0x1f or 31: without --connection all are printed"
        ) from None


def run(args: argparse.Namespace) -> int:
    try:
        events = [event for path in args.files for event in _read(path)]
    except ValueError as exc:
        print(f"trace: {exc}", file=sys.stderr)
        return 1
    names = [event for event in events if event["ph"] == "M"]
    chosen = sorted(_chosen(args, events, names), key=lambda event: event["ts"])
    if args.output is not None and args.output.suffix == ".pcapng":
        with args.output.open("wb") as packets:
            packets.writelines(pcapng.blocks(chosen, names))
        return 0
    if args.output is not None:
        with args.output.open("w", encoding="ascii") as file:
            json.dump({"displayTimeUnit": "ns", "traceEvents": names + chosen}, file, separators=(",", ":"))
        return 0
    for line in _lines(chosen):
        print(line)
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """:raises ValueError: it is no trace"""
    try:
        found = json.loads(path.read_bytes())["traceEvents"]
        if not all(map(_is_event, found)):
            raise ValueError("an event lacks a field, or one has the wrong type or range")
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"{path} is no trace: {printable(str(exc), _NAME_MOST)}") from None
    return list(found)


def _is_event(event: Any) -> bool:
    numbers = ("pid", "tid") if event["ph"] == "M" else ("pid", "tid", "ts")
    return (
        all(_is_number(event[name]) for name in numbers)
        and isinstance(event["tid"], int)
        and isinstance(event["name"], str)
        and isinstance(event.get("args", {}), dict)
        and _is_number(event.get("dur", 0))
    )


def _is_number(value: Any) -> bool:
    """Whether it can be shown: JSON has integers without end, and Python's has NaN."""
    return isinstance(value, (int, float)) and abs(value) < _NUMBER_MOST


def _chosen(
    args: argparse.Namespace, events: Iterable[dict[str, Any]], names: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    tracks = set() if args.connection is None else _both_ends(args.connection, names)
    words = args.words.split(",") if args.words else [""]
    for event in events:
        is_chosen = (
            event["ph"] != "M"
            and args.pid in (None, event["pid"])
            and (args.connection is None or event["tid"] in tracks)
            and any(word in event["name"] for word in words)
        )
        if is_chosen:
            yield event


def _both_ends(connection: int, names: Iterable[dict[str, Any]]) -> set[int]:
    """The tracks of this queue pair and of its peer's, as their names tell."""
    named = [(each["tid"], str(each.get("args", {}).get("name", ""))) for each in names]
    of_pair = [(track, name.partition(OF_PAIR)[2]) for track, name in named]
    pairs = {pair for track, pair in of_pair if pair and track == connection}
    return (
        {connection}
        | {track for track, name in named if name.endswith(f"{ITS_PEER}{connection:#x}")}
        | {track for track, pair in of_pair if pair in pairs}
    )


def _lines(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One for each, but for the ends of arrows; times are from the first one on."""
    began = None
    for event in events:
        if event["ph"] in ("s", "f"):
            continue
        began = event["ts"] if began is None else began
        known = [f"{name} {value}" for name, value in event.get("args", {}).items()]
        if event.get("dur", 0) > 1:
            known.append(f"for {event['dur']:.1f} µs")
        said = printable(f"{event['name']}  {', '.join(known)}".rstrip(), 2 * _NAME_MOST)
        yield f"{event['ts'] - began:14.1f} µs  {event['pid']:>8}  {event['tid']:#12x}  {said}"
