"""Regions of huge pages: that they are, and what is said where there are none."""

import errno
import os
import re
from pathlib import Path

import pytest

from rdmanet.verbs import AccessFlags, WCStatus, WROpcode

PAGE = os.sysconf("SC_PAGESIZE")
MORE_THAN_THERE_IS = 1 << 46  # 64 TiB: nothing of it is taken, since it is refused as a whole


def mapped_in(mr) -> int:
    """Bytes of each page behind a region, as the kernel says."""
    found = re.search(
        rf"^{mr.address:x}-.*?^KernelPageSize: *(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    return int(found[1]) << 10


def test_they_are_huge(net, pair):
    net.needs_huge_pages(2)
    size = mapped_in(net.mr(1, huge_pages=True))
    assert size > PAGE
    a, b = pair
    mr = net.mr(size + 5, huge_pages=True)
    assert len(mr) == size + 5
    assert mr.page_size == mapped_in(mr) == size
    assert mr.address % size == 0
    assert not any(mr[:])
    mr[size - 2 : size + 2] = b"over"
    other = net.mr(64)
    a.send(mr.sge(size - 2, 4), WROpcode.RDMA_WRITE, remote_addr=other.address, rkey=other.rkey)
    assert a.one().status == WCStatus.SUCCESS
    assert other[:4] == b"over"
    other[:4] = b"back"
    b.send(other.sge(0, 4), WROpcode.RDMA_WRITE, remote_addr=mr.address + size - 2, rkey=mr.rkey)
    assert b.one().status == WCStatus.SUCCESS
    assert mr[size - 2 : size + 2] == b"back"


def test_they_are_given_back(net):
    net.needs_huge_pages(1)
    for _ in range(100):
        net.pd.alloc_mr(1, huge_pages=True).close()
    with pytest.raises(OSError):  # the rights are wrong: the device refuses to register it
        net.pd.alloc_mr(1, AccessFlags.REMOTE_WRITE, huge_pages=True)
    net.pd.alloc_mr(1, huge_pages=True).close()


def test_what_there_is_not_is_told(net):
    with pytest.raises(
        OSError, match=rf"{MORE_THAN_THERE_IS} bytes need \d+ huge pages of \d+ KiB"
    ) as caught:
        net.pd.alloc_mr(MORE_THAN_THERE_IS, huge_pages=True)
    assert caught.value.errno == errno.ENOMEM
    (note,) = caught.value.__notes__
    assert re.search(r"`sysctl vm\.nr_hugepages=\d+`", note)


def test_the_best_that_there_is(net):
    mr = net.mr(100, huge_pages="try")
    assert mr.page_size == mapped_in(mr) >= PAGE
    assert mr[:] == bytes(100)
    # One more than there are: ordinary pages, on the embedded device none of which is touched.
    text = Path("/proc/meminfo").read_text()
    counts = dict(re.findall(r"^(HugePages_\w+|Hugepagesize): *(\d+)", text, re.M))
    length = (int(counts["HugePages_Total"]) + 1) * int(counts["Hugepagesize"]) * 1024
    with net.pd.alloc_mr(length, huge_pages="try") as mr:
        assert mr.page_size == mapped_in(mr) == PAGE
        assert mr.address % PAGE == 0


def test_ordinary_ones(net):
    assert net.mr(100).page_size == PAGE
    with net.pd.reg_mr(bytearray(10)) as mr:
        assert mr.page_size == 0


@pytest.mark.parametrize("wrong", ["yes", 2, None, "TRY"])
def test_what_cannot_be_asked_for(net, wrong):
    with pytest.raises(ValueError, match="huge_pages="):
        net.pd.alloc_mr(100, huge_pages=wrong)
