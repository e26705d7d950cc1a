# Only one thread at a time may use an identifier or a channel. The libraries promise no more, and closing an object
# while a call of another thread uses it would free it there. So each object is marked while a call is in progress
# (enter, leave), and a concurrent call is refused; the GIL makes that exact. Other threads may use it at other times.


@cython.no_gc_clear
cdef class _OneThread(Resource):
    """An object that only one thread at a time may use."""

    cdef bint in_use

    cdef int enter(self) except -1:
        """Mark the object before a library call without the GIL. Nothing may raise between this and leave()."""
        self.usable()
        if self.in_use:
            raise RuntimeError(
                f"{self!r} is in use by another thread; only one thread at a time can use a {type(self).__name__}")
        self.in_use = True
        return 0

    cdef void leave(self) noexcept:
        self.in_use = False
