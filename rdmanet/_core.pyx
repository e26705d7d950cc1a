# cython: language_level=3, auto_pickle=False
"""The verbs, from Python: devices, memory, completions, queue pairs, connections, and the data engine.

One extension module in parts. Each part is one concept, and begins with its theory. Read them in the order of the
includes. docs/architecture.md has their floors: which may use which.

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
from cpython.object cimport Py_TYPE, descrgetfunc
from cpython.pythread cimport (
    NOWAIT_LOCK, WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport (
    EACCES, EAGAIN, EBUSY, ECONNRESET, EFAULT, EFBIG, EINTR, EINVAL, EISCONN, ENOBUFS, ENODEV, ENOENT, ENOMEM, ENOSPC,
    ENOSYS, EOPNOTSUPP, EPERM, errno,
)
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, getenv, malloc, realloc
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
import enum
import logging
import os
import re
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

logger = logging.getLogger("rdmanet")

# A build of CPython without the lock switches it on for this module, unless it was told never to.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "rdmanet needs Python's global lock (GIL), which PYTHON_GIL=0 or -X gil=0 keeps off. Start the program without "
        "that: then Python switches the lock on when rdmanet is imported")

include "_pyx/late.pxi"          # names that are made when they are first used
include "_pyx/enums.pxi"         # the enumerations
include "_pyx/errors.pxi"        # return codes to exceptions
include "_pyx/record.pxi"        # the dataclasses among the verbs' structures
include "_pyx/wrid.pxi"          # to whom a completion belongs: the layouts of wr_id
include "_pyx/library.pxi"       # the verbs libraries: the embedded device's and the system's; the base of all objects
include "_pyx/deviceattr.pxi"    # the properties of devices and ports
include "_pyx/gid.pxi"           # the addresses of ports
include "_pyx/asyncevent.pxi"    # events of a device
include "_pyx/device.pxi"        # devices and contexts
include "_pyx/counters.pxi"      # what the embedded device counts, and the faults that it can inject
include "_pyx/pages.pxi"         # memory that regions own: ordinary pages, memfds, huge pages
include "_pyx/export.pxi"        # exports that are held for long
include "_pyx/memory.pxi"        # protection domains and memory regions
include "_pyx/devicememory.pxi"  # memory on the device itself
include "_pyx/address.pxi"       # address records and handles: the route to a peer
include "_pyx/completion.pxi"    # completion channels and queues, work completions
include "_pyx/extendedcq.pxi"    # extended completion queues, with an iterator and timestamps
include "_pyx/bufferpool.pxi"    # a pool of registered buffers
include "_pyx/registration.pxi"  # registrations of memory, kept for the next use
include "_pyx/allocation.pxi"    # memory for streams: rdmanet.alloc()
include "_pyx/reuse.pxi"         # memory that is about to be filled with what comes
include "_pyx/workrequest.pxi"   # scatter/gather elements, send and receive requests
include "_pyx/inflight.pxi"      # posted requests, which keep their memory alive until their completions are polled
include "_pyx/window.pxi"        # memory windows: keys for parts of regions
include "_pyx/srq.pxi"           # shared receive queues, and XRC domains
include "_pyx/qpattr.pxi"        # the attributes and states of queue pairs, and which transition takes which attribute
include "_pyx/queuepair.pxi"     # queue pairs: their states, connecting, and what each verb about one asks for
include "_pyx/qpcreating.pxi"    # creating them
include "_pyx/qpposting.pxi"     # posting to them
include "_pyx/wrsession.pxi"     # posting with the extended calls, as a `with` block
include "_pyx/collecting.pxi"    # which request a completion is of
include "_pyx/busypoll.pxi"      # how long to poll a queue before sleeping
include "_pyx/tracing.pxi"       # what has happened, for RDMANET_TRACE
include "_pyx/watcher.pxi"       # watching completion queues: looking, spinning, arming, sleeping
include "_pyx/operation.pxi"     # a request that is awaited
include "_pyx/awaited.pxi"       # awaited verbs: queues of operations, and the watcher of their completions
include "_pyx/onethread.pxi"     # objects that only one thread at a time may use
include "_pyx/cmaddress.pxi"     # the connection manager's addresses
include "_pyx/cmevent.pxi"       # its events, and the channel where they come
include "_pyx/cm.pxi"            # its identifiers
include "_pyx/framing.pxi"       # the sizes of the byte stream's frames and slots
include "_pyx/slab.pxi"          # slabs of registered memory for the byte stream
include "_pyx/qpmap.pxi"         # a map from queue pair numbers to connections
include "_pyx/sharedring.pxi"    # one receive queue for many connections
include "_pyx/ownring.pxi"       # the receives of a connection with a ring of its own
include "_pyx/backlog.pxi"       # what was written and found no frame
include "_pyx/sendlog.pxi"       # what each send of a connection keeps alive, and gives back when it has completed
include "_pyx/inbox.pxi"         # what was received and not given back
include "_pyx/engine.pxi"        # what an engine has, and what its connections ask of it
include "_pyx/sender.pxi"        # the sending half of a connection of the byte stream
include "_pyx/failing.pxi"       # how a connection fails
include "_pyx/chaining.pxi"      # work requests of frames
include "_pyx/sendmemory.pxi"    # the memory that frames are sent from
include "_pyx/sending.pxi"       # posting frames
include "_pyx/beside.pxi"        # one-sided operations, and keys
include "_pyx/blocks.pxi"        # lists of one-sided operations
include "_pyx/fastpath.pxi"      # those that have nothing to wait for
include "_pyx/placing.pxi"       # bytes go where the peer's read wants them
include "_pyx/writing.pxi"       # from the program's writes to frames, or to the backlog
include "_pyx/landing.pxi"       # where the peer places bytes that a read wants
include "_pyx/receiver.pxi"      # the receiving half
include "_pyx/granting.pxi"      # slots that are free again, and the control frames that are due
include "_pyx/receiving.pxi"     # frames that come
include "_pyx/intake.pxi"        # bytes that no program reads are put by, so that peers can go on
include "_pyx/completing.pxi"    # completions
include "_pyx/settling.pxi"      # what is due at the end of a pass
include "_pyx/delivering.pxi"    # from what has come to the program
include "_pyx/sink.pxi"          # where received bytes go: the protocol's callbacks
include "_pyx/immediate.pxi"     # awaitables that mostly have their result at once
include "_pyx/unread.pxi"        # what a StreamReader has not read: another sink
include "_pyx/separator.pxi"     # the search for a separator in that
include "_pyx/readrequest.pxi"   # one read
include "_pyx/decrypting.pxi"    # what TLS reads
include "_pyx/reader.pxi"        # the methods of StreamReader and StreamWriter
include "_pyx/lease.pxi"         # received bytes that a program reads where they are
include "_pyx/shrinking.pxi"     # rings that have grown, and are small again when nothing comes
include "_pyx/keepalive.pxi"     # whether the hosts of idle connections' peers are there
include "_pyx/routing.pxi"       # completions go to their owners
include "_pyx/totals.pxi"        # what all connections have counted, by device and side
include "_pyx/passes.pxi"        # all connections of a loop on a device: its passes
include "_pyx/opening.pxi"       # how a connection begins: memory, a queue pair, what both sides have agreed on
include "_pyx/ending.pxi"        # everything is given back
include "_pyx/connection.pxi"    # what a connection's owner may ask of it
include "_pyx/blocking.pxi"      # a blocking stream's calls: they wait without a loop
include "_pyx/histogram.pxi"     # counts of times, for percentiles
include "_pyx/traffic.pxi"       # traffic that is measured: loops in C
include "_pyx/cacheline.pxi"     # how far apart two CPUs are

for name, maker in makers.items():
    if maker.__name__ == name:
        del globals()[name]     # the function: see late.pxi
del name, maker
