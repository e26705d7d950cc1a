"""check this machine, and its connection to another one, and say what to fix

usage: rdmanet doctor                    this machine
       rdmanet doctor --serve [PORT]     answer the pings of other machines, until interrupted
       rdmanet doctor HOST               this machine, and ping that one, where `rdmanet doctor --serve` has to run
       rdmanet doctor HOST:PORT          this machine, and whether and how a program there is reached by RDMA

`doctor --serve` greets whoever connects, by TCP as well. Only who has been greeted sends pings, so a program that
listens on the port gets no byte from us. On another host the embedded device and iWARP adapters would have to send a
request to the TCP port, whoever has that. So they are used only if doctor greets there by TCP, and says by which port
they reach it: the next one, if that is free.

The exit status is 1 if a check has failed; warnings do not count.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import importlib
import json
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rdmanet.cli import interrupts
from rdmanet.cli.checks import CHECKS
from rdmanet.cli.finding import Finding
from rdmanet.cli.running import advice, reach, why_silent
from rdmanet.cli.variables import is_blamed
from rdmanet.errors import endpoint
from rdmanet.loop import loop_factory

PORT = 7474
_PINGS = 100
_PAYLOAD = bytes(range(64))
_TIMEOUT_S = 10
_GREETING = b"rdmanet doctor\n"
# The greeting there: ours, and the port of devices whose ports are TCP's, or 0.
_BY_TCP = struct.Struct("!16sH")
_GREETING_S = 2
"""How long to wait for the greeting of a program that may have none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "peer",
        nargs="?",
        type=_peer,
        metavar="HOST[:PORT]",
        help=f"connect to this host by RDMA, and ping it if `rdmanet doctor --serve` runs there (default port: {PORT})",
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
        if args.peer is not None:
            print("doctor: --serve waits for others: it takes no HOST", file=sys.stderr)
            return 2
        try:
            interrupts.run(_serve(args.serve))
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):
                raise
            where = f"at port {args.serve}: {os.strerror(exc.errno) if exc.errno else exc}"
            print(f"doctor: cannot answer pings {where}; --serve PORT chooses another port", file=sys.stderr)
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
        ping, is_doctor = interrupts.run(_ping(*peer))
        if peer[1] != PORT and not is_doctor:
            yield interrupts.run(reach(*peer), loop_factory)  # doctor itself is not on the event loop
        yield ping


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


async def _ping(host: str, port: int) -> tuple[Finding, bool]:
    """Connect. If doctor answers, send 64 bytes a hundred times, and measure how long each takes to come back.

    Also returns whether it is doctor that answers.
    """
    name = f"{host} port {port}"
    # Before the peer's time begins: on a slow machine this takes seconds.
    importlib.import_module("rdmanet.streams.reader_writer")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            connected = await _connect(host, port)
            if connected is None:
                return Finding("ping", "warn", f"{name}: {_NOT_TRIED}", _TRY), False
            reader, writer = connected
            with contextlib.closing(writer):
                way = f"{name} by {writer.get_extra_info('rdma_device')}"
                if not await _is_greeted(reader):
                    return Finding("ping", "ok", f"{way}: connected. {_NOT_PINGED}"), False
                times = []
                for _ in range(_PINGS):
                    begin = time.perf_counter()
                    writer.write(_PAYLOAD)
                    if await reader.readexactly(len(_PAYLOAD)) != _PAYLOAD:
                        return Finding("ping", "fail", f"{name} sent back other bytes"), True
                    times.append(time.perf_counter() - begin)
    except (OSError, EOFError, UnicodeError) as exc:
        if (
            isinstance(exc, ConnectionRefusedError)
            and not is_blamed(exc)
            and _LACKS not in str(exc)
            and await _answers_by_tcp(host, port)
        ):
            return Finding("ping", "info", f"{name}: {_BY_TCP_ALONE}", _OFFER), False
        return Finding("ping", "fail", *_failure(exc, host, port)), False
    pinged = (
        f"{way}: {len(times)} round trips of {len(_PAYLOAD)} bytes, "
        f"median {statistics.median(times) * 1e6:.0f} µs, longest {max(times) * 1e6:.0f} µs"
    )
    return Finding("ping", "ok", pinged), True


