# One connection of the byte stream: its half of the data engine.
#
# Receiving. The ring is data_slots + CONTROL_RESERVE slots, all posted before the connection is made (ownring.pxi); or
# they are those of a ring that many share (sharedring.pxi). A completed slot is checked (header, ledger) by `receive`;
# data slots wait in a FIFO until `deliver` hands their bytes to the protocol, control slots are reposted on the spot.
# Consumed data slots are reposted half a ring at a time, in one chained call, and only then granted. If the program
# does not read, and the peer has used up its credits, what has come is put by, into memory of its own, up to
# `put_by_bytes`.
#
# What a slot has held before is another message, or another client's: it must never be taken for a frame. A peer can
# complete a receive without filling it, by RDMA WRITE WITH IMM (which needs no key if it has no bytes), or with
# less than a header. So a completion counts only if it is a SEND's, and as far as its byte_len; and no slot
# is posted with a header in it.
#
# Sending. `write` fills the open frame (a send slot being filled) or, for large exact `bytes` and memoryviews, lets
# the device read them where they lie; what finds no credit or no slot waits in the backlog (backlog.pxi has when the
# program may change its memory again). `pump` turns both into posted frames. Two budgets bound it: the peer's credits
# (the ledger) and our own send queue (the log). Writes are held back only while they come in a burst: one that comes
# a microsecond or more after the one before goes out at once, with what was held, and so does one that comes HOLD_US
# after the last post. In a long burst only one write in LOOK_EVERY asks the clock, so its end may be noticed that
# much later. The rest goes with the engine's next pass. A pass flushes after each callback, so what a callback writes
# coalesces.
#
# Placing. Where the peer has named memory for the bytes that are sent next (placement.py), much of the backlog goes
# there by one RDMA WRITE, with a Placed frame behind it in the same call. What the peer places here: landing.pxi.

cdef extern from "Python.h":
    int PyContext_Enter(object) except -1
    int PyContext_Exit(object) except -1

cdef enum:
    HEADER = FRAME_HEADER_BYTES
    CONTROL_RESERVE = 8         # receive slots, send buffers and send-queue entries for control frames
    CONTROL_BYTES = 4096        # a control frame with its header
    OPERATIONS = 8              # one-sided work requests in flight
    LOOK_FIRST = 4              # writes of a burst that look at the clock,
    LOOK_EVERY = 16             # and then one in so many
    HOLD_US = 50                # microseconds, roughly; a post costs a fifth of one
    SIGNAL_EVERY = 4            # at most so many data frames without a signaled completion
    CHAIN = 16                  # work requests handed to the device in one call
    STRIDE_SKEW = 192           # slots start at different cache sets, not all on a page boundary
    BORROW_BYTES = 16384        # below this a copy is cheaper than a second scatter/gather entry
    LEND_BYTES = 262144         # below this a copy is cheaper than to wait until memory that may change is read
    # A completion with one of these is not a SEND's, or did more than that. (GRH says nothing: some adapters set it.)
    NO_FRAME_FLAGS = verbs.IBV_WC_WITH_IMM | verbs.IBV_WC_WITH_INV
    GATHER_BYTES = 65536        # larger fresh `bytes` cost page faults (malloc's mmap threshold)

cdef size_t GONE = <size_t>-1    # memory that was to be copied

STREAM_CONTROL_BODY_BYTES = CONTROL_BYTES - HEADER
STREAM_DATA_SLOTS_MAX = LOG - CONTROL_RESERVE - 2 * OPERATIONS


def stream_queue_depths(data_slots):
    """(send, receive) queue depths of a connection with a ring of so many slots."""
    return data_slots + CONTROL_RESERVE + OPERATIONS, data_slots + CONTROL_RESERVE


def stream_half_open_bytes(size_t slot_bytes, size_t data_slots, bint shared):
    """Memory that a connection has been given when it is accepted, at most: a peer may not know slots that grow."""
    if shared:
        return (min(<size_t>SHARED_OWN, data_slots) + SHARED_CONTROL) * stream_stride(slot_bytes)
    return (data_slots + CONTROL_RESERVE) * stream_stride(slot_bytes)


cdef inline void clear_header(char *slot) noexcept:
    memset(slot, 0, HEADER)


cdef size_t stream_stride(size_t slot_bytes) noexcept:
    return ((slot_bytes + HEADER + 63) & ~<size_t>63) + STRIDE_SKEW


cdef size_t stream_send_bytes(size_t slot_bytes, size_t data_slots) noexcept:
    """What a connection sends from, while it does: its send slots and its control buffers."""
    return (stream_stride(slot_bytes) * data_slots + CONTROL_BYTES * CONTROL_RESERVE + 4095) & ~<size_t>4095


cdef object not_bytes_like(data):
    return TypeError(f"data argument must be a bytes-like object, not {type(data).__name__!r}")


