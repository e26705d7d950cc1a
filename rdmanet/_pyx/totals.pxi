# What all connections of this process have counted, by device and side: for rdmanet.metrics().
#
# No message and no pass does anything for it: `stream_totals` adds up the counters that each connection and each engine
# has anyway. A sum must not go back when a connection ends, so what it has counted is added to its device's Totals when
# it leaves its engine's table; the same is done for an engine that is closed. Between what is read and what is added
# nothing of Python's is called, so no other thread runs there, and each connection is counted once.
#
# A forked child begins anew: connections and engines are its parent's.

STREAM_STRETCH_NS = 1 << (STRETCH_BITS + 1)     # the first limit of the cells of stretches; each other is twice as long

ctypedef struct connection_sums:
    uint64_t opened                 # those that were established,
    uint64_t connections            # and those of them that live
    uint64_t bytes_sent, bytes_received, bytes_borrowed, bytes_placed
    uint64_t frames_sent, frames_received, control_frames_sent
    uint64_t waits_for_credits, ns_without_credits
    uint64_t bytes_unsent, bytes_registered, sends_in_flight, slots_held    # of those that live
    uint64_t wait_for_peer, wait_for_device, wait_for_reader                # see ConnectionInfo.waits

ctypedef struct engine_sums:
    uint64_t engines                # those that live
    uint64_t passes, sleeps, wakeups, polls, messages
    uint64_t ns_asleep, ns_polling
    stretches worked


cdef class Totals:
    """What the connections and engines of one device have counted that have ended."""

    cdef connection_sums connecting, accepting
    cdef engine_sums engines


cdef dict _totals = {}              # by the device's name
cdef object _engines = weakref.WeakValueDictionary()

os.register_at_fork(after_in_child=_totals.clear)


cdef Totals begin_count(_Engine engine):
    """It is counted from now on."""
    _engines[id(engine)] = engine
    return _totals.setdefault(engine.pd.context.name, Totals())


cdef void count_connection(Receiver connection, Totals totals) noexcept:
    """Add what a connection has counted, when it leaves its engine."""
    add_counters(connection, &totals.accepting if connection.accepted else &totals.connecting)


cdef void count_engine(_Engine engine, engine_sums *sums) noexcept:
    """Add what an engine has counted."""
    sums.passes += engine.passes
    sums.sleeps += engine.sleeps
    sums.wakeups += engine.wakeups
    sums.polls += engine.polls
    sums.messages += engine.messages
    sums.ns_asleep += slept_ns(&engine.window)
    sums.ns_polling += engine.window.polled_ns
    add_stretches(&sums.worked, &engine.window.worked)


cdef void add_counters(Receiver connection, connection_sums *sums) noexcept:
    sums.opened += connection.opened
    sums.bytes_sent += connection.bytes_sent
    sums.bytes_received += connection.bytes_received
    sums.bytes_borrowed += connection.bytes_borrowed
    sums.bytes_placed += connection.bytes_placed
    sums.frames_sent += connection.frames_sent
    sums.frames_received += connection.frames_received
    sums.control_frames_sent += connection.controls_posted
    sums.waits_for_credits += connection.waits_for_credits
    sums.ns_without_credits += ns_without_credits(connection)


cdef int add_live(Receiver connection, connection_sums *sums) except -1:
    cdef size_t unsent = connection.fill + connection.backlog.size + connection.backlog.lent
    add_counters(connection, sums)
    if not connection.opened:
        return 0
    sums.connections += 1
    sums.bytes_unsent += unsent
    sums.bytes_registered += registered_bytes(connection)
    sums.sends_in_flight += connection.frames_sent - connection.done
    sums.slots_held += connection.inbox.held + connection.inbox.freed_count
    if unsent and not connection.ledger.credits():
        sums.wait_for_peer += 1
    elif unsent and not has_free_frame(connection):
        sums.wait_for_device += 1
    sums.wait_for_reader += connection.inbox.count > 0
    return 0


cdef int add_engine(_Engine engine, connection_sums *connecting, connection_sums *accepting,
                    engine_sums *sums) except -1:
    """Add what lives: an engine and its connections."""
    cdef Receiver connection
    sums.engines += 1
    count_engine(engine, sums)
    for connection in engine.table:
        if connection is not None:
            add_live(connection, accepting if connection.accepted else connecting)
    return 0


def stream_totals():
    """For each device that was used: what its connections have counted, by side, and its engines."""
    cdef _Engine engine
    cdef Totals totals
    cdef connection_sums connecting, accepting
    cdef engine_sums engines
    cdef list live = [alive for alive in (each() for each in _engines.valuerefs()) if alive is not None]
    found = {}
    for name, totals in list(_totals.items()):
        connecting, accepting, engines = totals.connecting, totals.accepting, totals.engines
        for engine in live:
            if engine.totals is totals and not engine.closed and engine.pid == verbs.rn_pid:
                add_engine(engine, &connecting, &accepting, &engines)
        found[name] = {"client": connecting, "server": accepting, "engines": engines}
    return found
