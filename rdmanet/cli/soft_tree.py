"""The files that the kernel would have for the embedded device, as directories, files and links.

The preloaded library leads programs to them (rdmanet/soft/preload/tree.c), and asks the device itself for what may have
changed since (rdmanet/soft/device/files.c).

There is one tree for each link layer, in the user's cache. It describes this host, so each run brings it up to date,
for itself and for programs that still run.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rdmanet.cli.text import gid_text, interface_name

CLASS = "sys/class/infiniband/soft0"
VERBS = "sys/class/infiniband_verbs"
PARENT = "sys/devices/virtual/rdmanet/soft0"
INTERFACES = f"{PARENT}/net"
NODE = "dev/infiniband/rdmanet_soft0"

STAMP = "rendered"
"""In this file is what the tree was made of, as a hash."""

_STATES = {"DOWN": "1: DOWN", "INIT": "2: INIT", "ARMED": "3: ARMED", "ACTIVE": "4: ACTIVE"}
_COUNTERS = (
    "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors",
    "multicast_rcv_packets", "multicast_xmit_packets", "port_rcv_constraint_errors", "port_rcv_data",
    "port_rcv_errors", "port_rcv_packets", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards",
    "port_xmit_packets", "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets",
    "VL15_dropped",
)  # fmt: skip


def update(directory: Path, device: Any) -> Path:
    """Make the tree of the embedded device, or bring it up to date; the directory that it is in.

    :raises OSError: it cannot be written
    """
    with device.open() as context:
        texts = dict(_texts(device, context))
        links = dict(_links(context))
        tree = directory / f"files-{context.query_port(1).link_layer.name.lower()}"
    stamp = hashlib.sha256(json.dumps([texts, links], sort_keys=True).encode()).hexdigest()
    try:
        if (tree / STAMP).read_text() == stamp:
            return tree
    except OSError:
        pass  # there is none yet
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        for name, text in (texts | {STAMP: stamp}).items():  # the stamp last
            _put(tree / name, text, Path(scratch) / "file")
        for name, target in links.items():
            link = tree / name
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                made = Path(scratch) / "link"
                made.symlink_to(target)
                made.replace(link)
    (tree / INTERFACES).mkdir(exist_ok=True)
    for top in ("sys/class/net", "sys/devices"):
        for each in (tree / top).rglob("*"):
            if each.is_symlink() and str(each.relative_to(tree)) not in links:  # an interface has gone
                each.unlink(missing_ok=True)
    return tree


def _put(path: Path, text: str, scratch: Path) -> None:
    """Replace a file at once: a program may be about to read it."""
    try:
        if path.read_text() == text:
            return
    except OSError:
        path.parent.mkdir(parents=True, exist_ok=True)
    scratch.write_text(text)
    scratch.chmod(0o444)
    scratch.replace(path)


def devices_of_interfaces(tree: Path) -> set[str]:
    """The interfaces' own devices, in which the tree shows this adapter, too. Those of containers have none."""
    devices = (_device_of(each.name) for each in (tree / INTERFACES).iterdir())
    return {device for device in devices if device}


def _device_of(interface: str) -> str:
    try:
        return str(Path("/sys/class/net", interface, "device").resolve(strict=True))
    except OSError:
        return ""


def _links(context: Any) -> Iterator[tuple[str, str]]:
    yield f"{CLASS}/device", "../../../devices/virtual/rdmanet/soft0"
    yield f"{VERBS}/rdmanet_soft0/device", "../../../devices/virtual/rdmanet/soft0"
    yield f"{PARENT}/infiniband", "../../../../class/infiniband"
    yield NODE, "/dev/null"
    names = {interface_name(entry.ndev_ifindex) for entry in context.gid_table(1)} - {""}
    for name in names - {"lo"} or names:
        yield f"{INTERFACES}/{name}", f"/sys/class/net/{name}"  # this one is the kernel's
        if device := _device_of(name):
            for place in (f"sys/class/net/{name}/device", device.lstrip("/")):
                yield f"{place}/infiniband", os.path.relpath("sys/class/infiniband", place)


