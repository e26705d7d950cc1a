"""From a host and a port to addresses, and from an address to the verbs libraries that may reach it."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket

from rdmanet._core import Library, is_in_environment
from rdmanet.base.environment import requires_rdma
from rdmanet.base.scopes import scope_of, with_scope
from rdmanet.errors import DeviceNotFoundError

logger = logging.getLogger("rdmanet")

SockAddr = tuple[str, int] | tuple[str, int, int, int]


_LOOPBACK = bytes(15) + b"\x01"
_MAPPED_LOOPBACK = bytes(10) + b"\xff\xff\x7f"  # ::ffff:127.0.0.0/104
_WILDCARDS: dict[int, str] = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


def wildcards(family: int) -> list[str]:
    """What host=None means: every address, of one family or of both."""
    return [_WILDCARDS[family]] if family in _WILDCARDS else list(_WILDCARDS.values())


@functools.lru_cache(maxsize=256)
def _address(host: str) -> tuple[int, bool, bool]:
    """A numeric address: its version, and whether it is of one link, or of this host only.

    Whoever connects again to the same peer does not parse it again.

    :raises ValueError: it is none
    """
    text = host.partition("%")[0]
    try:
        raw = socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except OSError:
        raise ValueError(f"{host!r} is not a numeric address") from None
    if len(raw) == 4:
        return 4, raw[:2] == b"\xa9\xfe", raw[0] == 127
    return 6, raw[0] == 0xFE and raw[1] & 0xC0 == 0x80, raw == _LOOPBACK or raw.startswith(_MAPPED_LOOPBACK)


def numeric(host: str, port: int | str, family: int) -> list[SockAddr] | None:
    """The address of a host that is given by number: it needs no resolver, and no waiting. None: by name."""
    if not isinstance(port, int) or not isinstance(host, str):
        return None
    try:
        version, is_link_local, _ = _address(host)
    except ValueError:
        return None
    wanted = socket.AF_INET if version == 4 else socket.AF_INET6
    if family not in (0, wanted):
        raise OSError(errno.EAFNOSUPPORT, f"{host} is not an address of family {family}")
    if not 0 <= port <= 65535:
        raise OverflowError(f"port {port} is not in 0..65535")
    if "%" not in host:
        return [(host, port) if version == 4 else (host, port, 0, 0)]
    if version == 6 and is_link_local:
        return [(host.partition("%")[0], port, 0, scope_of(host))]
    return None


async def resolve(
    loop: asyncio.AbstractEventLoop, host: str, port: int | str, family: int, proto: int, flags: int
) -> list[SockAddr]:
    """The addresses of a host. A numeric address is not passed to the loop's resolver, which would use a thread."""
    if addresses := numeric(host, port, family):
        return addresses
    found = await loop.getaddrinfo(
        host, port, family=family, type=socket.SOCK_STREAM, proto=proto, flags=flags
    )
    if not found:
        raise OSError(errno.EADDRNOTAVAIL, f"getaddrinfo({host!r}) returned nothing")
    return with_scope(host, (entry[4] for entry in found))


def libraries_for(address: SockAddr, device: str | None) -> list[Library]:
    """Which libraries to try, in order: the system's before the embedded one, but for loopback only the embedded one.

    :raises DeviceNotFoundError: there is no such device, or none at all
    :raises OSError: RDMANET_REQUIRE has an unknown value (EINVAL)
    """
    only_real = is_in_environment(b"RDMANET_REQUIRE") and requires_rdma()
    embedded = None if only_real else _embedded()
    but = "; RDMANET_REQUIRE=rdma excludes the embedded device" if only_real else ""
    wanted = device or is_in_environment(b"RDMANET_DEVICE") and os.environ.get("RDMANET_DEVICE") or None
    if wanted is not None:
        for library in (embedded, Library.system()):
            if library is not None and wanted in _device_names(library):
                return [library]
        source = "" if device else " (RDMANET_DEVICE)"
        raise DeviceNotFoundError(
            errno.ENODEV, f"no RDMA device is named {wanted!r}{source}{but}; `rdmanet devices` lists them"
        )
    if embedded is not None and _address(address[0])[2]:
        return [embedded]
    system = Library.system()
    has_real = system is not None and bool(_device_names(system))
    libraries = [library for library in (system if has_real else None, embedded) if library is not None]
    if not libraries:
        raise DeviceNotFoundError(
            errno.ENODEV, f"there is no RDMA device{but}; `rdmanet doctor` says what is missing"
        )
    return libraries


def _embedded() -> Library | None:
    try:
        return Library.embedded()
    except DeviceNotFoundError as exc:
        logger.warning("only real RDMA devices can be used: %s", exc)
        return None


def _device_names(library: Library) -> list[str]:
    try:
        return [device.name for device in library.devices()]
    except OSError:
        return []  # rdma-core is installed, but the kernel has no RDMA support


def merged(what: str, failures: list[Exception], all_errors: bool) -> Exception:
    if all_errors:
        return ExceptionGroup(f"{what} failed", failures)
    if len(failures) == 1:
        return failures[0]
    first = failures[0]
    if isinstance(first, OSError) and all(str(first) == str(other) for other in failures):
        return first
    numbers = {failure.errno if isinstance(failure, OSError) else None for failure in failures}
    if (
        len(numbers) == 1 and None not in numbers
    ):  # every address of a name failed alike, for example with ECONNREFUSED
        told = "; ".join(str(failure.strerror) for failure in failures if isinstance(failure, OSError))
        return OSError(numbers.pop(), f"{what} failed: {told}")
    return OSError(f"{what} failed: " + "; ".join(str(failure) for failure in failures))
