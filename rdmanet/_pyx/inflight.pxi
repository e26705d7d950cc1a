# The requests that are posted and not completed, with what they keep alive.
#
# The device may write into a request's memory until its completion has been polled. So each queue pair has an _InFlight
# for each of its two queues, and each shared receive queue has a _Shared: what they refer to lives until then. They
# find it by the completion's wr_id (wrid.pxi). The byte stream keeps its own books: sendlog.pxi for sends, and
# ownring.pxi and sharedring.pxi for receives.

# Storing into and taking out of a list. Most of the cost of posting and polling in Python is reference counting, and
# most of that would be for None. So an empty entry contains None, and its reference is kept while the entry is in use.
cdef extern from *:
    """
    static inline void rn_pair_put(PyObject *list, Py_ssize_t i, PyObject *wr_id, PyObject *kept)
    {
        Py_INCREF(wr_id);
        Py_INCREF(kept);
        PyList_SET_ITEM(list, i, wr_id);
        PyList_SET_ITEM(list, i + 1, kept);
    }

    static inline PyObject *rn_pair_take(PyObject *list, Py_ssize_t i)
    {
        PyObject *wr_id = PyList_GET_ITEM(list, i);
        PyObject *kept = PyList_GET_ITEM(list, i + 1);

        PyList_SET_ITEM(list, i, Py_None);
        PyList_SET_ITEM(list, i + 1, Py_None);
        Py_DECREF(kept); /* may run arbitrary code, so it comes last */
        return wr_id;
    }
    """
    void rn_pair_put(list ring, Py_ssize_t i, object wr_id, object kept)    # the entry must be empty
    object rn_pair_take(list ring, Py_ssize_t i)                            # the entry must not be empty
    PyObject *PyList_GET_ITEM(list items, Py_ssize_t i)


cdef enum:
    PLACES_MIN = 16

cdef list _NOTHING_POSTED = []     # of all that have no places yet; the engine's connections never have any


