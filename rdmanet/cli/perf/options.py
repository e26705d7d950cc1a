"""The arguments of `rdmanet perf`. A letter that perftest has means here what it means there."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rdmanet.cli.perf.control import (
    MOST_BYTES,
    MOST_CALLS,
    MOST_CONNECTIONS,
    MOST_COUNT,
    MOST_DEPTH,
    MOST_INLINE,
    MOST_MEMORY,
    MOST_OUTSTANDING,
    MOST_QUEUE_PAIRS,
    MOST_RATE,
    Settings,
)
from rdmanet.cli.perf.kinds import GROUPS, KINDS, QUICK, SIZES, Kind
from rdmanet.cli.perf.limits import limit_of
from rdmanet.cli.text import argument, seconds

PORT = 18515
"""perftest's."""
ALL_SIZES: Final = [1 << exponent for exponent in range(1, 24)]
MOST_TURNS: Final = 1000
SMALL_BYTES: Final = 8192
SMALL_EVERY: Final = 100
"""perftest's: of messages up to so many bytes each hundredth request is signaled."""
_SECONDS: Final = seconds("no number of seconds between 0 and 86400", 0, 86400)
_SUFFIXES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rdmanet perf [HOST] [TEST ...] [OPTION ...]\n       rdmanet perf server [OPTION ...]"
    parser.epilog = f"tests: {', '.join(KINDS)}; groups: {', '.join(GROUPS)}; by default {', '.join(QUICK)}"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="HOST TEST",
        help="tests, or groups of them; another word is the host where `rdmanet perf server` runs",
    )
    _what(parser.add_argument_group("what is measured"))
    _verbs(parser.add_argument_group("verbs, as perftest"))
    _where(parser.add_argument_group("where"))
    server = parser.add_argument_group("perf server: for clients that nobody knows")
    _option(server, "--most-seconds", "the longest run", _SECONDS, "SECONDS", 120.0)
    _option(server, "--most-memory", "memory of a run (default: 256m)", _memory, "BYTES", 1 << 28)
    _option(
        server, "--most-session", "the time of a client, if another one waits", _SECONDS, "SECONDS", 600.0
    )
    _shown(parser.add_argument_group("what is shown"))


def _option(
    group: Any, names: str, words: str, kind: Any = bool, metavar: str = "", default: Any = None
) -> None:
    """An option, with its default in the words, unless these have it; of kind `bool`: a switch.

    :param kind: gives the value of an argument, or raises; or is the choices
    """
    if kind is bool:
        group.add_argument(*names.split(), action="store_true", help=words)
        return
    if default and "(default" not in words:
        words += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    checked = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": metavar}
    group.add_argument(*names.split(), default=default, help=words, **checked)


def _what(group: Any) -> None:
    _option(group, "-s --size", "64, or 64,4k,1m, or 64-1m: powers of two", _sizes, "BYTES")
    _option(group, "-a --all", "all sizes from 2 to 2**23")
    iters = "number of messages on each queue pair, instead of a time"
    _option(group, "-n --iters", iters, _within(1, MOST_COUNT), "N", 0)
    _option(group, "-D --duration", "time for each size (default: 1)", _SECONDS, "SECONDS")
    warm_up = "time before the measurement that is not counted"
    _option(group, "--warm-up", warm_up, _SECONDS, "SECONDS", 0.1)
    api = "how streams are used: Protocol, BufferedProtocol, reader and writer"
    _option(group, "--api", api, ("protocol", "buffered", "streams"), default="protocol")
    in_flight = "calls of rpc_bw at once, messages of each connection of stream_rr, tcp_rr and unix_rr"
    _option(group, "--in-flight", in_flight, _within(1, MOST_CALLS), "N", 32)
    connections = "connections of stream_rr, tcp_rr and unix_rr"
    _option(group, "--connections", connections, _within(1, MOST_CONNECTIONS), "N", 1)
    rate = (
        "messages a second, for latency and the bandwidth of verbs; one that the answer before it delays counts"
        " from when it was due (default: as many as fit)"
    )
    _option(group, "--rate", rate, _rate, "N", 0.0)
    _option(
        group,
        "--first",
        "latency of the first message of a connection, with its making, for streams and calls",
    )
    _option(
        group, "--plan", "measure what a file says: each line has tests and options, as here", Path, "FILE"
    )
    turns = "measure all so many times, one after another; ratios and limits are of the medians"
    _option(group, "--turns", turns, _within(1, MOST_TURNS), "N", 1)
    loop = "the event loop of streams and calls (default: uvloop if it is installed)"
    _option(group, "--loop", loop, ("uvloop", "asyncio"))


