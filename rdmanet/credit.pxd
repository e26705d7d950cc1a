"""The C face of credit.py: what the data engine needs of it without a Python object."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t


# credit.Kind and its neighbours for C; tests/unit/test_frames.py compares them with the enum.
cdef enum:
    FRAME_DATA = 1
    FRAME_CREDIT = 2
    FRAME_PING = 3
    FRAME_PONG = 4
    FRAME_FIN = 5
    FRAME_ABORT = 6
    FRAME_PLACED = 7
    FRAME_HEADER_BYTES = 16
    FRAME_PING_BYTES = 8
    FRAME_PLACED_BYTES = 16

# credit.HEADER in the byte order of every machine this package runs on.
cdef struct frame_header:
    uint32_t kind
    uint32_t length
    uint32_t granted
    uint32_t reaped

# credit.PLACED_BODY, likewise.
cdef struct placed_body:
    uint32_t serial
    uint32_t zero
    uint64_t upto

# Private constants of credit.py, as C integers where it is compiled.
cdef uint32_t _DATA, _CREDIT, _PING, _PONG, _FIN, _ABORT, _PLACED
cdef uint32_t _HEADER_BYTES, _PING_BYTES, _PLACED_BYTES, _CONTROL_BODY_MAX, _CREDIT_ALLOWANCE, _CONTROL_ALLOWANCE
cdef uint32_t _MASK, _LATE


@cython.final
cdef class Ledger:
    # What we may send.
    cdef readonly uint32_t peer_slots
    cdef readonly uint32_t peer_granted
    cdef readonly uint32_t sent
    # What the peer may send.
    cdef readonly uint32_t slot_bytes
    cdef readonly uint32_t data_slots
    cdef readonly uint32_t granted
    cdef readonly uint32_t grantable
    cdef readonly uint32_t received
    cdef readonly bint placement, growth
    # Control frames, ours and the peer's.
    cdef readonly uint32_t peer_reaped
    cdef readonly uint32_t reaped
    cdef uint64_t _flight
    cdef readonly uint32_t in_flight
    cdef readonly uint32_t credits_in_flight
    cdef uint32_t _untold_credits
    cdef readonly bint ping_waiting
    cdef readonly bint pong_owed
    cdef readonly bint fin_sent
    cdef readonly bint fin_received
    cdef readonly bint abort_sent
    cdef readonly bint abort_received

    cpdef uint32_t credits(self) noexcept
    cpdef uint32_t outstanding(self) noexcept
    cpdef uint32_t held(self) noexcept
    cpdef int data_sent(self) except -1
    cpdef int control_sent(self, uint32_t kind) except -1
    cpdef bint may_send(self, uint32_t kind) noexcept
    @cython.locals(count=uint32_t, flight=uint64_t)
    cpdef uint32_t control_in_flight(self, uint32_t kind) noexcept
    cpdef int frame_received(
        self, uint32_t byte_len, uint32_t kind, uint32_t length, uint32_t granted, uint32_t reaped
    ) except -1
    cpdef int slots_grown(self, uint32_t slot_bytes) except -1
    cpdef int slots_freed(self, uint32_t count) except -1
    @cython.locals(fresh=uint32_t)
    cpdef bint grant_due(self) noexcept
    cpdef uint32_t control_due(self, bint credit_body) noexcept
    cpdef bint posted_ok(self, uint32_t posted) noexcept
    @cython.locals(fresh=uint32_t, answered=uint32_t)
    cdef int _header_received(self, uint32_t granted, uint32_t reaped) except -1
    cdef int _control_received(self, uint32_t kind) except -1
