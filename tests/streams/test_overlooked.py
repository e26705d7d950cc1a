"""A device may overlook what a client says first, until it says more, as soft-iWARP does: so the client does."""

import pytest
from harness import Echo, HalfOpen, Net, Recorder

from rdmanet.stream import beginning
from tests.support.waiting import until_seen


@pytest.fixture(autouse=True)
def spoken(monkeypatch) -> list[int]:
    """How many frames each attempt has sent; and the embedded device, which overlooks nothing, as if it did."""
    spoken: list[int] = []
    speak_again = beginning.speak_again

    def note(attempt):
        transport = attempt[0].callbacks.transport
        before = control_frames(transport)
        speak_again(attempt)
        spoken.append(control_frames(transport) - before)

    monkeypatch.setattr(beginning, "speak_again", note)
    monkeypatch.setattr(beginning, "may_be_overlooked", lambda life: True)
    return spoken


def control_frames(transport) -> int:
    return transport.get_extra_info("rdma_stats")["control_frames_sent"]


async def speaking(net: Net, server: type[Recorder]) -> Recorder:
    _, port = await net.serve(server)
    client = await net.connect(port)
    client.transport.write(b"is there anybody?")
    return client


async def test_a_client_that_hears_nothing_speaks_again(net: Net, spoken):
    """Its peer answers nothing to its program's words; frames of the transport do no harm."""
    await speaking(net, Recorder)
    await until_seen(lambda: sum(spoken) == len(beginning.AGAIN_S))


async def test_a_fin_that_was_overlooked_too(net: Net, spoken):
    """No Ping is sent after it; a Credit is."""
    client = await speaking(net, HalfOpen)
    client.transport.write_eof()
    await until_seen(lambda: sum(spoken) >= 1)


async def test_one_that_was_answered_does_not(net: Net, spoken):
    client = await speaking(net, Echo)
    await client.until_received(17)
    await until_seen(lambda: bool(spoken))
    assert spoken == [0]


async def test_one_that_is_over_does_not(net: Net, spoken):
    class Hasty(Recorder):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.abort()

    _, port = await net.serve(Recorder)
    client = await net.connect(port, Hasty)
    await client.until_lost()
    assert not spoken
