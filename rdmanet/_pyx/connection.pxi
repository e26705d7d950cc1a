# One connection of the byte stream: its half of the data engine, and what its owner may ask of it. The work is done by
# functions that take a connection, or the half of it that they need: the sending half (sender.pxi) or that which
# receives (receiver.pxi). Those of a whole one:
#
#     opening      memory, a queue pair, what both sides have agreed on
#     ending       everything is given back
#
# The engine calls `stream_completed`, `deliver_received` and `settle`, in its passes. The program calls `write` at any
# time, and whatever is called back may do anything; so each function leaves the connection in order before it calls
# back, and looks again afterwards. A connection's owner is a Reports (connection.py has what it is told): the
# connection decides nothing about its own life. It has memory from `attach` to `release`, a queue pair from `start`,
# and no owner after `release`.

STREAM_COUNTERS = (
    "bytes_sent", "bytes_received", "bytes_borrowed", "bytes_placed", "bytes_placed_here", "wants_open",
    "frames_sent", "frames_received", "control_frames_sent", "credits", "peer_slots", "sends_in_flight",
    "slots_held", "slots_leased", "slots_borrowed", "bytes_registered", "frame_bytes", "waits_for_credits",
    "us_without_credits", "us_open", "us_since_sent", "us_since_received",
)   # of Connection.stats(), in the order of counts()


