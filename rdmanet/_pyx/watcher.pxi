# Watching completion queues: when to look, for how long, and when to sleep.
#
# Whoever expects completions is a Watcher: the data engine of the byte streams (engine.pxi), and the CompletionWatcher
# of awaited verbs (awaited.pxi). It has a completion channel, whose descriptor it has put into an event loop, and any
# number of completion queues on that channel. It works in passes, which call_soon runs:
#
#     look    take at most a batch from each queue that is awake, and hand the completions out
#     spin    if there were none, look for a couple of microseconds in C: a completion mostly comes right behind the
#             last one. If there was something, do not: woken tasks must not wait for that. Completions of our own
#             sends that wake no task count as nothing: otherwise the answer would come while we go round the loop
#     work    whatever the user has to do then
#     rest    pass again for as long as watching pays (busypoll.pxi). Then arm, look once more (a completion that came
#             before the arming raises no event: ibv_req_notify_cq(3)), and sleep until the channel is readable
#
# Waking a sleeping process costs some 20 us each way, a look at a queue 30 ns.
#
# A pass costs what is busy, not what there is: only queues that are awake are polled. One that was armed, and polled
# once more in vain, is asleep: an event names it, and wakes it up; so does whoever posts what will complete there
# (rouse). All go to sleep when the watcher does. While others keep it awake, a queue that stayed empty during MISSED
# hits of theirs goes to sleep alone.
#
#     CQ.awake  CQ.armed            the queue is polled in each pass, and ...
#     yes       NOT_ARMED           no event will come
#     yes       ARMED               one may come, but there may be a completion that is older than the arming
#     yes       ARMED_AND_EMPTY     one will come, or waits at the channel already
#     no        ARMED_AND_EMPTY     it is not polled: asleep
#
# A send that the device executes while it is posted completes at once. To write that to the queue's channel would only
# wake the program that goes on anyhow: one more pass, and four system calls. So the queue is armed for solicited
# completions while all peers mark their SENDs so (`unsolicited` counts those that do not) and no send of ours is in
# flight. Whoever posts one has a pass run, which polls, and arms for all if the send is not done yet; or takes the
# completion itself.
#
# Why a base class and not an object that its users have: every write and every posted request asks whether a pass is
# to come, and every pass looks at its user's lists. So these are fields of one object, and the calls below are C's.

cdef enum:
    ACK_BATCH = 16                  # events acknowledged in one call: it takes a lock
    BATCH = 64                      # completions of one poll
    LOOKS_MOST = 4                  # after an arming, in one pass
    MISSED = 1024                   # some milliseconds of traffic; going to sleep and being woken costs a few us
    NOT_ARMED = 0
    ARMED = 1
    ARMED_AND_EMPTY = 2             # a look after the arming found nothing


