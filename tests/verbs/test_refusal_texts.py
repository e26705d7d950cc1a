"""Errors name what was asked for and what there is: queues that were overrun, inline data, the limit of files."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from rdmanet.verbs import (
    CQ,
    PD,
    QP,
    SGE,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendFlags,
    SendOpsFlags,
    SendWR,
    WCStatus,
    WROpcode,
)
from tests.verbs.conftest import Net

ROOT = Path(__file__).parents[2]
TOO_MUCH = 5000


@pytest.mark.embedded_only("only the embedded device tells of a completion queue that is overrun")
def test_an_overrun(net: Net, eventually):
    """How many completions the queue holds, and how many there may be at once."""
    a, b = net.side(cqe=1, max_send_wr=16, max_recv_wr=3), net.side()
    net.connect(a, b)
    mr = net.mr()
    b.qp.post_recv([RecvWR(mr.sge(0, 8)) for _ in range(a.cq.cqe + 1)])
    for _ in range(a.cq.cqe + 1):
        a.send(mr.sge(8, 8))
    found: list[OSError] = []

    def look():
        try:
            a.cq.poll()
        except OSError as exc:
            found.append(exc)
        return found

    eventually(look)
    assert found[0].errno == errno.EIO
    most = a.qp.cap.max_send_wr + a.qp.cap.max_recv_wr
    assert f"it holds {a.cq.cqe} completions, and its queue pairs may have {most} requests at once" in str(
        found[0]
    )


@pytest.mark.embedded_only("other devices have other limits, and other errors")
def test_a_queue_pair_with_too_much_inline_data(net: Net):
    with CQ(net.context, 8) as cq, PD(net.context) as pd:
        init = QPInitAttr(cq, cq, QPCap(max_send_wr=1, max_recv_wr=1, max_inline_data=TOO_MUCH))
        with pytest.raises(
            OSError, match=f"max_inline_data {TOO_MUCH} may be more .*, which is at most 1024"
        ) as caught:
            QP(pd, init)
        assert caught.value.errno == errno.EINVAL
        init.cap.max_inline_data = 1024
        QP(pd, init).close()


@pytest.mark.embedded_only("other devices do not check it, or have other limits")
@pytest.mark.parametrize("how", ["post_send", "wr"])
def test_a_request_with_too_much_inline_data(net: Net, how):
    """By either way to post, the error has both numbers."""
    a, b = net.side(ops=SendOpsFlags.SEND, max_inline_data=64), net.side()
    net.connect(a, b)
    most = a.qp.cap.max_inline_data
    request = SendWR(WROpcode.SEND, SGE(bytes(most + 1)), flags=SendFlags.INLINE | SendFlags.SIGNALED)
    text = f"{most + 1} bytes are to be inline, and at most {most} can be"
    with pytest.raises(OSError, match=text) as caught:
        if how == "post_send":
            a.qp.post_send(request)
        else:
            with a.qp.wr() as wr:
                wr.post(request)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.embedded_only("rxe's provider checks the address itself")
@pytest.mark.not_on_iwarp("has no atomics")
def test_a_polled_atomic_names_all_reasons(net: Net):
    """A completion does not say what the request was: every cause of the status is named, also alignment."""
    a, b = net.pair()
    there = net.mr()
    a.send(SGE(net.mr(), 0, 8), WROpcode.ATOMIC_FETCH_AND_ADD, remote_addr=there.address + 4, rkey=there.rkey)
    wc = a.one()
    assert wc.status == WCStatus.REM_INV_REQ_ERR
    with pytest.raises(OSError, match="qp_access_flags.*max_dest_rd_atomic.*multiple of 8"):
        wc.raise_for_status()


@pytest.mark.once
@pytest.mark.parametrize("call", ["open", "connect", "alloc"])
def test_files_may_be_smaller_than_the_memory(call):
    """`ulimit -f`: the embedded device's memory is a file. The error names the limit, wherever it is met."""
    limit = 64 << 20 if call != "alloc" else 600 << 20
    code = f"""
import asyncio, resource, rdmanet, rdmanet.verbs as v
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
def open():
    v.Library.embedded().devices()[0].open()
def connect():
    asyncio.run(rdmanet.open_rdma_connection("127.0.0.1", 1, device="soft0"))
def alloc():
    with v.Library.embedded().devices()[0].open() as context, v.PD(context) as pd:
        pd.alloc_mr(700 << 20)
try:
    {call}()
except OSError as exc:
    print(exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert f"files may be {limit} bytes large (RLIMIT_FSIZE, `ulimit -f`)" in done.stdout
    assert "`ulimit -f unlimited`" in done.stdout
