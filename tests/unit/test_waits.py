"""The limits of waits: which are over, when, and that one timer does for all."""

import asyncio

from rdmanet.stream.waits import LINES_MAX, Waits


class Loop:
    """A loop whose clock the test sets."""

    def __init__(self):
        self.now = 100.0
        self.soon = []
        self.timers = []
        self.exceptions = []

    def time(self):
        return self.now

    def call_soon(self, call, *arguments):
        self.soon.append((call, arguments))

    def call_later(self, seconds, call, *arguments):
        return self.call_at(self.now + seconds, lambda: call(*arguments))

    def call_at(self, when, call):
        timer = Timer(when, call)
        self.timers.append(timer)
        return timer

    def is_closed(self):
        return False

    def advance(self, now):
        """Let the time pass, and run what is due."""
        self.now = now
        for timer in [timer for timer in self.timers if timer.when <= now]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.call()
        self.run()

    def run(self):
        while self.soon:
            call, arguments = self.soon.pop(0)
            call(*arguments)

    @property
    def pending(self):
        return [timer.when for timer in self.timers if not timer.cancelled]


class Timer:
    def __init__(self, when, call):
        self.when, self.call, self.cancelled = when, call, False

    def cancel(self):
        self.cancelled = True


def test_a_wait_is_over_at_its_time_and_once():
    loop, over = Loop(), []
    wait = Waits(loop).begin(10.0, over.append, "ten")
    loop.advance(109.0)
    assert not over and not wait.cancelled() and wait.when() == 110.0
    loop.advance(110.0)
    assert over == ["ten"] and wait.cancelled()
    loop.advance(200.0)
    assert over == ["ten"] and not loop.pending


def test_waits_of_several_lengths_are_over_in_the_order_of_their_times():
    loop, over = Loop(), []
    waits = Waits(loop)
    waits.begin(30.0, over.append, "thirty")
    waits.begin(10.0, over.append, "ten")
    loop.advance(105.0)
    waits.begin(10.0, over.append, "fifteen")
    for now in (110.0, 115.0, 130.0):
        loop.advance(now)
    assert over == ["ten", "fifteen", "thirty"]


def test_a_thousand_waits_that_end_early_set_one_timer():
    loop, over = Loop(), []
    waits = Waits(loop)
    for number in range(1000):
        loop.now += 0.001
        waits.begin(10.0, over.append, number).cancel()
    assert len(loop.timers) == 1
    loop.advance(111.0)
    assert not over and not loop.pending


def test_the_timer_goes_on_to_the_eldest_that_is_left():
    loop, over = Loop(), []
    waits = Waits(loop)
    first = waits.begin(10.0, over.append, "first")
    loop.advance(103.0)
    waits.begin(10.0, over.append, "second")
    first.cancel()
    loop.advance(110.0)
    assert not over and loop.pending == [113.0]
    loop.advance(113.0)
    assert over == ["second"]


def test_lengths_that_all_differ_have_few_lines():
    """So do those that are what is left of a deadline."""
    loop, over = Loop(), []
    waits = Waits(loop)
    for number in range(1000):
        waits.begin(10.0 + number, over.append, number).cancel()
        assert len(waits._lines) <= LINES_MAX
    assert not loop.pending[1:]
    begun = [waits.begin(10.0 + number, over.append, number) for number in range(1000)]
    assert len(waits._lines) <= LINES_MAX
    for wait in begun[500:]:
        wait.cancel()
    for number in range(1000):
        loop.advance(110.0 + number)
        assert over == list(range(min(number + 1, 500)))
    assert not waits._lines and not loop.pending


def test_who_is_cancelled_in_the_turn_in_which_its_time_is_up_is_not_called():
    loop, over = Loop(), []
    waits = Waits(loop)
    second = None

    def first():
        over.append("first")
        second.cancel()

    waits.begin(10.0, first)
    second = waits.begin(10.0, over.append, "second")
    loop.advance(110.0)
    assert over == ["first"]


def test_a_wait_may_begin_again_when_its_time_is_up():
    loop, over = Loop(), []
    waits = Waits(loop)

    def again():
        over.append(loop.now)
        if len(over) < 3:
            waits.begin(10.0, again)

    again()
    loop.advance(110.0)
    loop.advance(120.0)
    loop.advance(130.0)
    assert over == [100.0, 110.0, 120.0] and not loop.pending


def test_what_one_raises_does_not_keep_the_others_from_their_end():
    """On asyncio's own loop."""

    async def waiting():
        loop, over, told = asyncio.get_running_loop(), [], []
        loop.set_exception_handler(lambda _, about: told.append(about["exception"]))
        waits, done = Waits(loop), loop.create_future()
        waits.begin(0.0, over.clear, "wrong")
        waits.begin(0.0, done.set_result, None)
        await done
        return told

    [error] = asyncio.run(waiting())
    assert isinstance(error, TypeError)


def test_no_timer_stays_on_a_loop_that_runs_only_while_it_is_not_idle():
    class Private(Loop):
        idle = False

    loop, over = Private(), []
    waits = Waits(loop)
    waits.begin(10.0, over.append, "first")
    waits.begin(10.0, over.append, "second").cancel()
    assert loop.pending == [110.0]
    loop.advance(110.0)
    assert over == ["first"] and not loop.pending


def test_closed_waits_are_never_over():
    loop, over = Loop(), []
    waits = Waits(loop)
    wait = waits.begin(10.0, over.append, "ten")
    waits.close()
    loop.advance(200.0)
    assert not over and wait.cancelled()
    wait.cancel()


def test_nor_are_those_whose_time_was_up_in_the_turn_in_which_they_are_closed():
    loop, over = Loop(), []
    waits = Waits(loop)
    waits.begin(10.0, waits.close)
    waits.begin(10.0, over.append, "ten")
    loop.advance(110.0)
    assert not over
