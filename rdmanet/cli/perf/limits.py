"""--require: limits that a measurement must keep, for the exit status.

    p99<20us            every test that has the metric; microseconds if no unit is given
    bw>5GB/s            GB/s, MB/s, MiB/s, GiB/s, Gb/s
    rate>1M/s           messages: /s, k/s, M/s
    cpu<2us             CPU time for each message, of both sides
    write_lat:p50<1us   this test only
    p50<1.1x            at most 1.1 times what --compare's file has

A limit that no result can be held against is an error: it would always be kept.
"""

import re
from typing import Final, NamedTuple

from rdmanet.cli.perf.control import PerfError
from rdmanet.cli.perf.kinds import KINDS
from rdmanet.cli.perf.results import METRICS, Report, Result, find, value_of

_FORM: Final = re.compile(
    r"(?:(?P<test>\w+):)?(?P<metric>[a-z]+[\d.]*)\s*(?P<sign><=|>=|<|>)\s*(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    r"\s*(?P<unit>[a-zA-Z/µ]*)"
)
_UNITS: Final[dict[str, dict[str, float]]] = {
    "us": {"": 1.0, "us": 1.0, "µs": 1.0, "ns": 1e-3, "ms": 1e3, "s": 1e6},
    "GB/s": {"GB/s": 1.0, "MB/s": 1e-3, "GiB/s": 2**30 / 1e9, "MiB/s": 2**20 / 1e9, "Gb/s": 0.125},
    "/s": {"": 1.0, "/s": 1.0, "k/s": 1e3, "M/s": 1e6},
    "": {"": 1.0},
}


class Limit(NamedTuple):
    """One limit.

    :ivar relative: `bound` is a multiple of the old value
    """

    text: str
    test: str | None
    metric: str
    sign: str
    bound: float
    relative: bool

    def is_about(self, result: Result) -> bool:
        return self.test in (None, result.test) and value_of(result, self.metric) is not None


def limit_of(text: str) -> Limit:
    """Read one.

    :raises ValueError: it has another form, or names what does not exist
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{text!r} is no limit; examples: 'p99<20us', 'bw>5GB/s', 'write_lat:p50<1us', 'p50<1.1x'"
        )
    test, metric, sign, number, unit = found.group("test", "metric", "sign", "number", "unit")
    if test is not None and test not in KINDS:
        raise ValueError(f"{text!r}: there is no test {test!r}; tests: {', '.join(KINDS)}")
    if metric not in METRICS:
        raise ValueError(f"{text!r}: there is no metric {metric!r}; metrics: {', '.join(METRICS)}")
    if unit == "x":
        return Limit(text, test, metric, sign, float(number), True)
    units = _UNITS[METRICS[metric][0]]
    if unit not in units:
        known = ", ".join(name for name in units if name) or "none"
        raise ValueError(
            f"{text!r}: {metric} has no unit {unit!r}; units: {known}, or x, a ratio to --compare"
        )
    return Limit(text, test, metric, sign, float(number) * units[unit], False)


def broken(limits: list[Limit], results: list[Result], old: Report | None) -> list[str]:
    """What is not kept, in words.

    :raises PerfError: no result has what a limit is about
    """
    said = []
    for limit in limits:
        there = [result for result in results if limit.is_about(result)]
        if not there:
            raise PerfError(f"--require {limit.text!r}: no test that was run measures that")
        for result in there:
            value, bound = value_of(result, limit.metric), limit.bound
            assert value is not None
            if limit.relative:
                before = None if old is None else find(old, result)
                was = None if before is None else value_of(before, limit.metric)
                if not was:
                    raise PerfError(
                        f"--require {limit.text!r}: --compare's file has no {limit.metric} of {result.test} with"
                        f" {result.size} bytes"
                    )
                bound *= was
            if not _keeps(value, limit.sign, bound):
                unit = METRICS[limit.metric][0]
                said.append(
                    f"{result.test} {result.size} B: {limit.metric} is {value:.4g} {unit}, and {limit.text} was"
                    " required"
                )
    return said


def _keeps(value: float, sign: str, bound: float) -> bool:
    kept = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}
    return kept[sign]
