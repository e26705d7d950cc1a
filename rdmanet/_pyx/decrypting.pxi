# What asyncio's SSLProtocol reads of a TLS connection (ssl_protocol.py).

cdef enum:
    TLS_RECORD_BYTES = 16384    # of plain text at most (RFC 8446, 5.1)


def decrypted(sslobj, incoming, again):
    """All that can be decrypted now, and whether the peer has sent close_notify: (bytes, bool).

    SSLObject.read() has one record at a time. They are read one behind the other into one object.

    :param sslobj: an ssl.SSLObject
    :param incoming: the ssl.MemoryBIO with its encrypted bytes
    :param again: the exceptions that say that no whole record is there
    :raises ssl.SSLError: the bytes are no good
    """
    # Plain text is shorter than what it came in, unless it was compressed; then some of it stays where it is. TLS may
    # have taken the beginning of a record before.
    cdef Py_ssize_t room = incoming.pending + TLS_RECORD_BYTES, taken = 0, count
    cdef PyObject *plain = PyBytes_FromStringAndSize_raw(NULL, room)
    cdef bint is_closed = False
    if plain == NULL:
        raise MemoryError
    read, pending = sslobj.read, sslobj.pending
    try:
        try:
            while taken < room:
                count = read(room - taken, PyMemoryView_FromMemory(
                    PyBytes_AS_STRING_raw(plain) + taken, room - taken, PyBUF_WRITE))
                if count == 0:
                    is_closed = True
                    break
                taken += count
                if not incoming.pending and not pending():
                    break       # another read() would only raise an exception to say so
        except again:
            pass
        _PyBytes_Resize(&plain, taken)
        return <object>plain, is_closed
    finally:
        Py_XDECREF(plain)