_NOT_TRIED = (
    "a program takes TCP connections. Whether it takes RDMA by the embedded device was not tried: its requests come by "
    "TCP, so one would have to be sent to the program, whatever it is"
)
_LACKS = "no descriptors left"
"""What a server says that would take RDMA if it could."""
_BY_TCP_ALONE = "a program answers by TCP, and offers no RDMA to direct calls"
_OFFER = (
    "to offer it, start the program with `rdmanet run`, or on rdmanet.run(); to try the way without it, run `rdmanet "
    "doctor --serve` on that host, and `rdmanet doctor HOST` here"
)
_TRY = "to try the way, run `rdmanet doctor --serve` on that host, and `rdmanet doctor HOST` here"


async def _answers_by_tcp(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_GREETING_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, Any] | None:
    """A connection by RDMA; None if that could not be tried without sending something to a TCP program.

    A name may have addresses of several hosts, and what is known of one does not hold for another.

    :raises OSError: there is none
    """
    from rdmanet.base.scopes import with_scope

    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure: OSError | None = None
    is_tried = True
    for place in dict.fromkeys(with_scope(host, (entry[4] for entry in found))):
        scope = f"%{place[3]}" if tuple(place[3:]) not in ((), (0,)) else ""
        try:
            connected = await _connect_at(f"{place[0].partition('%')[0]}{scope}", port)
        except OSError as exc:
            failure = failure or exc
            continue
        if connected is not None:
            return connected
        is_tried = False
    if is_tried:
        raise failure or OSError(errno.EADDRNOTAVAIL, "the name has no addresses")
    return None


async def _connect_at(address: str, port: int) -> tuple[asyncio.StreamReader, Any] | None:
    """The same, for one address."""
    import rdmanet
    from rdmanet.loop import kernel
    from rdmanet.loop.choice import adapters

    if kernel.is_of_this_host(address):  # the device does not disturb its TCP programs
        return await rdmanet.open_rdma_connection(address, port)
    for device in adapters():
        with contextlib.suppress(OSError):
            return await rdmanet.open_rdma_connection(address, port, device=device)
    far = await _port_by_tcp(address, port)
    return None if far is None else await rdmanet.open_rdma_connection(address, far)


async def _port_by_tcp(address: str, port: int) -> int | None:
    """Which port the doctor that answers there by TCP has for such devices; None if it is not doctor.

    :raises OSError: nobody answers; or doctor does, and has none
    """
    reader, writer = await asyncio.open_connection(address, port)
    with contextlib.closing(writer):
        try:
            async with asyncio.timeout(_GREETING_S):
                greeting, far = _BY_TCP.unpack(await reader.readexactly(_BY_TCP.size))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return None
    if greeting.rstrip(b"\0") != _GREETING:
        return None
    if not far:
        raise OSError(errno.ENODEV, "doctor answers there by TCP, and has no RDMA device for other hosts")
    return int(far)


_NOT_PINGED = "It does not answer pings, because it is not `rdmanet doctor --serve`"


async def _is_greeted(reader: asyncio.StreamReader) -> bool:
    """Whether doctor answers there. A program that waits for its client to begin says nothing."""
    try:
        async with asyncio.timeout(_GREETING_S):
            return await reader.readexactly(len(_GREETING)) == _GREETING
    except (TimeoutError, asyncio.IncompleteReadError):
        return False


