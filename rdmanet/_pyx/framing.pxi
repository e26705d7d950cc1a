# The sizes that the byte stream is built of: frames, slots, and how many of each.
#
# A frame is a header and what follows it (credit.pxd). A data frame fits in a slot of the peer's. A control frame is
# small, and takes nothing that data may have used up: slots, buffers and entries of the send queue are kept for it.

cdef enum:
    HEADER = FRAME_HEADER_BYTES
    BORROW_BYTES = 16384        # below this a copy is cheaper than a second scatter/gather entry
    PLACE_BYTES = 65536         # less is not placed into memory that a read has named: landing.pxi
    FIRST_SLOT_BYTES = 1024     # of a ring of a connection's own, until it grows
    CHAIN = 16                  # work requests handed to the device in one call
    CONTROL_RESERVE = 8         # receive slots, send buffers and send-queue entries for control frames
    CONTROL_BYTES = 4096        # a control frame with its header
    SHARED_OWN = 2              # data slots of a shared ring that are each connection's own,
    SHARED_CONTROL = 6          # and those for its control frames: credit.CONTROL_ALLOWANCE
    OPERATIONS = 8              # one-sided work requests in flight
    STRIDE_SKEW = 192           # slots start at different cache sets, not all on a page boundary

STREAM_FIRST_SLOT_BYTES = FIRST_SLOT_BYTES
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


cdef size_t bank_stride(size_t size) noexcept:
    """Of a ring of a connection's own. Small slots are at different cache sets anyway."""
    return stream_stride(size) if size > FIRST_SLOT_BYTES else (size + HEADER + 63) & ~<size_t>63


cdef size_t stream_send_bytes(size_t slot_bytes, size_t data_slots) noexcept:
    """What a connection sends from, while it does: its send slots and its control buffers."""
    return (stream_stride(slot_bytes) * data_slots + CONTROL_BYTES * CONTROL_RESERVE + 4095) & ~<size_t>4095
