# cython: language_level=3, auto_pickle=False
"""Where messages begin and end in what a connection receives: compiled, since each message goes through it.

A frame is a length of four bytes, in network order, and a body of that many bytes (messages.py). A short body is copied
out of what was received, so that what is kept of it does not keep the rest; a longer one is a view.

A long body that is not all there has memory for all of it, whose pages the kernel provides as they are filled. Large
memory has huge ones (_pyx/reuse.pxi): a peer that sends a few bytes of it takes all of the first, so that counts. A
transport can put the rest of the body there itself (`room`, `came`). The body ends at a multiple of ALIGN: so the last
thing in it, mostly the bytes of an array, is where an array may be. The arguments or the result in its message are a
read-only view of that memory, by whose `obj` an array gets it; what views msgspec's Raw has only the Raw there.

Of bodies of KEPT_LEAST and more the process keeps the last few, for the next ones: the allocator gives what is freed
beyond some megabytes back to the kernel, and new pages cost more than what is read into them. A body that somebody
refers to is not used again. Larger ones are kept by `unfilled` itself.

The two messages that each call has are read in plain.pxi, and the others by msgspec.
"""

import math

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset

import msgspec

from rdmanet._core import REUSED_BYTES, unfilled
from rdmanet.errors import ProtocolError, printable

cdef enum:
    C_HEADER_BYTES = 4
    C_COST_BYTES = 1024
    C_LONG_BYTES = 64 << 10
    COPIED_BYTES = 512  # a view of fewer costs more than the copy
    KEPT_LEAST = 256 << 10
    KEPT_MOST = 4
    OUTBOX_LEAST = 1024
    ALIGN = 16

HEADER_BYTES = C_HEADER_BYTES
COST_BYTES = C_COST_BYTES
LONG_BYTES = C_LONG_BYTES

cdef Py_ssize_t HUGE_PAGE = REUSED_BYTES
cdef tuple RAW_FIELDS = ("arguments", "result")
cdef list kept = []  # bytearrays, the eldest first

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)
    int _PyBytes_Resize(PyObject **, Py_ssize_t) except -1


