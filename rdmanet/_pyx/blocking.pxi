# A blocking stream's calls that move bytes: without an event loop, for as long as nothing but bytes moves.
#
# The stream has a loop of its own (streams/blocking.py), and so an engine of its own. A call that has to wait runs the
# engine's passes itself, and sleeps in ppoll(2) where the loop would sleep in epoll_wait(2). The engine decides which,
# as ever (watcher.pxi). Everything else is the loop's: the connection's end, events of the connection manager and of
# the device, timers. If any of these is pending, the call runs the loop until its own wait is over.
#
# Signals. Python runs a signal handler between any two bytecodes, so a handler that raises (KeyboardInterrupt, say)
# could leave the owner of a connection half-way through an update. So this thread blocks signals while it runs passes.
# It lets handlers run where nothing is half done: before and after it sleeps, now and then while it watches, and before
# it returns bytes. (If the process has other threads, the kernel gives the signal to one of them, and the handler may
# still run during a pass.) A signal that comes just before the sleep must end it: so it is written to the loop's bell,
# as asyncio does it.
#
# Threads. One may read while another writes. If both wait, the first leads: it runs the passes, or the loop, and wakes
# the other one as soon as that one's own call can continue. The other one follows: it sleeps on a lock; when the leader
# returns, it takes over. It leaves all passes to the leader, and rings the bell if one is due.

cdef extern from "signal.h" nogil:
    ctypedef struct sigset_t:
        pass
    int sigfillset(sigset_t *)
    int sigdelset(sigset_t *, int)
    int pthread_sigmask(int, const sigset_t *, sigset_t *)
    enum: SIG_SETMASK, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events, revents
    int ppoll(pollfd *, unsigned long, const timespec *, const sigset_t *)
    enum: POLLIN

cdef extern from "sys/socket.h" nogil:
    ssize_t recv(int, void *, size_t, int)
    ssize_t send(int, const void *, size_t, int)
    enum: MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum wait_for:
    FOR_BYTES       # there is something to read, or its end
    FOR_PLACE       # there is a free frame to copy into
    FOR_ROOM        # all that was written is posted
    FOR_NEWS        # what has happened was looked at once

cdef enum:
    # While a call waits to write, it takes in so many bytes beside the ring: two peers may both write first.
    ASIDE_BYTES = 1 << 20
    PASSES_BETWEEN_LOOKS = 32       # for signals and at the clock: some 100 us
    NEWS_US = 100                   # a write looks so often, roughly, whether the connection is over


cdef str READING = "reading", WRITING = "writing"   # calls


cdef object too_late(wait_for what, timeout):
    """The error of a call that has waited for longer than its time-out."""
    return TimeoutError(f"{not_come(what)}: not within {timeout} s")


cdef str not_come(wait_for what):
    return "no byte came" if what == FOR_BYTES else "the peer took no more bytes"


cdef inline uint64_t deadline_of(timeout) except? 0:
    """When a call that begins now has had so many seconds; 0: never."""
    if timeout is None:
        return 0
    return now_ns() + <uint64_t>(min(<double>timeout, <double>LONGEST_S) * 1e9)


