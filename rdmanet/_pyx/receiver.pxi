# What a connection has to receive with: its receiving half, which also sends what receiving asks for. The functions
# that use it take a Receiver:
#
#     granting     consumed slots go back to the device, and to the peer
#     intake       what no program reads is spilled, so that the peer can go on
#     receiving    frames that come: data waits in the inbox, control frames are heard
#     completing   what completions give back
#     settling     what is due at the end of a pass
#     delivering   from the inbox to the sink, and so to the program
#
# Why it is a base class: sender.pxi. What needs none of these fields is a class of its own: Inbox, OwnRing, Landings.


cdef class Sink(Namer):
    """Where received bytes go; sink.pxi has the kinds."""

    cdef str callback           # the protocol's method that is to blame for an exception

    cdef bint take(self, Receiver connection) except -1:
        """Move bytes; false if it wants none of what is left, and will take that itself when it does."""
        raise NotImplementedError

    cdef int ends(self, Receiver connection) except -1:
        """The slots are about to go: save what is unread, if that is to outlive the connection."""
        return 0

    cdef int leaves(self, Receiver connection) except -1:
        """The connection has ended, or has another sink."""
        return 0


@cython.no_gc_clear
cdef class Receiver(Sender):
    """A connection's receiving half, on top of the sending one.

    :ivar shared: the shared receive queue where its receives come from, or None: it has a ring of its own
    """

    cdef OwnRing own                    # where its receives come from,
    cdef readonly SharedRing shared     # or the ring that it shares
    cdef ring_share share               # of that ring's data slots
    cdef bint parted                    # its queue pair is about to be destroyed
    cdef bint stalled                   # on the engine's list of those whose peer has no credits left,
    cdef uint64_t stalled_tick          # since that pass
    cdef size_t spill_bytes             # unread bytes that it takes in at least, whatever its ring
    cdef Inbox inbox                    # what has come
    cdef uint32_t repost_at             # consumed slots that are posted again in one call
    cdef Landings landings              # where the peer may place bytes; None: no read has asked for that yet
    cdef bytes ping_body
    cdef list early                     # control frames that came before we were established
    cdef Sink sink                      # where received bytes go
    cdef object context                 # contextvars.Context of all callbacks
    cdef bint greeted                   # what connection_made() has scheduled has run: delivery may begin
    cdef bint reading_paused            # the protocol wants no bytes now
    cdef bint discarding                # closed: what still comes is dropped, its slots granted again
    cdef bint tell_drained
    cdef bint telling_unread            # somebody looks whether something is undelivered: tell of changes
    cdef bint unread_told
    cdef bint keeps_alive               # idle for so long, it gets a probe: keepalive.pxi
    cdef bint keep_probing
    cdef uint64_t keep_idle_ns, keep_interval_ns, keep_since
    cdef uint32_t keep_count, keep_mark
    cdef uint64_t bytes_received, frames_received
    cdef uint64_t heard_ns              # the last data, as sent_ns

    def __cinit__(self):
        self.inbox = Inbox()


cdef Landings landings_of(Receiver connection):
    """Where the peer may place bytes, made at first use. None: both sides have not agreed on that, or nothing comes."""
    cdef Ledger ledger = connection.ledger
    if connection.landings is None and ledger is not None and ledger.placement and not (
        ledger.fin_received or ledger.abort_received or connection.broken or not connection.attached
    ):
        connection.landings = Landings(connection.bytes_received)
    return connection.landings


cdef int let_memory_go(Receiver connection) except -1:
    """Nobody wants bytes where reads have named memory: copy out what has been placed, and take the Wants back."""
    if connection.landings is not None:
        connection.inbox.copy_out()
        connection.landings.take_back(connection)
    return 0


cdef int take_memory_back(Receiver connection) except -1:
    """The same for reads that are given up. The peer has to answer before the memory is theirs again."""
    let_memory_go(connection)
    if connection.landings.wants.unanswered and connection.owner is not None:
        connection.owner.memory_taken_back()
    return 0


cdef size_t registered_bytes(Receiver connection):
    """Bytes of memory that are this connection's alone."""
    cdef size_t total = connection.own.registered() if connection.own is not None else 0
    if connection.chunk is not None:
        total += stream_send_bytes(connection.slot_bytes, connection.data_slots)
    return total
