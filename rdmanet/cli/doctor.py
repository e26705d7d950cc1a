"""check this machine, and its connection to another one, and say what to fix

usage: rdmanet doctor                    this machine
       rdmanet doctor --serve [PORT]     answer the pings of other machines, until interrupted
       rdmanet doctor HOST[:PORT]        this machine, then ping that one

The exit status is 1 if a check has failed; warnings do not count.
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
        help=f"ping this host, on which `rdmanet doctor --serve` has to run (default port: {PORT})",
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=_port,
        const=PORT,
        metavar="PORT",
        help=f"answer pings on this port (default: {PORT}), from everyone who can reach it, unless "
        "RDMANET_SOFT_SECRET_FILE is set",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    if args.serve is not None:
        try:
            interrupts.run(_serve(args.serve))
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):
                raise
            print(f"doctor: cannot answer pings: {exc}; --serve PORT chooses another port", file=sys.stderr)
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
        print(f"{len(findings)} findings: {failed} failed, {warned} warnings")
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
        raise argparse.ArgumentTypeError("the host name is empty")
    return text.strip("[]"), PORT


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _print(finding: Finding) -> None:
    print(f"{finding.status:4}  {finding.check:9}  {finding.found}")
    if finding.advice:
        print(f"{'':15}  -> {finding.advice}")


async def _ping(host: str, port: int) -> Finding:
    """Connect, send 64 bytes a hundred times, and measure how long each takes to come back."""
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
                            "ping",
                            "fail",
                            f"{name} sent back other bytes",
                            "is it `rdmanet doctor --serve` that answers there?",
                        )
                    times.append(time.perf_counter() - begin)
    except ConnectionRefusedError as exc:
        return Finding(
            "ping",
            "fail",
            f"{name} refused: {exc.strerror}",
            f"run `rdmanet doctor --serve {port}` on that host",
        )
    except TimeoutError:
        return Finding(
            "ping",
            "fail",
            f"{name} did not answer within {_TIMEOUT_S} s",
            f"ping {host}; is UDP port 4791 (RoCE) or TCP port {port} (embedded device, iWARP) open in every firewall?",
        )
    except (socket.gaierror, UnicodeError) as exc:  # UnicodeError: a name that DNS cannot spell
        return Finding(
            "ping",
            "fail",
            f"the host name {host} cannot be resolved: {exc}",
            "try the IP address: rdmanet doctor ADDRESS",
        )
    except (OSError, EOFError) as exc:
        return Finding(
            "ping",
            "fail",
            f"{name}: {exc or type(exc).__name__}",
            "run `rdmanet doctor` on that host as well",
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
