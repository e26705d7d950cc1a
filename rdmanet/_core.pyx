# cython: language_level=3, auto_pickle=False
"""The verbs, from Python: devices, memory, completions, queue pairs, connections, and the data engine.

One extension module in parts. Each part is one concept, and begins with its theory. Read them in the order of the
includes:

    errors       return codes to exceptions
    record       the dataclasses among the verbs' structures
    wrid         to whom a completion belongs: the layouts of wr_id
    library      the verbs libraries: the embedded device's and the system's; the base class of all objects
    deviceattr   the properties of devices and ports
    gid          the addresses of ports
    asyncevent   events of a device
    device       devices and contexts
    counters     what the embedded device counts, and the faults that it can inject
    pages        memory that regions own: ordinary pages, memfds, huge pages
    memory       protection domains and memory regions
    devicememory memory on the device itself
    address      address records and handles: the route to a peer
    completion   completion channels and queues, work completions
    extendedcq   extended completion queues, with an iterator and timestamps
    bufferpool   a pool of registered buffers
    registration registrations of memory, kept for the next use
    allocation   memory for streams: rdmanet.alloc()
    workrequest  scatter/gather elements, send and receive requests
    inflight     posted requests, which keep their memory alive until their completions are polled
    window       memory windows: keys for parts of regions
    srq          shared receive queues, and XRC domains
    qpattr       the attributes and states of queue pairs, and which transition takes which attribute
    queuepair    queue pairs: their states, connecting, and what each verb about one asks for
    qpcreating   creating them
    qpposting    posting to them
    wrsession    posting with the extended calls, as a `with` block
    busypoll     how long to poll a queue before sleeping
    watcher      watching completion queues: looking, spinning, arming, sleeping
    operation    a request that is awaited
    awaited      awaited verbs: queues of operations, and the watcher of their completions
    onethread    objects that only one thread at a time may use
    cmaddress    the connection manager's addresses
    cmevent      its events, and the channel where they come
    cm           its identifiers
    framing      the sizes of the byte stream's frames and slots
    slab         slabs of registered memory for the byte stream
    qpmap        a map from queue pair numbers to connections
    sharedring   one receive queue for many connections
    ownring      the receives of a connection with a ring of its own
    backlog      what was written and found no frame
    sendlog      what each send of a connection keeps alive, and gives back when it has completed
    inbox        what was received and not given back
    engine       what an engine has, and what its connections ask of it
    sender       the sending half of a connection of the byte stream
    failing      how a connection fails
    chaining     work requests of frames
    sendmemory   the memory that frames are sent from
    sending      posting frames
    beside       one-sided operations, and keys
    blocks       lists of one-sided operations
    placing      bytes go where the peer's read wants them
    writing      from the program's writes to frames, or to the backlog
    landing      where the peer places bytes that a read wants
    receiver     the receiving half
    granting     slots that are free again, and the control frames that are due
    receiving    frames that come
    intake       bytes that no program reads are put by, so that peers can go on
    completing   completions
    settling     what is due at the end of a pass
    delivering   from what has come to the program
    sink         where received bytes go: the protocol's callbacks
    immediate    awaitables that mostly have their result at once
    unread       what a StreamReader has not read: another sink
    separator    the search for a separator in that
    readrequest  one read
    reader       the methods of StreamReader and StreamWriter
    lease        received bytes that a program reads where they are
    shrinking    rings that have grown, and are small again when nothing comes
    keepalive    whether the hosts of idle connections' peers are there
    routing      completions go to their owners
    totals       what all connections have counted, by device and side
    passes       all connections of a loop on a device: its passes
    opening      how a connection begins: memory, a queue pair, what both sides have agreed on
    ending       everything is given back
    connection   what a connection's owner may ask of it
    blocking     a blocking stream's calls: they wait without a loop

Each kind of verbs object has a class here. An instance owns its C object and holds references to its parents, so that
nothing is destroyed too early; see Resource in library.pxi.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.memoryview cimport (
    PyMemoryView_Check, PyMemoryView_FromMemory, PyMemoryView_FromObject, PyMemoryView_GET_BUFFER,
)
from cpython.number cimport PyNumber_Index
from cpython.pythread cimport (
    NOWAIT_LOCK, WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport (
    EACCES, EAGAIN, EBUSY, ECONNRESET, EFAULT, EFBIG, EINTR, EINVAL, ENOBUFS, ENODEV, ENOENT, ENOMEM, ENOSPC, ENOSYS,
    EOPNOTSUPP, EPERM, errno,
)
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strerror
from posix.types cimport pid_t

from rdmanet cimport _verbs as verbs
from rdmanet.credit cimport (
    FRAME_ABORT, FRAME_CREDIT, FRAME_DATA, FRAME_FIN, FRAME_HEADER_BYTES, FRAME_PING, FRAME_PLACED, FRAME_PLACED_BYTES,
    FRAME_PONG, Ledger, frame_header, placed_body,
)
from rdmanet.wire.placement cimport WANT_OVER, OurWant, OurWants, PeerWant, PeerWants
from rdmanet.wire.slots cimport OurSlots, PeerSlots

cdef extern from *:
    """
    /* Cython converts an object that is not an int with __int__, and so would take 1.5 as 1. Use __index__ instead,
     * as Python's own functions do. */
    #define nb_int nb_index
    """

import collections
import contextvars
import dataclasses
import enum
import inspect
import ipaddress
import logging
import os
import resource
import socket
import sys
import threading
import warnings
import weakref

from rdmanet.base.environment import tell_unknown
from rdmanet.errors import (
    DeviceNotFoundError, ModifyQPError, ProtocolError, cm_error, completion_error, endpoint, is_not_ours,
    not_ours_error, other_version_error, shown,
)
from rdmanet.wire.qpinfo import QPInfo
from rdmanet.wire.remote import RemoteMemory, bounds

logger = logging.getLogger("rdmanet")

include "_pyx/errors.pxi"
include "_pyx/record.pxi"
include "_pyx/wrid.pxi"
include "_pyx/library.pxi"
include "_pyx/deviceattr.pxi"
include "_pyx/gid.pxi"
include "_pyx/asyncevent.pxi"
include "_pyx/device.pxi"
include "_pyx/counters.pxi"
include "_pyx/pages.pxi"
include "_pyx/export.pxi"
include "_pyx/memory.pxi"
include "_pyx/devicememory.pxi"
include "_pyx/address.pxi"
include "_pyx/completion.pxi"
include "_pyx/extendedcq.pxi"
include "_pyx/bufferpool.pxi"
include "_pyx/registration.pxi"
include "_pyx/allocation.pxi"
include "_pyx/reuse.pxi"
include "_pyx/workrequest.pxi"
include "_pyx/inflight.pxi"
include "_pyx/window.pxi"
include "_pyx/srq.pxi"
include "_pyx/qpattr.pxi"
include "_pyx/queuepair.pxi"
include "_pyx/qpcreating.pxi"
include "_pyx/qpposting.pxi"
include "_pyx/wrsession.pxi"
include "_pyx/busypoll.pxi"
include "_pyx/watcher.pxi"
include "_pyx/operation.pxi"
include "_pyx/awaited.pxi"
include "_pyx/onethread.pxi"
include "_pyx/cmaddress.pxi"
include "_pyx/cmevent.pxi"
include "_pyx/cm.pxi"
include "_pyx/framing.pxi"
include "_pyx/slab.pxi"
include "_pyx/qpmap.pxi"
include "_pyx/sharedring.pxi"
include "_pyx/ownring.pxi"
include "_pyx/backlog.pxi"
include "_pyx/sendlog.pxi"
include "_pyx/inbox.pxi"
include "_pyx/engine.pxi"
include "_pyx/sender.pxi"
include "_pyx/failing.pxi"
include "_pyx/chaining.pxi"
include "_pyx/sendmemory.pxi"
include "_pyx/sending.pxi"
include "_pyx/beside.pxi"
include "_pyx/blocks.pxi"
include "_pyx/placing.pxi"
include "_pyx/writing.pxi"
include "_pyx/landing.pxi"
include "_pyx/receiver.pxi"
include "_pyx/granting.pxi"
include "_pyx/receiving.pxi"
include "_pyx/intake.pxi"
include "_pyx/completing.pxi"
include "_pyx/settling.pxi"
include "_pyx/delivering.pxi"
include "_pyx/sink.pxi"
include "_pyx/immediate.pxi"
include "_pyx/unread.pxi"
include "_pyx/separator.pxi"
include "_pyx/readrequest.pxi"
include "_pyx/decrypting.pxi"
include "_pyx/reader.pxi"
include "_pyx/lease.pxi"
include "_pyx/shrinking.pxi"
include "_pyx/keepalive.pxi"
include "_pyx/routing.pxi"
include "_pyx/totals.pxi"
include "_pyx/passes.pxi"
include "_pyx/opening.pxi"
include "_pyx/ending.pxi"
include "_pyx/connection.pxi"
include "_pyx/blocking.pxi"
