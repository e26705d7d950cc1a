# READs or WRITEs of many blocks on a connection of the byte stream, awaited as one.
#
# A block is a range of the peer's memory and the range here that it goes to or comes from. Each takes a work request,
# since one request reaches one contiguous range over there. What a block costs in Python would be more than what its
# bytes cost, up to some 16 KiB. So the blocks are numbers in an array, and are posted from here:
#
#     joined     two blocks that follow each other, here and there, are one, as long as that is short enough
#     chained    some are handed to the device in one call, and the last of them alone gives a completion
#     in turns   OPERATIONS entries are for all one-sided requests of a connection. A list takes those that are free,
#                except KEPT_FREE, which short operations, and the keys of memory on offer, find free
#     at once    the embedded device mostly copies blocks at once, when it is handed their list: no work request is made
#                (rdmanet_soft_move). Or it executes a chain while it is posted: then its completion is there when the
#                call returns, and is taken, and the next chain posted, without a pass between them: `begin`. It stops
#                when this has taken so long that the loop is due to turn (engine.pxi)
#
# What the embedded device is handed it may execute at once, in the loop's thread: a chain has `at_once` bytes at most.
# A block that is longer goes in pieces, as transfers.py says, of which LONG_IN_FLIGHT are posted; of shorter pieces as
# many as have that many bytes, in chains of one piece's: so not each of them wakes the loop.
#
# Each entry of the log (sendlog.pxi) refers to the list. It ends once: when all has been read or written, or when
# nothing more is to be posted (`stop`, a failure) and nothing is in flight, or with the queue pair. So whoever waits
# for its end knows that no device touches the memory.

cdef enum:
    KEPT_FREE = 2
    LONG_IN_FLIGHT = 2
    BLOCKS_FEW = 16             # that have room without being asked for


