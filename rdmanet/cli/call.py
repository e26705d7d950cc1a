"""call methods of a server of rdmanet.rpc, or list them

usage: rdmanet call HOST:PORT                           its services, methods and types
       rdmanet call HOST:PORT Store.get '{"name": "w"}'  call one, and print the result as JSON
       rdmanet call HOST:PORT Store --pyi               write a class for clients, with all types

A stream is printed with a line for each item. A stream of the caller's is read from standard input, as JSON, a line for
each item. Bytes and buffers are given as text, or as @FILE for the contents of a file. Arrays are given as @FILE.npy,
as [[1, 2], [3, 4]], or as ["<f4", [2, 2], "@FILE"]. A result that is a buffer is printed as its length, and an array as
its type, its shape and its items, if these are few; so is an array within a result. --output writes them to a file.
Exit status: 64 and the number of the error's code, if the call fails: NOT_FOUND is 69.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from rdmanet.cli import interrupts
from rdmanet.cli.text import file_path, seconds

FAILED = 64
"""To this the number of the error's code is added."""
PIECE_BYTES = 16 << 20
READ_BYTES = 64 << 10


class Misuse(Exception):
    """It was called wrongly."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "server", metavar="HOST:PORT", help="the server; with --transport unix the path of its socket"
    )
    parser.add_argument(
        "method", nargs="?", metavar="SERVICE.METHOD", help="what to call (default: list the methods)"
    )
    parser.add_argument(
        "arguments", nargs="?", default="{}", metavar="JSON", help="the arguments, by their names"
    )
    parser.add_argument(
        "--transport", choices=("rdma", "tcp", "unix"), default="rdma", help="(default: rdma)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds("not a number of seconds above 0", math.ulp(0)),
        metavar="SECONDS",
        help="how long the call may take",
    )
    parser.add_argument(
        "--metadata",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="send this along, as a token for example; may be given several times",
    )
    parser.add_argument(
        "--output",
        type=file_path,
        metavar="FILE",
        help="write the result, a buffer or an array, to this file; FILE.npy is one of NumPy, and FILE.npz has the"
        " arrays within a result",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also write what the method says beside its result to standard error, as JSON: metadata before and after",
    )
    parser.add_argument("--json", action="store_true", help="list the schemas as JSON")
    parser.add_argument(
        "--pyi",
        action="store_true",
        help="write the service of this name, or all of them, as classes of Python: a stub, and a module for clients",
    )


def run(args: argparse.Namespace) -> int:
    from rdmanet.errors import ProtocolError
    from rdmanet.rpc.errors import ConnectError, Error

    try:
        host, port = _address(args.server, args.transport)
        what = _classes if args.pyi else _listed if args.method is None else _called
        interrupts.run(what(args, host, port))
    except Misuse as exc:
        print(f"call: {exc}", file=sys.stderr)
        return 2
    except Error as exc:
        if isinstance(exc, ConnectError):
            return _nobody(args, exc.__cause__ or exc)
        print(f"call: {exc}", file=sys.stderr)
        return FAILED + int(exc.code)
    except ProtocolError as exc:
        print(f"call: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except (ConnectionError, TimeoutError, socket.gaierror) as exc:
        return _nobody(args, exc)
    return 0


def _nobody(args: argparse.Namespace, exc: BaseException) -> int:
    where = f"{args.server} by {args.transport}"
    print(f"call: no server answers at {where}; --transport chooses another way: {exc}", file=sys.stderr)
    return 1


def _address(server: str, transport: str) -> tuple[str, int | None]:
    if transport == "unix":
        return server, None
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise Misuse(f"{server!r} is not HOST:PORT, or [IPv6]:PORT; --transport unix takes a path")
    return host.strip("[]"), int(port)


def _metadata(given: list[str]) -> dict[str, str | bytes] | None:
    """What is sent along; a text that begins with @ names a file, as for bytes."""
    found: dict[str, str | bytes] = {}
    for each in given:
        name, sign, text = each.partition("=")
        if not sign or not name:
            raise Misuse(f"--metadata {each!r} is not NAME=TEXT, or NAME=@FILE")
        found[name] = _bytes(text) if text.startswith("@") else text
    return found or None


# ---- Listing ------------------------------------------------------------------------------------------------


async def _listed(args: argparse.Namespace, host: str, port: int | None) -> None:
    from rdmanet import rpc
    from rdmanet.errors import printable
    from rdmanet.rpc.describe import text
    from rdmanet.rpc.dynamic_client import discover

    connecting = rpc.connect(
        rpc.Reflection, host, port, transport=args.transport, timeout=args.timeout or 10.0
    )
    async with connecting as reflection:
        names = await reflection.services()
        schemas = {name: await reflection.schema(name) for name in names} if args.json else {}
    if args.json:
        print(json.dumps(schemas, indent=2))
        return
    for name in names:
        async with discover(name, host, port, args.transport) as (_, schema):
            print(printable(name))
            for method in schema.numbered:
                print(f"  {printable(str(method), 4096)}")
            for struct, (_, _, _, fields) in schema.structs.items():
                shown = ", ".join(
                    f"{n}: {text(type_)}{'' if needed else ' = ...'}" for n, type_, needed, *_ in fields
                )
                print(f"  {printable(f'{struct}: {shown}', 4096)}")


async def _classes(args: argparse.Namespace, host: str, port: int | None) -> None:
    from rdmanet import rpc
    from rdmanet.cli.call_classes import Unwritable, classes
    from rdmanet.errors import printable
    from rdmanet.rpc.dynamic_client import discover

    if args.arguments != "{}" or args.json:
        raise Misuse(
            "--pyi writes classes: it takes the name of a service or none, and neither arguments nor --json"
        )
    connecting = rpc.connect(
        rpc.Reflection, host, port, transport=args.transport, timeout=args.timeout or 10.0
    )
    async with connecting as reflection:
        names = [each for each in await reflection.services() if not each.startswith("rdmanet.")]
    if args.method is not None and args.method not in names:
        has = printable(", ".join(names), 1000)
        raise Misuse(
            f"the server has no service {args.method!r}; it has: {has}. --pyi takes a service, not a method"
        )
    found = {}
    for name in names if args.method is None else [args.method]:
        async with discover(name, host, port, args.transport) as (_, schema):
            found[name] = schema.described, schema.structs
    try:
        print(classes(found), end="")
    except Unwritable as exc:
        raise Misuse(f"--pyi: {printable(str(exc), 1000)}") from None


# ---- Calling ------------------------------------------------------------------------------------------------


async def _called(args: argparse.Namespace, host: str, port: int | None) -> None:
    from rdmanet.cli.call_arrays import is_shown, write_archive
    from rdmanet.errors import printable
    from rdmanet.rpc.buffer import Buffer
    from rdmanet.rpc.context import deadline_in
    from rdmanet.rpc.describe import BUFFER
    from rdmanet.rpc.dynamic_client import DiscoveredMethod, discover
    from rdmanet.rpc.errors import Code, Error
    from rdmanet.rpc.method import Kind
    from rdmanet.rpc.pending import CallDetails

    service, _, name = args.method.rpartition(".")
    if not service or not name:
        raise Misuse(f"{args.method!r} is not SERVICE.METHOD; without it, the methods are listed")
    try:
        given = json.loads(args.arguments)
    except ValueError as exc:
        raise Misuse(f"the arguments are not JSON: {exc}") from None
    metadata = _metadata(args.metadata)
    if not isinstance(given, dict):
        raise Misuse('the arguments are an object of JSON with their names: \'{"name": "w"}\'')
    async with contextlib.AsyncExitStack() as stack:
        try:
            channel, schema = await stack.enter_async_context(discover(service, host, port, args.transport))
        except Error as exc:
            if exc.code is Code.UNIMPLEMENTED:
                raise Misuse(printable(exc.text, 1000)) from None
            raise
        if channel.service != service:
            raise Misuse(f"the server has {printable(channel.service)}, and no {printable(service)}")
        method = schema.methods.get(name)
        if not isinstance(method, DiscoveredMethod):
            raise Misuse(
                f"{service} has no method {name!r}; it has: {printable(', '.join(schema.methods), 1000)}"
            )
        if args.output is not None and (wrong := _not_writable(args.output, method)):
            raise Misuse(f"--output: {args.method} {wrong}: {printable(str(method))}")
        method.wants = is_shown if args.output is None else _any
        try:
            arguments = method.arguments_of(given, schema.structs, _bytes, _array)
        except ValueError as exc:
            raise Misuse(f"{args.method}: {printable(str(exc))}") from None
        items = None if method.stream is None else _items()
        said = _Said() if args.verbose else None
        if said is not None:
            stack.callback(said.last)
        deadline, response = deadline_in(args.timeout), None if said is None else said.response
        call = CallDetails(method, tuple(arguments), items, deadline, metadata, response=response)
        if method.kind in (Kind.SERVER_STREAM, Kind.BOTH):
            async with contextlib.aclosing(channel.stream(call)) as results:
                async for item in results:
                    if said is not None:
                        said.first()
                    _print(item)
            return
        result = await channel.unary(call)
        if said is not None:
            said.first()
        if not isinstance(result, Buffer):
            if args.output is not None:
                write_archive(args.output, method.arrays)
            _print(result)
            return
        async with result:
            array = None if method.result_description == BUFFER else method.array
            if args.output is not None:
                await _written(result, array, args.output)
            elif array is None:
                _print({"bytes": result.nbytes})
            else:
                await _print_array(result, array)


def _any(_: Any) -> bool:
    return True


def _not_writable(path: Path, method: Any) -> str:
    """Why a result cannot be written to this file; "" if it can."""
    from rdmanet.rpc.method import Kind

    if method.kind in (Kind.SERVER_STREAM, Kind.BOTH):
        return "returns a stream, which is printed"
    if method.result_brings and path.suffix != ".npz":
        return "returns arrays within something else, for which give FILE.npz"
    return "" if method.result_is_buffer or method.result_brings else "returns no buffer"


def _print(value: Any, to: Any = None) -> None:
    import msgspec

    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_shown)
    print(json.dumps(plain, default=str), flush=True, file=to)


def _shown(value: Any) -> Any:
    """What JSON does not have, as it is printed: an array within a result. A peer may have sent something else."""
    from rdmanet.cli.call_arrays import is_shown, shown_array
    from rdmanet.errors import shown
    from rdmanet.rpc.dynamic_results import ArrayWithin

    if not isinstance(value, ArrayWithin):
        return shown(value)
    return shown_array(value.placed, value.nbytes, value.data if is_shown(value.placed) else None)


class _Said:
    """Writes what a method says beside its result: initial metadata before that, and trailing metadata at the end."""

    def __init__(self) -> None:
        from rdmanet.rpc.response import Response

        self.response = Response()
        self._has_begun = False

    def first(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            _print({"initial metadata": self.response.initial_metadata}, sys.stderr)

    def last(self) -> None:
        self.first()
        _print({"trailing metadata": self.response.trailing_metadata}, sys.stderr)


def _bytes(given: str) -> bytes:
    if not given.startswith("@"):
        return given.encode()
    try:
        return Path(given[1:]).read_bytes()
    except OSError as exc:
        raise Misuse(f"{given}: {exc.strerror}; text that begins with @ names a file") from None


def _array(given: Any, items: Any, where: str) -> Any:
    """What is sent for an array; what is none is left for the server to refuse."""
    from rdmanet.cli.call_arrays import of_file, of_list

    if isinstance(given, list):
        return of_list(given, items, where)
    if not isinstance(given, str) or not given.startswith("@"):
        return given
    try:
        return of_file(Path(given[1:]))
    except OSError as exc:
        raise ValueError(f"{where}: {given}: {exc.strerror}") from None


async def _items() -> AsyncIterator[Any]:
    """The items of standard input, as they come."""
    async with contextlib.aclosing(_lines(sys.stdin.fileno())) as lines:
        async for line in lines:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as exc:
                    raise Misuse(f"a line of standard input is not JSON: {exc}") from None


async def _lines(fd: int) -> AsyncGenerator[bytes, None]:
    """The lines of a descriptor. No thread reads it: Ctrl-C would have to wait for that."""
    rest = b""
    while True:
        await _readable(fd)
        if not (chunk := os.read(fd, READ_BYTES)):
            yield rest
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


async def _readable(fd: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
    except PermissionError:
        return  # it is a file, which does not keep us waiting
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _print_array(buffer: Any, array: Any) -> None:
    from rdmanet.cli.call_arrays import fits, is_shown, shown_array

    data = await buffer.read() if fits(array, buffer.nbytes) and is_shown(array) else None
    _print(shown_array(array, buffer.nbytes, data))


async def _written(buffer: Any, array: Any, path: Path) -> None:
    from rdmanet.cli.call_arrays import file_head, fits

    with path.open("wb") as file:
        if array is not None and path.suffix == ".npy" and fits(array, buffer.nbytes):
            file.write(file_head(array))
        for start in range(0, buffer.nbytes, PIECE_BYTES):
            file.write(await buffer.read(start, min(start + PIECE_BYTES, buffer.nbytes)))