@cython.final
@cython.no_gc_clear
cdef class _InFlight:
    """The requests of one queue of a queue pair that are posted and whose completions have not been polled, in order.

    A ring of pairs: the user's wr_id, and the object to keep alive, which is None only in an empty entry. It is an
    ordinary list, so that the collector can traverse it. If room() has returned true, begin() needs no allocation, so
    no other thread and no destructor runs between the requests of one chain.

    A completion ends all requests before its own, because a queue completes in the order of posting. There are two
    exceptions, in which a signaled request waits for its own completion. Linux's soft-iWARP completes requests that
    were posted after a READ before the READ. The receives of a datagram queue pair of the embedded device complete in
    the order in which their senders, which take one each, have finished with them.
    """

    cdef list ring
    cdef bytearray waits       # per entry: 1 if others may overtake it; None if nothing overtakes
    cdef bint all_wait         # all entries wait for their own completions (datagram receives); else only READs
    cdef bint all_signaled
    cdef uint64_t tag          # generation and queue
    cdef uint64_t oldest, next_position
    cdef uint64_t places       # a power of two, or 0
    cdef list queues           # weak references to the OperationQueues whose operations wait for room here, or None

    def __init__(self, uint64_t generation, bint send, bint overtakes=False, bint all_signaled=False):
        self.ring = _NOTHING_POSTED
        self.tag = generation << QP_GENERATION_SHIFT | send
        if overtakes:
            self.waits = bytearray()
        self.all_wait = overtakes and not send
        self.all_signaled = all_signaled

    cdef inline Py_ssize_t count(self) noexcept:
        return <Py_ssize_t>(self.next_position - self.oldest)

    cdef inline bint room(self, Py_ssize_t n) noexcept:
        return self.next_position - self.oldest + n <= self.places

    cdef int grow(self, Py_ssize_t n) except -1:
        """Make room for n more."""
        cdef uint64_t places = self.places, position
        cdef Py_ssize_t i, was
        cdef list ring
        cdef bytearray waits = None
        places = max(places, PLACES_MIN)
        while places < self.next_position - self.oldest + n:
            places *= 2
        ring = [None] * (2 * places)
        if self.waits is not None:
            waits = bytearray(places)
        # Creating the list may have run arbitrary code; nothing does from here on.
        if places <= self.places or places < self.next_position - self.oldest:
            return 0
        for position in range(self.oldest, self.next_position):
            was, i = 2 * (position & (self.places - 1)), 2 * (position & (places - 1))
            if self.ring[was + 1] is not None:
                rn_pair_put(ring, i, self.ring[was], self.ring[was + 1])
                rn_pair_take(self.ring, was)
            if waits is not None:
                waits[position & (places - 1)] = self.waits[position & (self.places - 1)]
        self.ring, self.waits, self.places = ring, waits, places
        return 0

    cdef inline uint64_t begin(self, object wr_id, object kept) noexcept:
        """The device's wr_id for a request about to be posted; there must be room."""
        cdef uint64_t position = self.next_position
        cdef Py_ssize_t i = 2 * (position & (self.places - 1))
        self.next_position += 1
        rn_pair_put(self.ring, i, wr_id, kept)
        if self.waits is not None:
            self.waits[position & (self.places - 1)] = self.all_wait
        return self.tag | (position & POSITION_MASK) << POSITION_SHIFT

    cdef inline void may_be_overtaken(self, const verbs.ibv_send_wr *wr) noexcept:
        """Mark the request that began last, if later ones may overtake it: a signaled READ."""
        if (self.waits is not None and wr.opcode == verbs.IBV_WR_RDMA_READ
                and (self.all_signaled or wr.send_flags & verbs.IBV_SEND_SIGNALED)):
            self.waits[(self.next_position - 1) & (self.places - 1)] = 1

    cdef int take_back(self, Py_ssize_t count) except -1:
        """Remove the last count requests, which were refused. Their caller holds the objects, so no destructor runs."""
        for _ in range(count):
            self.next_position -= 1
            rn_pair_take(self.ring, 2 * (self.next_position & (self.places - 1)))
        return 0

    cdef object end(self, uint64_t device_wr_id):
        """The user's wr_id. Unsignaled requests before it end with it."""
        cdef uint64_t ahead = ((device_wr_id >> POSITION_SHIFT) - self.oldest) & POSITION_MASK
        cdef uint64_t last = self.oldest + ahead
        if ahead >= self.next_position - self.oldest:
            return None     # it was dropped
        if self.waits is not None:
            return self.end_but_waiting(last)
        while self.oldest < last:
            self.oldest += 1
            rn_pair_take(self.ring, 2 * ((self.oldest - 1) & (self.places - 1)))
        if self.oldest != last:
            return None     # a destructor of a released object has polled, or closed the queue pair
        self.oldest += 1
        return rn_pair_take(self.ring, 2 * (last & (self.places - 1)))

    cdef object end_but_waiting(self, uint64_t last):
        """The same, except that earlier requests that wait for their own completions stay."""
        cdef uint64_t position
        cdef Py_ssize_t i
        cdef list dropped = []  # released at the end
        cdef object wr_id = None
        for position in range(self.oldest, last + 1):
            i = position & (self.places - 1)
            if self.ring[2 * i + 1] is None or (position != last and self.waits[i]):
                continue
            dropped.append(self.ring[2 * i + 1])
            wr_id = rn_pair_take(self.ring, 2 * i)
            dropped.append(wr_id)
        # An ended request keeps nothing alive.
        while self.oldest < self.next_position and self.ring[2 * (self.oldest & (self.places - 1)) + 1] is None:
            self.oldest += 1
        return wr_id

    cdef int clear(self) except -1:
        """Drop all requests. The awaiters of operations get an error."""
        cdef list ring = self.ring
        cdef OperationQueue queue
        cdef Py_ssize_t i
        cdef object wr_id
        self.places, self.ring = 0, _NOTHING_POSTED
        if self.waits is not None:
            self.waits = bytearray()
        self.oldest = self.next_position
        for i in range(0, len(ring), 2):
            if ring[i + 1] is not None:
                wr_id = rn_pair_take(ring, i)
                if type(wr_id) is Operation:
                    (<Operation>wr_id).lost()
        for reference in self.queues or ():
            queue = reference()
            if queue is not None:
                queue.emptied()
        return 0


@cython.final
@cython.no_gc_clear
cdef class _Shared:
    """The receives of an SRQ, which complete in any order."""

    cdef dict entries          # position to (the user's wr_id, elements)
    cdef uint64_t tag
    cdef uint64_t next_position

    def __init__(self, uint64_t generation):
        self.entries = {}
        self.tag = generation << QP_GENERATION_SHIFT | WR_SHARED

    cdef uint64_t begin(self, object wr_id, _Elements elements) except? 0:
        cdef uint64_t position = self.next_position & POSITION_MASK
        self.next_position += 1
        self.entries[position] = (wr_id, elements)
        return self.tag | position << POSITION_SHIFT

    cdef object end(self, uint64_t device_wr_id):
        entry = self.entries.pop(device_wr_id >> POSITION_SHIFT & POSITION_MASK, None)
        return None if entry is None else entry[0]
