# The two messages that each call has, Call and Reply, as C reads and begins them: a part of framing.pyx.
#
# Mostly they have no more in them than they must have. Such plain ones are the same bytes as any others. What is not
# exactly of that form is left to msgspec, which says what is wrong with it: so no more is accepted here than there.
#
# If a plain message ends with an argument or a result of TAIL_LEAST bytes and more, these are its `tail`: a bytes
# object of their own: what was received, or that into which they go from there. Whoever wants `bytes` has them without
# another copy.

cdef enum:
    CALL = 1                # the tags of messages.py
    REPLY = 2
    CONTAINERS_MOST = 16    # lists and maps in the arguments: so they are not nested deeper than msgspec takes them
    TAIL_LEAST = 4096
    NIL = 0xc0


@cython.final
@cython.freelist(64)
cdef class PlainCall:
    """A Call without metadata and memory.

    :ivar timeout_us: what is left of the caller's time; -1: no limit
    :ivar arguments: in msgpack, with no bytes in the place of the tail
    :ivar tail: the last argument, if it is long bytes; else None
    """


@cython.final
@cython.freelist(64)
cdef class PlainReply:
    """A Reply with a result, and no more; `tail` as in PlainCall."""


@cython.final
cdef class Filling:
    """The memory of new bytes, until they are filled."""

    cdef bytes _bytes

    def __cinit__(self, bytes new):
        self._bytes = new

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, PyBytes_AS_STRING(self._bytes), PyBytes_GET_SIZE(self._bytes), 0, flags)


cpdef bytes call_head(uint64_t number, uint64_t method, timeout_us):
    """A Call until its arguments, if nothing follows these."""
    cdef unsigned char head[32]
    cdef unsigned char *at = head + 2
    head[0], head[1] = 0x95, CALL
    at = write_number(write_number(at, number), method)
    if timeout_us is None:
        at[0] = NIL
        at += 1
    else:
        at = write_number(at, timeout_us)
    return PyBytes_FromStringAndSize(<const char *>head, at - head)


cpdef bytes reply_head(uint64_t number):
    """A Reply until its result, if nothing follows that."""
    cdef unsigned char head[16]
    head[0], head[1] = 0x93, REPLY
    return PyBytes_FromStringAndSize(<const char *>head, write_number(head + 2, number) - head)


cpdef bytes with_tail(bytes value, bytes tail):
    """An argument list, or a result, in msgpack, with the tail in its place."""
    cdef int size = length_bytes(<const unsigned char *>PyBytes_AS_STRING(value) + PyBytes_GET_SIZE(value))
    return value[:-size] + len(tail).to_bytes(size, "big") + tail


cdef struct envelope:
    bint is_call
    uint64_t number, method
    int64_t timeout_us


cdef object plain_message(data, const unsigned char *received, Py_ssize_t begin, Py_ssize_t length):
    """The message in these bytes, if it is a plain one; else None."""
    cdef const unsigned char *body = received + begin
    cdef const unsigned char *end = body + length
    cdef const unsigned char *at
    cdef envelope head
    cdef Py_ssize_t size = 0
    if TAIL_LEAST <= length and (size := tail_begins(body, end, length)):
        return tailed(
            PyBytes_FromStringAndSize(<const char *>body, size),
            PyBytes_FromStringAndSize(<const char *>body + size, length - size))
    at = read_envelope(body, end, &head)
    if at == NULL or behind_value(at, end) != end:
        return None
    return message_of(&head, part_of(data, received, at - received, end - at), None)


cdef object tailed(bytes begin, bytes tail):
    """The message that begins so, up to its tail."""
    cdef const unsigned char *body = <const unsigned char *>PyBytes_AS_STRING(begin)
    cdef const unsigned char *end = body + PyBytes_GET_SIZE(begin)
    cdef envelope head
    cdef const unsigned char *at = read_envelope(body, end, &head)
    cdef bytes value
    cdef char *length
    cdef int size = 2 if PyBytes_GET_SIZE(tail) <= 0xffff and end[-3] == 0xc5 else 4
    value = PyBytes_FromStringAndSize(<const char *>at, end - at)
    length = PyBytes_AS_STRING(value) + PyBytes_GET_SIZE(value) - size
    memset(length, 0, size)
    return message_of(&head, value, tail)


cdef object message_of(envelope *head, value, bytes tail):
    cdef PlainCall call
    cdef PlainReply reply
    if head.is_call:
        call = PlainCall.__new__(PlainCall)
        call.number, call.method, call.timeout_us = head.number, head.method, head.timeout_us
        call.arguments, call.tail = value, tail
        return call
    reply = PlainReply.__new__(PlainReply)
    reply.number, reply.result, reply.tail = head.number, value, tail
    return reply


