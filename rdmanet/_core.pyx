# cython: language_level=3
"""The verbs, from Python: devices, memory, completions, queue pairs, connections, and the data engine.

One extension, in parts; each part is one concept and opens with what there is to know about it.
Reading order is the order of the includes:

    errors       a negative code becomes an exception, in one place
    library      the verbs libraries: the embedded device's and the system's; what all objects share
    device       devices, their ports and addresses; contexts
    memory       protection domains and memory regions
    completion   completion channels and queues, work completions
    workrequest  scatter/gather elements, send and receive requests
    queuepair    queue pairs: attributes, states, posting
    cm           the connection manager's identifiers and events
    engine       the byte stream's data path

Every object of the verbs world is an instance of a class here. It owns its C object and holds its
parents, so that nothing is destroyed too early; see Resource in library.pxi.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ND, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.ref cimport PyObject
from libc.errno cimport EAGAIN, EBUSY, EINVAL, EINTR, ENOMEM, EOPNOTSUPP, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strerror
from posix.types cimport pid_t

from rdmanet cimport _verbs as verbs

import collections
import dataclasses
import enum
import ipaddress
import os
import socket
import sys
import warnings
import weakref

from rdmanet.errors import CompletionError, DeviceNotFoundError, cm_error, completion_error

include "_pyx/errors.pxi"
include "_pyx/library.pxi"
include "_pyx/device.pxi"
include "_pyx/memory.pxi"
include "_pyx/completion.pxi"
include "_pyx/workrequest.pxi"
include "_pyx/queuepair.pxi"
include "_pyx/cm.pxi"
include "_pyx/engine.pxi"
