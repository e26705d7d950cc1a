"""A device may overlook what a client says first, until it says more, as soft-iWARP does: so the client does."""

from typing import Any

import pytest
from harness import Echo, HalfOpen, Net, Recorder

from rdmanet.stream import beginning
from tests.support.waiting import until_seen


class Overlooking:
    """The embedded device, which overlooks nothing, as if it did.

    :ivar lives: of the clients
    :ivar spoken: how many frames each attempt has sent
    """

    def __init__(self, monkeypatch) -> None:
        self.lives: list[Any] = []
        self.spoken: list[int] = []
        self._speak_again = beginning.speak_again
        monkeypatch.setattr(beginning, "speak_again", self.attempt)
        monkeypatch.setattr(beginning, "may_be_overlooked", lambda life: self.lives.append(life) or True)

    def attempt(self, attempt: tuple[Any, int]) -> None:
        transport = attempt[0].callbacks.transport
        before = control_frames(transport)
        self._speak_again(attempt)
        self.spoken.append(control_frames(transport) - before)


@pytest.fixture(autouse=True)
def device_overlooks(monkeypatch) -> Overlooking:
    return Overlooking(monkeypatch)


@pytest.fixture
def by_hand(monkeypatch) -> None:
    """The only attempt is the test's: a slow machine's answer takes longer than a client waits."""
    monkeypatch.setattr(beginning, "AGAIN_S", (3600.0,))


def control_frames(transport) -> int:
    return transport.get_extra_info("rdma_stats")["control_frames_sent"]


async def speaking(net: Net, server: type[Recorder]) -> Recorder:
    _, port = await net.serve(server)
    client = await net.connect(port)
    client.transport.write(b"is there anybody?")
    return client


async def test_a_client_that_hears_nothing_speaks_again(net: Net, device_overlooks):
    """Its peer answers nothing to its program's words; frames of the transport do no harm."""
    await speaking(net, Recorder)
    await until_seen(lambda: len(device_overlooks.spoken) == len(beginning.AGAIN_S))
    # At most two Credits are unanswered, and the first has gone before.
    assert sum(device_overlooks.spoken) >= 2


async def test_a_fin_that_was_overlooked_too(net: Net, device_overlooks, by_hand):
    """No Ping is sent after it; a Credit is."""
    client = await speaking(net, HalfOpen)
    client.transport.write_eof()
    device_overlooks.attempt((device_overlooks.lives[-1], 1))
    assert device_overlooks.spoken == [1]


async def test_one_that_was_answered_does_not(net: Net, device_overlooks, by_hand):
    client = await speaking(net, Echo)
    await client.until_received(17)
    device_overlooks.attempt((device_overlooks.lives[-1], 1))
    assert device_overlooks.spoken == [0]


async def test_one_that_is_over_does_not(net: Net, device_overlooks):
    class Hasty(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.abort()

    _, port = await net.serve(Recorder)
    client = await net.connect(port, Hasty)
    await client.until_lost()
    assert not sum(device_overlooks.spoken)
