"""What makes a measurement wrong, in words.

* One CPU for both processes: they take turns, and every wait is a switch.
* Far CPUs: a cache line takes several times as long between core complexes or sockets, and a host moves the CPUs of its
  virtual machines about. Measured before each test, between the two processes.
* A busy machine: others take the CPU away. The kernel counts how often each process was preempted.
* CPU time stolen by the host of a virtual machine.
* A frequency that changes: a governor other than "performance".
* A peer that sleeps: a stream polls for as long as messages come, and to be woken takes some 20 us.
"""

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

FAR_NS = 250.0
"""A cache line's round trip above this: not on one core complex (0.1 us there, 0.46 us across)."""
PREEMPTED_PER_S = 20.0
BUSY_SHARE = 0.1
STOLEN_SHARE = 0.02


class Spent(NamedTuple):
    """What a process has used.

    :ivar preempted: how often it was taken off its CPU
    :ivar slept: how often it gave its CPU away, to sleep
    """

    seconds: float
    cpu_s: float
    preempted: int
    slept: int


class Usage:
    """What this process has used since this was made."""

    def __init__(self) -> None:
        self.began = self._now()

    @staticmethod
    def _now() -> Spent:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Spent(time.perf_counter(), used.ru_utime + used.ru_stime, used.ru_nivcsw, used.ru_nvcsw)

    def since(self) -> Spent:
        now, before = self._now(), self.began
        return Spent(
            now.seconds - before.seconds,
            now.cpu_s - before.cpu_s,
            now.preempted - before.preempted,
            now.slept - before.slept,
        )


def preempted(times: int, seconds: float, side: str) -> list[str]:
    """What is wrong if a process was taken off its CPU so often."""
    if times < 3 or times < PREEMPTED_PER_S * seconds:
        return []
    return [
        f"the {side} was taken off its CPU more than {PREEMPTED_PER_S:.0f} times a second: other programs run there,"
        " and percentiles and bandwidth are theirs as well"
    ]


def asleep(times: int, messages: int, side: str) -> list[str]:
    """What is wrong if a process that could poll has slept so often."""
    if messages < 100 or times * 2 < messages:
        return []
    return [
        f"the {side} slept before nearly each message: to be woken takes some 20 µs, and that is what was measured"
    ]


class Machine:
    """The whole machine, from when this was made."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def wrong(self, cpus: list[int]) -> list[str]:
        """What was wrong with it since then.

        :param cpus: where the two processes are
        """
        now = _cpu_times()
        passed = {
            cpu: [after - before for after, before in zip(times, self._before[cpu], strict=False)]
            for cpu, times in now.items()
            if cpu in self._before
        }
        said = []
        stolen = max((_share(passed[cpu], 7) for cpu in cpus if cpu in passed), default=0.0)
        if stolen > STOLEN_SHARE:
            said.append(f"the host of this virtual machine took {stolen:.0%} of the time of a CPU (steal)")
        return said


def far(cache_line_ns: float | None) -> list[str]:
    """What is wrong if a cache line takes so long to the other process's CPU and back."""
    if cache_line_ns is None or cache_line_ns <= FAR_NS:
        return []
    return [
        f"the CPUs were far from each other: a cache line took more than {FAR_NS:.0f} ns there and back, on one core"
        " complex it takes about 100; choose others by --cpus, or measure again, if a host moves them about"
    ]


def standing(cpus: list[int], cache_line_ns: float | None) -> list[str]:
    """What is wrong from the beginning.

    :param cpus: where the processes of this machine are pinned
    """
    said = []
    if len(os.sched_getaffinity(0)) < 2 and len(set(cpus)) < 2 and cache_line_ns is None:
        said.append(
            "there is one CPU for both processes: they take turns, and every wait is a switch between them"
        )
    elif len(cpus) == 2 and cpus[0] == cpus[1]:
        said.append(
            f"both processes are on CPU {cpus[0]}: they take turns, and every wait is a switch between them"
        )
    nodes = {node for cpu in cpus if (node := _node(cpu)) is not None}
    if len(nodes) > 1:
        said.append(f"the CPUs are of different NUMA nodes: {', '.join(map(str, sorted(nodes)))}")
    governors = {governor for cpu in cpus if (governor := _governor(cpu))}
    if governors - {"performance"}:
        said.append(
            f"the frequency of the CPUs changes (governor {', '.join(sorted(governors))}): choose performance, or"
            " warm up for longer (--warm-up)"
        )
    busy = _load() - 0.5
    if busy > BUSY_SHARE * (os.cpu_count() or 1):
        said.append(f"the machine is busy: its load was {busy + 0.5:.1f} before the first test")
    return said


def pinned_to(cpu: int | None) -> int | None:
    """Pin this process; None leaves it where it is. Returns the CPU.

    :raises OSError: it may not run there
    """
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    return cpu


def _cpu_times() -> dict[int, list[int]]:
    times: dict[int, list[int]] = {}
    for line in _read("/proc/stat").splitlines():
        name, _, rest = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdigit():
            times[int(name[3:])] = [int(word) for word in rest.split()]
    return times


def _share(passed: list[int], index: int) -> float:
    total = sum(passed[:8])
    return passed[index] / total if total > 0 and index < len(passed) else 0.0


def _load() -> float:
    words = _read("/proc/loadavg").split()
    return float(words[0]) if words else 0.0


def _node(cpu: int) -> int | None:
    for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"):
        return int(path.name.removeprefix("node"))
    return None


def _governor(cpu: int) -> str:
    return _read(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor").strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
