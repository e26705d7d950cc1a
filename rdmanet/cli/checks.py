"""The checks of `rdmanet doctor`: each reads one aspect of this machine, and says what it found and what to do.

General layout. A check is a function that yields findings. Checks of the kernel read files below `root`, which is /
except in tests; checks of devices ask the libraries, as any program does. No check changes anything, sleeps, or talks
to another host. `CHECKS` has them in the order in which to fix a machine: what a later check finds often follows from
what an earlier one found.
"""

import ctypes
import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rdmanet import _core
from rdmanet.cli.finding import Finding
from rdmanet.cli.running import processes
from rdmanet.cli.variables import is_blamed, variables

# Below this much lockable memory a server with a hundred connections cannot register its rings.
_MEMLOCK_BYTES = 64 << 20
# From this version on the kernel copies pinned pages for a forked child, so that the parent keeps its registered pages.
_KERNEL_COPIES_ON_FORK = (5, 12)
_MODULES = {
    "ib_core": "rdma core",
    "ib_uverbs": "verbs from user space",
    "rdma_ucm": "rdma_cm from user space",
}
_PR_GET_DUMPABLE = 3
_LOOK = """
import os, sys
try:
    os.readlink(sys.argv[1])
except OSError as exc:
    print(exc.strerror)
"""
_INSTALL = (
    "apt-get install libibverbs1 librdmacm1 ibverbs-providers (Fedora: dnf install libibverbs librdmacm)"
)


Check = Callable[[Path], Iterator[Finding]]


def libraries(root: Path) -> Iterator[Finding]:
    """The embedded device's library, and rdma-core's."""
    devices = _core.devices()
    missing = _core.Library.missing()
    for name in ("embedded", "rdma-core"):
        count = sum(device.library.name == name for device in devices)
        if name not in missing:
            path = next((device.library.path for device in devices if device.library.name == name), "loaded")
            yield Finding("libraries", "ok", f"{name}: {path}, {_counted(count, 'device')}")
        elif name == "embedded":
            yield Finding(
                "libraries",
                "fail",
                f"{name}: {missing[name]}",
                "unset RDMANET_SOFT_LIBRARY"
                if os.environ.get("RDMANET_SOFT_LIBRARY")
                else "reinstall rdmanet (`pip install --force-reinstall rdmanet`)",
            )
        elif _core.Library.system() is not None and _has_hardware(root):
            yield Finding(
                "libraries",
                "fail",
                f"{name}: this machine has RDMA hardware, but the library cannot list it: {missing[name]}",
                _INSTALL,
            )
        elif _core.Library.system() is not None:
            yield Finding("libraries", "info", f"{name}: installed, but the kernel has no RDMA device")
        elif _has_hardware(root):
            yield Finding(
                "libraries", "fail", f"{name}: {missing[name]}, but this machine has RDMA hardware", _INSTALL
            )
        else:
            yield Finding(
                "libraries", "info", f"{name}: {missing[name]}", f"only RDMA hardware needs it: {_INSTALL}"
            )


def modules(root: Path) -> Iterator[Finding]:
    """The kernel's RDMA modules, if it has an RDMA device."""
    if not _has_hardware(root):
        yield Finding("modules", "info", "the kernel has no RDMA device: the embedded device is used")
        return
    loaded = {line.split()[0] for line in _read(root / "proc/modules").splitlines() if line}
    for module, purpose in _MODULES.items():
        if module in loaded or (root / "sys/module" / module).exists():
            yield Finding("modules", "ok", f"{module} ({purpose})")
        else:
            yield Finding("modules", "fail", f"{module} ({purpose}) is not loaded", f"modprobe {module}")


def nodes(root: Path) -> Iterator[Finding]:
    """The device nodes below /dev/infiniband, and whether this user may open them."""
    if not _has_hardware(root):
        return
    directory = root / "dev/infiniband"
    found = sorted([*directory.glob("uverbs*"), *directory.glob("rdma_cm")])
    if not any(node.name.startswith("uverbs") for node in found):
        yield Finding(
            "nodes",
            "fail",
            f"{directory} has no uverbs node",
            "modprobe ib_uverbs; in a container: run it with --device=/dev/infiniband",
        )
    for node in found:
        if os.access(node, os.R_OK | os.W_OK):
            yield Finding("nodes", "ok", str(node))
        else:
            held = node.stat()
            yield Finding(
                "nodes",
                "fail",
                f"user {os.geteuid()} may not open {node}: "
                f"mode {held.st_mode & 0o777:o}, owner {held.st_uid}:{held.st_gid}",
                f"chmod 666 {node}, or install udev's rules: apt-get install rdma-core",
            )


