# Memory that is about to be filled with what comes: unfilled().
#
# The kernel gives a process new memory page by page, and clears each page first. For 64 MiB that takes four times as
# long as to copy 64 MiB into memory that is there. So large memory of this kind is not unmapped when its last user is
# gone, but kept for the next one who needs the same size. Small memory is the allocator's, which does the same; it is
# a bytearray that is not cleared.
#
#     its end     The object is freed when nothing refers to it: no view, no array, no operation of a device. Nothing
#                 else ends it, so nobody has the memory who could still use it.
#     content     Undefined: what was there before. Who takes memory fills it before anybody sees it.
#     sizes       Eight for each power of two, so that the next user's often fits; at most an eighth is wasted.
#     pages       Huge ones, if the kernel has them and lets programs ask (madvise): a new one takes one fault instead
#                 of 512.
#     how much    IDLE_BYTES in IDLE_AREAS areas; if there were more, the one that is idle for longest leaves.
#     leaving     What is more leaves, and not at once: who has used a gigabyte often needs one again soon, and new
#                 pages cost more than what is read into them. It waits in a list, whose links are in that memory
#                 itself, and is used again from there. What nobody has needed for some time is unmapped, piece by
#                 piece: to unmap a gigabyte in one go takes the kernel 3 to 50 ms. Who does that is told by
#                 `on_leaving` (stream/leaving.py); where there is nobody, it is unmapped at once. If each user needs
#                 another size, the list may have more than was ever in use at a time: all of the last seconds.
#     shortage    The kernel may take the pages of idle memory whenever it needs some (MADV_FREE, which costs nothing
#                 for huge pages, and for others as much as to fill them). Memory that the program has locked it may not
#                 take: that does not wait in the list.
#
# Who is not to be held up by the first use of much memory brings it in before, piece by piece: bring_in().
#
# All of this is one list for the process, behind the GIL. A forked child has copies of it, as of any private memory.

cdef extern from * nogil:
    """
    enum {
        RN_REUSED_BYTES = 2 << 20, /* a huge page, where pages have 4 KiB */
        RN_IDLE_BYTES = 256 << 20,
        RN_IDLE_AREAS = 64,
        RN_SIZES_BITS = 3, /* eight sizes for each power of two */
    };

    struct rn_area {
        char *address;
        size_t length;
    };

    /* At the beginning of an area that leaves. */
    struct rn_leaving {
        struct rn_leaving *next;
        size_t length;
    };

    static struct rn_area rn_idle[RN_IDLE_AREAS]; /* the first is idle for longest */
    static size_t rn_idle_count, rn_idle_bytes;
    static struct rn_leaving *rn_leaving;
    static size_t rn_leaving_bytes, rn_unneeded_bytes; /* the least that there were since somebody has looked */

    /* The size of the area for so many bytes; 0 if there is none. */
    static size_t rn_area_size(size_t length)
    {
        size_t step = RN_REUSED_BYTES >> RN_SIZES_BITS, size;

        while (length >> (RN_SIZES_BITS + 1) >= step)
            step *= 2;
        return __builtin_add_overflow(length, step - 1, &size) || size > SIZE_MAX / 4 ? 0 : size & ~(step - 1);
    }

    static char *rn_area_map(size_t length)
    {
        size_t align = RN_REUSED_BYTES, before;
        char *mapped = mmap(NULL, length + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (mapped == MAP_FAILED)
            return NULL;
        before = -(uintptr_t)mapped & (align - 1);
        if (before)
            munmap(mapped, before);
        munmap(mapped + before + length, align - before);
        (void)madvise(mapped + before, length, MADV_HUGEPAGE);
        return mapped + before;
    }

    static void rn_idle_remove(size_t i)
    {
        rn_idle_bytes -= rn_idle[i].length;
        rn_idle_count--;
        memmove(&rn_idle[i], &rn_idle[i + 1], (rn_idle_count - i) * sizeof(rn_idle[0]));
    }

    static void rn_area_leave(char *address, size_t length)
    {
        struct rn_leaving *area = (struct rn_leaving *)address;

        if (madvise(address, length, MADV_FREE)) { /* locked by the program: the kernel could not take it */
            munmap(address, length);
            return;
        }
        *area = (struct rn_leaving){rn_leaving, length};
        rn_leaving = area;
        rn_leaving_bytes += length;
    }

    static void rn_leaving_fewer(size_t length)
    {
        rn_leaving_bytes -= length;
        if (rn_unneeded_bytes > rn_leaving_bytes)
            rn_unneeded_bytes = rn_leaving_bytes;
    }

    /* An area of this size, after all. */
    static char *rn_leaving_stay(size_t length)
    {
        for (struct rn_leaving **at = &rn_leaving, *area; (area = *at); at = &area->next)
            if (area->length == length) {
                *at = area->next;
                rn_leaving_fewer(length);
                return (char *)area;
            }
        return NULL;
    }

    /* Take up to so many bytes out of the list, to be unmapped: the end of an area. */
    static struct rn_area rn_leaving_take(size_t most)
    {
        struct rn_leaving *area = rn_leaving;
        struct rn_area piece = {NULL, 0};

        if (!area)
            return piece;
        if (area->length <= most)
            rn_leaving = area->next;
        piece.length = area->length <= most ? area->length : most;
        piece.address = (char *)area + area->length - piece.length;
        area->length -= piece.length;
        rn_leaving_fewer(piece.length);
        return piece;
    }

    static size_t rn_unneeded(void)
    {
        size_t bytes = rn_unneeded_bytes;

        rn_unneeded_bytes = rn_leaving_bytes;
        return bytes;
    }

    static void rn_area_unmap(struct rn_area area)
    {
        munmap(area.address, area.length);
    }

    static void rn_idle_drop(void)
    {
        rn_area_leave(rn_idle[0].address, rn_idle[0].length);
        rn_idle_remove(0);
    }

    /* An area of this size, the one that was used last if there is any. */
    static char *rn_area_take(size_t length)
    {
        char *address;

        for (size_t i = rn_idle_count; i--;)
            if (rn_idle[i].length == length) {
                address = rn_idle[i].address;
                rn_idle_remove(i);
                return address;
            }
        if ((address = rn_leaving_stay(length)))
            return address;
        while (!(address = rn_area_map(length)) && (rn_leaving || rn_idle_count)) {
            if (rn_leaving)
                rn_area_unmap(rn_leaving_take(SIZE_MAX));
            else
                rn_idle_drop();
        }
        return address;
    }

    static void rn_area_give(char *address, size_t length)
    {
        if (length > RN_IDLE_BYTES) {
            rn_area_leave(address, length);
            return;
        }
        (void)madvise(address, length, MADV_FREE);
        while (rn_idle_count == RN_IDLE_AREAS || rn_idle_bytes + length > RN_IDLE_BYTES)
            rn_idle_drop();
        rn_idle[rn_idle_count++] = (struct rn_area){address, length};
        rn_idle_bytes += length;
    }

    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif

    /* Whole pages only. What the kernel does not do, the first use does. */
    static void rn_bring_in(char *address, size_t length)
    {
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t first = ((uintptr_t)address + page - 1) & -page, last = ((uintptr_t)address + length) & -page;

        if (first < last)
            (void)madvise((void *)first, last - first, MADV_POPULATE_WRITE);
    }
    """
    struct rn_area:
        char *address
        size_t length
    size_t RN_REUSED_BYTES, RN_IDLE_BYTES, rn_idle_bytes, rn_leaving_bytes
    rn_area rn_leaving_take(size_t most)
    void rn_area_unmap(rn_area area)
    size_t rn_unneeded()
    size_t rn_area_size(size_t length)
    char *rn_area_take(size_t length)
    void rn_area_give(char *address, size_t length)
    void rn_bring_in(char *address, size_t length)


