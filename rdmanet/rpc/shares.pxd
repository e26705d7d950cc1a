"""The C face of shares.py."""

cimport cython


cdef class Holder:
    cdef public bint is_counted
    cdef public long long inline_bytes, lent_bytes


cdef class Shares:
    cdef readonly object limits
    cdef long long _calls_most, _inline_most, _lent_most, _bytes_most
    cdef public long long calls, held_bytes
    cdef readonly dict _connections


cdef class Share:
    cdef Shares _shares
    cdef object _source
    cdef readonly long long calls, inline_bytes, lent_bytes, frame_bytes
    @cython.locals(shares=Shares, most=cython.longlong, held=cython.longlong, server_held=cython.longlong)
    cpdef begin(self, Holder holder, long long nbytes)
    @cython.locals(shares=Shares, inline_bytes=cython.longlong, lent_bytes=cython.longlong)
    cpdef end(self, Holder holder)
    cpdef hold(self, Holder holder, long long nbytes, str what)
    cpdef hold_lent(self, Holder holder, long long nbytes, str what)
    cpdef frame_is(self, long long nbytes)
    cdef _check_share(self, long long nbytes, str what)


@cython.final
cdef class Held:
    cdef Share _share
    cdef Holder _holder
    cdef long long _nbytes
