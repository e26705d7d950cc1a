"""What wakes a data engine that sleeps: SENDs that the peer has marked for it, and none of its own.

The engine arms its queue for solicited completions where all peers mark their SENDs; see watcher.pxi.
"""

import os

import pytest
from harness import FAR, HOST, Echo, Net
from test_polling import engine, volley

from rdmanet import credit
from rdmanet.verbs import SendFlags
from tests.support.bare_peer import DATA, HELLO, BarePeer, frame

SOLICITING_HELLO = credit.pack_hello(credit.Hello(65536, 16, 8, 16, credit.FEATURE_SOLICITS))
LATE = "RDMANET_SOFT_DEFER" in os.environ or os.environ.get("RDMANET_SOFT_TRANSPORT") == "stream"


@pytest.mark.embedded_only("adapters complete a send after it was posted")
@pytest.mark.skipif(LATE or bool(FAR), reason="requests complete after they were posted")
async def test_a_question_costs_no_pass(net: Net):
    """What it posts while the engine sleeps completes at once; the answer wakes the engine, and its credit may."""
    client = await net.connect(await net.spawn("echo.py").port(), busy_poll=0)
    await volley(client, 20)
    before = engine(net).stats()
    await volley(client, 160)
    after = engine(net).stats()
    # One for each answer. If its own sends woke it, it would be one and a half, and two to three passes.
    assert after["wakeups"] - before["wakeups"] <= 160 * 1.25
    assert after["passes"] - before["passes"] <= 160 * 2.1


@pytest.mark.parametrize("hello", [HELLO, SOLICITING_HELLO], ids=["unmarked", "marked"])
async def test_who_marks_nothing_and_does_not_say_that_it_would_is_heard(net: Net, device, hello):
    _, port = await net.serve(Echo, busy_poll=0)
    marked = SendFlags.SOLICITED if hello == SOLICITING_HELLO else SendFlags(0)
    peer = BarePeer(device.library, renews=True)
    try:
        await peer.connect(HOST, port, hello)
        for number in range(10):
            peer.post(frame(DATA, b"%d" % number, granted=16 + number), flags=marked)
            await net.until(lambda: bool(net.recorders))
            await net.recorders[0].until_received(number + 1)
            assert engine(net).sleeps
    finally:
        peer.close()


@pytest.mark.embedded_only("the engine is armed for all there")
async def test_what_is_not_marked_comes_with_what_is(net: Net, device):
    """A peer that does not do what its Hello has said is heard late; its bytes are in order nonetheless."""
    _, port = await net.serve(busy_poll=0)
    peer = BarePeer(device.library, renews=True)
    try:
        await peer.connect(HOST, port, SOLICITING_HELLO)
        peer.post(frame(DATA, b"a"))
        peer.post(frame(DATA, b"b"))
        peer.post(frame(DATA, b"c"), flags=SendFlags.SOLICITED)
        await net.until(lambda: bool(net.recorders))
        assert await net.recorders[0].until_received(3) == b"abc"
    finally:
        peer.close()
