"""The end of a connection: its table, and the steps that it leads to."""

import gc

import pytest

from rdmanet.protocol import ENDINGS, NOTHING, Action, Ending
from rdmanet.protocol import EndingEvent as Event
from rdmanet.stream.teardown import Teardown


class Loop:
    """A clock that stands still."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, call):
        timer = Timer(call)
        self.timers.append(timer)
        return timer


class Timer:
    def __init__(self, call):
        self.call, self.cancelled = call, False

    def cancel(self):
        self.cancelled = True


class Stage:
    def __init__(self, broken=None):
        self.did = []
        self.reports = []
        self.loop = Loop()
        self.broken = broken
        self.subject = Teardown(self.loop, self)

    def disconnect(self):
        self.did.append("disconnect")

    def steps_of_end(self):
        return self.first, self.second, self.third

    def report(self, exc, message):
        self.reports.append((exc, message))

    def first(self):
        self.step("first")

    def second(self):
        self.step("second")

    def third(self):
        self.step("third")

    def step(self, name):
        self.did.append(name)
        if name == self.broken:
            raise OSError(name)


STEPS = ["first", "second", "third"]


def test_each_state_has_each_event():
    assert set(ENDINGS) == set(Ending)
    for row in ENDINGS.values():
        assert set(row) == set(Event)


def test_what_is_done_is_done_once_and_in_order():
    """On each path of the table: disconnecting at most once and before releasing, releasing at most once."""
    seen = set()
    paths = [(Ending.CONNECTED, ())]
    while paths:
        state, done = paths.pop()
        if (state, done) in seen:
            continue
        seen.add((state, done))
        assert done in {(), (Action.DISCONNECT,), (Action.RELEASE,), (Action.DISCONNECT, Action.RELEASE)}
        assert (Action.RELEASE in done) == (state is Ending.RELEASED)
        for event in Event:
            after, action = ENDINGS[state][event]
            paths.append((after, done if action == NOTHING else (*done, action)))
    assert {state for state, _ in seen} == set(Ending)


def test_from_each_state_release_and_heard_end_it():
    for state in Ending:
        for event in (Event.RELEASE, Event.HEARD):
            state, _ = ENDINGS[state][event]
        assert state is Ending.RELEASED


def test_without_an_abort():
    stage = Stage()
    stage.subject.disconnect()
    assert stage.did == ["disconnect"] and stage.subject.wanted and not stage.subject.released
    stage.subject.release()
    stage.subject.release()
    stage.subject.disconnect()
    assert stage.did == ["disconnect", *STEPS]
    assert stage.subject.released and not stage.subject.wanted


@pytest.mark.parametrize("by", ["completion", "timer"])
@pytest.mark.parametrize("released_before", [False, True])
def test_an_abort_delays_the_rest(by, released_before):
    stage = Stage()
    subject = stage.subject
    subject.abort_posted()
    subject.disconnect()
    if released_before:
        subject.release()
    assert stage.did == [] and subject.in_farewell and subject.wanted == (not released_before)
    (timer,) = stage.loop.timers
    if by == "timer":
        timer.call()
    else:
        subject.heard()
    assert stage.did == (STEPS if released_before else ["disconnect"])
    assert timer.cancelled and not subject.in_farewell
    subject.release()
    assert stage.did == (STEPS if released_before else ["disconnect", *STEPS])


def test_release_now_waits_for_nobody():
    stage = Stage()
    stage.subject.abort_posted()
    stage.subject.release_now()
    assert stage.did == STEPS and stage.loop.timers[0].cancelled
    stage.subject.abort_posted()
    assert len(stage.loop.timers) == 1


def test_a_step_that_fails_spares_none_of_the_others():
    stage = Stage(broken="second")
    stage.subject.release()
    assert stage.did == STEPS
    ((exc, message),) = stage.reports
    assert str(exc) == "second" and message == "rdmanet: second failed"


def test_afterwards_it_refers_to_nobody():
    stage = Stage()
    assert stage in gc.get_referents(stage.subject)
    stage.subject.release()
    assert stage not in gc.get_referents(stage.subject)
