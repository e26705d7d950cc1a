"""What `rdmanet doctor` learns of programs that run, from where `rdmanet ss` and `explain()` have it.

The fabric to a program is not foretold but tried: a connection is made to it as the event loop makes it, nothing is
sent, and its transport says which fabric it took and why. What is only found out by trying, such as a peer of another
version, is then known here, too. The check `processes` asks the processes that run, as `rdmanet ss` does.

RDMA that could be and is not is a warning. Versions and secrets that differ are a failure, since somebody has meant
them to be the same. Where nobody offers RDMA, nothing is wrong.
"""

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rdmanet.base.accounts import ConnectionInfo
from rdmanet.cli.finding import Finding, Status
from rdmanet.cli.ss import Picture, Process
from rdmanet.loop import kernel
from rdmanet.loop.doors import NOBODY

TIMEOUT_S = 10
_ADVICE: dict[str, tuple[Status, str]] = {
    "speaks version": (
        "fail",
        "install the same version of rdmanet on both sides, and restart both programs",
    ),
    "same version": ("fail", "install the same version of rdmanet on both sides, and restart both programs"),
    "secret": ("fail", "set the same secret on both sides: `rdmanet secret FILE` makes one"),
    "/proc": ("warn", "mount it: mount -t proc proc /proc (chroot and unshare leave that to their caller)"),
    "mapped": ("warn", "run both as one user, or name the peer in RDMANET_PEERS"),
    "may not map": (
        "warn",
        "allow processes of one user to trace each other, or name the peer in RDMANET_PEERS",
    ),
    "do not include it": ("info", "RDMANET_PEERS, or peers=, says for which peers RDMA is"),
    "did not answer": ("warn", "the server is busy or stopped: `rdmanet ss` says which"),
    "has not answered": ("warn", "the server is busy or stopped: `rdmanet ss` says which"),
    "in time": ("warn", "the server is busy or stopped: `rdmanet ss` says which"),
    "SIGSTOP": ("warn", "have it go on: kill -CONT, and the number of the process"),
    "descriptor": ("warn", "raise the limit of descriptors: ulimit -n, for a service LimitNOFILE="),
    "the client came by TCP": ("warn", "look at the client, which has the reason: `rdmanet ss` on its host"),
    NOBODY: ("info", "start the server with `rdmanet run`, or on rdmanet.run()"),
}
"""What to do about a connection by TCP, by what its reason has in it: the first that fits."""
_ELSE: tuple[Status, str] = ("warn", "`rdmanet ss` shows both sides of the connection, each on its host")


def advice(reason: str) -> tuple[Status, str]:
    """How bad it is that a connection takes TCP for this reason, and what to do."""
    return next((said for part, said in _ADVICE.items() if part in reason), _ELSE)


async def reach(host: str, port: int) -> Finding:
    """Which fabric leads to a program, and why: a connection is made and closed, on the switched loop that runs."""
    name = f"{host} port {port}"
    lost = asyncio.get_running_loop().create_future()

    class Silent(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(None)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            transport, _ = await asyncio.get_running_loop().create_connection(Silent, host, port)
            fabric, reason, address = (
                transport.get_extra_info(what) for what in ("fabric", "fabric_reason", "peername")
            )
            transport.close()
            await lost
    except TimeoutError:
        return Finding(
            "fabric", "fail", f"{name}: no connection within {TIMEOUT_S} s, by any fabric", _NOBODY
        )
    except (OSError, UnicodeError, ValueError) as exc:
        if isinstance(exc, (socket.gaierror, UnicodeError, ValueError)):
            return Finding("fabric", "fail", f"{name}: {exc}", "check the host name, and RDMANET_PEERS")
        if "only TCP reaches" in str(exc):  # RDMANET_REQUIRE=no-tcp
            return Finding("fabric", "fail", f"{name}: {exc}", advice(str(exc))[1])
        said = f"{name}: programs on rdmanet's event loop get no connection: {exc}"
        return Finding("fabric", "warn", said, _NOBODY)
    said = f"{name}: programs on rdmanet's event loop take {fabric.upper()} to {address[0]}: {reason}"
    if fabric == "rdma":
        return Finding("fabric", "ok", said)
    status, what_to_do = advice(reason)
    if not kernel.is_of_this_host(address[0]) and reason.startswith(NOBODY):
        what_to_do = "the event loop reaches other hosts by an RDMA adapter only; direct calls use any device"
    elif why := why_silent(*address[:2]):
        said, what_to_do = f"{said}: {why}", advice(why)[1]
    return Finding("fabric", "fail" if status == "fail" else "warn", said, what_to_do)


def why_silent(address: str, port: int) -> str:
    """Which process of this host has the TCP listener there, and why it does not answer `rdmanet ss`; "" if it does."""
    with contextlib.suppress(OSError):
        if (listener := kernel.tcp_listener(address, port)) is not None:
            for process in Picture(is_last=True).take(None):
                if process.silent and f"socket:[{listener.inode}]" in _links(process.pid):
                    return f"process {process.pid} does not answer: {process.silent}"
    return ""


def _links(pid: int) -> Iterator[str]:
    """What the descriptors of a process are, as far as this one may see them."""
    for name in kernel.names_in(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


_NOBODY = "servers on the event loop listen by TCP and RDMA; those of direct calls (start_rdma_server()) by RDMA only"


def processes(root: Path) -> Iterator[Finding]:
    """The programs of this user, or as root of all users, that use rdmanet now: do they answer, and what takes TCP?"""
    try:
        found = Picture().take(None)
    except OSError as exc:
        yield Finding(
            "processes", "warn", f"those that use rdmanet cannot be listed: {exc}", _ADVICE["/proc"][1]
        )
        return
    for process in found:
        yield from _process(process)
    if not found:
        yield Finding("processes", "info", "none uses rdmanet now")


def _process(process: Process) -> Iterator[Finding]:
    name = f"{process.pid} ({process.program})"
    if process.silent and process.silent != "it has ended":
        status, what_to_do = advice(process.silent)
        yield Finding("processes", status, f"{name} does not answer: {process.silent}", what_to_do)
    made = [info for answer in process.answers for info in answer.connections]
    by_rdma = sum(info.fabric == "rdma" for info in made)
    if process.answers:
        yield Finding(
            "processes", "ok", f"{name}: connections by RDMA: {by_rdma}, by TCP: {len(made) - by_rdma}"
        )
    for reason, count in sorted(Counter(map(_reason, made)).items()):
        if reason:
            status, what_to_do = advice(reason)
            yield Finding("processes", status, f"{name}: {count} by TCP: {reason}", what_to_do)


def _reason(info: ConnectionInfo) -> str:
    return (info.reason or "no reason is known") if info.fabric == "tcp" else ""