def _texts(device: Any, context: Any) -> Iterator[tuple[str, str]]:
    attributes, port = context.query_device(), context.query_port(1)
    guid = f"{device.guid:016x}"
    guid = ":".join(guid[i : i + 4] for i in range(0, 16, 4))
    kind = "RNIC" if device.transport_type.name == "IWARP" else "CA"
    yield f"{CLASS}/node_type", f"{4 if kind == 'RNIC' else 1}: {kind}\n"
    yield f"{CLASS}/node_guid", f"{guid}\n"
    yield f"{CLASS}/sys_image_guid", f"{guid}\n"
    yield f"{CLASS}/node_desc", "rdmanet soft0\n"
    yield f"{CLASS}/fw_ver", f"{attributes.fw_ver}\n"
    yield f"{CLASS}/hw_rev", "0x1\n"
    yield f"{CLASS}/hca_type", "rdmanet_soft\n"
    yield f"{CLASS}/board_id", "rdmanet_soft\n"
    yield f"{VERBS}/abi_version", "6\n"
    yield f"{VERBS}/rdmanet_soft0/abi_version", "1\n"
    yield f"{VERBS}/rdmanet_soft0/ibdev", "soft0\n"
    yield f"{VERBS}/rdmanet_soft0/dev", "231:192\n"
    yield f"{PARENT}/vendor", "0xffff\n"  # PCI's number for none
    yield f"{PARENT}/device", "0x0000\n"
    yield f"{PARENT}/class", "0x020700\n"
    yield f"{PARENT}/numa_node", "-1\n"
    yield f"{PARENT}/local_cpus", _read("/sys/devices/system/cpu/online", _mask)
    yield f"{PARENT}/local_cpulist", _read("/sys/devices/system/cpu/online", str)
    yield f"{PARENT}/resource", "0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 6
    yield f"{PARENT}/uevent", "DRIVER=rdmanet_soft\n"
    for name, text in _port(context, port):
        yield f"{CLASS}/ports/1/{name}", text


def _port(context: Any, port: Any) -> Iterator[tuple[str, str]]:
    infiniband = port.link_layer.name == "INFINIBAND"
    active = port.state.name == "ACTIVE"
    yield "state", f"{_STATES.get(port.state.name, '0: NOP')}\n"
    yield "phys_state", "5: LinkUp\n" if active else "3: Disabled\n"
    yield "link_layer", "InfiniBand\n" if infiniband else "Ethernet\n"
    yield "rate", "100 Gb/sec (4X EDR)\n"
    yield "lid", f"{port.lid:#x}\n"
    yield "lid_mask_count", "0\n"
    yield "sm_lid", f"{port.sm_lid:#x}\n"
    yield "sm_sl", "0\n"
    yield "cap_mask", f"{port.port_cap_flags:#010x}\n"
    yield "pkeys/0", "0xffff\n"
    for name in _COUNTERS:
        yield f"counters/{name}", "0\n"
    for name in context.counters():
        yield f"hw_counters/{name}", "0\n"
    entries = {entry.gid_index: entry for entry in context.gid_table(1)}
    for index in range(port.gid_tbl_len):
        entry = entries.get(index)
        yield f"gids/{index}", gid_text(entry.gid if entry else bytes(16)) + "\n"
        yield f"gid_attrs/types/{index}", ("IB/RoCE v1\n" if infiniband else "RoCE v2\n") if entry else ""
        yield f"gid_attrs/ndevs/{index}", f"{interface_name(entry.ndev_ifindex)}\n" if entry else ""


def _read(path: str, convert: Any) -> str:
    try:
        return str(convert(Path(path).read_text()))
    except (OSError, ValueError):
        return "\n"


def _mask(processors: str) -> str:
    """A list of processors, "0-3,8", as the kernel's mask: words of 32 bits."""
    bits = 0
    for part in processors.strip().split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            bits |= 1 << number
    words = max(1, (bits.bit_length() + 31) // 32)
    text = f"{bits:0{words * 8}x}"
    return ",".join(text[i : i + 8] for i in range(0, len(text), 8)) + "\n"
