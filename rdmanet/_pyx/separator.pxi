# The search for a separator in what is unread, which lies in pieces: the bytearray `aside`, then slot after slot.
#
# A position counts from the first unread byte. In each piece the separator's last byte is looked for; where that is
# found, the others may be in pieces before. Nothing is moved and nothing taken. A read that finds none goes on later
# where this search ended, so no byte is searched twice, but for the last few, where a separator may have begun.

cdef extern from "string.h" nogil:
    void *memchr(const void *, int, size_t)
    int memcmp(const void *, const void *, size_t)


cdef Py_ssize_t find_separator(IntoReader into, bytes separator, size_t start) except -2:
    """The position of the first separator at or after `start`; -1 if there is none."""
    cdef const char *sep = PyBytes_AS_STRING(separator)
    cdef size_t length = <size_t>PyBytes_GET_SIZE(separator), base = 0, size
    cdef size_t last = start + length - 1       # where its last byte may be, at the earliest
    cdef Receiver connection = into.connection
    cdef Inbox inbox
    cdef ready_slot *entry
    cdef Py_ssize_t at
    cdef uint32_t i
    size = <size_t>PyByteArray_GET_SIZE(into.aside)
    at = find_in_piece(into, PyByteArray_AS_STRING(into.aside), 0, size, sep, length, last)
    if at != -1 or not into.has_slots():
        return at
    base = size
    inbox = connection.inbox
    for i in range(inbox.count):
        entry = inbox.at(i)
        size = entry.length - (inbox.offset if i == 0 else 0)
        at = find_in_piece(
            into, entry.data + (inbox.offset if i == 0 else 0), base, size, sep, length, last)
        if at != -1:
            return at
        base += size
    return -1


cdef Py_ssize_t find_in_piece(IntoReader into, const char *piece, size_t base, size_t size, const char *sep,
                              size_t length, size_t last) except -2:
    """The same for separators whose last byte is in this piece, which begins at position `base`."""
    cdef const char *found
    cdef size_t i = last - base if last > base else 0
    cdef size_t at
    while i < size:
        found = <const char *>memchr(piece + i, sep[length - 1], size - i)
        if found == NULL:
            return -1
        i = found - piece
        at = base + i + 1 - length
        if length == 1 or (memcmp(piece + i + 1 - length, sep, length) == 0 if i + 1 >= length
                           else is_separator_at(into, at, sep, length)):
            return <Py_ssize_t>at
        i += 1
    return -1


cdef bint is_separator_at(IntoReader into, size_t at, const char *sep, size_t length) except -1:
    """Whether `sep` is at position `at`; it may span pieces."""
    cdef size_t size = <size_t>PyByteArray_GET_SIZE(into.aside), i
    cdef Inbox inbox
    cdef uint32_t slot = 0
    cdef size_t offset
    for i in range(length):
        if at + i < size:
            if PyByteArray_AS_STRING(into.aside)[at + i] != sep[i]:
                return False
            continue
        inbox = into.connection.inbox
        offset = at + i - size + inbox.offset
        slot = 0
        while offset >= inbox.at(slot).length:
            offset -= inbox.at(slot).length
            slot += 1
        if inbox.at(slot).data[offset] != sep[i]:
            return False
    return True