@cython.final
@cython.no_gc_clear     # it may be in flight, and end, when the collector destroys the connection
cdef class Blocks:
    """Many one-sided requests of one kind, awaited as one; see Lists in stream/blocks.py, which posts them.

    :param future: which is told of the end; may be replaced. None: whoever has begun this looks whether it is `done`
    :param opcode: RDMA_READ or RDMA_WRITE
    :param at_once: the most bytes of one chain, which the device may execute while it is posted
    :param piece: the most bytes of one request, where a block is longer than that

    :ivar done: it has ended: no device touches the memory that it names
    :ivar moved: bytes of what has completed
    :ivar is_to_await: of what a FastPath has begun: it is not done, or the loop is due to turn
    :ivar error: why it ended too early, if there was no future to be told; to be taken out
    """

    cdef block *blocks
    cdef Py_ssize_t count, room, posted, in_flight
    cdef int opcode
    cdef uint64_t at_once, piece
    cdef uint64_t long_in_flight    # bytes of those that are longer than at_once
    cdef uint64_t total         # bytes
    cdef bint stopped
    cdef bint beginning         # `begin` runs: what completes leaves as much room as there was before
    cdef readonly bint done
    cdef readonly bint is_to_await
    cdef readonly uint64_t moved
    cdef public object future, error
    cdef object closing

    def __cinit__(self, future, int opcode, uint64_t at_once, uint64_t piece):
        if opcode not in (verbs.IBV_WR_RDMA_READ, verbs.IBV_WR_RDMA_WRITE):
            raise ValueError(f"opcode {opcode} is neither RDMA_READ nor RDMA_WRITE")
        if not 0 < at_once <= piece < 1 << 31:
            raise ValueError(f"chains of {at_once} bytes, and pieces of {piece}")
        self.future = future
        self.opcode = opcode
        self.at_once = at_once
        self.piece = piece

    def __dealloc__(self):
        free(self.blocks)

    def __len__(self):
        """How many requests it is."""
        return self.count

    # -- what it consists of ---------------------------------------------------------------------------------

    def add(self, view, uint32_t lkey, uint64_t address, uint32_t rkey):
        """One block: all of this memory, and the peer's at this address. Both live until it has ended."""
        cdef Py_buffer c
        self.still_open()
        PyObject_GetBuffer(view, &c, PyBUF_SIMPLE)
        try:
            self.append(<uint64_t>c.buf, address, <uint64_t>c.len, lkey, rkey, self.piece)
        finally:
            PyBuffer_Release(&c)

    def add_rows(self, view, uint32_t lkey, uint64_t address, uint32_t rkey, uint64_t row_bytes, uint64_t rows,
                 indices):
        """The rows of this memory, one after the other, and those of the peer's array that `indices` name.

        :param rows: the peer's array has so many
        :param indices: numbers of 64 bits with a sign, contiguous; as many as this memory has rows
        :raises IndexError: one of them is negative, or no row of the peer's; nothing is added then
        """
        cdef Py_buffer c, numbers
        cdef Py_ssize_t i, count
        cdef int64_t *index
        self.still_open()
        PyObject_GetBuffer(indices, &numbers, PyBUF_SIMPLE)
        try:
            index = <int64_t *>numbers.buf
            count = numbers.len // <Py_ssize_t>sizeof(int64_t)
            for i in range(count):
                if index[i] < 0 or <uint64_t>index[i] >= rows:
                    raise IndexError(f"row {index[i]} is not within {rows} rows of {row_bytes} bytes")
            PyObject_GetBuffer(view, &c, PyBUF_SIMPLE)
            try:
                if <uint64_t>c.len != <uint64_t>count * row_bytes:
                    raise ValueError(f"{count} rows of {row_bytes} bytes are not {c.len} bytes")
                self.reserve(count)
                for i in range(count):
                    self.append(<uint64_t>c.buf + i * row_bytes, address + index[i] * row_bytes, row_bytes, lkey, rkey,
                                self.piece)
            finally:
                PyBuffer_Release(&c)
        finally:
            PyBuffer_Release(&numbers)

    cdef int still_open(self) except -1:
        if self.posted or self.stopped or self.done:
            raise ValueError("this list has begun")
        return 0

    cdef int reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t room = self.count + more
        cdef block *grown
        if room <= self.room:
            return 0
        room = max(room, 2 * self.room, BLOCKS_FEW)
        grown = <block *>realloc(self.blocks, room * sizeof(block))
        if grown is NULL:
            raise MemoryError()
        self.blocks = grown
        self.room = room
        return 0

    cdef inline int append(self, uint64_t here, uint64_t there, uint64_t length, uint32_t lkey, uint32_t rkey,
                           uint64_t piece) except -1:
        cdef block *last
        self.total += length
        if self.count and length:
            last = &self.blocks[self.count - 1]
            if (
                last.there + last.length == there and last.here + last.length == here and last.lkey == lkey
                and last.rkey == rkey and last.length + length <= self.at_once
            ):
                last.length += <uint32_t>length
                return 0
        if length > piece or self.count == self.room:
            return self.append_pieces(here, there, length, lkey, rkey, piece)
        if length:
            self.put(here, there, <uint32_t>length, lkey, rkey)
        return 0

    cdef int append_pieces(self, uint64_t here, uint64_t there, uint64_t length, uint32_t lkey, uint32_t rkey,
                           uint64_t piece) except -1:
        cdef uint64_t part
        while length:
            part = min(length, piece)
            self.reserve(1)
            self.put(here, there, <uint32_t>part, lkey, rkey)
            here, there, length = here + part, there + part, length - part
        return 0

    cdef inline void put(self, uint64_t here, uint64_t there, uint32_t length, uint32_t lkey, uint32_t rkey) noexcept:
        cdef block *last = &self.blocks[self.count]
        last.here, last.there, last.length, last.lkey, last.rkey = here, there, length, lkey, rkey
        self.count += 1

    # -- its way ---------------------------------------------------------------------------------------------

    def begin(self, Sender connection not None):
        """Post what the device executes at once, for as long as the loop need not turn.

        Returns whether that was all, or may go on like this in the loop's next turn. If not, `post` goes on.
        """
        return self.go_on_at_once(connection)

    cdef bint go_on_at_once(self, Sender connection) except -1:
        cdef _Engine engine = connection.engine
        cdef bint are_all
        if (
            engine is None or engine.in_pass or self.in_flight
            or connection.controls_posted != connection.controls_done   # whose completion the program hears of
        ):
            return False
        engine.begin_turn()
        while not self.stopped and self.posted < self.count:
            if connection.broken or connection.qp_c == NULL or self.blocks[self.posted].length > self.at_once:
                return False
            if self.move(connection):
                if engine.turn_is_over() and self.posted < self.count:
                    return True
                continue
            if not self.post_chain(connection):
                return False
            self.beginning = True
            try:
                are_all = engine.take_own_operations(connection)
            finally:
                self.beginning = False
            if self.in_flight or not are_all:
                engine.rouse(connection.queue)
            if self.in_flight:
                return False
            if engine.turn_is_over():
                return True
        if not self.done:
            self.finish()
        return True

    cdef uint32_t move(self, Sender connection) noexcept:
        """Have the device copy what it can at once, of one chain's bytes; returns how many blocks it has."""
        cdef _Engine engine = connection.engine
        cdef uint32_t i, count
        if engine.moves is NULL or tracing != NULL:     # which sees each request
            return 0
        count = engine.moves(connection.qp_c, self.opcode, flags_of_part(engine, self.total), &self.blocks[self.posted],
                             <uint32_t>(self.count - self.posted), self.at_once)
        for i in range(count):
            self.moved += self.blocks[self.posted + i].length
        self.posted += count
        return count

    def post(self, Sender connection not None):
        """Post what may be in flight now. Returns whether nothing is left to be posted.

        :raises OSError: the connection is lost
        """
        while not self.stopped and self.posted < self.count:
            if not self.post_chain(connection):
                return False
            connection.engine.rouse(connection.queue)
            connection.engine.wake()
        if not self.in_flight:
            self.finish()   # there is nothing in it
        return True

    cdef bint post_chain(self, Sender connection) except -1:
        cdef verbs.ibv_send_wr wr[OPERATIONS]
        cdef verbs.ibv_sge sge[OPERATIONS]
        cdef verbs.ibv_send_wr *bad = NULL
        cdef _Engine engine = connection.engine
        cdef Py_ssize_t n = 0
        cdef uint64_t bytes_in_chain = 0, long_in_chain = 0
        cdef block *next
        cdef int rc
        if connection.broken or connection.qp_c == NULL:
            raise ConnectionResetError(ECONNRESET, "the connection is lost")
        while self.posted < self.count and connection.operations < OPERATIONS - KEPT_FREE:
            next = &self.blocks[self.posted]
            if next.length > self.at_once:
                if self.long_in_flight + next.length > LONG_IN_FLIGHT * self.piece:
                    break
                if long_in_chain and long_in_chain + next.length > self.piece:
                    break
                self.long_in_flight += next.length
                long_in_chain += next.length
            elif n and bytes_in_chain + next.length > self.at_once:
                break
            else:
                bytes_in_chain += next.length
            memset(&wr[n], 0, sizeof(wr[n]))
            sge[n].addr, sge[n].length, sge[n].lkey = next.here, next.length, next.lkey
            wr[n].wr_id = connection.wr_base | SEND_FLAG | connection.log.next_low()
            wr[n].sg_list = &sge[n]
            wr[n].num_sge = 1
            wr[n].opcode = <verbs.ibv_wr_opcode>self.opcode
            wr[n].wr.rdma.remote_addr, wr[n].wr.rdma.rkey = next.there, next.rkey
            wr[n].send_flags = flags_of_part(engine, self.total)
            if connection.operations and self.opcode != verbs.IBV_WR_RDMA_READ:     # see post_beside
                wr[n].send_flags |= engine.behind_operations
            if n:
                wr[n - 1].next = &wr[n]
            request_begins(connection, OPERATION, next.length, self)
            self.in_flight += 1
            self.posted += 1
            n += 1
        if n == 0:
            return False
        wr[n - 1].send_flags |= verbs.IBV_SEND_SIGNALED
        rc = verbs.rn_post_send(connection.qp_c, &wr[0], &bad)
        if rc < 0:
            # Entries are kept free for these; whatever it is, the connection cannot go on, and this ends with it.
            fail_connection(connection, OSError(-rc, f"ibv_post_send: {strerror(-rc).decode()}"))
            self.stopped = True
        return True

    cdef int completed(self, uint32_t length) except -1:
        """One of its requests has."""
        self.moved += length
        self.in_flight -= 1
        if length > self.at_once:
            self.long_in_flight -= length
        if not self.in_flight and (self.stopped or self.posted == self.count):
            self.finish()
        return 0

    # -- its end ---------------------------------------------------------------------------------------------

    def close_after(self, resource):
        """Close this when it has ended, before the future is told."""
        if self.done:
            resource.close()
        else:
            self.closing = resource

    def stop(self, error=None):
        """Post nothing more. It ends when nothing is in flight, or now; then the future gets this error, if any."""
        if self.done:
            return
        self.stopped = True
        if self.error is None:
            self.error = error
        if not self.in_flight:
            self.finish()

    def end(self, error=None):
        """The queue pair is gone: what is in flight will not complete, and no device touches its memory."""
        if not self.done:
            self.stopped = True
            self.in_flight = self.long_in_flight = 0
            if self.error is None:
                self.error = error
            self.finish()

    def failure(self, int status, uint32_t vendor_err, uint32_t qp_num):
        """The exception for the completion of one of them, which failed."""
        return completion_error(status, self.name(), vendor_err, qp_num)

    cdef object name(self):
        return "RDMA_READ" if self.opcode == verbs.IBV_WR_RDMA_READ else "RDMA_WRITE"

    cdef int finish(self) except -1:
        cdef object future = self.future, closing = self.closing, error = self.error
        if self.done:
            return 0
        self.done = True
        self.future = self.closing = None       # see Operation.finish
        if future is not None:
            self.error = None
        free(self.blocks)
        self.blocks = NULL
        self.room = 0
        if closing is not None:
            try:
                closing.close()
            except Exception:
                logger.exception("%r cannot be closed, and leaks", closing)
        try:
            if future is None or future.done():
                return 0    # cancelled
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        except RuntimeError:
            pass    # the loop is closed: nobody is left to be told
        return 0

    def __repr__(self):
        cdef str state = "done" if self.done else f"{self.in_flight} in flight, {self.count - self.posted} to be posted"
        return f"<Blocks: {self.count} of {self.name()}, {state}>"
