"""Percentiles of times, beside those of a sorted list."""

import random

import pytest

from rdmanet._core import Histogram


def nearest_rank(times, percent):
    ordered = sorted(times)
    return ordered[max(0, min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1))]


@pytest.mark.parametrize("most", [100, 10_000, 10**9])
def test_percentiles_are_within_a_hundredth(most):
    source, found = random.Random(most), Histogram()
    times = [int(source.uniform(1, most)) for _ in range(5000)]
    for time in times:
        found.add(time)
    for percent in (1, 50, 90, 99):
        assert found.percentile(percent) == pytest.approx(nearest_rank(times, percent), rel=0.01, abs=1)
    assert found.percentile(0) == pytest.approx(min(times), rel=0.01, abs=1)
    assert found.percentile(100) == max(times)
    assert (found.count, found.min_ns, found.max_ns) == (5000, min(times), max(times))
    assert found.mean_ns == pytest.approx(sum(times) / 5000)
    assert sum(many for _, many in found.filled()) == 5000


def test_each_time_is_in_the_cell_of_its_size():
    """Also at the borders of the octaves, where the width of the cells changes."""
    for exponent in range(41):
        for time in ((1 << exponent) - 1, 1 << exponent, (1 << exponent) + 1):
            found = Histogram()
            found.add(time)
            [(middle, many)] = found.filled()
            assert many == 1
            assert middle == pytest.approx(min(time, (1 << 40) - 1), rel=0.01)


def test_what_is_too_long_counts_as_the_longest():
    found = Histogram()
    found.add(1 << 63)
    assert found.max_ns == (1 << 40) - 1
    assert found.percentile(50) == found.max_ns


def test_empty():
    found = Histogram()
    assert (found.count, found.percentile(50), found.mean_ns, found.deviation_ns) == (0, 0.0, 0.0, 0.0)
    assert found.filled() == []
    with pytest.raises(ValueError, match=r"101.0 is not in 0..100"):
        found.percentile(101)


def test_merged_and_cleared():
    one, other = Histogram(), Histogram()
    for time in (5, 7):
        one.add(time)
    for time in (3, 1000):
        other.add(time)
    one.merge(other)
    one.merge(Histogram())
    assert (one.count, one.min_ns, one.max_ns) == (4, 3, 1000)
    other.clear()
    assert (other.count, other.filled(), other.deviation_ns) == (0, [], 0.0)


def test_laps():
    found = Histogram()
    for now in (1.0, 1.000_001, 1.000_003):
        found.lap(now)
    assert (found.count, found.min_ns, found.max_ns) == (2, 1000, 2000)
