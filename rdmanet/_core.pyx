# cython: language_level=3, auto_pickle=False
"""The verbs, from Python: devices, memory, completions, queue pairs, connections, and the data engine.

One extension, in parts; each part is one concept and opens with what there is to know about it.
Reading order is the order of the includes:

    errors       a negative code becomes an exception, in one place
    library      the verbs libraries: the embedded device's and the system's; what all objects share
    device       devices, their ports and addresses; contexts
    pages        memory that regions own: ordinary pages, memfds, huge pages
    memory       protection domains and memory regions
    devicememory memory on the device itself
    address      address records and handles: the way to a peer
    completion   completion channels and queues, work completions
    polling      completion queues with an iterator, and timestamps
    bufferpool   registered buffers, lent and taken back
    workrequest  scatter/gather elements, send and receive requests
    window       memory windows: keys for parts of regions
    srq          shared receive queues, and XRC domains
    qpattr       what is told to a queue pair: attributes, states, and which transition takes which
    queuepair    queue pairs: creating, connecting, posting
    session      posting with the extended calls, as a `with` block
    watch        how long to watch a queue before sleeping
    operation    requests that are awaited, and who watches for their completions
    cm           the connection manager's identifiers and events
    ring         the byte stream's memory
    qpmap        from a queue pair's number to its connection
    sharedring   one receive queue for many connections
    stream       one connection of the byte stream: frames, credits, delivery
    engine       all connections of a loop on a device: completions, polling, sleeping

Every object of the verbs world is an instance of a class here. It owns its C object and holds its
parents, so that nothing is destroyed too early; see Resource in library.pxi.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.number cimport PyNumber_Index
from cpython.pythread cimport (
    NOWAIT_LOCK, WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_get_thread_ident, PyThread_release_lock, PyThread_type_lock,
)
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport (
    EACCES, EAGAIN, EBUSY, ECONNRESET, EINTR, EINVAL, ENOBUFS, ENODEV, ENOENT, ENOMEM, ENOSPC, ENOSYS, EOPNOTSUPP,
    EPERM, errno,
)
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strerror
from posix.types cimport pid_t

from rdmanet cimport _verbs as verbs
from rdmanet.credit cimport (
    FRAME_ABORT, FRAME_CREDIT, FRAME_DATA, FRAME_FIN, FRAME_HEADER_BYTES, FRAME_PING, FRAME_PONG, Ledger, frame_header,
)

cdef extern from *:
    """
    /* Cython asks what is no int for its __int__, and so would take 1.5 for 1; like Python's own functions, ask for its
     * __index__. */
    #define nb_int nb_index
    """

import collections
import dataclasses
import enum
import ipaddress
import logging
import os
import resource
import secrets
import socket
import threading
import warnings
import weakref

from rdmanet.environment import tell_unknown
from rdmanet.errors import (
    DeviceNotFoundError, ModifyQPError, ProtocolError, cm_error, completion_error, endpoint, is_not_ours,
    not_ours_error,
)
from rdmanet.qpinfo import QPInfo
from rdmanet.remote import RemoteMemory, bounds

logger = logging.getLogger("rdmanet")

include "_pyx/errors.pxi"
include "_pyx/library.pxi"
include "_pyx/device.pxi"
include "_pyx/pages.pxi"
include "_pyx/memory.pxi"
include "_pyx/devicememory.pxi"
include "_pyx/address.pxi"
include "_pyx/completion.pxi"
include "_pyx/polling.pxi"
include "_pyx/bufferpool.pxi"
include "_pyx/workrequest.pxi"
include "_pyx/window.pxi"
include "_pyx/srq.pxi"
include "_pyx/qpattr.pxi"
include "_pyx/queuepair.pxi"
include "_pyx/session.pxi"
include "_pyx/watch.pxi"
include "_pyx/operation.pxi"
include "_pyx/cm.pxi"
include "_pyx/ring.pxi"
include "_pyx/qpmap.pxi"
include "_pyx/sharedring.pxi"
include "_pyx/stream.pxi"
include "_pyx/engine.pxi"