cdef class Frames:
    """Takes what a connection receives, and gives what the bodies in it decode to.

    A body that is not all there takes pages of memory as it comes, not as it is announced.

    :param decode: makes a message of a body
    :param message_bytes: the longest body that is accepted
    :param first_bytes: the same for the first message
    :ivar gives_plain: whether it gives PlainCall and PlainReply, too
    :ivar budget: the cost of the messages that `feed` may still give (COST_BYTES). It gives one more, whatever that
        costs, as long as this is not used up
    :ivar unfinished_bytes: of a body of LONG_BYTES or more that is not all there, these are, with their huge pages
    """

    def __init__(self, decode, Py_ssize_t message_bytes, first_bytes=None):
        self.budget = math.inf
        self.unfinished_bytes = 0
        self._decode = decode
        self._message_bytes = message_bytes
        self._most = message_bytes if first_bytes is None else min(first_bytes, message_bytes)
        self._rest = b""
        self._at = 0
        self._body = None
        self._head = self._tail = None
        self._length = self._have = 0

    @property
    def is_behind(self):
        """Whether it keeps what may be a message, for which the budget did not suffice."""
        kept = len(self._rest) - self._at
        if self._body is not None:
            return kept > 0 or self._have == self._length
        return kept >= C_HEADER_BYTES

    def keep(self, data):
        """Take what has come, and give it with the next `feed`."""
        self._rest = self._rest[self._at :] + data
        self._at = 0

    def room(self):
        """The memory for what is missing of a long body; None if it is not known that there is one."""
        if self.unfinished_bytes == 0 or self._rest:
            return None
        return self._body[self._have :]

    def came(self, Py_ssize_t nbytes):
        """So many bytes were put into the `room`."""
        cdef Py_ssize_t taken
        self._have += nbytes
        if C_LONG_BYTES <= self._length > self._have:
            taken = self._have
            if self._length > HUGE_PAGE - ALIGN:
                taken += -taken % HUGE_PAGE
            self.unfinished_bytes = min(taken, self._length)
        else:
            self.unfinished_bytes = 0

    def drop(self):
        """Nothing more will come: keep nothing of what has."""
        self._rest, self._at = b"", 0
        self._body = self._head = self._tail = None
        self._length = self._have = self.unfinished_bytes = 0

    cpdef list feed(self, data=b""):
        """The messages that are complete with these bytes, to which they may refer, as far as the budget suffices.

        :raises ProtocolError: the peer sent something else. The framer cannot be used any more
        """
        cdef list messages = []
        cdef Py_ssize_t at = 0
        cdef Py_buffer buffer
        if self._rest:
            if data:
                self.keep(data)
            data, at = self._rest, self._at
            self._rest, self._at = b"", 0
        PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
        try:
            self._feed(messages, data, <const unsigned char *>buffer.buf, at, buffer.len)
        except (msgspec.MsgspecError, ValueError) as exc:
            raise ProtocolError(f"the peer sent what is no message: {printable(str(exc))}") from None
        except RecursionError:
            raise ProtocolError("the peer sent a message that is nested too deep") from None
        finally:
            PyBuffer_Release(&buffer)
        return messages

    cdef int _feed(self, list messages, data, const unsigned char *received, Py_ssize_t at, Py_ssize_t end) except -1:
        cdef Py_ssize_t length, start
        if self._body is not None and self.budget > 0:
            start, at = at, min(end, at + self._length - self._have)
            if self._tail is not None and at - start == self._length == end and type(data) is bytes:
                self._tail = data   # it has come by itself, as one of 64 KiB does
            else:
                self._body[self._have : self._have + at - start] = memoryview(data)[start:at]
            self.came(at - start)
            if self._have < self._length:
                return 0
            body, self._body = self._body, None
            if self._tail is not None:
                message = tailed(self._head, self._tail)
                self._head = self._tail = None
            else:
                message = self._decode(body)
                if self._length >= C_LONG_BYTES:
                    view_memory(message, body)
            messages.append(message)
            self.budget -= 1 + self._length // C_COST_BYTES
            self._most = self._message_bytes
        while end - at >= C_HEADER_BYTES and self.budget > 0:
            length = (<Py_ssize_t>received[at] << 24 | <Py_ssize_t>received[at + 1] << 16
                      | <Py_ssize_t>received[at + 2] << 8 | <Py_ssize_t>received[at + 3])
            at += C_HEADER_BYTES
            if length > self._most:
                name = "message_bytes" if self._most == self._message_bytes else "for a first message"
                raise ProtocolError(
                    f"the peer announces a message of {length} bytes: the limit {name} is {self._most}"
                )
            if end - at < length:
                self._begin(data, received, at, end, length)
                return 0
            message = plain_message(data, received, at, length) if self.gives_plain else None
            if message is None:
                message = self._decode(part_of(data, received, at, length))
            messages.append(message)
            self.budget -= 1 + length // C_COST_BYTES
            at += length
            self._most = self._message_bytes
        if end - at >= C_HEADER_BYTES:
            self._rest, self._at = data, at
        elif at < end:
            self._rest = PyBytes_FromStringAndSize(<const char *>received + at, end - at)
        return 0

    cdef int _begin(self, data, const unsigned char *received, Py_ssize_t at, Py_ssize_t end,
                    Py_ssize_t length) except -1:
        """The first bytes of a body of this length have come."""
        cdef Py_ssize_t before = -length % ALIGN, head = 0
        if self.gives_plain and length < KEPT_LEAST:
            head = tail_begins(received + at, received + end, length)
        try:
            if head:
                self._head = PyBytes_FromStringAndSize(<const char *>received + at, head)
                self._tail = PyBytes_FromStringAndSize(NULL, length - head)
                self._body = memoryview(Filling(self._tail))
            else:
                memory = kept_memory(before + length) if length >= KEPT_LEAST else unfilled(before + length)
                self._body = memoryview(memory)[before : before + length]
        except MemoryError:
            raise ProtocolError(
                f"the peer announces a message of {length} bytes: there is no memory for it"
            ) from None
        self._length, self._have = length - head, 0
        at += head
        self._body[: end - at] = memoryview(data)[at:end]
        self.came(end - at)
        return 0


cdef part_of(data, const unsigned char *received, Py_ssize_t at, Py_ssize_t length):
    """So many of the bytes that were received."""
    if length < COPIED_BYTES:
        return PyBytes_FromStringAndSize(<const char *>received + at, length)
    return memoryview(data)[at : at + length]