def memlock(root: Path) -> Iterator[Finding]:
    """How much memory this process may pin. Only adapters need it: the embedded device pins none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock", "ok", "unlimited")
    elif soft >= _MEMLOCK_BYTES or not _has_hardware(root):
        yield Finding(
            "memlock",
            "ok",
            f"{soft >> 10} KiB" + ("" if _has_hardware(root) else " (the embedded device pins no memory)"),
        )
    else:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard >> 10} KiB"
        yield Finding(
            "memlock",
            "warn",
            f"{soft >> 10} KiB (hard limit: {limit}): registering more memory fails with ENOMEM",
            "ulimit -l unlimited; for a service LimitMEMLOCK=infinity; for a container --ulimit memlock=-1",
        )


def filesize(root: Path) -> Iterator[Finding]:
    """Whether a file may be as large as the embedded device's memory, which is one without a name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("filesize", "ok", "unlimited")
    elif soft < _core.EMBEDDED_ARENA_BYTES:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard >> 10} KiB"
        yield Finding(
            "filesize",
            "fail",
            f"files may have {soft >> 10} KiB (hard limit: {limit}), and the memory of the embedded device is a file "
            f"of {_core.EMBEDDED_ARENA_BYTES >> 10} KiB, of which only what is used exists: it does not open (EFBIG)",
            "ulimit -f unlimited; for a service LimitFSIZE=infinity; for a container --ulimit fsize=-1",
        )
    else:
        yield Finding(
            "filesize",
            "ok",
            f"files may have {soft >> 10} KiB, and so may a region of PD.alloc_mr() or rdmanet.alloc()",
        )


def ports(root: Path) -> Iterator[Finding]:
    """Each device's ports: state, network interface, and the path MTU against the interface's."""
    for device in _core.devices():
        try:
            with device.open() as context:
                for number in range(1, context.query_device().phys_port_cnt + 1):
                    yield from _port(root, context, number)
        except OSError as exc:
            yield Finding(
                "ports", "fail", f"{device.name} cannot be opened: {exc}", _why_not_open(device, exc)
            )


def _why_not_open(device: _core.Device, exc: OSError) -> str:
    if not device.library.embedded_device:
        return "see `nodes` above, and dmesg"
    if is_blamed(exc):
        return "see `variables` above"
    return "the error says what this process lacks; see `filesize` above, and the log (rdmanet.device)"


def _port(root: Path, context: _core.Context, number: int) -> Iterator[Finding]:
    port = context.query_port(number)
    name = f"{context.name} port {number}"
    where = ", ".join(sorted(_interfaces(context, number))) or "no interface"
    if port.state != _core.PortState.ACTIVE:
        yield Finding(
            "ports",
            "fail",
            f"{name} ({where}): {port.state.name}",
            f"ip link set {where} up; check the cable",
        )
        return
    yield Finding(
        "ports", "ok", f"{name} ({where}): ACTIVE, {port.link_layer.name}, MTU {port.active_mtu.bytes} bytes"
    )
    if context.library.embedded_device:
        return
    for interface in _interfaces(context, number):
        mtu = _read(root / "sys/class/net" / interface / "mtu").strip()
        if mtu.isdigit() and int(mtu) < 4200 and port.active_mtu.bytes < port.max_mtu.bytes:
            yield Finding(
                "ports",
                "warn",
                f"{name}: the path MTU is only {port.active_mtu.bytes} bytes because the MTU of {interface} is {mtu}",
                f"ip link set {interface} mtu 4200 (or 9000), on both ends and the switch",
            )


def gids(root: Path) -> Iterator[Finding]:
    """Each device's addresses, and which one to choose."""
    for device in _core.devices():
        try:
            with device.open() as context:
                table = context.gid_table()
        except OSError:
            continue  # `ports` has said why
        best = _core.best_gid(table)
        if best is None:
            yield Finding(
                "gids",
                "fail",
                f"{device.name} has no address",
                "give its interface an IP address: ip address add 192.0.2.1/24 dev IFACE",
            )
        elif best.address.is_link_local:
            yield Finding(
                "gids",
                "warn",
                f"{device.name}: only link-local addresses, index {best.gid_index} ({best.address})",
                "link-local addresses cannot be routed: give the interface an IPv4 address",
            )
        else:
            yield Finding(
                "gids",
                "ok",
                f"{device.name}: {_counted(len(table), 'address')}; index {best.gid_index} is the one to choose: "
                f"{best.address}, {best.gid_type.name}",
            )