def _failure(exc: Exception, host: str, port: int) -> tuple[str, str]:
    """Why a ping has failed, and what to do."""
    name = f"{host} port {port}"
    if isinstance(exc, ConnectionRefusedError):
        if is_blamed(exc):
            return (
                f"{name} refused: {exc.strerror}",
                "set the same secret on both hosts: rdmanet secret FILE makes one",
            )
        if _LACKS in str(exc):
            return f"{name} refused: {exc.strerror}", advice(str(exc))[1]
        serve = "run `rdmanet doctor --serve` on that host"
        if port != PORT:
            serve = (
                f"start the program that is to listen there; to try the way without it, {serve}, "
                f"and `rdmanet doctor {host}` here"
            )
        return f"{name} refused: {exc.strerror}", serve
    if isinstance(exc, TimeoutError):
        with contextlib.suppress(OSError):
            [place, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            if why := why_silent(str(place[4][0]), port):
                return f"{name} did not answer within {_TIMEOUT_S} s: {why}", advice(why)[1]
        return (
            f"{name} did not answer within {_TIMEOUT_S} s",
            f"ping {host}; is UDP port 4791 (RoCE) open in every firewall, or TCP ports {port} and {port + 1} "
            "(embedded device, iWARP)?",
        )
    if isinstance(exc, (socket.gaierror, UnicodeError)):  # UnicodeError: a name that DNS cannot spell
        return (
            f"the host name {host} cannot be resolved: {exc}",
            "try the IP address: rdmanet doctor ADDRESS",
        )
    # Before anything was sent: a variable has a wrong value, or leaves no device, on this host.
    if isinstance(exc, OSError) and exc.errno in (errno.EINVAL, errno.ENODEV) and is_blamed(exc):
        return f"{name}: {exc}", "see `variables` above"
    return f"{name}: {exc or type(exc).__name__}", "run `rdmanet doctor` on that host as well"


async def _listening(echo: Callable[..., Any], port: int, stack: contextlib.AsyncExitStack) -> list[Any]:
    """Servers at a port that doctor has by TCP, too. An iWARP adapter, whose ports are TCP's, is left out then.

    :raises OSError: no device can have the port
    """
    import rdmanet

    async def server(host: list[str] | None, device: str | None = None) -> Any:
        found = await rdmanet.start_rdma_stream_server(echo, host, port, device=device)
        return await stack.enter_async_context(found)

    try:
        return [await server(None)]
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        taken = exc
    servers = []
    for name, hosts in _without_iwarp():
        try:
            servers.append(await server(hosts, name))
        except OSError:
            if hosts is None:
                raise
    if not servers:
        raise taken
    return servers


def _without_iwarp() -> Iterator[tuple[str, list[str] | None]]:
    """The embedded device, for all addresses, and adapters that have ports of their own, with their addresses.

    One that is broken, and cannot be opened, is left out.
    """
    from rdmanet import verbs

    for device in verbs.devices():
        if device.library.embedded_device:
            yield device.name, None
        elif device.transport_type != verbs.TransportType.IWARP:
            found = set()
            with contextlib.suppress(OSError), device.open() as context:
                found = {entry.address for entry in context.gid_table()}
            if hosts := [str(address) for address in found if address and not address.is_link_local]:
                yield device.name, hosts


async def _serve(port: int) -> None:
    import rdmanet

    async def echo(reader: asyncio.StreamReader, writer: rdmanet.RdmaStreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(_GREETING)
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_BY_TCP.pack(_GREETING, far))
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        both = socket.has_dualstack_ipv6()
        tcp = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
        stack.callback(tcp.close)
        port = tcp.getsockname()[1]
        servers = await _listening(echo, port, stack)
        far = 0
        for wanted in (port + 1, 0):  # one that can be known to firewalls, or any
            with contextlib.suppress(OSError, OverflowError):
                beside = await rdmanet.start_rdma_stream_server(echo, None, wanted)
                await stack.enter_async_context(beside)
                far = beside.sockets[0].getsockname()[1]
                break
        # Last: who is greeted is told where the others listen.
        await stack.enter_async_context(await asyncio.start_server(greet, sock=tcp))
        sockets = [each for server in servers for each in server.sockets]
        print("answering pings on", *(endpoint(each.getsockname()) for each in sockets), flush=True)
        await servers[0].serve_forever()
