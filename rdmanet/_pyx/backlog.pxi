# What was written and found no room in a frame: `bytes` objects, in order, the first perhaps in part.


@cython.final
cdef class Backlog:
    cdef object chunks          # deque of bytes
    cdef size_t offset          # how much of the first is taken already
    cdef size_t size            # bytes in all that are left

    def __cinit__(self):
        self.chunks = collections.deque()

    cdef inline int append(self, object chunk) except -1:
        self.chunks.append(chunk)
        self.size += <size_t>PyBytes_GET_SIZE(chunk)
        return 0

    cdef inline object first(self, const char **data, size_t *left):
        """The first chunk, and what of it is left. There is one."""
        first = self.chunks[0]
        data[0] = PyBytes_AS_STRING(first) + self.offset
        left[0] = <size_t>PyBytes_GET_SIZE(first) - self.offset
        return first

    cdef inline int taken(self, size_t n, size_t left) except -1:
        """`n` of the `left` bytes of the first chunk are in a frame."""
        self.size -= n
        if n == left:
            self.chunks.popleft()
            self.offset = 0
        else:
            self.offset += n
        return 0

    cdef int clear(self) except -1:
        self.chunks.clear()
        self.size = self.offset = 0
        return 0
