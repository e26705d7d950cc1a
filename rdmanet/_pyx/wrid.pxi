# How a wr_id says to whom a completion belongs.
#
# Of a failed completion only wr_id, the number of the queue pair, status and vendor_err are valid, not even its opcode.
# So wr_id, which is ours to choose, has to say everything that finding the owner takes. There are two layouts, because
# there are two ways to find one:
#
#     requests of programs         63..48  generation of the queue pair, or of the shared receive queue (WR_SHARED)
#     (queuepair.pxi, srq.pxi)     47..2   position in its queue
#                                  1       WR_SHARED: a receive of a shared receive queue
#                                  0       WR_SEND: of the send queue
#
#     the byte stream              63..44  index of the connection in the engine's table; SHARED_INDEX: of a shared ring
#     (chaining.pxi, ownring.pxi,  43..28  generation of this place in the table; of a shared ring: its number
#     sharedring.pxi)              27..25  unused
#                                  24      SEND_FLAG: of the send queue
#                                  23..0   sequence number of the send (sendlog.pxi), or slot of the ring
#
# A program's queue pairs come and go on any completion queue. The number finds the queue pair in a dict; the position
# finds the program's own wr_id, and what is kept for the request, in the in-flight table. A position is never used
# twice, so the completion of a request that was dropped finds nothing. What stands in the table instead of the
# program's wr_id may be an Operation, which somebody awaits; all other completions are the program's to collect.
#
# A message of the byte stream has no time for a dict, for objects, or for an entry a request. The index finds the
# connection, and its slots and sequence numbers are few. The generation tells an earlier connection here apart;
# its completions are counted, and dropped.
#
# No completion queue has both: those of an engine are its own, and nobody else posts to its queue pairs. So whoever
# polls a queue knows the layout, and calls its function in routing.pxi.

cdef enum:
    # Requests of programs.
    QP_GENERATION_SHIFT = 48
    POSITION_SHIFT = 2
    WR_SHARED = 2
    WR_SEND = 1

    # The byte stream.
    INDEX_SHIFT = 44
    SHARED_INDEX = 0xFFFFF
    STREAM_GENERATION_SHIFT = 28
    STREAM_GENERATION_MASK = 0xFFFF
    SEND_FLAG = 1 << 24
    LOW_MASK = 0xFFFFFF

cdef uint64_t POSITION_MASK = ((<uint64_t>1) << 46) - 1
cdef uint64_t WR_BASE_MASK = ~((<uint64_t>1 << STREAM_GENERATION_SHIFT) - 1)    # index and generation


cdef inline uint64_t stream_wr_base(uint64_t index, uint64_t generation) noexcept:
    """What all wr_ids of a connection, or of a shared ring, begin with."""
    return index << INDEX_SHIFT | (generation & STREAM_GENERATION_MASK) << STREAM_GENERATION_SHIFT
