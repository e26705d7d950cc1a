"""Find a device by its name, GUID, address, interface or subnet.

A machine with adapters has several devices, each with a table of addresses (GIDs). Programs are usually configured with
an IP address, an interface or a subnet rather than a device; `find_device` finds the device that has it.

To read its table a device must be opened. A device that cannot be opened matches no address; if no device matches, the
error lists it with the reason.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rdmanet._core import Context, Device, GIDEntry, Library, devices
from rdmanet.errors import DeviceNotFoundError, shown

__all__ = ["features", "find_device", "open_device"]

_Made = TypeVar("_Made")
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# The optional calls of the libraries, by feature.
_FEATURES = {
    "dmabuf_mr": "ibv_reg_dmabuf_mr",
    "iova_mr": "ibv_reg_mr_iova2",
    "rereg_mr": "ibv_rereg_mr",
    "gid_table": "_ibv_query_gid_table",
    "ah_from_wc": "ibv_init_ah_from_wc",
    "multicast": "ibv_attach_mcast",
    "qp_ex": "ibv_qp_to_qp_ex",
    "fork": "ibv_fork_init",
    "cm_establish": "rdma_establish",
    "cm_notify": "rdma_notify",
    "cm_qp_attr": "rdma_init_qp_attr",
    "cm_qp_ex": "rdma_create_qp_ex",
    "cm_multicast": "rdma_join_multicast",
    "cm_multicast_ex": "rdma_join_multicast_ex",
}


def find_device(
    name: str | None = None,
    *,
    guid: int | str | None = None,
    gid: bytes | str | IPAddress | None = None,
    ip: str | IPAddress | None = None,
    netdev: str | None = None,
    subnet: str | IPNetwork | None = None,
) -> Device:
    """The first device that matches all arguments; without arguments the first device.

    The system's devices come first, the embedded one last. One single address of the device has to match gid, ip,
    netdev and subnet together. The GIDs of an iWARP adapter are not IP addresses: find it by its name or netdev.

    :param guid: a number, or the format of ibv_devices(1) and ibv_devinfo(1): 16 digits, with or without colons
    :param gid: one of its GIDs: 16 bytes, or an IP address
    :param ip: one of its IP addresses
    :param netdev: the network interface that one of its addresses belongs to
    :param subnet: a network that one of its addresses is in: "10.0.0.0/8"
    :raises DeviceNotFoundError: no device matches; the message lists all devices
    :raises ValueError: an argument is malformed
    """
    matches: list[Callable[[GIDEntry], bool]] = []
    number = _guid(guid) if guid is not None else None
    if gid is not None:
        wanted = _gid(gid)
        matches.append(lambda entry: entry.gid == wanted)
    if ip is not None:
        address = _address(ip)
        matches.append(lambda entry: entry.address == address)
    if netdev is not None:
        matches.append(lambda entry: _interface(entry) == netdev)
    if subnet is not None:
        network = _made(ipaddress.ip_network, subnet, "subnet")
        matches.append(lambda entry: entry.address in network)
    found = devices()
    for device in found:
        if name is not None and device.name != name:
            continue
        if number is not None and device.guid != number:
            continue
        if not matches or any(all(match(entry) for match in matches) for entry in _table(device)):
            return device
    asked = {"name": name, "guid": guid, "gid": gid, "ip": ip, "netdev": netdev, "subnet": subnet}
    raise _not_found({key: value for key, value in asked.items() if value is not None}, found)


def open_device(
    name: str | None = None,
    *,
    guid: int | str | None = None,
    gid: bytes | str | IPAddress | None = None,
    ip: str | IPAddress | None = None,
    netdev: str | None = None,
    subnet: str | IPNetwork | None = None,
) -> Context:
    """Find a device as find_device() does, and open it.

    :raises DeviceNotFoundError: no device matches; the message lists all devices
    :raises OSError: it cannot be opened
    """
    return find_device(name, guid=guid, gid=gid, ip=ip, netdev=netdev, subnet=subnet).open()


def features() -> dict[str, dict[str, bool]]:
    """What the libraries of this process can do, by library ("rdma-core", "embedded") and feature.

    A library that cannot be opened is left out; Library.missing() says why. A feature is a call that not every version
    of rdma-core has; using one that is missing raises OSError with EOPNOTSUPP. Whether a device supports it as well
    shows only when it is used.
    """
    return {
        library.name: {feature: calls[call] for feature, call in _FEATURES.items()}
        for library in _libraries()
        for calls in (library.optional_calls(),)
    }


def _libraries() -> Iterable[Library]:
    if (system := Library.system()) is not None:
        yield system
    try:
        yield Library.embedded()
    except DeviceNotFoundError:
        return


# ---- The arguments ----


def _guid(guid: int | str) -> int:
    if isinstance(guid, int):
        return guid
    digits = guid.replace(":", "").removeprefix("0x")
    if len(digits) > 16:
        raise ValueError(f"guid: {shown(guid)} has more than 64 bits")
    return int(digits, 16)


def _made(make: Callable[[Any], _Made], value: object, what: str) -> _Made:
    """What ipaddress makes of it; its own errors show all of the value, which may be memory by mistake."""
    try:
        return make(value)
    except ValueError:
        raise ValueError(f"{what}: {shown(value)} is no address, or no network") from None


def _address(ip: str | IPAddress) -> IPAddress:
    """The form of GIDEntry.address: without a zone, and IPv4 addresses not mapped into IPv6."""
    address = _made(ipaddress.ip_address, ip.partition("%")[0] if isinstance(ip, str) else ip, "ip")
    return (address.ipv4_mapped or address) if address.version == 6 else address


def _gid(gid: bytes | str | IPAddress) -> bytes:
    if isinstance(gid, bytes):
        if len(gid) != 16:
            raise ValueError(f"gid: {len(gid)} bytes, a GID has 16")
        return gid
    address = _made(ipaddress.ip_address, gid, "gid")
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


# ---- The devices ----


def _table(device: Device) -> list[GIDEntry]:
    try:
        with device.open() as context:
            return context.gid_table()
    except OSError:
        return []


def _interface(entry: GIDEntry) -> str:
    try:
        return socket.if_indextoname(entry.ndev_ifindex)
    except OSError:
        return ""  # on InfiniBand, or the interface has just gone


def _not_found(asked: dict[str, object], found: list[Device]) -> DeviceNotFoundError:
    what = " and ".join(
        f"{key} {value.hex() if isinstance(value, bytes) else value}" for key, value in asked.items()
    )
    there = "; ".join(_described(device) for device in found) or "no device"
    text = f"no device has {what}; there is {there}" if asked else "there is no device"
    for library, reason in Library.missing().items():
        text += f"; {library} is not available: {reason}"
    return DeviceNotFoundError(errno.ENODEV, text)


def _described(device: Device) -> str:
    try:
        with device.open() as context:
            table = context.gid_table()
    except OSError as exc:
        return f"{device.name} (guid {device.guid:016x}, cannot be opened: {exc})"
    addresses = [f"{entry.address} {_interface(entry)}".rstrip() for entry in table] or ["no address"]
    return f"{device.name} (guid {device.guid:016x}, {', '.join(addresses)})"