def _verbs(group: Any) -> None:
    depth = _within(1, MOST_DEPTH)
    _option(group, "-c --connection", "type of connection", ("RC", "UC", "UD"), default="RC")
    queue_pairs = "number of queue pairs, for bandwidth"
    _option(group, "-q --qp", queue_pairs, _within(1, MOST_QUEUE_PAIRS), "N", 1)
    _option(group, "-l --post_list", "number of requests posted as one list", depth, "N", 1)
    _option(group, "-t --tx-depth", "requests in flight on each queue pair", depth, "N", 128)
    _option(group, "-r --rx-depth", "receives posted on each queue pair", depth, "N", 512)
    every = "every N-th request is signaled (default: 100 for messages up to 8 KiB, else 1)"
    _option(group, "-Q --cq-mod", every, depth, "N")
    outstanding = "outstanding READs and atomics of each queue pair"
    _option(group, "-o --outs", outstanding, _within(1, MOST_OUTSTANDING), "N", 16)
    inline = "post messages up to this size inline (default: 0)"
    _option(group, "-I --inline_size", inline, _within(0, MOST_INLINE), "BYTES", 0)
    _option(group, "-e --events", "sleep until a completion comes, instead of polling; streams, too")
    _option(group, "-b --bidirectional", "both sides send, for bandwidth")
    mtu = "path MTU in bytes (default: the port's)"
    group.add_argument("-m", "--mtu", type=int, choices=(256, 512, 1024, 2048, 4096), help=mtu)


def _where(group: Any) -> None:
    _option(group, "-d --ib-dev", "name of the RDMA device (default: the first one)", str, "DEVICE")
    _option(group, "-i --ib-port", "port of the device", _positive, "PORT", 1)
    _option(group, "-x --gid-index", "index of the port's GID (default: the best one)", _number, "INDEX")
    _option(group, "-p --port", "TCP port of `rdmanet perf server`", _port, "PORT", PORT)
    cpus = (
        "pin the server and the client to these (default: the first two that this process may use); with HOST, and"
        " for `perf server`, one CPU, for this process (default: not pinned); - pins nothing"
    )
    _option(group, "--cpus", cpus, _cpus, "CPU[,CPU]")


def _shown(group: Any) -> None:
    _option(group, "--json", "print JSON, schema rdmanet-perf/1, instead of tables")
    _option(group, "--csv", "print CSV instead of tables")
    _option(group, "--save", "write the JSON to a file as well", Path, "FILE")
    _option(group, "--hgrm", "write the percentiles of each test as HdrHistogram's text", Path, "FOLDER")
    _option(group, "--plot", "draw it", Path, "FILE.svg")
    _option(group, "--compare", "print ratios to an earlier run", Path, "OLD.json")
    group.add_argument(
        "--require",
        type=argument(limit_of),
        nargs="+",
        action="extend",
        default=[],
        metavar="LIMIT",
        help="'p99<20us' 'bw>5GB/s' 'write_lat:p50<1us' 'p50<1.1x' (times the --compare file's): the exit status is"
        " 3 if one is not kept",
    )


def tests_of(words: list[str]) -> tuple[str | None, list[Kind]]:
    """The host, if any, and the tests.

    :raises ValueError: a word is a test that there is not, or several are hosts
    """
    hosts = list(dict.fromkeys(word for word in words if word not in KINDS and word not in GROUPS))
    for word in hosts:
        if word.endswith(("_lat", "_bw", "_rr")):
            raise ValueError(
                f"there is no test {word!r}; tests: {', '.join(KINDS)}; groups: {', '.join(GROUPS)}"
            )
    if len(hosts) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, hosts))}: only one of them can be the host; tests: {', '.join(KINDS)}; groups:"
            f" {', '.join(GROUPS)}"
        )
    host = hosts[0] if hosts else None
    names: list[str] = []
    for word in words:
        names += [word] if word in KINDS else _reachable(GROUPS.get(word, []), host)
    return host, [KINDS[name] for name in dict.fromkeys(names or _reachable(QUICK, host))]


def _reachable(names: list[str], host: str | None) -> list[str]:
    """Of a group, what a host can do: no Unix socket reaches another machine."""
    return names if host is None else [name for name in names if KINDS[name].over != "unix"]