def forks(root: Path) -> Iterator[Finding]:
    """Whether a forked child can take registered pages away from its parent."""
    release = _read(root / "proc/sys/kernel/osrelease").strip() or platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    asked = os.environ.get("RDMAV_FORK_SAFE") or os.environ.get("IBV_FORK_SAFE")
    if version >= _KERNEL_COPIES_ON_FORK:
        yield Finding("fork", "ok", f"kernel {release} copies registered pages for a forked child")
    elif asked or not _has_hardware(root):
        yield Finding("fork", "ok", f"kernel {release}" + (", RDMAV_FORK_SAFE is set" if asked else ""))
    else:
        yield Finding(
            "fork",
            "warn",
            f"kernel {release} may give the parent's registered pages to a forked child",
            "set RDMAV_FORK_SAFE=1, or start processes with multiprocessing's spawn method",
        )


def mapped(root: Path) -> Iterator[Finding]:
    """Whether processes of this user may map the memory that this process registers with the embedded device.

    They may if the kernel lets them trace this process: then they can read the names of its descriptors. A child tries.
    """
    if os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream":
        yield Finding(
            "mapped",
            "info",
            "RDMANET_SOFT_TRANSPORT=stream: all connections use TCP, and no process maps this one's memory",
        )
    elif not _is_dumpable():
        yield Finding(
            "mapped",
            "info",
            "this process is not dumpable, so no process may trace it: all connections use TCP",
            "a process that drops privileges without exec becomes so: start it as its final user",
        )
    elif os.geteuid() == _overflow_user(root):
        yield Finding(
            "mapped",
            "info",
            f"user {os.geteuid()} is the kernel's placeholder for users without a name here: all connections use TCP",
            "run as a user of its own; in a container, map the user into its user namespace",
        )
    elif not (root / "proc/self").exists():
        yield Finding(
            "mapped",
            "warn",
            f"{root / 'proc'} is not mounted, by which processes find each other's memory: all connections use TCP",
            "mount it: mount -t proc proc /proc (chroot and unshare leave that to their caller)",
        )
    elif why := _why_no_trace(root):
        yield Finding(
            "mapped",
            "info",
            f"a child of this process may not read its descriptors ({why}): all connections use TCP",
            "allow processes of one user to trace each other",
        )
    elif _has_capabilities(root):
        yield Finding(
            "mapped", "ok", "processes of this user with the same capabilities can map this one's memory"
        )
    else:
        yield Finding("mapped", "ok", "processes of this user without capabilities can map this one's memory")


def direct(root: Path) -> Iterator[Finding]:
    """Whether the embedded device may copy directly between the memories of two processes of this user."""
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope").strip() or "0"
    if scope not in ("0", "") and os.geteuid() != 0:
        asked = os.environ.get("RDMANET_SOFT_PTRACER") == "1" and scope == "1"
        yield Finding(
            "direct",
            "info",
            f"kernel.yama.ptrace_scope is {scope}"
            + (
                ", but RDMANET_SOFT_PTRACER=1"
                if asked
                else ": memory that PD.alloc_mr() did not allocate is copied twice"
            ),
            "use PD.alloc_mr(); or, if the scope is 1, set RDMANET_SOFT_PTRACER=1, which lets every process of this "
            "user trace this one",
        )
    elif not _is_dumpable() or not (root / "proc/self").exists():
        yield Finding("direct", "info", "this process's memory is not mapped: see `mapped`")
    else:
        yield Finding(
            "direct", "ok", "processes of this user can copy directly into each other's registered memory"
        )


CHECKS: dict[str, Check] = {
    "variables": variables,
    "libraries": libraries,
    "modules": modules,
    "nodes": nodes,
    "memlock": memlock,
    "filesize": filesize,
    "ports": ports,
    "gids": gids,
    "fork": forks,
    "mapped": mapped,
    "direct": direct,
    "processes": processes,
}


def _is_dumpable() -> bool:
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0)


def _overflow_user(root: Path) -> int:
    text = _read(root / "proc/sys/kernel/overflowuid").strip()
    return int(text) if text.isdigit() else 65534


def _why_no_trace(root: Path) -> str:
    """The error of a child that reads the name of one of our descriptors; "" if it succeeds."""
    with open(os.devnull) as file:
        name = root / "proc" / str(os.getpid()) / "fd" / str(file.fileno())
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _LOOK, name], stdout=subprocess.PIPE, text=True
        )
    return child.stdout.strip()


def _has_capabilities(root: Path) -> bool:
    found = re.search(r"^CapPrm:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.MULTILINE)
    return found is not None and int(found[1], 16) != 0


def _has_hardware(root: Path) -> bool:
    return any((root / "sys/class/infiniband").glob("*"))


def _interfaces(context: _core.Context, port: int) -> set[str]:
    """The names of the network interfaces that have a port's addresses."""
    names = set()
    for entry in context.gid_table(port):
        try:
            names.add(socket.if_indextoname(entry.ndev_ifindex))
        except OSError:  # 0, or one of another namespace
            continue
    return names


def _read(path: Path) -> str:
    """The text of a file of the kernel; "" if this kernel does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"