@cython.no_gc_clear
cdef class Connection:
    """The engine's half of a transport: owns `write` and delivery.

    It decides nothing about its own life: what happens it tells its owner, a Lifecycle (see connection.py).

    It has more than 500 lines, because sending and receiving share the ledger, the queue pair and the memory. What
    needs none of these is a class of its own: SendLog, Backlog, Inbox, Sink.

    :ivar engine: that it is one of
    :ivar qp: its queue pair, until that is destroyed
    :ivar shared: the shared receive queue where its receives come from, or None: it has a ring of its own
    """

    cdef readonly object owner          # until `release`: it refers to us, too
    cdef readonly StreamEngine engine
    cdef readonly QP qp
    cdef verbs.ibv_qp *qp_c
    cdef CQ queue                       # where its completions come
    cdef Ledger ledger
    cdef bint attached                  # has memory and a place in the engine
    cdef bint solicits                  # the peer marks its SENDs as solicited
    cdef Chunk chunk                    # what it sends from, while it does
    cdef bint warm                      # it keeps that although nothing is in flight: it is on the engine's list
    cdef OwnRing own                    # where its receives come from,
    cdef readonly SharedRing shared     # or the ring that it shares
    cdef uint32_t aim, borrowed         # of its data slots; see sharedring.pxi
    cdef bint parted                    # its queue pair is about to be destroyed
    cdef uint64_t wr_base               # index and generation, as every wr_id of ours begins
    cdef object context                 # contextvars.Context of all callbacks

    # receiving
    cdef uint32_t slot_bytes, data_slots
    cdef size_t stride
    cdef bint stuffed                   # on the engine's list of those whose peer has no credits left,
    cdef uint64_t stuffed_tick          # since that pass
    cdef size_t put_by_bytes            # unread bytes that it takes in at least, whatever its ring
    cdef Inbox inbox                    # what has come
    cdef uint32_t repost_at             # consumed slots that are posted again in one call
    cdef Sink sink                      # where received bytes go
    cdef bint may_deliver               # the protocol wants bytes and may have them
    cdef bint discarding                # closed: what still comes is dropped, its slots granted again
    cdef bint opened                    # established: control frames are heard
    cdef bint greeted                   # what connection_made() has scheduled has run: delivery may begin
    cdef list early                     # control frames that came before that
    cdef bint listed                    # already on the engine's list of connections to deliver
    cdef bint tell_drained
    cdef Landings landings              # where the peer may place bytes; None if both sides have not agreed on that
    cdef bint telling_unread            # somebody looks whether something is undelivered: tell of changes
    cdef bint unread_told

    # sending
    cdef uint32_t frame_bytes           # payload of the next frame: what both sides' slots can hold
    cdef PeerSlots peer_slots           # how much the peer's can hold; None if they share a queue, or do not grow
    cdef char *frames
    cdef char *controls
    cdef uint32_t posted, done          # data frames
    cdef uint32_t frames_used           # send slots used: an inline frame leaves its slot free, and warm
    cdef uint32_t controls_posted, controls_done
    cdef uint32_t operations            # one-sided work requests in flight
    cdef SendLog log
    cdef uint32_t unsignaled, signal_every
    cdef uint32_t fill                  # bytes in the open frame
    cdef Backlog backlog                # what was written and found no room in a frame
    cdef bint may_send                  # iWARP's rule: the accepting side waits for the first frame
    cdef bint lends                     # large memory that may change is sent from where it lies
    cdef bint amid_lines                # a writelines() is under way: no memory of the program's is let go
    cdef bint writable                  # neither write_eof nor close nor a failure so far
    cdef bint blocked                   # bytes wait for credits or slots
    cdef bint dirty                     # on the engine's list of connections to flush
    cdef bint tell_flushed
    cdef bint tell_place                # somebody waits for a free frame
    cdef bint body_due                  # news of regions, or of direct placement, wait for a Credit to ride in
    cdef PeerWants peer_wants           # where we may place bytes, or None
    cdef bytes ping_body
    cdef uint64_t tick                  # engine.tick of the last frame posted at once
    cdef uint64_t posted_at             # cheap_clock() then
    cdef uint64_t looked_at             # and when a write looked at it last
    cdef uint32_t held                  # writes since then
    cdef size_t high_water_bytes, low_water_bytes
    cdef readonly bint protocol_paused  # it was told to pause writing

    cdef bint keeps_alive               # idle for so long, it gets a probe: keepalive.pxi
    cdef bint keep_probing
    cdef uint64_t keep_idle_ns, keep_interval_ns, keep_since
    cdef uint32_t keep_count, keep_mark

    cdef bint broken                    # a completion failed or the peer broke the protocol: post nothing more
    cdef bint distrusted                # the peer broke the protocol: deliver nothing more from it
    cdef object failure                 # what `_fabric_failed` will be told once the queue is drained
    cdef uint64_t failure_tick
    cdef uint64_t bytes_sent, bytes_received, frames_sent, frames_received, bytes_borrowed, bytes_placed

    def __cinit__(self, owner, bint lends=True, size_t put_by_bytes=0):
        self.owner = owner
        self.lends = lends
        self.put_by_bytes = put_by_bytes
        self.log = SendLog()
        self.backlog = Backlog()
        self.inbox = Inbox(0)   # until `attach` says how large
        self.high_water_bytes = 65536
        self.low_water_bytes = 16384
        self.may_deliver = True

    # -- set-up --------------------------------------------------------------------------------------

    def attach(self, StreamEngine engine not None, object context, uint32_t slot_bytes, uint32_t data_slots,
               shared_slots=None, first_bytes=None):
        """Take memory and a place in `engine`; `start` comes when the queue pair exists.

        `shared_slots`: receive from a shared ring that lends so many; the queue pair is to be made on its srq and cq.
        `first_bytes`: what slots of a ring of its own hold until they grow; by default they do not.
        """
        if not 1 <= data_slots <= STREAM_DATA_SLOTS_MAX:
            raise ValueError(f"a ring of {data_slots} slots, 1 to {STREAM_DATA_SLOTS_MAX} are possible")
        self.slot_bytes = slot_bytes
        self.data_slots = data_slots
        # Slots come back by signaled completions: a small ring cannot wait for SIGNAL_EVERY of them.
        self.signal_every = max(1, min(<uint32_t>SIGNAL_EVERY, data_slots // 2))
        self.stride = stream_stride(slot_bytes)
        self.context = context
        self.inbox = Inbox(data_slots)
        engine.send_buffers(slot_bytes, data_slots).have_some()
        if shared_slots is None:
            self.own = OwnRing(
                engine, data_slots + CONTROL_RESERVE, min(slot_bytes, first_bytes or slot_bytes), slot_bytes)
            self.repost_at = (data_slots + 1) // 2
        else:
            ring = engine.shared_ring(slot_bytes, data_slots, shared_slots)
            ring.join()
            self.shared = ring
            self.aim = ring.own
            self.repost_at = 1
        self.engine = engine
        engine.unsolicited += 1     # until the peer says what it does
        self.attached = True
        self.wr_base = engine.enroll(self)

    @property
    def first_slot_bytes(self):
        """What our receives hold as long as nothing else has been said."""
        return self.own.sizes.size if self.own is not None else self.slot_bytes

    cdef int has_engine(self) except -1:
        if self.engine is None:
            raise RuntimeError("this connection has no engine yet")
        return 0

    def start(self, QP qp not None):
        """Post the whole receive ring; call before connect or accept."""
        self.qp = qp
        self.qp_c = qp.ptr
        self.queue = qp.send_cq
        if self.shared is not None:
            self.shared.numbers.put(qp.ptr.qp_num, <uint32_t>(self.wr_base >> INDEX_SHIFT))
        else:
            self.own.post_all(self)

    def agree(self, Ledger ledger, uint32_t frame_bytes, uint32_t depth, bint solicits=False):
        """Both sides' geometry is known; the peer's frames may come from now on.

        `frame_bytes`, `depth`: what the peer's receives hold at first, and how many it can have posted. `solicits`: it
        marks its SENDs as solicited.
        """
        if not solicits:
            self.engine.rouse(self.queue)   # to be armed for all
            self.engine.wake()
        elif not self.solicits:
            self.solicits = True
            self.engine.unsolicited -= 1
        self.ledger = ledger
        self.frame_bytes = min(frame_bytes, self.slot_bytes)
        if ledger.growth:
            self.peer_slots = PeerSlots(frame_bytes, depth)
        if ledger.placement:
            self.peer_wants = PeerWants(0)
            self.landings = Landings()

    def open(self, object protocol, bint buffered, bint may_send):
        """Established: delivery and sending may begin."""
        self.has_engine()
        self.may_send = self.may_send or may_send
        self.writable = True
        self.bind(protocol, buffered)
        self.opened = True
        if self.failure is not None and self not in self.engine.failed:
            self.engine.failed.append(self)     # the owner was told before it could end what was not open yet
        if self.inbox.count or self.tell_drained:
            self.engine.deliver_later(self)
        # Frames that came early may want an answer.
        self.engine.flush_later(self)
        self.engine.wake()

    def hear_early(self):
        """connection_made() has been called: now for the control frames that came before it."""
        early, self.early = self.early, None
        for kind, body, granted in early or ():
            try:
                self.owner._control_received(kind, body, granted)
            except ProtocolError as exc:
                self.distrust(exc)
                return

    def greet(self):
        """Deliver from now on: what connection_made() has scheduled by call_soon() has run, as with asyncio's TCP."""
        self.greeted = True
        if self.attached and (self.inbox.count or self.tell_drained):
            self.engine.deliver_later(self)
            self.engine.wake()

    def bind(self, object protocol, bint buffered):
        """Look the protocol's callbacks up once, not once a message."""
        cdef Sink before = self.sink
        into = getattr(protocol, "_rdma_sink", None)
        if into is not None:
            (<IntoReader?>into).connection = self
            self.sink = into
        else:
            self.sink = (
                IntoTls(protocol) if is_tls(protocol) else IntoBuffer(protocol) if buffered else DataReceived(protocol)
            )
        if before is not None and before is not self.sink:
            if self.landings is not None:
                self.take_memory_back()
            before.ends(self)
            before.leaves(self)

    # -- memory for sending ------------------------------------------------------------------------
    #
    # A connection has it while something is in flight, and some keep it warm until the engine sleeps (engine.pxi). If
    # all of the pool's memory is lent, a connection waits until another gives its own back. The pool always has memory
    # for one at least, so somebody has some who will give it back.

    cdef bint borrow_frames(self):
        """Whether there is memory to send from now; if not, `settle` comes when there may be."""
        cdef StreamEngine engine = self.engine
        cdef RingPool pool = engine.send_buffers(self.slot_bytes, self.data_slots)
        try:
            self.chunk = pool.take()
        except (OSError, MemoryError):
            if self not in engine.in_want:
                engine.in_want.append(self)
            engine.cool(0)      # what others keep warm is for us
            return False
        self.frames = self.chunk.address
        self.controls = self.frames + self.data_slots * self.stride
        return True

    cdef inline bint nothing_in_flight(self) noexcept:
        """Whether the memory that it sends from has nothing in it."""
        return (
            self.chunk is not None and self.fill == 0
            and self.posted == self.done and self.controls_posted == self.controls_done
        )

    cdef int return_frames(self) except -1:
        cdef Connection waiting
        self.frames = self.controls = NULL
        chunk, self.chunk = self.chunk, None
        self.engine.send_buffers(self.slot_bytes, self.data_slots).give(chunk)
        if self.engine.in_want:
            for waiting in self.engine.in_want:
                self.engine.flush_later(waiting)
            self.engine.in_want.clear()
            self.engine.wake_if_running()
        return 0

    cdef size_t registered(self):
        """Bytes of memory that are this connection's alone."""
        cdef size_t total = self.own.registered() if self.own is not None else 0
        if self.chunk is not None:
            total += stream_send_bytes(self.slot_bytes, self.data_slots)
        return total

    # -- receiving ---------------------------------------------------------------------------------

    cdef inline char *slot_at(self, uint32_t slot) noexcept:
        return self.own.at(slot) if self.shared is None else self.shared.slots[slot].address

    cdef inline int fits(self, uint32_t slot, uint32_t byte_len) except -1:
        """Raise ProtocolError for a completion of something else than what was posted."""
        if self.shared is not None:
            if slot < self.shared.most and byte_len <= HEADER + self.slot_bytes:
                return 0
        elif self.own.has(slot):
            self.own.sizes.received_one()
            if byte_len <= HEADER + self.own.room(slot):
                return 0
        return self.does_not_fit(slot, byte_len)

    cdef int does_not_fit(self, uint32_t slot, uint32_t byte_len) except -1:
        room = self.own.room(slot) if self.shared is None and self.own.has(slot) else self.slot_bytes
        raise ProtocolError(f"a completion of {byte_len} bytes in a receive of {HEADER + room}")

    cdef int receive(self, verbs.ibv_wc *wc) except -1:
        """A frame lies in the slot that wc names. Raises ProtocolError for what no correct peer sends."""
        cdef uint32_t slot = <uint32_t>(wc.wr_id & LOW_MASK), byte_len = wc.byte_len
        cdef frame_header header
        cdef char *frame
        if wc.opcode != verbs.IBV_WC_RECV or wc.wc_flags & NO_FRAME_FLAGS:
            raise ProtocolError("a receive was completed by something else than a SEND")
        if byte_len < HEADER:
            raise ProtocolError(f"a frame of {byte_len} bytes is shorter than its {HEADER}-byte header")
        self.fits(slot, byte_len)
        if self.ledger is None:
            raise ProtocolError("a frame from a peer that has not said hello")
        frame = self.slot_at(slot)
        header = (<frame_header *>frame)[0]
        if header.kind == FRAME_DATA or header.kind == FRAME_PLACED or self.blocked:
            self.engine.messages += 1   # what somebody waits for: credits, only where bytes wait for them
        if header.kind == FRAME_DATA:
            self.ledger.frame_received(byte_len, FRAME_DATA, header.length, header.granted, header.reaped)
            self.frames_received += 1
            self.bytes_received += header.length
            self.inbox.append(slot, frame + HEADER, header.length, False)
            if self.landings is not None:
                self.landings.came(self, header.length)
            if self.own is not None and self.ledger.growth:
                self.own.came(header.length)
            if self.ledger.granted == self.ledger.received:
                self.look_for_reader()
        elif header.kind == FRAME_PLACED:
            self.ledger.frame_received(byte_len, FRAME_PLACED, header.length, header.granted, header.reaped)
            self.receive_placed(slot, <placed_body *>(frame + HEADER))
        else:
            body = PyBytes_FromStringAndSize(frame + HEADER, byte_len - HEADER) if byte_len > HEADER else b""
            self.repost(slot)
            self.ledger.frame_received(byte_len, header.kind, header.length, header.granted, header.reaped)
            if (header.kind == FRAME_FIN or header.kind == FRAME_ABORT) and self.landings is not None:
                self.landings.wants.end()
                self.landings.sweep(self)
            if header.kind == FRAME_PING:
                self.ping_body = body
            elif header.kind == FRAME_CREDIT and self.ledger.growth and says_slots(body, header.granted):
                self.hear_size(size_said(body, 0), size_said(body, 1))
            elif header.kind != FRAME_PONG and (header.kind != FRAME_CREDIT or byte_len > HEADER):
                if self.opened:
                    self.owner._control_received(header.kind, body, header.granted)
                else:
                    # The peer is connected and we do not know it yet; few frames, the ledger sees to that.
                    if self.early is None:
                        self.early = []
                    self.early.append((header.kind, body, header.granted))
        self.may_send = True
        # Also for frames without data: they may have brought credits, or answered control frames.
        if self.opened:
            self.engine.deliver_later(self)
        return 0

    cdef int receive_placed(self, uint32_t slot, placed_body *body) except -1:
        """The peer has placed bytes where we wanted them, or where we did until a moment ago."""
        cdef Landings landings = self.landings
        cdef Landing landing
        if body.zero:
            raise ProtocolError(f"a Placed with {body.zero:#x} where zero must be")
        landing = landings.placed(self, body.serial, body.upto)
        self.frames_received += 1
        self.bytes_received += landings.wants.placed
        self.inbox.append(slot, <char *><uintptr_t>landings.wants.target, <uint32_t>landings.wants.placed, True)
        if landing.taken_back:
            self.inbox.copy_out()
        return landings.sweep(self)

    cdef int deliver(self) except -1:
        """Hand the protocol what has arrived, then send what is due. A callback may do anything."""
        if not self.greeted:
            return self.settle()
        cdef uint32_t turns = self.data_slots
        cdef Inbox inbox = self.inbox
        cdef Sink sink = self.sink
        cdef bint wanted = True
        if self.discarding:
            while inbox.count:
                inbox.first_consumed()
            self.repost_if_half()
        self.engine.delivering = self
        try:
            while inbox.count and self.may_deliver and turns and not self.discarding:
                turns -= 1
                sink = self.sink        # the application may have chosen another
                wanted = sink.take(self)
                if self.fill or self.backlog.size:
                    self.pump(True)
                if not wanted:
                    break
        except Exception as exc:
            self.owner._callback_raised(exc, sink.callback)
            return 0
        finally:
            self.engine.delivering = None
        if self.telling_unread:
            self.tell_unread()
        if self.inbox.count == 0:
            if self.tell_drained and self.may_deliver:
                self.tell_drained = False
                self.owner._drained()
        elif self.may_deliver and wanted:
            self.engine.deliver_later(self)
        else:
            self.look_for_reader()
        return self.settle()

    cdef inline uint32_t many_slots(self) noexcept:
        """How many slots of unread bytes may be kept for a program that does not read."""
        return (self.data_slots + 1) // 2 if self.shared is None else 1

    cdef int slots_consumed(self) except -1:
        """A sink has taken bytes. Outside of a delivery: what follows from that."""
        cdef StreamEngine engine = self.engine
        cdef uint32_t freed = self.inbox.freed_count
        if engine.delivering is self:
            try:
                return self.repost_if_half()
            except Exception as exc:
                return self.fail(exc)   # whoever reads is not to blame
        if freed and (freed >= self.repost_at or freed > self.ledger.outstanding()):
            try:
                self.repost_freed()
            except Exception as exc:
                self.fail(exc)
            engine.flush_later(self)
            engine.wake_if_running()
        if self.inbox.count:
            self.look_for_reader()
        else:
            if self.tell_drained:
                engine.deliver_later(self)
                engine.wake_if_running()
            if self.telling_unread:
                self.tell_unread()
        return 0

    cdef int tell_unread(self) except -1:
        if self.unread_told != (self.inbox.count > 0):
            self.unread_told = not self.unread_told
            self.owner._unread_changed()
        return 0

    cdef int settle(self) except -1:
        """Send everything that may go now: what was written, then what control frames are due."""
        if self.fill or self.backlog.size:
            self.pump(True)
        if self.protocol_paused or self.tell_flushed or self.tell_place:
            self.tell_room()
        return self.say_what_is_due()

    cdef inline int repost_if_half(self) except -1:
        if self.inbox.freed_count >= self.repost_at:
            self.repost_freed()
        return 0

    cdef int repost_freed(self) except -1:
        """Give consumed slots back to the device, and only then to the peer."""
        cdef uint32_t i
        if self.shared is not None:
            self.shared.take_back(self)
            return 0 if self.broken else self.shared.promise(self)
        if self.broken:
            return 0
        for i in range(self.inbox.freed_count):
            self.own.post_later(self, self.inbox.freed[i])
            if self.engine.recv_count == CHAIN:
                self.own.post(self)
        self.own.post(self)
        i = self.inbox.freed_count
        self.inbox.freed_count = 0
        self.ledger.slots_freed(i if self.landings is None else self.landings.to_grant(self, i))
        return 0

    cdef inline int repost(self, uint32_t slot) except -1:
        """What a control frame used is posted at once."""
        if self.shared is not None:
            self.shared.post_again(slot)
            return self.shared.post()
        self.own.post_later(self, slot)
        return self.own.post(self)

    cdef inline int look_for_reader(self) except -1:
        """The peer has used up its credits: look in a while whether its bytes have been read."""
        if (
            not self.stuffed and self.inbox.held and self.inbox.bytes < self.put_by_bytes
            and self.ledger.granted == self.ledger.received and self.attached
        ):
            self.engine.look_again(self)
        return 0

    cdef int put_by(self) except -1:
        """The program does not read, and the peer can send no more: free the slots of what has come."""
        try:
            self.inbox.put_by(self)
            self.repost_freed()
        except Exception as exc:
            return self.fail(exc)
        return self.engine.flush_later(self)

    cdef int say_what_is_due(self) except -1:
        """Grants that no data frame carried, answers, news of memory regions."""
        cdef uint32_t kind
        cdef bint resizes
        if not self.may_post():
            return 0
        if self.inbox.freed_count > self.ledger.outstanding():
            self.repost_freed()     # the peer would run dry before half a ring is free
        while self.controls_posted - self.controls_done < CONTROL_RESERVE:
            resizes = self.own is not None and self.own.next is not None
            kind = self.ledger.control_due(self.body_due or resizes)
            if kind == 0 and self.own is not None and self.own.behind and self.asks_for_frames():
                kind = FRAME_PING
            if kind == 0 or not (self.controls != NULL or self.borrow_frames()):
                break
            body = b""
            if kind == FRAME_PONG:
                body = self.ping_body
            elif kind == FRAME_PING:
                body = b"rdmanet!"
            elif resizes:
                self.ledger.slots_grown(self.own.next.size)
                body = self.own.say(self.ledger.grantable)
            elif self.body_due:
                # frame_bytes: the peer's slots may be smaller than our buffers.
                self.body_due, body = self.owner._credit_body(
                    self.ledger.grantable, min(<uint32_t>(CONTROL_BYTES - HEADER), self.frame_bytes))
            self.post_control(kind, body)
            if resizes and kind == FRAME_CREDIT:
                self.slots_resized()
        return 0

    cdef int slots_resized(self) except -1:
        """The peer has been told."""
        if self.own.sizes.size > self.own.first:
            return self.engine.grown.add(self)
        return self.repost_freed()      # in small slots, where they would wait for half a ring

    cdef bint may_shrink(self) except -1:
        """Whether the peer is about to be told of small slots: nothing is unread, and no memory is named."""
        if (
            not self.may_post() or self.inbox.count or self.inbox.leased or self.own.next is not None
            or self.ledger.fin_sent or self.ledger.fin_received
            or (self.landings is not None and self.landings.open)
        ):
            return False
        self.repost_freed()     # some may be in the bank before this one, which has to be free
        self.own.take_next(self.own.first)
        return self.own.next is not None

    cdef inline bint asks_for_frames(self) noexcept:
        """Whether a Ping is to bring a frame that uses up one of the large receives."""
        return (
            self.own.sizes.wants_frames() and self.ledger.may_send(FRAME_PING)
            and not self.ledger.fin_sent and not self.ledger.fin_received
        )

    # -- sending -----------------------------------------------------------------------------------

    def write(self, data):
        """Send `data`, a bytes-like object; never blocks (asyncio.WriteTransport.write).

        Exact `bytes` of 16 KiB and more, and memoryviews of 256 KiB and more, may be read by the device where they lie,
        after this returns. If it is memory that can change, pause_writing() is called, and resume_writing() when it
        has been read. Otherwise, and in all other cases, it is consumed or copied before this returns.
        """
        if self.take(data):
            self.send_taken()
            self.pause_if_full()

    def writelines(self, list_of_data):
        """Send all buffers of an iterable, in one step: nothing is sent if one of them is not bytes-like.

        pause_writing() is called after the last, so nothing that it does can cut the others, or come between them.
        """
        cdef list parts = list(list_of_data)
        cdef bint taken = False
        cdef Py_buffer view
        for data in parts:
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise not_bytes_like(data)
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            PyBuffer_Release(&view)
        if not self.may_write():
            return
        self.amid_lines = True
        try:
            for data in parts:
                if self.take(data):
                    taken = True
                    if self.backlog.size:
                        self.pump(False)
        finally:
            self.amid_lines = False
            if taken:
                self.send_taken()
        self.pause_if_full()

    cdef bint may_write(self) except -1:
        """Whether written bytes are taken; if not, the owner says why."""
        if self.qp is not None and self.qp.pid != verbs.rn_pid:
            raise RuntimeError(f"this connection was opened by process {self.qp.pid}; open another after fork")
        if self.writable and self.opened:
            return True
        if self.owner is not None:
            self.owner._write_refused()
        return False

    cdef bint take(self, data) except -1:
        """Put bytes into frames, or behind those that wait. False: there are none, or they are refused."""
        cdef Py_buffer view
        cdef Loan loan
        if PyBytes_CheckExact(data):
            return self.accept(data, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        if (
            PyMemoryView_Check(data) and PyMemoryView_GET_BUFFER(data).len >= LEND_BYTES
            and (self.lends or PyBytes_CheckExact(data.obj))
            and data.obj is not None    # else it is good for this call only: io.BufferedWriter passes such
        ):
            loan = loan_of(data)
            return self.accept(loan, loan.data, loan.size)
        if isinstance(data, (bytes, bytearray, memoryview)):
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            try:
                return self.accept(None, <const char *>view.buf, view.len)
            finally:
                PyBuffer_Release(&view)
        raise not_bytes_like(data)

    cdef bint accept(self, object owner, const char *data, size_t size) except -1:
        """Take `size` bytes. `owner` is the exact `bytes` or the Loan that they are all of, or None: then copy."""
        cdef size_t taken = 0
        if not self.may_write() or size == 0:
            return False
        if self.backlog.size == 0 and (owner is None or size < BORROW_BYTES):
            taken = self.copy_in(data, size)
            if taken == GONE:
                return False
        if type(owner) is Loan:
            self.backlog.append_loan(owner)
        elif taken < size:
            if owner is None or taken:
                owner = PyBytes_FromStringAndSize(NULL, size - taken)
                if not self.carried(PyBytes_AS_STRING(owner), data + taken, size - taken):
                    return False
            self.backlog.append(owner)
        return True

    cdef int send_taken(self) except -1:
        """Post what was taken, now or at the end of the engine's pass."""
        if self.engine.in_pass:
            # Whoever runs now was called from a pass, which flushes before it ends.
            if self.backlog.size:
                self.pump(False)
            if self.engine.delivering is not self:
                self.engine.flush_later(self)
        elif self.tick != self.engine.tick or self.held_long():
            self.tick = self.engine.tick
            self.held = 0
            self.pump(True)
            self.posted_at = self.looked_at = cheap_clock()
            if self.protocol_paused:
                self.engine.flush_later(self)
            if not self.is_done_with():
                self.engine.wake()
        else:
            if self.backlog.size:
                self.pump(False)
            self.engine.flush_later(self)
            self.engine.wake()
        return 0

    cdef inline int pause_if_full(self) except -1:
        """Call pause_writing(), if it is due. This is the last step of a call: the protocol may do anything there."""
        if self.is_full() and not self.protocol_paused and self.owner is not None:
            self.protocol_paused = True
            self.owner._pause_writing()
        return 0

    cdef inline bint is_done_with(self) except -1:
        """Whether what was just posted has completed already, so that the engine, which sleeps, can go on sleeping."""
        return (
            not self.engine.scheduled and self.queue is not None and self.queue.armed == ARMED_AND_EMPTY
            and self.fill == 0 and self.backlog.size == 0 and self.operations == 0
            and self.controls_posted == self.controls_done and self.engine.take_own(self)
        )

    cdef inline bint is_full(self) noexcept:
        """Whether a protocol is to pause writing."""
        return self.backlog.loans > 0 or self.fill + self.backlog.size > self.high_water_bytes

    cdef inline bint held_long(self) noexcept:
        """Whether a write is not one of a burst, or the last post is long ago. In bursts only some ask the clock."""
        cdef uint64_t now, gap
        self.held += 1
        if self.held > LOOK_FIRST and self.held % LOOK_EVERY:
            return False
        now = cheap_clock()
        gap = now - self.looked_at
        self.looked_at = now
        return (
            gap > (LOOK_EVERY if self.held > LOOK_FIRST else 1) * cheap_microsecond()
            or now - self.posted_at > HOLD_US * cheap_microsecond()
        )

    cdef inline bint carried(self, char *to, const char *data, size_t size) except -1:
        """Copy memory of the program's. False: it is gone, and the connection fails, as TCP's does with EFAULT."""
        if copy_carefully(to, data, size):
            return True
        self.fail(memory_is_gone("write"))
        return False

    cdef size_t copy_in(self, const char *data, size_t size) except? 0:
        """Copy into the open frame, posting full ones on the way; returns how much found a place, or GONE."""
        cdef size_t taken = 0, n
        while taken < size and self.send_queue_has_room() and self.fill < self.frame_bytes:
            n = min(size - taken, <size_t>(self.frame_bytes - self.fill))
            if not self.carried(self.open_frame() + HEADER + self.fill, data + taken, n):
                return GONE
            taken += n
            self.fill += <uint32_t>n
            if self.fill == self.frame_bytes:
                self.pump(False)
        return taken

    cdef size_t take_back(self, size_t size) except? 0:
        """Forget what is not posted of the last `size` bytes that were accepted; returns how many that are."""
        cdef size_t dropped = min(size, self.backlog.size), unposted
        self.backlog.drop_last(dropped)
        unposted = min(size - dropped, <size_t>self.fill)
        self.fill -= <uint32_t>unposted
        self.set_blocked(self.backlog.size > 0 or self.fill == self.frame_bytes)
        return dropped + unposted

    cdef inline char *open_frame(self) noexcept:
        return self.frames + (self.frames_used % self.data_slots) * self.stride

    cdef inline bint send_queue_has_room(self):
        return self.posted - self.done < self.data_slots and (self.frames != NULL or self.borrow_frames())

    cdef inline bint has_place(self) noexcept:
        """Whether there is a free frame, or part of one."""
        return self.fill < self.frame_bytes and self.posted - self.done < self.data_slots

    cdef int pump(self, bint flush) except -1:
        """Post what credits and slots allow; a frame that is not full only when `flush`."""
        cdef StreamEngine engine = self.engine
        cdef object first
        cdef const char *data
        cdef size_t left, n
        cdef uint32_t budget, lkey
        if not self.may_post():
            return 0
        budget = <uint32_t>self.ledger.credits()
        while budget and self.send_queue_has_room() and (self.fill or self.backlog.size):
            if self.peer_wants is not None and self.peer_wants.count and self.place_next():
                budget -= 1
                continue
            if self.backlog.size:
                first = self.backlog.first(&data, &left)
                if self.fill == 0 and left >= BORROW_BYTES and self.reads_in_place(first, &lkey):
                    n = min(left, <size_t>self.frame_bytes)
                    if type(first) is Loan:
                        self.backlog.lend(first, n)
                    self.backlog.taken(first, n, left)
                    self.chain_data(first, data, <uint32_t>n, lkey)
                    budget -= 1
                    continue
                n = min(left, <size_t>(self.frame_bytes - self.fill))
                if not self.carried(self.open_frame() + HEADER + self.fill, data, n):
                    break
                self.fill += <uint32_t>n
                self.backlog.taken(first, n, left)
                if self.fill < self.frame_bytes and self.backlog.size:
                    continue
            if self.fill < self.frame_bytes and not flush:
                break
            self.chain_data(None, NULL, self.fill, 0)
            budget -= 1
        self.post_sends()
        self.set_blocked(self.backlog.size > 0 or self.fill == self.frame_bytes)
        if self.backlog.spent and not self.amid_lines:
            self.backlog.let_go()
        return 0

    cdef bint reads_in_place(self, object first, uint32_t *lkey) except -1:
        """Whether the device can read a chunk of the backlog where it lies, and by which key."""
        cdef MR mr
        if self.engine.implicit_lkey_valid:
            lkey[0] = self.engine.implicit_lkey
            return True
        if type(first) is Loan and (<Loan>first).memory is not None:
            mr = (<Loan>first).memory.region_in(self.engine.pd)
            if mr is not None:
                lkey[0] = mr.ptr.lkey
                return True
        return False

    cdef bint place_next(self) except -1:
        """Write what comes next where the peer wants it, if that pays: the open frame and what is behind it."""
        cdef PeerWant want = self.peer_wants.current()
        cdef object first
        cdef const char *data
        cdef size_t left, n
        cdef uint64_t room
        cdef uint32_t lkey
        if want is None or not self.backlog.size or self.operations >= OPERATIONS:
            return False
        first = self.backlog.first(&data, &left)
        room = self.peer_wants.room(want)
        if left < BORROW_BYTES or room <= self.fill:
            return False
        n = min(min(left, <size_t>room - self.fill), <size_t>PLACE_CHUNK)
        if self.fill + n < PLACE_BYTES or not self.reads_in_place(first, &lkey):
            return False
        if type(first) is Loan:
            self.backlog.lend(first, n)
        self.backlog.taken(first, n, left)
        self.chain_placing(want, first, data, <uint32_t>n, lkey)
        return True

    cdef int chain_placing(self, PeerWant want, object owner, const char *data, uint32_t length,
                           uint32_t lkey) except -1:
        """Add a WRITE of the open frame's bytes and of `length` bytes of `owner`, and its Placed, to the chain."""
        cdef StreamEngine engine = self.engine
        cdef char *frame = self.open_frame()
        cdef placed_body *body = <placed_body *>(frame + HEADER + self.slot_bytes)  # beyond the open frame's bytes
        cdef verbs.ibv_send_wr *wr
        cdef verbs.ibv_sge *sge
        cdef uint32_t total = self.fill + length, i
        if engine.send_count > CHAIN - 2:
            self.post_sends()
        i = engine.send_count
        wr, sge = &engine.send_wr[i], &engine.send_sge[2 * i]
        wr.num_sge = 0
        if self.fill:
            sge.addr, sge.length, sge.lkey = <uint64_t>(frame + HEADER), self.fill, self.chunk.lkey
            wr.num_sge = 1
        sge[wr.num_sge].addr, sge[wr.num_sge].length = <uint64_t>data, length
        sge[wr.num_sge].lkey = lkey
        wr.num_sge += 1
        wr.sg_list = sge
        wr.wr_id = self.wr_base | SEND_FLAG | self.log.next_low()
        wr.next = NULL
        wr.opcode = verbs.IBV_WR_RDMA_WRITE
        wr.wr.rdma.remote_addr = self.peer_wants.target(want)
        wr.wr.rdma.rkey = want.rkey
        wr.send_flags = engine.behind_operations if self.operations else 0
        if i:
            engine.send_wr[i - 1].next = wr
        engine.send_count = i + 1
        self.log.posted(PLACING, length, owner)
        engine.in_flight += 1
        self.operations += 1

        self.peer_wants.sent(total)
        self.ledger.data_sent()
        wr = self.chain_entry(FRAME_PLACED, frame, FRAME_PLACED_BYTES, None)
        body.serial, body.zero, body.upto = want.serial, 0, self.peer_wants.position
        sge = &engine.send_sge[2 * (engine.send_count - 1)]
        sge[0].length = HEADER
        sge[1].addr, sge[1].length, sge[1].lkey = <uint64_t>body, FRAME_PLACED_BYTES, self.chunk.lkey
        wr.num_sge = 2
        wr.send_flags |= verbs.IBV_SEND_SIGNALED
        if HEADER + FRAME_PLACED_BYTES <= engine.max_inline:
            wr.send_flags |= verbs.IBV_SEND_INLINE
        self.frames_used += 1       # the WRITE reads the open frame
        self.fill = 0
        self.unsignaled = 0
        self.posted += 1
        self.frames_sent += 1
        self.bytes_sent += total
        self.bytes_placed += total
        return self.post_sends()

    cdef int tell_room(self) except -1:
        """Tell whom it concerns what has been posted. Never from `write`: resume_writing() writes."""
        if (
            self.protocol_paused and self.backlog.loans == 0
            and self.fill + self.backlog.size <= self.low_water_bytes
        ):
            self.protocol_paused = self.tell_place = False
            self.owner._resume_writing()
        elif self.tell_place and self.has_place():
            self.tell_place = False
            self.owner._resume_writing()
        if self.tell_flushed and self.fill == 0 and self.backlog.size == 0 and self.may_post():
            self.tell_flushed = False
            self.owner._flushed()
        return 0

    cdef inline bint may_post(self) noexcept:
        return self.opened and self.may_send and not self.broken and self.engine.pid == verbs.rn_pid

    cdef inline void set_blocked(self, bint blocked) noexcept:
        if blocked != self.blocked:
            self.blocked = blocked
            self.engine.blocked += 1 if blocked else -1

    cdef int chain_data(self, object owner, const char *data, uint32_t length, uint32_t lkey) except -1:
        """Add a DATA frame to the chain: the open frame, or `length` bytes of `owner` where they lie."""
        cdef StreamEngine engine = self.engine
        cdef char *frame = self.open_frame()
        cdef verbs.ibv_send_wr *wr
        cdef bint last = self.backlog.size == 0 and (data == NULL or self.fill == 0)
        cdef bint inline = data == NULL and HEADER + length <= engine.max_inline
        self.ledger.data_sent()
        wr = self.chain_entry(FRAME_DATA, frame, length, owner)
        if data != NULL:
            engine.send_sge[2 * (engine.send_count - 1)].length = HEADER
            engine.send_sge[2 * (engine.send_count - 1) + 1].addr = <uint64_t>data
            engine.send_sge[2 * (engine.send_count - 1) + 1].length = length
            engine.send_sge[2 * (engine.send_count - 1) + 1].lkey = lkey
            wr.num_sge = 2
            self.bytes_borrowed += length
        else:
            self.fill = 0
        # The last frame of a burst is signaled, so that what has been delivered is known when it is
        # asked; in between one in signal_every, so that slots come back in time.
        self.unsignaled += 1
        if last or owner is not None or self.unsignaled >= self.signal_every:
            wr.send_flags |= verbs.IBV_SEND_SIGNALED
            self.unsignaled = 0
        self.posted += 1
        self.frames_sent += 1
        self.bytes_sent += length
        if self.peer_wants is not None:
            self.peer_wants.sent(length)
        if inline:
            wr.send_flags |= verbs.IBV_SEND_INLINE
        else:
            self.frames_used += 1
        if inline or engine.send_count == CHAIN:
            self.post_sends()
        return 0

    cdef verbs.ibv_send_wr *chain_entry(self, uint32_t kind, char *frame, uint32_t length, object reference) noexcept:
        """The next work request of the chain, its header written and its log entry made."""
        cdef StreamEngine engine = self.engine
        cdef frame_header *header = <frame_header *>frame
        cdef uint32_t i = engine.send_count
        cdef verbs.ibv_send_wr *wr = &engine.send_wr[i]
        cdef verbs.ibv_sge *sge = &engine.send_sge[2 * i]
        header.kind = kind
        header.length = length
        header.granted = self.ledger.granted
        header.reaped = self.ledger.reaped
        sge.addr = <uint64_t>frame
        sge.length = HEADER + length
        sge.lkey = self.chunk.lkey
        wr.wr_id = self.wr_base | SEND_FLAG | self.log.next_low()
        wr.next = NULL
        wr.sg_list = sge
        wr.num_sge = 1
        wr.opcode = verbs.IBV_WR_SEND
        wr.send_flags = verbs.IBV_SEND_SOLICITED    # as our Hello has said
        if self.operations:
            wr.send_flags |= engine.behind_operations
        if i:
            engine.send_wr[i - 1].next = wr
        engine.send_count = i + 1
        self.log.posted(kind, length, reference)
        engine.in_flight += 1
        if self.peer_slots is not None:
            self.frame_bytes = min(self.peer_slots.sent_one(), self.slot_bytes)
        return wr

    cdef int post_sends(self) except -1:
        cdef verbs.ibv_send_wr *bad = NULL
        cdef int rc
        if self.engine.send_count == 0:
            return 0
        self.engine.send_count = 0
        rc = verbs.rn_post_send(self.qp_c, &self.engine.send_wr[0], &bad)
        if rc < 0:
            # Budgets make a full queue impossible; whatever it is, the connection cannot go on.
            self.fail(OSError(-rc, f"ibv_post_send: {strerror(-rc).decode()}"))
        if not self.queue.awake:
            self.engine.rouse(self.queue)
        return 0

    cdef int post_control(self, uint32_t kind, bytes body) except -1:
        cdef char *frame = self.controls + (self.controls_posted % CONTROL_RESERVE) * CONTROL_BYTES
        cdef verbs.ibv_send_wr *wr
        cdef size_t length = PyBytes_GET_SIZE(body)
        if length > STREAM_CONTROL_BODY_BYTES:
            raise ValueError(f"control body of {length} bytes, at most {STREAM_CONTROL_BODY_BYTES} fit")
        memcpy(frame + HEADER, PyBytes_AS_STRING(body), length)
        self.ledger.control_sent(kind)
        if (kind == FRAME_FIN or kind == FRAME_ABORT) and self.peer_wants is not None:
            self.peer_wants.finish()
        wr = self.chain_entry(kind, frame, <uint32_t>length, None)
        if HEADER + length <= self.engine.max_inline:
            wr.send_flags |= verbs.IBV_SEND_INLINE
        wr.send_flags |= verbs.IBV_SEND_SIGNALED
        self.unsignaled = 0
        self.controls_posted += 1
        self.post_sends()
        return self.engine.wake_if_running()    # no event tells that it has completed

    def send_control(self, uint32_t kind, bytes body=b""):
        """Post a control frame if its allowance permits; returns whether it did."""
        if not self.may_post() or not self.ledger.may_send(kind):
            return False
        if self.controls_posted - self.controls_done >= CONTROL_RESERVE:
            return False
        if self.controls == NULL and not self.borrow_frames():
            return False
        self.post_control(kind, body)
        return True

    def post_operation(self, Operation operation not None):
        """Post a one-sided work request; it lives until it completes, then `_operation_done`.

        Returns False when OPERATIONS are in flight already.
        """
        cdef SendWR request = operation.requests[0]
        cdef verbs.ibv_send_wr wr = request.c
        return self.post_beside(operation, &wr)

    def post_bind(self, object operation, MW mw not None, MR mr not None, uint32_t rkey, int access):
        """The same for BIND_MW: a window of type 2 to all of a region, with this key."""
        return self.post_bind_part(operation, mw, mr, rkey, mr.iova, mr.length, access)

    cdef bint post_bind_part(self, object operation, MW mw, MR mr, uint32_t rkey, uint64_t address, uint64_t length,
                             int access) except -1:
        """The same to a part of it."""
        cdef verbs.ibv_send_wr wr
        mw.usable()
        mr.usable()
        memset(&wr, 0, sizeof(wr))
        wr.opcode = verbs.IBV_WR_BIND_MW
        wr.bind_mw.mw = mw.ptr
        wr.bind_mw.rkey = rkey
        wr.bind_mw.bind_info.mr = mr.ptr
        wr.bind_mw.bind_info.addr = address
        wr.bind_mw.bind_info.length = length
        wr.bind_mw.bind_info.mw_access_flags = access
        if not self.post_beside(operation, &wr):
            return False
        mw.ptr.rkey = rkey
        mw.mr = mr
        return True

    def post_invalidate(self, object operation, uint32_t rkey):
        """The same for LOCAL_INV: such a key is good no more."""
        cdef verbs.ibv_send_wr wr
        memset(&wr, 0, sizeof(wr))
        wr.opcode = verbs.IBV_WR_LOCAL_INV
        wr.invalidate_rkey = rkey
        return self.post_beside(operation, &wr)

    cdef bint post_beside(self, object operation, verbs.ibv_send_wr *wr) except -1:
        """Post what is no frame."""
        cdef verbs.ibv_send_wr *bad = NULL
        if self.broken or self.qp_c == NULL:
            raise ConnectionResetError(ECONNRESET, "the connection is lost")
        if self.operations >= OPERATIONS:
            return False
        wr.wr_id = self.wr_base | SEND_FLAG | self.log.next_low()
        wr.send_flags = verbs.IBV_SEND_SIGNALED
        if self.operations and wr.opcode != verbs.IBV_WR_RDMA_READ:  # READs keep their order, and take no fence
            wr.send_flags |= self.engine.behind_operations
        check(verbs.rn_post_send(self.qp_c, wr, &bad), "ibv_post_send")
        self.log.posted(OPERATION, 0, operation)
        self.engine.in_flight += 1
        self.operations += 1
        self.engine.rouse(self.queue)
        self.engine.wake()
        return True

    # -- keep-alive ----------------------------------------------------------------------------------

    def keep_alive(self, bint on, double idle, double interval, uint32_t count):
        """Whether to look, after `idle` seconds without a frame, if the peer's host is there: keepalive.pxi.

        If it has not answered for `interval` * `count` seconds, the connection is lost.
        """
        self.keep_idle_ns, self.keep_interval_ns = <uint64_t>(idle * 1e9), <uint64_t>(interval * 1e9)
        self.keep_count = count
        self.keeps_alive = on
        if on and self.attached and self.opened:
            self.engine.alive.added(self)

    @property
    def kept_alive(self):
        """What `keep_alive` was told: whether it is on, idle and interval in seconds, count."""
        return self.keeps_alive, self.keep_idle_ns / 1e9, self.keep_interval_ns / 1e9, self.keep_count

    @property
    def probed(self):
        """Whether it is probed: the embedded device knows without of peers that it reaches through memory."""
        cdef KeepAlive alive = self.engine.alive
        return self.qp_c != NULL and (alive.way == NULL or alive.way(self.qp_c) == WAY_STREAM)

    cdef inline uint64_t looks_every(self) noexcept:
        return max(min(self.keep_idle_ns // 4, self.keep_interval_ns), LOOK_LEAST_NS)

    cdef inline uint32_t moves(self) noexcept:
        """A number that changes with each frame that comes or goes."""
        return self.log.sequence + <uint32_t>self.ledger.received + <uint32_t>self.ledger.reaped

    cdef bint probe(self) except -1:
        """Ask whether the peer's host is there. Nothing is in flight. Returns whether something was sent."""
        cdef verbs.ibv_send_wr wr
        if not self.may_post() or not self.probed:
            return False
        if self.engine.behind_operations:   # iWARP
            if self.ledger.fin_sent or self.ledger.fin_received or not self.send_control(FRAME_PING, b"rdmanet!"):
                return False
            return True
        memset(&wr, 0, sizeof(wr))
        wr.opcode = verbs.IBV_WR_RDMA_WRITE
        try:
            self.keep_probing = self.post_beside(None, &wr)
        except OSError as exc:
            self.fail(exc)
        return self.keep_probing

    # -- completions ---------------------------------------------------------------------------------

    cdef int retire(self, uint32_t sequence) except -1:
        """All sends up to `sequence` are done with; give back what their entries held."""
        cdef PyObject *reference
        cdef object held
        cdef uint32_t kind, length
        cdef bint made_room = False
        while self.log.has_before(sequence):
            kind = self.log.retire(&length, &reference)
            self.engine.in_flight -= 1
            held = None
            if reference != NULL:
                held = <object>reference
                Py_DECREF(held)
            if kind == FRAME_DATA or kind == PLACING:
                if kind == PLACING:
                    self.operations -= 1
                    made_room = True
                else:
                    self.done += 1
                if type(held) is Loan:
                    self.backlog.give_back(held, length)
                    self.engine.flush_later(self)   # the program may await the end of the loan, in drain()
            elif kind == FRAME_PLACED:
                self.done += 1
            elif kind == OPERATION:
                self.operations -= 1
                if type(held) is Landing:
                    self.landings.done(self, held)
                    made_room = True
                elif held is not None:      # else it was a probe
                    self.owner._operation_done(held)
            else:
                if self.controls_posted - self.controls_done == CONTROL_RESERVE:
                    self.engine.flush_later(self)   # something may have waited for a buffer
                self.controls_done += 1
                if kind == FRAME_FIN or kind == FRAME_ABORT:
                    self.owner._control_sent(kind)
        if self.landings is not None and self.landings.open:
            self.landings.sweep(self)
            if self.landings.has_news(self):
                self.body_due = True
        if made_room and self.operations < OPERATIONS and self.owner is not None:
            self.owner._room_for_operations()
        if self.backlog.size or self.fill or self.tell_flushed or self.tell_place or self.body_due:
            self.engine.flush_later(self)
        elif not self.warm and self.nothing_in_flight():
            self.engine.keep_warm(self)
        return 0

    cdef int completed(self, verbs.ibv_wc *wc) except -1:
        """One completion of this connection."""
        cdef uint32_t low = <uint32_t>(wc.wr_id & LOW_MASK)
        cdef bint is_send = bool(wc.wr_id & SEND_FLAG)
        if wc.status != verbs.IBV_WC_SUCCESS:
            if not self.broken or (wc.status != verbs.IBV_WC_WR_FLUSH_ERR and self.was_flushed()):
                failure = (wc.status, is_send, wc.vendor_err, self.log.operation_at(low) if is_send else None)
                if self.broken:
                    self.failure = failure      # receives may be flushed before that which flushes them completes
                else:
                    self.fail(failure)
            return 0
        try:
            if is_send:
                return self.retire(low)
            # Receives that completed before a failure still count: the peer's Fin may be among them.
            if not self.distrusted:
                return self.receive(wc)
        except ProtocolError as exc:
            self.distrust(exc)
        except Exception as exc:
            self.fail(exc)
        return 0

    cdef int distrust(self, object exc) except -1:
        """The peer broke the protocol: tell the owner, who may still say Abort, and hear nothing more."""
        self.distrusted = True
        try:
            self.owner._protocol_broken(exc)
        finally:
            self.broken = True
        return 0

    cdef bint was_flushed(self):
        return type(self.failure) is tuple and self.failure[0] == verbs.IBV_WC_WR_FLUSH_ERR

    cdef int fail(self, object failure) except -1:
        """Post nothing more; tell the owner when all completions that are there have been seen."""
        if self.failure is not None or not self.attached:
            return 0
        self.broken = True
        self.failure = failure
        self.failure_tick = self.engine.tick
        self.engine.failed.append(self)
        self.engine.wake()
        return 0

    # -- what the owner asks for ---------------------------------------------------------------------

    @property
    def reading(self):
        """Whether what arrives is delivered. What has arrived keeps its slots, so the peer runs out of credits."""
        return self.may_deliver

    @reading.setter
    def reading(self, bint value):
        self.may_deliver = value
        if value and (self.inbox.count or self.tell_drained) and self.opened:
            self.engine.deliver_later(self)
            self.engine.wake()

    def stop_writing(self):
        """No `write` from now on; what is buffered still goes out."""
        self.writable = False

    def allow_writing(self):
        """Take back `stop_writing`."""
        self.writable = True

    def discard_writes(self):
        """Forget what is written and not posted. A protocol that it paused resumes, once its memory is its own."""
        self.writable = False
        self.backlog.clear()
        self.fill = 0
        self.resume_if_discarded()

    cdef int resume_if_discarded(self) except -1:
        if self.protocol_paused and self.backlog.loans == 0 and not self.writable and self.owner is not None:
            self.protocol_paused = False
            self.owner._resume_writing()
        return 0

    def lose_loans(self):
        """After the queue pair is destroyed: memory that was lent is the program's again."""
        cdef list loans = self.log.take_loans()
        self.backlog.forget_loans()
        if self.backlog.size == 0 and self.fill == 0:
            self.resume_if_discarded()
        loans.clear()   # last: their memory's finalizers may do anything

    def stop_posting(self):
        """Post nothing more."""
        self.broken = True
        self.set_blocked(False)

    def stop_reading(self):
        """Deliver nothing any more: drop what has come and what will, and keep granting."""
        if self.opened and self.attached and not self.discarding:
            if self.landings is not None:
                self.landings.take_back(self)
            self.sink.ends(self)
        self.discarding = True
        if self.inbox.count:
            self.engine.deliver_later(self)
            self.engine.wake()

    def when_flushed(self):
        """Call `_flushed` once nothing is left to post."""
        self.has_engine()
        self.tell_flushed = True
        self.engine.flush_later(self)
        self.engine.wake()

    def credit_body_due(self):
        """Ask for `_credit_body` as soon as a Credit may go."""
        self.body_due = True
        if self.attached and self.opened:
            self.engine.flush_later(self)
            self.engine.wake()

    @property
    def places(self):
        """Whether both sides know direct placement."""
        return self.landings is not None

    def placement_news(self):
        """What a Credit that goes now has to say of it: (wants, unwanted, answered) or None; whether there is more."""
        news = (self.landings.say(self), self.landings.wants.unwanted(), self.peer_wants.answered())
        return news if any(news) else None, self.landings.has_news(self)

    def hear_placement(self, wants, unwanted, answered):
        """What the peer's Credit says of it. Raises ProtocolError."""
        self.landings.wants.hear(answered)
        self.landings.sweep(self)
        self.peer_wants.hear(wants, unwanted)
        if self.peer_wants.answer_due or self.landings.has_news(self):
            self.body_due = True
        self.engine.flush_later(self)

    def hear_slots(self, number, slot_bytes):
        """What the peer's Credit says of its slots. Raises ProtocolError."""
        self.hear_size(number, slot_bytes)

    cdef int hear_size(self, uint32_t number, uint32_t slot_bytes) except -1:
        self.peer_slots.hear(number, slot_bytes)
        self.frame_bytes = min(self.peer_slots.limit, self.slot_bytes)
        if self.fill > self.frame_bytes:
            # They have shrunk: what is in the open frame goes out in several.
            self.backlog.put_first(PyBytes_FromStringAndSize(self.open_frame() + HEADER, self.fill))
            self.fill = 0
        return self.engine.flush_later(self)

    @property
    def grows(self):
        """Whether both sides know slots that grow."""
        return self.ledger is not None and self.ledger.growth

    cdef int take_memory_back(self) except -1:
        """Reads that named memory are given up. The peer has to answer before it is theirs again."""
        self.landings.take_back(self)
        if self.landings.wants.unanswered and self.owner is not None:
            self.owner._memory_taken_back()
        return 0

    @property
    def placing_unanswered(self):
        """What the peer has not answered yet, asked to let go of memory: a serial number, or 0."""
        return self.landings.wants.unanswered if self.landings is not None else 0

    def end_keys(self):
        """The queue pair is about to be destroyed: end the keys of memory that the peer may write to."""
        if self.landings is not None:
            self.landings.end_keys(self)

    @property
    def lands(self):
        """Whether the peer may still write to memory that a read has named."""
        return self.landings is not None and bool(self.landings.open)

    def lose_landings(self):
        """After the queue pair is destroyed: nobody writes to memory of ours any more."""
        if self.landings is not None:
            self.landings.lose()

    def when_drained(self):
        """Call `_drained` once all that arrived has been delivered (reading must be on)."""
        self.tell_drained = True
        if self.opened:
            self.engine.deliver_later(self)
            self.engine.wake()

    @property
    def unread(self):
        """Whether bytes have come that the protocol was not given yet."""
        return self.inbox.count > 0

    def watch_unread(self):
        """Call `_unread_changed` from now on."""
        self.telling_unread = True
        self.unread_told = self.inbox.count > 0

    @property
    def undelivered(self):
        """Whether bytes of ours may not have reached the peer."""
        return bool(self.fill or self.backlog.size or self.posted != self.done)

    @property
    def progress(self):
        """Counts up as our bytes arrive: close_timeout is measured from its last change."""
        return self.done

    def part_from_shared(self):
        """The queue pair is about to be destroyed: a shared ring takes back first what it has in its hands."""
        if self.shared is None or self.qp is None or self.qp.closed or self.parted:
            return
        self.parted = True
        self.broken = True
        try:
            self.qp.to_error()
        except OSError:
            pass    # a device that is gone: then no slot comes back, and none is needed
        self.shared.part(self)

    cdef bint may_be_amid_a_message(self) noexcept:
        """May its queue pair have taken a receive that will never complete? The embedded device gives them back."""
        return (
            self.ledger is not None and not self.ledger.fin_received
            and not self.engine.pd.context.library.embedded_device
        )

    def release(self):
        """After the queue pair is destroyed: give the memory and the place in the engine back."""
        cdef StreamEngine engine = self.engine
        if not self.attached:
            self.owner = None
            return
        self.stop_posting()
        if self.landings is not None:
            self.landings.take_back(self)
        if self.sink is not None:
            self.sink.ends(self)
            self.sink.leaves(self)
        self.attached = False
        self.writable = False
        self.backlog.clear()
        self.fill = 0
        if self.shared is not None:
            self.shared.leave(self)
        while self.inbox.count:
            self.inbox.first_consumed()
        self.may_deliver = self.tell_drained = self.tell_flushed = self.body_due = False
        self.protocol_paused = self.telling_unread = False     # nobody is left to be told
        self.early = None
        self.qp_c = NULL
        self.queue = None
        engine.in_flight -= self.log.left()
        engine.unsolicited -= not self.solicits
        engine.expel(self)
        try:
            self.lose_operations()
        finally:
            self.lose_landings()
            self.log.drop_references()
            self.backlog.forget_loans()
            if self.chunk is not None:
                self.return_frames()
            if self.own is not None:
                self.own.release()
            self.sink = None
            self.owner = None

    def lose_operations(self):
        """After the queue pair is destroyed: one-sided operations that it had begun will not complete."""
        failure = None
        for operation in self.log.take_operations():
            if type(operation) is Landing:
                continue    # lose_landings()
            try:
                self.owner._operation_lost(operation)
            except Exception as exc:
                failure = exc   # the others end nonetheless
        if failure is not None:
            raise failure

    def get_write_buffer_size(self):
        """Bytes accepted by write() and not yet handed to the device, or read by it from memory that can change."""
        return self.fill + self.backlog.size + self.backlog.lent

    @property
    def borrows_memory(self):
        """Whether something is written, and not read yet, that lies in memory that can change."""
        return self.backlog.loans > 0

    def get_write_buffer_limits(self):
        """(low, high), in bytes."""
        return (self.low_water_bytes, self.high_water_bytes)

    def set_write_buffer_limits(self, high=None, low=None):
        """When pause_writing and resume_writing are called, in bytes of get_write_buffer_size().

        As asyncio.WriteTransport.set_write_buffer_limits: high defaults to 64 KiB (or four times low),
        low to a quarter of high. Raises ValueError unless high >= low >= 0.
        """
        if high is None:
            high = 65536 if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high_water_bytes = high
        self.low_water_bytes = low
        self.pause_if_full()

    def stats(self):
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_borrowed": self.bytes_borrowed,
            "bytes_placed": self.bytes_placed,
            "bytes_placed_here": self.landings.bytes_placed if self.landings is not None else 0,
            "wants_open": len(self.landings.open) if self.landings is not None else 0,
            "frames_sent": self.frames_sent,
            "frames_received": self.frames_received,
            "control_frames_sent": self.controls_posted,
            "credits": self.ledger.credits() if self.ledger is not None else 0,
            "peer_slots": self.ledger.peer_slots if self.ledger is not None else 0,
            "sends_in_flight": self.posted - self.done,
            "slots_held": self.inbox.held + self.inbox.freed_count,
            "slots_leased": self.inbox.leased,
            "slots_borrowed": self.borrowed,
            "bytes_registered": self.registered(),
        }
