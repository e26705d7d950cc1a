"""check this machine, and the way to another one, and say what to do

usage: rdmanet doctor                    this machine
       rdmanet doctor --serve [PORT]     answer others' pings, until interrupted
       rdmanet doctor HOST[:PORT]        this machine, then a ping of that one

The exit status is 1 if something has failed; warnings and remarks do not count.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rdmanet.cli import interrupts
from rdmanet.cli.checks import CHECKS, Finding

PORT = 7474
_PINGS = 100
_PAYLOAD = bytes(range(64))
_TIMEOUT_S = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "peer",
        nargs="?",
        type=_peer,
        metavar="HOST[:PORT]",
        help=f"ping this host, where `--serve` runs (port {PORT})",
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=_port,
        const=PORT,
        metavar="PORT",
        help=f"answer pings, on port {PORT} unless told otherwise; those of anybody who reaches it, but where "
        "RDMANET_SOFT_SECRET is set",
    )
    parser.add_argument("--json", action="store_true", help="the findings, for programs")


def run(args: argparse.Namespace) -> int:
    if args.serve is not None:
        try:
            interrupts.run(_serve(args.serve))
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):
                raise
            print(f"doctor: cannot answer pings: {exc}; another port: --serve PORT", file=sys.stderr)
            return 1
        return 0
    findings = []
    for finding in _examine(args.peer):
        findings.append(finding)
        if not args.json:
            _print(finding)
    failed = sum(finding.status == "fail" for finding in findings)
    if args.json:
        json.dump({"findings": [dataclasses.asdict(finding) for finding in findings]}, sys.stdout, indent=2)
        print()
    else:
        warned = sum(finding.status == "warn" for finding in findings)
        print(f"{len(findings)} findings, {failed} failed, {warned} with a warning")
    return 1 if failed else 0


def _examine(peer: tuple[str, int] | None) -> Iterator[Finding]:
    for check in CHECKS.values():
        yield from check(Path("/"))
    if peer is not None:
        yield interrupts.run(_ping(*peer))


def _peer(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, an IPv6 address, [IPv6]:PORT."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], _port(port)
    if host and ":" not in host:
        return host, _port(port)
    if not text:
        raise argparse.ArgumentTypeError("a host without a name")
    return text.strip("[]"), PORT


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number up to 65535")
    return int(text)


def _print(finding: Finding) -> None:
    print(f"{finding.status:4}  {finding.check:9}  {finding.found}")
    if finding.advice:
        print(f"{'':15}  -> {finding.advice}")


async def _ping(host: str, port: int) -> Finding:
    """Connect, send 64 bytes a hundred times, and say how long each took to come back."""
    import rdmanet

    name = f"{host} port {port}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await rdmanet.open_rdma_connection(host, port)
            with contextlib.closing(writer):
                device = writer.get_extra_info("rdma_device")
                times = []
                for _ in range(_PINGS):
                    begin = time.perf_counter()
                    writer.write(_PAYLOAD)
                    if await reader.readexactly(len(_PAYLOAD)) != _PAYLOAD:
                        return Finding(
                            "ping", "fail", f"{name} sent back something else", "is it `doctor --serve`?"
                        )
                    times.append(time.perf_counter() - begin)
    except ConnectionRefusedError as exc:
        return Finding(
            "ping",
            "fail",
            f"{name} can be reached, and refuses: {exc.strerror}",
            f"run `rdmanet doctor --serve {port}` on that host",
        )
    except TimeoutError:
        return Finding(
            "ping",
            "fail",
            f"{name} did not answer within {_TIMEOUT_S} s",
            f"ping {host}; is UDP port 4791 (RoCE) or TCP port {port} (embedded device, iWARP) open in every firewall?",
        )
    except (socket.gaierror, UnicodeError) as exc:  # the last of a name that DNS has no letters for
        return Finding(
            "ping",
            "fail",
            f"{host} is no name of a host: {exc}",
            "an IP address needs no name: doctor ADDRESS",
        )
    except (OSError, EOFError) as exc:
        return Finding(
            "ping", "fail", f"{name}: {exc or type(exc).__name__}", "run doctor on that host as well"
        )
    return Finding(
        "ping",
        "ok",
        f"{name} by {device}: {len(times)} round trips of {len(_PAYLOAD)} bytes, "
        f"median {statistics.median(times) * 1e6:.0f} µs, longest {max(times) * 1e6:.0f} µs",
    )


async def _serve(port: int) -> None:
    import rdmanet

    async def echo(reader: asyncio.StreamReader, writer: rdmanet.RdmaStreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with await rdmanet.start_rdma_stream_server(echo, None, port) as server:
        print("answering pings on", *(listener.getsockname() for listener in server.sockets), flush=True)
        await server.serve_forever()