cdef const unsigned char *read_envelope(const unsigned char *at, const unsigned char *end, envelope *head) noexcept:
    """Where the arguments or the result of a plain message begin; NULL: it is none, or not all there."""
    cdef uint64_t timeout_us = 0
    if end - at < 4 or not (at[0] == 0x95 and at[1] == CALL or at[0] == 0x93 and at[1] == REPLY):
        return NULL
    head.is_call, head.method, head.timeout_us = at[1] == CALL, 0, -1
    at = read_number(at + 2, end, &head.number)
    if at != NULL and head.is_call:
        at = read_number(at, end, &head.method)
        if at != NULL and at < end and at[0] == NIL:
            at += 1
        elif at != NULL:
            at = read_number(at, end, &timeout_us)
            if at == NULL or timeout_us >> 53:
                return NULL
            head.timeout_us = <int64_t>timeout_us
    if at == NULL or head.number >> 32 or head.method >> 32:
        return NULL
    return at


cdef Py_ssize_t tail_begins(const unsigned char *body, const unsigned char *end, Py_ssize_t length) noexcept:
    """Where the tail of a plain message of this length begins, of which these bytes are there; 0: it has none."""
    cdef envelope head
    cdef const unsigned char *at = read_envelope(body, end, &head)
    cdef int _i, others = 0, size
    if at == NULL or at >= end:
        return 0
    if head.is_call:
        if at[0] < 0x91 or at[0] > 0x9f:
            return 0
        others = at[0] - 0x91
        at += 1
        for _i in range(others):
            at = behind_value(at, end)
            if at == NULL:
                return 0
    if at >= end or at[0] < 0xc5 or at[0] > 0xc6:
        return 0
    size = 2 if at[0] == 0xc5 else 4
    if end - at <= size or read_big(at + 1, size) < TAIL_LEAST:
        return 0
    at += 1 + size
    return at - body if <uint64_t>(length - (at - body)) == read_big(at - size, size) else 0


cdef inline int length_bytes(const unsigned char *end) noexcept:
    """How many bytes there are of a length that is 0: with its type before it, a bytes object ends there."""
    return 2 if end[-3] == 0xc5 else 4


cdef const unsigned char *behind_value(const unsigned char *at, const unsigned char *end) noexcept:
    """The end of a value in msgpack; NULL: it is not complete, or not one that is simple."""
    cdef uint64_t values = 1, size
    cdef int containers = 0, length
    cdef unsigned char kind
    while values:
        if at >= end:
            return NULL
        values -= 1
        kind = at[0]
        at += 1
        size = 0
        if kind <= 0x7f or kind >= 0xe0 or kind == NIL or kind == 0xc2 or kind == 0xc3:
            continue
        if kind <= 0x9f:
            size = kind & 15
            values += size if kind & 0x10 else 2 * size
            containers += 1
        elif kind <= 0xbf:
            size = kind & 31
            if <uint64_t>(end - at) < size:
                return NULL
            at += size
        elif 0xc4 <= kind <= 0xc6 or 0xd9 <= kind <= 0xdb:          # bytes and text
            length = 1 << (kind - 0xc4 if kind <= 0xc6 else kind - 0xd9)
            if end - at < length:
                return NULL
            size = read_big(at, length)
            at += length
            if <uint64_t>(end - at) < size:
                return NULL
            at += size
        elif kind == 0xca or kind == 0xcb or 0xcc <= kind <= 0xd3:  # numbers
            length = 1 << (kind & 3) if kind >= 0xcc else 4 << (kind - 0xca)
            if end - at < length:
                return NULL
            at += length
        elif kind >= 0xdc:                                          # long lists and maps
            length = 2 << (kind & 1)
            if end - at < length:
                return NULL
            size = read_big(at, length)
            at += length
            values += size if kind <= 0xdd else 2 * size
            containers += 1
        else:
            return NULL
        if containers > CONTAINERS_MOST:
            return NULL
    return at


cdef const unsigned char *read_number(const unsigned char *at, const unsigned char *end, uint64_t *number) noexcept:
    """The end of a number that is not negative; NULL: it is something else, or not complete."""
    cdef int length
    if at >= end:
        return NULL
    if at[0] <= 0x7f:
        number[0] = at[0]
        return at + 1
    if not 0xcc <= at[0] <= 0xcf:
        return NULL
    length = 1 << (at[0] - 0xcc)
    if end - at <= length:
        return NULL
    number[0] = read_big(at + 1, length)
    return at + 1 + length


cdef inline uint64_t read_big(const unsigned char *at, int length) noexcept:
    cdef uint64_t number = 0
    cdef int i
    for i in range(length):
        number = number << 8 | at[i]
    return number


cdef unsigned char *write_number(unsigned char *at, uint64_t number) noexcept:
    """Write it in as few bytes as it takes. Returns the end."""
    cdef int i, power = 0
    if number <= 0x7f:
        at[0] = <unsigned char>number
        return at + 1
    while power < 3 and number >> (8 << power):
        power += 1
    at[0] = 0xcc + power
    for i in range(1 << power):
        at[1 + i] = <unsigned char>(number >> (8 * ((1 << power) - 1 - i)))
    return at + 1 + (1 << power)