@cython.no_gc_clear
cdef class Connection(Receiver):
    """The engine's half of a transport: owns `write` and delivery.

    It decides nothing about its own life: what happens it tells its owner, a Reports (see connection.py).

    :ivar engine: that it is one of
    :ivar qp: its queue pair, until that is destroyed
    :ivar broken: it has failed, and nothing more is posted; the owner is told when what has come before is seen
    """

    def __cinit__(self, owner, bint reference_writes=True, size_t spill_bytes=0):
        self.owner = owner
        self.reference_writes = reference_writes
        self.spill_bytes = spill_bytes
        set_write_limits(self, None, None)

    # -- beginning: opening.pxi --------------------------------------------------------------------------

    def attach(self, _Engine engine not None, object context, uint32_t slot_bytes, uint32_t data_slots,
               shared_slots=None, first_bytes=None):
        """Take memory and a place in `engine`; `start` comes when the queue pair exists.

        `shared_slots`: receive from a shared ring that lends so many; the queue pair is to be made on its srq and cq.
        `first_bytes`: what slots of a ring of its own hold until they grow; by default they do not.
        """
        attach_connection(self, engine, context, slot_bytes, data_slots, shared_slots, first_bytes)

    @property
    def first_slot_bytes(self):
        """What our receives hold as long as nothing else has been said."""
        return self.own.sizes.size if self.own is not None else self.slot_bytes

    def create_qp(self, CMID id not None, CQ cq not None):
        """Create its queue pair for an identifier of the connection manager, on `cq`; `start` comes next."""
        has_engine(self)
        return create_queue_pair(self, id, cq)

    def start(self, QP qp not None):
        """Post the whole receive ring; call before connect or accept."""
        has_engine(self)
        start_receiving(self, qp)

    def agree(self, Ledger ledger, uint32_t frame_bytes, uint32_t depth, bint solicits=False):
        """Both sides' geometry is known; the peer's frames may come from now on.

        `frame_bytes`, `depth`: what the peer's receives hold at first, and how many it can have posted. `solicits`: it
        marks its SENDs as solicited.
        """
        agree_on(self, ledger, frame_bytes, depth, solicits)

    @property
    def promised(self):
        """Data slots of a shared ring that it was promised."""
        if self.ledger is None:
            return self.shared.own
        return (self.ledger.grantable - self.ledger.received) & 0xFFFFFFFF

    @property
    def grows(self):
        """Whether both sides know slots that grow."""
        return self.ledger is not None and self.ledger.growth

    @property
    def places(self):
        """Whether both sides know direct placement."""
        return self.ledger is not None and self.ledger.placement

    @property
    def has_heard(self):
        """On the accepting side: whether the peer's first frame has come."""
        return self.may_send

    @property
    def has_said(self):
        """Whether a frame of ours is posted."""
        return self.frames_sent != 0 or self.controls_posted != 0

    def open(self, object protocol, bint buffered, bint may_send):
        """Established: delivery and sending may begin."""
        open_connection(self, protocol, buffered, may_send)

    def hear_early(self):
        """connection_made() has been called: now for the control frames that came before it."""
        hear_early_frames(self)

    def greet(self):
        """Deliver from now on: what connection_made() has scheduled by call_soon() has run, as with asyncio's TCP."""
        self.greeted = True
        if self.attached and (self.inbox.count or self.tell_drained):
            self.engine.deliver_later(self)
            if self.engine.by_hand:
                self.engine.wake()
            else:
                self.engine.run_pass()      # now: in another turn, the program may close what it has not heard of

    def bind(self, object protocol, bint buffered):
        """Look the protocol's callbacks up once, not once a message."""
        choose_sink(self, protocol, buffered)

    # -- writing: writing.pxi, sending.pxi ---------------------------------------------------------------

    def write(self, data):
        """Send `data`, a bytes-like object; never blocks (asyncio.WriteTransport.write).

        Exact `bytes` of 16 KiB and more, and memoryviews of 256 KiB and more, may be read by the device where they lie,
        after this returns. If it is memory that can change, pause_writing() is called, and resume_writing() when it
        has been read. Otherwise, and in all other cases, it is consumed or copied before this returns.
        """
        if take_data(self, data):
            send_taken(self)
            pause_if_full(self)

    def writelines(self, list_of_data):
        """Send all buffers of an iterable, in one step: nothing is sent if one of them is not bytes-like.

        pause_writing() is called after the last, so nothing that it does can cut the others, or come between them.
        """
        write_lines(self, list_of_data)

    def get_write_buffer_size(self):
        """Bytes accepted by write() and not yet handed to the device, or read by it from memory that can change."""
        return self.fill + self.backlog.size + self.backlog.lent

    def get_write_buffer_limits(self):
        """(low, high), in bytes."""
        return (self.low_water_bytes, self.high_water_bytes)

    def set_write_buffer_limits(self, high=None, low=None):
        """When pause_writing and resume_writing are called, in bytes of get_write_buffer_size().

        As asyncio.WriteTransport.set_write_buffer_limits: high defaults to 64 KiB (or four times low),
        low to a quarter of high. Raises ValueError unless high >= low >= 0.
        """
        set_write_limits(self, high, low)

    @property
    def borrows_memory(self):
        """Whether something is written, and not read yet, that lies in memory that can change."""
        return self.backlog.loans > 0

    @property
    def undelivered(self):
        """Whether bytes of ours may not have reached the peer."""
        return is_undelivered(self)

    @property
    def progress(self):
        """Counts up as our bytes arrive: close_timeout is measured from its last change."""
        return self.done

    def stop_writing(self):
        """No `write` from now on; what is buffered still goes out."""
        allow_writes(self, False)

    def allow_writing(self):
        """Take back `stop_writing`."""
        allow_writes(self, True)

    def discard_writes(self):
        """Forget what is written and not posted. A protocol that it paused resumes, once its memory is its own."""
        forget_writes(self)
        resume_if_discarded(self)

    def when_flushed(self):
        """Call `_flushed` once nothing is left to post."""
        has_engine(self)
        tell_when_flushed(self)

    def when_delivered(self):
        """Call `_delivered` once the peer's device has everything that was written."""
        tell_when_delivered(self)

    def stop_posting(self):
        """Post nothing more, but an Abort that is held back."""
        if self.held_abort is None:
            post_no_more(self)
        set_blocked(self, False)

    # -- reading: receiving.pxi, delivering.pxi, granting.pxi --------------------------------------------

    @property
    def reading(self):
        """Whether what arrives is delivered. What has arrived keeps its slots, so the peer runs out of credits."""
        return not self.reading_paused

    @reading.setter
    def reading(self, bint value):
        pause_reading(self, not value)

    @property
    def unread(self):
        """Whether bytes have come that the protocol was not given yet."""
        return self.inbox.count > 0

    def watch_unread(self):
        """Call `_unread_changed` from now on."""
        watch_unread(self)

    def when_drained(self):
        """Call `_drained` once all that arrived has been delivered (reading must be on)."""
        tell_when_drained(self)

    def stop_reading(self):
        """Deliver nothing any more: drop what has come and what will, and keep granting."""
        if self.opened and self.attached and not self.discarding:
            let_memory_go(self)
            self.sink.ends(self)
        self.discarding = True
        if self.inbox.count:
            self.engine.deliver_later(self)
            self.engine.wake()

    # -- control frames, and what they say ---------------------------------------------------------------

    def send_control(self, uint32_t kind, bytes body=b""):
        """Post a control frame if its allowance permits; returns whether it did."""
        return post_control_if_allowed(self, kind, body)

    def say_abort(self, bytes body):
        """The same for an Abort. If we may not send before the peer's first frame, it goes when that comes."""
        return say_abort(self, body)

    def credit_body_due(self):
        """Ask for `_credit_body` as soon as a Credit may go."""
        credit_is_due(self)

    def hear_slots(self, number, slot_bytes):
        """What the peer's Credit says of its slots. Raises ProtocolError."""
        slot_size_came(self, number, slot_bytes)

    def placement_news(self):
        """What a Credit that goes now has to say of it: (wants, unwanted, answered) or None; whether there is more."""
        said, unwanted, answered = (), 0, 0
        if self.landings is not None:
            said, unwanted = self.landings.say(self), self.landings.wants.unwanted()
        if self.peer_wants is not None:
            answered = self.peer_wants.answered()
        news = (said, unwanted, answered) if said or unwanted or answered else None
        return news, self.landings is not None and self.landings.has_news(self)

    def hear_placement(self, wants, unwanted, answered):
        """What the peer's Credit says of it. Raises ProtocolError."""
        cdef Landings landings = landings_of(self) if answered else self.landings
        cdef PeerWants peer_wants = peer_wants_of(self) if wants or unwanted else self.peer_wants
        if landings is not None:
            landings.wants.hear(answered)
            landings.sweep(self)
        if peer_wants is not None:
            peer_wants.hear(wants, unwanted)
        if (peer_wants is not None and peer_wants.answer_due) or (landings is not None and landings.has_news(self)):
            credit_is_due(self)
        self.engine.flush_later(self)

    @property
    def placing_unanswered(self):
        """What the peer has not answered yet, asked to let go of memory: a serial number, or 0."""
        return self.landings.wants.unanswered if self.landings is not None else 0

    # -- beside frames: beside.pxi -----------------------------------------------------------------------

    def post_operation(self, Operation operation not None, uint64_t total=0):
        """Post a one-sided work request; it lives until it completes, then `_operation_done`.

        Returns False when OPERATIONS are in flight already.

        :param total: it is a part of so many bytes
        """
        cdef SendWR request = operation.requests[0]
        cdef verbs.ibv_send_wr wr = request.c
        wr.send_flags |= flags_of_part(self.engine, total)
        return post_beside(self, operation, &wr)

    def post_bind(self, object operation, MW mw not None, MR mr not None, uint32_t rkey, int access, uint64_t address,
                  uint64_t length):
        """The same for BIND_MW: a window of type 2 to a part of a region, with this key."""
        return post_bind_part(self, operation, mw, mr, rkey, address, length, access)

    def post_invalidate(self, object operation, uint32_t rkey):
        """The same for LOCAL_INV: such a key is good no more."""
        return post_invalidation(self, operation, rkey)

    # -- keep-alive: keepalive.pxi -----------------------------------------------------------------------

    def keep_alive(self, bint on, double idle, double interval, uint32_t count):
        """Whether to look, after `idle` seconds without a frame, if the peer's host is there: keepalive.pxi.

        If it has not answered for `interval` * `count` seconds, the connection is lost.
        """
        self.keep_idle_ns, self.keep_interval_ns = <uint64_t>(idle * 1e9), <uint64_t>(interval * 1e9)
        self.keep_count = count
        self.keeps_alive = on
        if on and self.attached and self.opened:
            (<StreamEngine>self.engine).alive.added(self)

    @property
    def kept_alive(self):
        """What `keep_alive` was told: whether it is on, idle and interval in seconds, count."""
        return self.keeps_alive, self.keep_idle_ns / 1e9, self.keep_interval_ns / 1e9, self.keep_count

    @property
    def probed(self):
        """Whether it is probed: the embedded device knows without of peers that it reaches through memory."""
        return is_probed((<StreamEngine>self.engine).alive, self)

    # -- ending: ending.pxi ------------------------------------------------------------------------------

    @property
    def lands(self):
        """Whether the peer may still write to memory that a read has named."""
        return self.landings is not None and bool(self.landings.open)

    def end_keys(self):
        """The queue pair is about to be destroyed: end the keys of memory that the peer may write to."""
        if self.landings is not None:
            self.landings.end_keys(self)

    def part_from_shared(self):
        """The queue pair is about to be destroyed: a shared ring takes back first what it has in its hands.

        What was received may be delivered after that, so the connection is there for long: nobody posts to the queue
        pair any more, or asks the device about it.
        """
        try:
            part_from_shared_ring(self)
        finally:
            post_no_more(self)
            if self.engine is not None:
                self.engine.serve_no_more(self)

    def lose_operations(self):
        """After the queue pair is destroyed: one-sided operations that it had begun will not complete."""
        lose_operations(self)

    def lose_loans(self):
        """After the queue pair is destroyed: memory that was lent is the program's again."""
        cdef list loans = self.log.take_loans()
        self.backlog.forget_loans()
        if self.backlog.size == 0 and self.fill == 0:
            resume_if_discarded(self)
        loans.clear()   # last: their memory's finalizers may do anything

    def lose_landings(self):
        """After the queue pair is destroyed: nobody writes to memory of ours any more."""
        if self.landings is not None:
            self.landings.lose()

    def release(self):
        """After the queue pair is destroyed: give the memory and the place in the engine back."""
        try:
            release_connection(self)
        finally:
            self.owner = None

    # -- counts ------------------------------------------------------------------------------------------

    def stats(self):
        return dict(zip(STREAM_COUNTERS, self.counts()))

    def counts(self):
        """The numbers of stats() alone: thousands of connections have the same names."""
        cdef uint64_t now = now_ns(), quiet = now - max(self.sent_ns, self.opened_ns)
        if self.posted_at:
            quiet = min(quiet, cheap_ns(cheap_clock() - self.posted_at))
        return [
            self.bytes_sent,
            self.bytes_received,
            self.bytes_borrowed,
            self.bytes_placed,
            self.landings.bytes_placed if self.landings is not None else 0,
            len(self.landings.open) if self.landings is not None else 0,
            self.frames_sent,
            self.frames_received,
            self.controls_posted,
            self.ledger.credits() if self.ledger is not None else 0,
            self.ledger.peer_slots if self.ledger is not None else 0,
            self.frames_sent - self.done,
            self.inbox.held + self.inbox.freed_count,
            self.inbox.leased,
            self.share.borrowed,
            registered_bytes(self),
            self.frame_bytes,
            self.waits_for_credits,
            ns_without_credits(self) // 1000,
            (now - self.opened_ns) // 1000 if self.opened else 0,
            quiet // 1000 if self.opened else 0,
            (now - min(now, max(self.heard_ns, self.opened_ns))) // 1000 if self.opened else 0,
        ]