cdef class Watcher:
    """Watches completion queues, for its user: a subclass, which gets what is found by the methods that come first.

    :ivar notifier: what calls back when the channel is readable; None when it does not any more
    :ivar channel: the channel of the queues
    :ivar cqs: the queues
    :ivar passes: how often it looked,
    :ivar sleeps: how often it went to sleep,
    :ivar wakeups: how often it was woken,
    :ivar events: by how many events,
    :ivar polls: how often it polled a queue
    """

    cdef readonly object notifier
    cdef readonly CompChannel channel
    cdef readonly list cqs
    cdef list awake                     # those of them that are polled; the others are armed, and will be named
    cdef Py_ssize_t expected            # events of one wake-up: so many were awake when we went to sleep
    cdef Py_ssize_t blocked             # how many wait for what must come soon: watch for as long as is allowed at all
    cdef uint64_t hits                  # looks that found something in a queue
    cdef bint has_idle                  # one of the awake has missed too much
    cdef bint keeping                   # the user has older completions than those in the queues: take_kept()
    cdef bint lost                      # the device has failed: it will tell nothing any more
    cdef bint in_pass, scheduled, closed
    cdef bint by_hand                   # whoever waits runs the passes, and not the loop
    cdef object call_soon, pass_method
    cdef object context                 # contextvars.Context of the passes; None: that of whoever wakes us
    cdef pid_t pid                      # a forked child touches nothing of its parent's
    cdef uint64_t tick                  # the number of this pass, or the next
    cdef uint64_t in_flight             # sends that were posted and have not completed
    cdef int unheard                    # completions of this pass that nobody was told of
    cdef Py_ssize_t unsolicited         # peers that do not mark what is to wake us

    cdef verbs.ibv_wc completions[BATCH]
    cdef int completion_next, completion_count
    cdef watch_window window
    cdef readonly uint64_t passes, sleeps, wakeups, events, polls
    cdef readonly uint64_t messages     # completions that the window is learned from,
    cdef uint64_t learned               # and how many it has been learned from

    def __cinit__(self):
        self.cqs = []
        self.awake = []
        self.expected = 1
        self.tick = 1

    cdef int begin(self, CompChannel channel, notifier, call_soon, readable, context=None) except -1:
        """Have `readable` called when the channel is, and passes run by `call_soon`, in `context` if there is one."""
        self.pid = verbs.rn_pid
        self.channel = channel
        self.call_soon = call_soon
        self.context = context
        self.pass_method = self.pass_
        notifier.add_reader(channel.fd, readable)
        self.notifier = notifier
        return 0

    # -- what its user does ----------------------------------------------------------------------------

    cdef int dispatch(self) except -1:
        """Hand completions[completion_next:completion_count] out, and count what was awaited among them in `messages`.

        What an exception keeps it from comes first the next time.
        """
        raise NotImplementedError

    cdef int take_kept(self) except -1:
        """Hand out what the user has kept, and clear `keeping`; returns how many."""
        return 0

    cdef bint expects(self) except -1:
        """Whether a completion may concern anybody. If not, it neither watches nor sleeps: nothing is armed."""
        return True

    cdef bint has_work(self) except -1:
        """Whether there is something to do in the next pass, even if no completion comes."""
        return False

    cdef int work(self, int found) except -1:
        """What is to be done in a pass after so many completions."""
        return 0

    cdef int resting(self) except -1:
        """It is about to sleep."""
        return 0

    cdef int broken(self, CQ cq, error) except -1:
        """A queue has failed for good (it was overrun, say). It is to be given up: unwatch()."""
        raise NotImplementedError

    # -- its queues --------------------------------------------------------------------------------------

    cdef int watch(self, CQ cq) except -1:
        """One more queue."""
        self.cqs.append(cq)
        return self.rouse(cq)   # it has to be armed before anything can be heard of it

    cdef int unwatch(self, CQ cq) except -1:
        """One queue less, if it is ours."""
        if cq in self.cqs:
            self.cqs.remove(cq)
        if cq.awake:
            self.awake.remove(cq)
            cq.awake = False
        return 0

    cdef int rouse(self, CQ cq) except -1:
        """Poll it from now on. One that is not ours (any more) is left alone."""
        cq.last_hit = self.hits
        if not cq.awake and cq in self.cqs:
            cq.awake = True
            self.awake.append(cq)
        return 0

    cdef int rouse_all(self) except -1:
        cdef CQ cq
        for cq in self.cqs:
            self.rouse(cq)
        return 0

    # -- passes ------------------------------------------------------------------------------------------

    cdef int wake(self) except -1:
        """Have a pass run soon."""
        if not self.scheduled and not self.in_pass and not self.closed:
            if not self.by_hand:
                self.pass_soon()
            self.scheduled = True
        return 0

    cdef int run_by_hand(self, bint by_hand) except -1:
        """Choose who runs the passes: a call that waits (by run_pass(), while `scheduled` is set), or the loop."""
        if self.by_hand and not by_hand and self.scheduled and not self.closed:
            self.pass_soon()
        self.by_hand = by_hand
        return 0

    cdef int pass_soon(self) except -1:
        if self.context is None:
            self.call_soon(self.pass_method)
        else:
            self.call_soon(self.pass_method, context=self.context)  # else the loop would copy one for each pass
        return 0

    def pass_(self):
        """One pass, as call_soon runs it."""
        self.scheduled = False
        self.run_pass()

    cdef Py_ssize_t take_events(self) except -1:
        """Take the channel's events, and wake up the queues that they name; returns how many there were."""
        cdef CQ cq
        cdef Py_ssize_t events = 0
        # As many as there were busy queues, each of which an arming gives one. Should there be more, the descriptor
        # stays readable; asking until there is none would cost a system call at each wake-up.
        while events < self.expected and (cq := self.channel.get_cq_event()) is not None:
            events += 1
            cq.armed = NOT_ARMED
            self.rouse(cq)
            if cq.unacked >= ACK_BATCH:
                cq.ack_rest()
        self.events += events
        if events:
            self.window.looked_ns = now_ns()
        return events

    cdef int run_pass(self) except -1:
        cdef bint quiet = False
        cdef int found
        if self.closed or self.in_pass or self.pid != verbs.rn_pid:
            return 0
        self.in_pass = True
        if self.window.asleep_ns:
            watch_wakes(&self.window)
            if tracing != NULL:
                trace(TRACE_ASLEEP, 0, False, <uintptr_t><void *>self)
        self.passes += 1
        self.tick += 1
        self.unheard = 0
        try:
            found = self.poll()
            if (
                found == self.unheard and self.awake and watch_time(&self.window, self.blocked > 0)
                and not self.has_work() and self.expects()
            ):
                found += self.spin()
            self.work(found)
            if self.has_idle:
                self.put_idle_to_sleep()
            quiet = not self.has_work() and self.completion_next == self.completion_count
        finally:
            self.in_pass = False
            if not self.closed:
                try:
                    self.rest(quiet)
                except BaseException:
                    self.wake()     # what it had taken and not handed out raises no event
                    raise
        return 0

    cdef int rest(self, bint quiet) except -1:
        """Pass again, or arm and sleep."""
        cdef uint64_t messages = self.messages
        cdef bint came = self.learned != messages and self.window.limit_ns > 0
        cdef int looks = 0
        if came:
            self.learned = messages
            watch_learn(&self.window, now_ns())
        if not quiet:
            return self.wake()
        if not self.expects():
            return 0
        # Tasks that a message has woken run before the next pass, which sees how long they worked.
        if came or (self.window.limit_ns and watch_on(&self.window, now_ns(), self.blocked > 0)):
            return self.wake()
        if self.scheduled:
            return 0
        if self.awake and not self.lost:
            if self.in_flight:
                self.poll()     # what the device has executed in the meantime need not be waited for
                if messages != self.messages or self.has_work():
                    return self.wake()
            # What was there before an arming raises no event, so look again; mostly it is what we have sent ourselves.
            while self.arm(0) and self.poll():
                looks += 1
                if looks == LOOKS_MOST or messages != self.messages or self.has_work():
                    return self.wake()
            if self.scheduled or self.has_work():
                return self.wake()
            self.expected = max(1, len(self.awake))
            self.put_to_sleep(0)
        self.resting()
        self.sleeps += 1
        watch_sleeps(&self.window)
        if tracing != NULL:
            trace(TRACE_ASLEEP, 0, True, <uintptr_t><void *>self)
        return 0

    cdef int spin(self) except -1:
        """Look for a couple of microseconds; returns how many completions came."""
        cdef uint64_t until = now_ns() + SPIN_NS
        cdef int i, found, looks = 0
        while (found := self.poll()) == 0:
            looks += 1
            for i in range(1 if looks < SPIN_KEEN else SPIN_PAUSES):
                cpu_relax()
            if looks > SPIN_KEEN and now_ns() > until:
                break
        return found

    cdef int poll(self) except -1:
        """Take completions, at most a batch from each queue that is awake, and hand them out; returns how many."""
        cdef CQ cq
        cdef int total = 0
        # What an exception kept the last pass from handing out comes first.
        if self.completion_next < self.completion_count:
            total += self.completion_count - self.completion_next
            self.dispatch()
        if self.keeping:
            total += self.take_kept()
        for cq in self.awake:
            if self.keeping:
                total += self.take_kept()
            total += self.take(cq)
            if not cq.awake:
                break   # it was given up; the other queues at the next look
        return total

    @cython.final
    cdef int take(self, CQ cq) except -1:
        """Take a batch of completions, and hand them out; returns how many. One that is broken counts as found."""
        cdef int n
        if cq.ptr is NULL:
            return 0
        self.polls += 1
        n = verbs.rn_poll_cq(cq.ptr, BATCH, self.completions)
        if n > 0:
            self.hits += 1
            cq.last_hit = self.hits
            self.completion_next = 0
            self.completion_count = n
            self.dispatch()
        elif n == 0:
            if cq.armed == ARMED:
                cq.armed = ARMED_AND_EMPTY
            if self.hits - cq.last_hit >= MISSED:
                self.has_idle = True
        else:
            self.broken(cq, cq.failure(n, "ibv_poll_cq"))
            return 1
        return n

    # -- going to sleep ------------------------------------------------------------------------------------

    cdef int arm(self, uint64_t missed) except -1:
        """Those that are awake and have missed so many hits; returns how many have yet to be found empty since.

        One that is armed for what is to wake us, as no event of it has been taken, needs no other arming: either that
        one stands, or its event waits at the channel.
        """
        cdef CQ cq
        cdef bint for_all
        cdef int rc, count = 0
        for cq in self.awake.copy():
            if self.hits - cq.last_hit < missed or cq.ptr is NULL:
                continue
            for_all = self.in_flight > 0 or self.unsolicited > 0 or not cq.solicits
            if cq.armed == NOT_ARMED or (for_all and not cq.armed_for_all):
                rc = verbs.rn_req_notify_cq(cq.ptr, not for_all)
                if rc < 0:
                    self.broken(cq, OSError(-rc, f"ibv_req_notify_cq: {strerror(-rc).decode()}"))
                cq.armed = ARMED
                cq.armed_for_all = for_all
            elif cq.armed == ARMED_AND_EMPTY:
                continue
            count += 1
        return count

    cdef int put_to_sleep(self, uint64_t missed) except -1:
        """Those that are armed, were found empty after that, and have missed so many hits."""
        cdef CQ cq
        cdef list awake = []
        for cq in self.awake:
            if cq.armed == ARMED_AND_EMPTY and self.hits - cq.last_hit >= missed:
                cq.awake = False
            else:
                awake.append(cq)
        self.awake = awake
        return 0

    cdef int put_idle_to_sleep(self) except -1:
        """The ones that are empty while others are not: no pass is to look at them."""
        self.has_idle = False
        if not self.lost:
            self.arm(MISSED)
            self.poll()     # one that has something after all stays
            self.put_to_sleep(MISSED)
        return 0

    # -- the end -------------------------------------------------------------------------------------------

    cdef int turn_deaf(self) except -1:
        """Take the channel's descriptor out of the loop; but not that of a parent process, whose loop it is too."""
        notifier, self.notifier = self.notifier, None
        if notifier is not None and self.pid == verbs.rn_pid:
            try:
                notifier.remove_reader(self.channel.fd)
            except RuntimeError:
                pass    # the loop is closed
        return 0

    cdef int end(self) except -1:
        """Watch nothing any more. The queues and the channel are the user's to close."""
        self.closed = True
        self.turn_deaf()
        # A cycle through the loop, which no collector breaks: neither side can be cleared.
        self.call_soon = self.pass_method = self.context = None
        return 0