cdef kept_memory(Py_ssize_t nbytes):
    """Memory for so many bytes or a few more: that of a former body, if nobody refers to it."""
    cdef Py_ssize_t size = nbytes + -nbytes % C_LONG_BYTES, i
    if size >= HUGE_PAGE:
        return unfilled(nbytes)
    for i in range(len(kept)):
        memory = kept[i]
        if Py_REFCNT(memory) == 2 and len(memory) == size:  # the list's and ours
            return memory
    memory = unfilled(size)
    kept.append(memory)
    if len(kept) > KEPT_MOST:
        del kept[0]
    return memory


def is_kept(memory):
    """Whether it is the memory of a body that is used again when nobody else refers to it."""
    return any([memory is each for each in kept])


@cython.final
cdef class Outbox:
    """Messages that are to be written together, each with its length before it.

    They are collected in the bytes object that is written then: it grows, and is cut at its end.

    :ivar nbytes: how many bytes there are
    """

    def __len__(self):
        return self.nbytes

    cpdef put(self, bytes head, bytes body):
        """Add a message: `head`, and the rest of it."""
        cdef Py_ssize_t first = PyBytes_GET_SIZE(head), length = first + PyBytes_GET_SIZE(body)
        cdef Py_ssize_t needed = self.nbytes + C_HEADER_BYTES + length
        cdef bytes larger
        cdef char *at
        if needed > self._size:
            larger = PyBytes_FromStringAndSize(NULL, max(needed, 2 * self._size, self._usual, OUTBOX_LEAST))
            if self.nbytes:
                memcpy(PyBytes_AS_STRING(larger), PyBytes_AS_STRING(self._bytes), self.nbytes)
            self._bytes, self._size = larger, PyBytes_GET_SIZE(larger)
        at = PyBytes_AS_STRING(self._bytes) + self.nbytes
        write_length(<unsigned char *>at, length)
        memcpy(at + C_HEADER_BYTES, PyBytes_AS_STRING(head), first)
        memcpy(at + C_HEADER_BYTES + first, PyBytes_AS_STRING(body), length - first)
        self.nbytes = needed

    cpdef bytes take(self):
        """Them all, in one object."""
        cdef PyObject *taken
        cdef Py_ssize_t nbytes = self.nbytes
        cdef bytes found = self._bytes
        if nbytes == 0:
            return b""
        self.clear()
        self._usual = nbytes + nbytes // 8
        Py_INCREF(found)
        taken = <PyObject *>found
        found = None    # so that it has one reference
        _PyBytes_Resize(&taken, nbytes)
        found = <bytes>taken
        Py_DECREF(found)
        return found

    cpdef clear(self):
        """Drop them."""
        self._bytes = None
        self.nbytes = self._size = 0


cdef inline void write_length(unsigned char *at, Py_ssize_t length) noexcept:
    at[0], at[1], at[2], at[3] = length >> 24 & 255, length >> 16 & 255, length >> 8 & 255, length & 255


cpdef bytes framed(bytes body, bytes head=b""):
    """A body with its length before it.

    :param head: begins the body
    """
    cdef Py_ssize_t first = PyBytes_GET_SIZE(head), length = first + PyBytes_GET_SIZE(body)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, C_HEADER_BYTES + length)
    cdef char *start = PyBytes_AS_STRING(frame)
    write_length(<unsigned char *>start, length)
    memcpy(start + C_HEADER_BYTES, PyBytes_AS_STRING(head), first)
    memcpy(start + C_HEADER_BYTES + first, PyBytes_AS_STRING(body), length - first)
    return frame


cdef int view_memory(message, body) except -1:
    """Have a view of the body in place of the Raw in a message."""
    cdef Py_buffer whole, part
    for name in RAW_FIELDS:
        if (raw := getattr(message, name, None)) is not None:
            PyObject_GetBuffer(body, &whole, PyBUF_SIMPLE)
            PyObject_GetBuffer(raw, &part, PyBUF_SIMPLE)
            start = <const char *>part.buf - <const char *>whole.buf
            length = part.len
            PyBuffer_Release(&part)
            PyBuffer_Release(&whole)
            setattr(message, name, body[start : start + length].toreadonly())
    return 0


include "plain.pxi"