cdef class BlockingEnd:
    """The compiled base of a blocking stream's protocol: unread bytes, the connection's end, and calls that move bytes.

    `private` is the stream's own loop, a PrivateLoop (streams/private_loop.py).

    :ivar eof: the peer has ended its half; bytes from before that may be unread
    :ivar lost: the connection is over: `error` says why, or is None
    """

    cdef readonly IntoReader _rdma_sink
    cdef object private
    cdef object running_loop        # asyncio's function
    cdef object set_wakeup_fd       # signal's
    cdef list calls                 # the private loop's: who is in a call
    cdef Connection connection
    cdef int fd                     # readable if anything has happened
    cdef int bell, bell_rope        # the loop's two sockets; what is written to the second makes the first readable
    cdef pid_t pid
    cdef unsigned long main_thread
    cdef unsigned long leader       # the thread that leads; 0: none
    cdef object follower            # the lock on which the other sleeps, or None
    cdef wait_for follower_waits
    cdef uint64_t heard_at          # cheap_clock() after the last pass; 0: there was none
    cdef sigset_t all_signals       # but those that a fault raises
    cdef public bint eof, lost
    cdef public object error

    def __cinit__(self, private, *args):
        from asyncio import _get_running_loop   # programs that use only the verbs do not import asyncio
        from signal import set_wakeup_fd
        self.running_loop = _get_running_loop
        self.set_wakeup_fd = set_wakeup_fd
        self.private = private
        self.calls = private.calls
        self.connection = Connection(None)      # until there is one
        self._rdma_sink = IntoReader(private.loop, ASIDE_BYTES // 2)
        self.pid = verbs.rn_pid
        self.main_thread = threading.main_thread().ident
        self.fd = -1
        self.bell, self.bell_rope = private.loop.bell
        sigfillset(&self.all_signals)
        for fault in (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV):
            sigdelset(&self.all_signals, fault)

    def connected(self, Connection connection not None, int fd):
        """The connection is made. Everything that happens to it makes `fd` readable."""
        self.connection = connection
        self.fd = fd
        (<StreamEngine>connection.engine).alive.run_by_hand(True)

    def changed(self):
        """Wake whoever waits on the loop: one half has ended, or the connection, or there is room."""
        self._rdma_sink.tell()

    def notify(self, waiter):
        """Have a future's result set by the next change, or by the next bytes."""
        self._rdma_sink.waiter = waiter

    def may_go_on(self, int what):
        """Whether a call need not wait (any more)."""
        self.tell_follower()
        return self.is_over(<wait_for>what)

    def run_by_loop(self):
        """From now on the loop runs the engine's passes, until the next call waits."""
        if self.connection.engine is not None:
            self.connection.engine.run_by_hand(False)

    # -- calls -------------------------------------------------------------------------------------------

    def recv(self, Py_ssize_t size, timeout):
        """Wait for at least one byte, and return at most `size`; b"" at the end."""
        cdef size_t there
        self.enter(READING, WRITING)
        try:
            there = min(self.wait_for_bytes(<size_t>size, timeout), <size_t>size)
            expect_large(there)
            chunk = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>there)
            self.take(PyBytes_AS_STRING(chunk), there)
            return chunk
        finally:
            self.calls.remove(READING)

    def readinto(self, buffer, timeout):
        """Like recv(), but into `buffer`; returns the number of bytes."""
        cdef Py_buffer view
        cdef size_t there
        try:
            PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        except BufferError as exc:
            raise TypeError(f"readinto() takes a writable buffer: {exc}") from None
        try:
            if view.len == 0:
                return 0
            self.enter(READING, WRITING)
            try:
                there = min(self.wait_for_bytes(<size_t>view.len, timeout), <size_t>view.len)
                self.take(<char *>view.buf, there)
                return there
            finally:
                self.calls.remove(READING)
        finally:
            PyBuffer_Release(&view)

    def write(self, data, timeout, bint whole):
        """Return the length of `data`, in bytes, once all of it has been posted.

        If time runs out and not `whole`, return how many bytes were posted, or raise TimeoutError if none was; later
        calls send none of the others. What is left when an exception ends the call otherwise goes out in later calls.
        """
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            self.enter(WRITING, READING)
            try:
                return self.post(data, <const char *>view.buf, <size_t>view.len, timeout, whole)
            finally:
                self.calls.remove(WRITING)
        finally:
            PyBuffer_Release(&view)

    cdef int enter(self, str call, str beside) except -1:
        """Begin a call, which may run beside another kind. No bytecode runs here: no thread and no signal comes in."""
        cdef Py_ssize_t calls = len(self.calls)
        if (
            calls > 1 or (calls == 1 and self.calls[0] is not beside)
            or (self.leader != 0 and self.leader == PyThread_get_thread_ident())    # this is a signal's handler
            or self.pid != verbs.rn_pid or self.running_loop() is not None
        ):
            raise self.private.refusal("this stream")
        self.calls.append(call)
        return 0

    cdef size_t wait_for_bytes(self, size_t enough, timeout) except? 0:
        """Wait for bytes, and return how many are unread (it counts up to `enough`); 0 at the end.

        Raises the error of a lost connection.
        """
        cdef size_t there = self._rdma_sink.available(enough)
        if there == 0 and not self.eof and not self.lost:
            self.wait(FOR_BYTES, timeout, deadline_of(timeout))
            there = self._rdma_sink.available(enough)
        if there == 0 and not self.eof and self.error is not None:
            raise self.error
        return there

    cdef int take(self, char *to, size_t size) except -1:
        """Take bytes that are there, and grant the freed slots to the peer. If a handler raises, none is lost."""
        cdef Connection connection = self.connection
        self._rdma_sink.take_into(to, size)
        try:
            if connection.attached and connection.dirty:
                try:
                    settle(connection)
                    connection.engine.wake()
                except Exception as exc:
                    fail_connection(connection, exc)
            PyErr_CheckSignals()
        except BaseException:
            self._rdma_sink.aside[:0] = to[:size]
            raise
        return 0

    cdef size_t post(self, object data, const char *bytes, size_t size, timeout, bint whole) except <size_t>-1:
        """Give bytes to the device, and return how many; see write()."""
        cdef Connection connection = self.connection
        cdef size_t taken = 0, back
        try:
            if not self.leader and cheap_clock() - self.heard_at > NEWS_US * cheap_microsecond():
                self.hear()
            self.check_writable()
            if PyBytes_CheckExact(data) and size >= BORROW_BYTES and connection.engine.implicit_lkey_valid:
                connection.backlog.append(data)     # the device reads them where they lie
                taken = size
            self.post_all(bytes, size, &taken, timeout)
        except BaseException as exc:
            if self.lost or not connection.writable:
                raise
            if isinstance(exc, TimeoutError) and not whole:
                back = take_back_unposted(connection, taken)
                if back == taken:
                    raise
                return taken - back
            if taken < size:
                connection.backlog.append(PyBytes_FromStringAndSize(bytes + taken, <Py_ssize_t>(size - taken)))
            raise
        return size

    cdef int post_all(self, const char *bytes, size_t size, size_t *taken, timeout) except -1:
        """Wait until all is posted. `taken` counts the bytes that are in frames, or in the backlog."""
        cdef Connection connection = self.connection
        cdef uint64_t deadline = deadline_of(timeout)
        cdef size_t more
        while True:
            if connection.backlog.size == 0:
                more = copy_in(connection, bytes + taken[0], size - taken[0], False)
                if more == GONE:
                    raise connection.failure
                taken[0] += more
            pump(connection, True)
            connection.engine.wake()    # the next pass sees what has completed: no event tells
            if taken[0] == size:
                break
            self.wait(FOR_PLACE, timeout, deadline)
            self.check_writable()
        if connection.fill or connection.backlog.size:
            self.wait(FOR_ROOM, timeout, deadline)
            self.check_writable()
        return 0

    cdef int check_writable(self) except -1:
        if self.lost or not self.connection.writable:
            raise (<object>self).why_unwritable()
        return 0

    # -- waiting -----------------------------------------------------------------------------------------

    cdef bint is_over(self, wait_for what) noexcept:
        cdef Connection connection = self.connection
        if self.lost or what == FOR_NEWS:
            return True
        if what == FOR_BYTES:
            return self.eof or self._rdma_sink.available(1) > 0
        if not connection.writable:
            return True
        if what == FOR_ROOM:
            return connection.fill == 0 and connection.backlog.size == 0
        return connection.backlog.size == 0 and has_place(connection)

    cdef int wait(self, wait_for what, timeout, uint64_t deadline) except -1:
        """Wait until `what` holds. Raises TimeoutError, and what a signal's handler raises."""
        while not self.is_over(what):
            if self.leader:
                self.follow(what, timeout, deadline)
                continue
            self.leader = PyThread_get_thread_ident()
            try:
                self.lead(what, timeout, deadline)
            finally:
                self.leader = 0
                self.release_follower()
        return 0

    cdef int hear(self) except -1:
        """Look once at what has happened: a program that only writes would learn too late that its peer has gone."""
        self.leader = PyThread_get_thread_ident()
        try:
            self.lead(FOR_NEWS, None, 0)
        finally:
            self.heard_at = cheap_clock()
            self.leader = 0
            self.release_follower()
        return 0

    cdef int follow(self, wait_for what, timeout, uint64_t deadline) except -1:
        """Sleep until the leader says that `what` holds, or leads no more."""
        cdef StreamEngine engine = self.connection.engine
        cdef uint64_t now = now_ns() if deadline else 0
        if deadline and now >= deadline:
            raise too_late(what, timeout)
        if what != FOR_BYTES:
            self.tell_when_posted()
        lock = threading.Lock()
        lock.acquire()
        if self.leader == 0 or self.is_over(what):
            return 0    # another thread may have run until here, but does not until the lock is in its place
        self.follower_waits = what
        self.follower = lock
        if engine is not None and (engine.scheduled or engine.has_work()):
            send(self.bell_rope, b"\0", 1, MSG_DONTWAIT | MSG_NOSIGNAL)
        try:
            lock.acquire(True, (deadline - now) / 1e9 if deadline else -1)
        finally:
            if self.follower is lock:
                self.follower = None
        return 0

    cdef int tell_follower(self) except -1:
        if self.follower is not None and self.is_over(self.follower_waits):
            self.release_follower()
        return 0

    cdef int release_follower(self) except -1:
        follower, self.follower = self.follower, None
        if follower is not None:
            follower.release()
        return 0

    cdef int lead(self, wait_for what, timeout, uint64_t deadline) except -1:
        cdef sigset_t let_in
        cdef bint by_hand
        pthread_sigmask(SIG_SETMASK, &self.all_signals, &let_in)
        try:
            if self.is_enough():
                self.connection.engine.run_by_hand(True)
            if not self.private.loop.idle:
                self.private.turn()
            by_hand = self.private.loop.idle and self.is_enough() and self.pass_until(what, timeout, deadline, &let_in)
        finally:
            pthread_sigmask(SIG_SETMASK, &let_in, NULL)
        PyErr_CheckSignals()
        if not by_hand and what == FOR_NEWS:
            self.private.turn()
        elif not by_hand and not self.is_over(what):
            self.run_loop_until(what, timeout, deadline)
            if self.is_enough():
                self.connection.engine.run_by_hand(True)
        return 0

    cdef int run_loop_until(self, wait_for what, timeout, uint64_t deadline) except -1:
        cdef uint64_t now = now_ns() if deadline else 0
        if deadline and now >= deadline:
            raise too_late(what, timeout)
        if what != FOR_BYTES:
            self.tell_when_posted()
        left = (deadline - now) / 1e9 if deadline else None
        self.private.run_until(self, <int>what, left, f"{not_come(what)}: not within {timeout} s")
        return 0

    cdef int tell_when_posted(self) except -1:
        """Have resume_writing() called when there is place, and when all is posted: a call may wait on the loop."""
        return tell_of_place(self.connection)

    cdef bint is_enough(self) noexcept:
        """Whether running passes is enough: nothing needs the loop."""
        cdef Connection connection = self.connection
        return connection.attached and not connection.engine.closed and not connection.engine.failed

    cdef bint pass_until(self, wait_for what, timeout, uint64_t deadline, const sigset_t *let_in) except -1:
        """Run passes. Returns whether `what` holds; if it does not, the loop is needed."""
        cdef StreamEngine engine = self.connection.engine
        cdef uint32_t passes = 0
        engine.rouse_all()      # it may watch, and then nobody looks whether a queue that sleeps has an event
        while self.is_enough():
            engine.scheduled = False
            engine.run_pass()
            self.heard_at = cheap_clock()
            self.tell_follower()
            if self.is_over(what):
                return what != FOR_NEWS or self.look(engine, what, timeout, deadline, let_in)
            passes += 1
            if engine.scheduled and passes % PASSES_BETWEEN_LOOKS:
                with nogil:     # other threads may have the GIL
                    cpu_relax()
                continue
            if not self.private.loop.idle or not self.look(engine, what, timeout, deadline, let_in):
                return False
        return False

    cdef bint look(self, StreamEngine engine, wait_for what, timeout, uint64_t deadline,
                   const sigset_t *let_in) except -1:
        """See what has happened; sleep until something has, if no pass is due. False: the loop is needed."""
        cdef bint is_main = self.main_thread == PyThread_get_thread_ident(), is_due
        cdef int ready
        if engine.alive.next_ns and now_ns() >= engine.alive.next_ns:
            engine.alive.look()
            if not self.is_enough():
                return False
        if engine.scheduled:
            self.let_handlers_run(let_in)
            ready = self.wait_for_event(engine, what, timeout, deadline, let_in, True)
        else:
            before = self.set_wakeup_fd(self.bell_rope, warn_on_full_buffer=False) if is_main else None
            try:
                self.let_handlers_run(let_in)
                # A handler may have run Python, and so another thread.
                is_due = what == FOR_NEWS or engine.scheduled or engine.has_work()
                ready = self.wait_for_event(engine, what, timeout, deadline, let_in, is_due)
                self.let_handlers_run(let_in)
            finally:
                if is_main:
                    self.set_wakeup_fd(before)
        return ready == 0 or engine.channel_ready()

    cdef int wait_for_event(self, StreamEngine engine, wait_for what, timeout, uint64_t deadline,
                            const sigset_t *let_in, bint is_poll) except -1:
        """1: there is an event. 0: there is none, but perhaps a signal, or another thread has rung the bell."""
        cdef pollfd fds[2]
        cdef timespec t
        cdef uint64_t until = deadline, look = engine.alive.next_ns, now, ns = 0
        cdef char bytes[64]
        cdef int rc
        if look and (until == 0 or look < until):
            until = look
        now = now_ns() if until else 0
        if deadline and now >= deadline:
            raise too_late(what, timeout)
        if until > now and not is_poll:
            ns = until - now
        t.tv_sec = <time_t>(ns // 1000000000)
        t.tv_nsec = <long>(ns % 1000000000)
        fds[0].fd, fds[1].fd = self.fd, self.bell
        fds[0].events = fds[1].events = POLLIN
        fds[0].revents = fds[1].revents = 0
        with nogil:
            rc = ppoll(fds, 2, &t if until or is_poll else NULL, let_in)
            if rc < 0:
                rc = -errno
        if rc < 0 and rc != -EINTR:
            raise OSError(-rc, f"ppoll: {strerror(-rc).decode()}")
        if rc > 0 and fds[1].revents:
            recv(self.bell, bytes, sizeof(bytes), MSG_DONTWAIT)
        return rc > 0 and fds[0].revents != 0

    cdef int let_handlers_run(self, const sigset_t *let_in) except -1:
        """Run the handlers of signals that have come, with the signals let in."""
        pthread_sigmask(SIG_SETMASK, let_in, NULL)
        try:
            PyErr_CheckSignals()
        finally:
            pthread_sigmask(SIG_SETMASK, &self.all_signals, NULL)
        return 0