REUSED_BYTES = RN_REUSED_BYTES

cdef object on_leaving = None   # is called when there is more to be unmapped


@cython.final
cdef class ReusableMemory:
    """Large memory of `unfilled()`. It has the buffer protocol."""

    cdef char *address
    cdef size_t length, area_bytes

    def __init__(self):
        raise TypeError("use unfilled()")

    def __dealloc__(self):
        if self.address is not NULL:
            rn_area_give(self.address, self.area_bytes)
            if rn_leaving_bytes:
                tell_of_leaving()

    def __len__(self):
        return <Py_ssize_t>self.length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.address, <Py_ssize_t>self.length, False, flags)

    def __repr__(self):
        return f"<ReusableMemory of {self.length} bytes>"


cdef int tell_of_leaving() except -1:
    """There is memory to be unmapped."""
    try:
        if on_leaving is not None and on_leaving():
            return 0
    except Exception:   # the loop is being closed, or the interpreter
        pass
    unmap_some(rn_leaving_bytes)
    return 0


def call_on_leaving(callback):
    """Call this whenever there is more memory to be unmapped; it returns whether it sees to that, by `unmap_some`.

    From then on, until None is given. Whoever lets go of memory calls it: in any thread, at any place.
    """
    global on_leaving
    on_leaving = callback


def unmap_some(size_t nbytes):
    """Unmap up to so many bytes of what nobody uses any more; returns how many are left."""
    cdef rn_area piece
    while nbytes and rn_leaving_bytes:
        piece = rn_leaving_take(nbytes)
        nbytes -= piece.length
        with nogil:
            rn_area_unmap(piece)
    return rn_leaving_bytes


def unneeded_bytes():
    """How many bytes of what leaves nobody has needed since this was called before."""
    return rn_unneeded()


def unfilled(nbytes):
    """Writable memory of undefined content, for who fills it: a bytearray, or large memory that may have been in use
    before.

    :raises ValueError: nbytes is out of range
    :raises MemoryError: there is none
    """
    cdef ReusableMemory memory
    cdef size_t size
    read_size(nbytes, "unfilled: nbytes", ValueError, &size)
    if size < RN_REUSED_BYTES:
        return PyByteArray_FromStringAndSize(NULL, <Py_ssize_t>size)
    memory = ReusableMemory.__new__(ReusableMemory)
    memory.area_bytes = rn_area_size(size)
    memory.address = rn_area_take(memory.area_bytes) if memory.area_bytes else NULL
    if memory.address is NULL:
        raise MemoryError(f"there is no memory for {nbytes} bytes")
    memory.length = size
    return memory


def idle_bytes():
    """How much memory of `unfilled()` is idle."""
    return rn_idle_bytes


def bring_in(memory, nbytes, offset):
    """Have the kernel provide so many bytes of writable memory, from this offset, before they are used.

    Their content stays as it is. Nothing happens where the kernel cannot do that, and to what is beyond the end.
    """
    cdef Py_buffer view
    cdef size_t length, begin
    read_size(nbytes, "bring_in: nbytes", ValueError, &length)
    read_size(offset, "bring_in: offset", ValueError, &begin)
    PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE)
    if begin < <size_t>view.len:
        length = min(length, <size_t>view.len - begin)
        with nogil:
            rn_bring_in(<char *>view.buf + begin, length)
    PyBuffer_Release(&view)
