"""On which CPUs a process may run, and how far these are from its peer's, or from an adapter.

Two processes on different NUMA nodes pay for each cache line that goes from one to the other, and so does a process
that is not at the node of its adapter. What can be told of that from outside is the affinity (sched_setaffinity(2)): if
the CPUs of one, all of them, are at other nodes than those of the other, they are far. A process that may run anywhere
may be near at any moment, and nothing is said of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Set
from functools import lru_cache

_PLACES_MOST = 64
"""So many different pairs of sets of CPUs are asked about, at most."""
_PAIRS_MOST = 1 << 16
"""And so many pairs of processes are looked at."""
ROOT = "/"
"""Where /proc and /sys are."""
_PIN = "pin both to CPUs of one node (taskset, numactl --cpunodebind)"


def why_far(pid: int, peer: int) -> str:
    """Why two processes of this host are slow to each other, by where they may run; "" if nothing can be told."""
    ours, theirs = allowed(pid), allowed(peer)
    if not ours or not theirs:  # one of them has ended
        return ""
    if len(ours | theirs) == 1:
        return f"one CPU: this process and its peer, process {peer}, may only run on CPU {min(ours)}, and take turns"
    our_nodes, their_nodes = nodes(ours), nodes(theirs)
    if not our_nodes or not their_nodes or our_nodes & their_nodes:
        return ""
    return (
        f"far CPUs: this process may only run on {_named(ours, our_nodes)}, and its peer, process {peer}, on"
        f" {_named(theirs, their_nodes)}: {_PIN}"
    )


def is_any_far(pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether `why_far` may have something to say of a pair of processes; on nearly every machine it has not.

    Of pairs with the same two sets of CPUs one is asked. Others' processes say who is whose peer, so what that takes is
    bounded, and True beyond.
    """
    cpus, asked = dict[int, frozenset[int]](), set[tuple[frozenset[int], frozenset[int]]]()
    for number, (pid, peer) in enumerate(pairs):
        for each in (pid, peer):
            if each not in cpus:
                cpus[each] = frozenset(allowed(each))
        places = cpus[pid], cpus[peer]
        if places not in asked:
            asked.add(places)
            if len(asked) > _PLACES_MOST or why_far(pid, peer):
                return True
        if number == _PAIRS_MOST:
            return True
    return False


def why_far_from(device: str) -> str:
    """The same of this process and an adapter."""
    with contextlib.suppress(OSError):  # who lacks a descriptor is told nothing, and asks again
        return _why_far_from(device, frozenset(os.sched_getaffinity(0)))
    return ""


@lru_cache(maxsize=64)  # thousands of connections ask; only the affinity changes
def _why_far_from(device: str, ours: frozenset[int]) -> str:
    text = _told(f"sys/class/infiniband/{device}/device/numa_node").strip()
    our_nodes = nodes(ours, _told)
    if not text.isdecimal() or not our_nodes or int(text) in our_nodes:  # -1: the kernel does not know
        return ""
    return (
        f"far CPUs: this process may only run on {_named(ours, our_nodes)}, and {device} is at node {text}: pin the"
        " process to CPUs of that node (taskset, numactl --cpunodebind)"
    )


def allowed(pid: int) -> set[int]:
    """The CPUs on which a process may run; none if the kernel does not say."""
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", _read(f"proc/{pid}/status"), re.MULTILINE)
    return _numbers(found[1]) if found else set()


def nodes(cpus: Set[int], read: Callable[[str], str] | None = None) -> set[int]:
    """The NUMA nodes of these CPUs; none if the kernel has no nodes."""
    read = read or _read
    there = _numbers(read("sys/devices/system/node/online").strip())
    return {
        node for node in there if cpus & _numbers(read(f"sys/devices/system/node/node{node}/cpulist").strip())
    }


def _named(cpus: Set[int], at: Set[int]) -> str:
    return f"CPUs {_ranges(cpus)} (node {_ranges(at)})"


def _ranges(numbers: Set[int]) -> str:
    """As the kernel writes them: 0-3,8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _numbers(text: str) -> set[int]:
    """Of 0-3,8."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: str) -> str:
    """A file of the kernel; "" if it has none of that name, or cannot be read."""
    with contextlib.suppress(OSError):
        return _told(path)
    return ""


def _told(path: str) -> str:
    """The same, for an answer that is kept. By a descriptor: these files do not block.

    :raises OSError: no descriptor or memory is left to read it with
    """
    try:
        fd = os.open(ROOT + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 1 << 16).decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return ""