def sizes_of(args: argparse.Namespace, kind: Kind) -> list[int]:
    """The sizes that a test is run with."""
    if kind.over == "atomic":
        return [8]
    if args.all:
        return [size for size in ALL_SIZES if args.connection != "UD" or size <= (args.mtu or 4096)]
    sizes: list[int] = args.size or SIZES[kind.measures]
    return sizes


def settings_of(args: argparse.Namespace, size: int) -> Settings:
    """How a size is measured."""
    every = args.cq_mod or max(args.post_list, SMALL_EVERY if size <= SMALL_BYTES else 1)
    return Settings(
        seconds=1.0 if args.duration is None else args.duration,
        iterations=args.iters,
        warm_up_s=args.warm_up,
        queue_pairs=args.qp,
        connection=args.connection,
        mtu=args.mtu or 0,
        depth=args.tx_depth,
        receive_depth=args.rx_depth,
        every=min(every, args.tx_depth) if args.cq_mod is None else every,
        list_size=args.post_list,
        inline=args.inline_size,
        events=args.events,
        both_ways=args.bidirectional,
        outstanding=args.outs,
        api=args.api,
        in_flight=args.in_flight,
        connections=args.connections,
        rate=args.rate,
        first=args.first,
    )


# ---- Types of arguments -------------------------------------------------------------------------------------


def _bytes(text: str) -> int:
    """0 if it is none."""
    found = re.fullmatch(r"(\d{1,15})([kmg]?)(?:i?b)?", text.strip().lower())
    return int(found[1]) * _SUFFIXES[found[2]] if found else 0


def _memory(text: str) -> int:
    size = _bytes(text)
    if not 1 <= size <= MOST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text!r} is no size between 1 byte and 4g; examples: 64m, 1g")
    return size


def _size(text: str) -> int:
    size = _bytes(text)
    if not 1 <= size <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size between 1 byte and 1g; examples: 64, 4k, 1m")
    return size


def _sizes(text: str) -> list[int]:
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _size(first)
        high = _size(last) if dash else low
        if low > high:
            raise argparse.ArgumentTypeError(f"{part!r}: the first size is greater than the last")
        while low < high:
            sizes.append(low)
            low *= 2
        sizes.append(high)
    return list(dict.fromkeys(sizes))


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def _positive(text: str) -> int:
    number = _number(text)
    if not number:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _within(least: int, most: int) -> Callable[[str], int]:
    """A number that the other side takes, too: control.py has the ranges."""

    def number_of(text: str) -> int:
        number = int(text) if re.fullmatch(r"\d{1,15}", text) else -1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number between {least} and {most}")
        return number

    return number_of


def _port(text: str) -> int:
    number = _number(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return number


def _rate(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)(?:/s)?", text)
    rate = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6}[found[2].lower()] if found else 0.0
    if not 0 < rate <= MOST_RATE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of messages a second up to {MOST_RATE:g}; examples: 1000, 50k, 1M"
        )
    return rate


def _cpus(text: str) -> list[int]:
    if text == "-":
        return []
    allowed = os.sched_getaffinity(0)
    cpus = [_number(part) for part in text.split(",")]
    if len(cpus) > 2:
        raise argparse.ArgumentTypeError(f"{text!r}: two CPUs at most, the server's and the client's")
    if missing := [cpu for cpu in cpus if cpu not in allowed]:
        raise argparse.ArgumentTypeError(
            f"this process may not run on CPU {missing[0]}; it may on {sorted(allowed)}"
        )
    return cpus


def wrong_together(args: argparse.Namespace, kinds: list[Kind], host: str | None) -> str | None:
    """What arguments do not go together, in words."""
    relative = any(limit.relative for limit in args.require)
    over_unix = [kind.name for kind in kinds if kind.over == "unix"]
    checks: list[tuple[Any, str]] = [
        (args.iters and args.duration is not None, "either -n or -D, not both"),
        (args.all and args.size, "either -a or -s, not both"),
        (args.json and args.csv, "either --json or --csv, not both"),
        (args.duration == 0, "-D 0 measures nothing: give a longer time, or -n"),
        (relative and not args.compare, "--require with x, a ratio, needs --compare"),
        (
            host is not None and over_unix,
            f"{', '.join(over_unix)}: a Unix socket does not reach another machine",
        ),
        (
            host is not None and len(args.cpus or []) > 1,
            "--cpus: with HOST give one CPU, for this process; the server has --cpus of its own",
        ),
    ]
    return next((words for wrong, words in checks if wrong), None)
