"""The life of a key that a peer has, without a device: every way to its end, and what is done on it."""

import asyncio
from types import SimpleNamespace

import pytest

from rdmanet import AccessFlags
from rdmanet.stream import bindings
from rdmanet.stream.bindings import TABLE, Binding, Event, State


class Stage:
    """A lessor, its loop's clock, a region and a key, which write down what is asked of them."""

    def __init__(self, monkeypatch, invalidates=True, is_over=False):
        self.did = []
        self.timers = []
        self.leased = 0
        self.bound = self.invalidated = None
        self.is_over = is_over
        self.invalidates = invalidates
        self.rkey = 0x1234
        self.engine = SimpleNamespace(drain=lambda: self.did.append("drain"))
        self.future_loop = asyncio.new_event_loop()
        monkeypatch.setattr(bindings, "_key_for", lambda *_: self)
        self.binding = Binding(self, self, AccessFlags.REMOTE_READ, self)

    # the loop
    def create_future(self):
        return self.future_loop.create_future()

    def is_closed(self):
        return False

    def call_later(self, seconds, callback):
        timer = SimpleNamespace(seconds=seconds, callback=callback, cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def wait(self):
        """The next timer is due."""
        timer = self.timers.pop()
        timer.cancel = lambda: None
        timer.callback()
        return timer.seconds

    def look(self):
        """The queue pair has not come to it, each time that is looked."""
        waited = sum(self.wait() for _ in range(bindings.LOOKS))
        assert waited == pytest.approx(bindings.STUCK_AFTER_S)
        assert self.did[-bindings.LOOKS - 4 : -4] == ["drain"] * bindings.LOOKS
        self.did = [what for what in self.did if what != "drain"]

    # the region
    def to_remote(self):
        return None

    def _offered(self, more):
        self.leased += more

    # the key
    def bind(self, done):
        self.bound = done

    def invalidate(self, done):
        self.did.append("invalidate")
        if self.is_over:
            raise ConnectionResetError
        self.invalidated = done

    def close(self):
        self.did.append("free")

    # the lessor
    def stop_queue_pair(self):
        self.did.append("stop")

    def binding_stuck(self, error):
        self.did.append(type(error).__name__)

    def binding_over(self, binding):
        assert binding is self.binding and binding.state is State.OVER
        self.did.append("over")


@pytest.fixture
def stage(monkeypatch):
    made = Stage(monkeypatch)
    made.binding.begin(10.0)
    yield made
    assert made.binding.state is State.OVER
    assert made.binding.over.done() and made.binding.granted.done()
    assert made.leased == 0 and not made.timers
    made.did.clear()
    for event in Event:
        made.binding._receive(event)
    assert made.did == []
    made.future_loop.close()


def granted(stage):
    stage.bound()
    assert stage.binding.granted.result() == 0x1234
    assert stage.leased == 1 and stage.binding.state is State.GRANTED


def test_a_peer_that_lets_go(stage):
    granted(stage)
    stage.binding.leave(True, 10.0)
    assert stage.did == [] and not stage.binding.over.done()
    stage.binding.acknowledged()
    assert stage.did == ["invalidate"] and not stage.binding.over.done()
    stage.invalidated()
    assert stage.did == ["invalidate", "free", "over"]


def test_a_peer_that_does_not(stage):
    granted(stage)
    stage.binding.leave(True, 10.0)
    assert stage.wait() == 10.0
    assert stage.did == ["invalidate"]
    stage.binding.acknowledged()  # late
    stage.invalidated()
    assert stage.did == ["invalidate", "free", "over"]


def test_a_peer_that_was_never_told(stage):
    granted(stage)
    stage.binding.leave(False, 10.0)
    assert stage.did == ["invalidate"]
    stage.invalidated()


def test_a_queue_pair_that_does_not_come_to_it(stage):
    """The queue pair takes nothing any more before the window is freed, and only then the connection hears of it."""
    granted(stage)
    stage.binding.leave(True, 10.0)
    assert stage.wait() == 10.0
    stage.look()
    assert stage.did == ["invalidate", "stop", "free", "over", "TimeoutError"]


def test_a_queue_pair_that_had_come_to_it_when_the_loop_was_busy(stage):
    granted(stage)
    stage.binding.leave(True, 10.0)
    stage.wait()
    stage.engine.drain = stage.invalidated
    stage.wait()
    assert stage.did == ["invalidate", "free", "over"]


@pytest.mark.parametrize("looks", [1, bindings.LOOKS - 1])
def test_a_queue_pair_that_comes_to_it_when_the_loop_has_turned_again(stage, looks):
    """Its timers come late while the loop is busy, and only then what waited for room is posted."""
    granted(stage)
    stage.binding.leave(True, 10.0)
    stage.wait()
    for _ in range(looks):
        stage.wait()
    stage.invalidated()
    assert stage.did == ["invalidate", *["drain"] * looks, "free", "over"]


def test_the_block_is_left_before_the_key_is_there(stage):
    stage.binding.leave(False, 10.0)
    assert stage.did == []
    stage.bound()
    assert stage.did == ["invalidate"]
    stage.invalidated()
    assert stage.did == ["invalidate", "free", "over"]


def test_a_key_that_never_comes(stage):
    stage.binding.leave(False, 10.0)
    stage.wait()
    stage.look()
    assert stage.did == ["stop", "free", "over", "TimeoutError"]
    assert isinstance(stage.binding.granted.exception(), TimeoutError)


def test_a_key_that_is_not_there_in_time(stage):
    assert stage.wait() == 10.0
    assert stage.did == [] and not stage.binding.granted.done()
    stage.look()
    assert stage.did == ["stop", "free", "over", "TimeoutError"]
    assert isinstance(stage.binding.granted.exception(), TimeoutError)


@pytest.mark.parametrize("when", ["binding", "granted", "unwanted", "revoking", "invalidating"])
def test_the_connection_ends(stage, when):
    if when == "unwanted":
        stage.binding.leave(False, 10.0)
    elif when != "binding":
        granted(stage)
    if when in ("revoking", "invalidating"):
        stage.binding.leave(True, 10.0)
    if when == "invalidating":
        stage.binding.acknowledged()
    assert stage.binding.state is State[when.upper()]
    stage.did.clear()
    stage.binding.lost()
    assert stage.did == ["free", "over"]


def test_nothing_can_be_posted_any_more(monkeypatch):
    stage = Stage(monkeypatch, is_over=True)
    stage.binding.begin(10.0)
    stage.bound()
    stage.binding.leave(False, 10.0)
    assert stage.binding.state is State.INVALIDATING
    stage.binding.lost()
    assert stage.did == ["invalidate", "free", "over"]
    stage.future_loop.close()


def test_the_table_is_whole():
    """Each state knows how the connection ends, and those that wait for something know when it is too late."""
    assert set(TABLE) == set(State)
    for state, row in TABLE.items():
        assert row[Event.LOST][0] is State.OVER
        if state in (State.UNWANTED, State.INVALIDATING):
            assert row[Event.STUCK][0] is State.OVER
        if state is not State.OVER:
            reached = {state}
            while more := {to for each in reached for to, _ in TABLE[each].values()} - reached:
                reached |= more
            assert State.OVER in reached
