# Return codes to exceptions.
#
# Each function of calls.h returns a value >= 0 or -errno; check() is the only place that turns it into an exception.
# OSError picks its own subclass by the number: TimeoutError, PermissionError...


# Of the embedded device: the size of its own memory, and how much it sends inline at most. soft/shm/arena.h and
# soft/shm/limits.h have the same numbers.
EMBEDDED_ARENA_BYTES = 512 << 20
EMBEDDED_MAX_INLINE = 1024


cdef int check(int rc, str call) except -1:
    """Return rc if it is a success; else raise OSError, with the name of the call."""
    if rc < 0:
        raise OSError(-rc, f"{call}: {reason_of(rc)}")
    return rc


cdef str reason_of(int rc):
    """The error of a call as text. EFBIG comes only from memory that is a file, and names the limit that it met."""
    cdef str text = strerror(-rc).decode()
    if rc != -EFBIG:
        return text
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = "as large as the kernel allows" if soft == resource.RLIM_INFINITY else f"{soft} bytes large"
    return (f"{text}: files may be {limit} (RLIMIT_FSIZE, `ulimit -f`), and memory that peers map is a file; that of "
            f"the embedded device itself has {EMBEDDED_ARENA_BYTES} bytes, of which only those exist that are used. "
            "Raise the limit: `ulimit -f unlimited`; for a service LimitFSIZE=infinity")


cdef int check_locked(int rc, str call, size_t length, bint embedded) except -1:
    """check() for a call that locks memory, with a note about the limit if it fails with ENOMEM.

    :param embedded: it was the embedded device's
    """
    if rc != -ENOMEM:
        return check(rc, call)
    exc = OSError(ENOMEM, f"{call}: {strerror(ENOMEM).decode()}")
    if embedded:
        exc.add_note(
            f"{length} bytes could not be registered. The embedded device locks no memory: `ulimit -l` does not matter "
            "to it. This process has no more memory, addresses or mappings (the memory limit of its container, `ulimit "
            "-v`, vm.max_map_count); or the fault `memlock` is set, as if an adapter needed `ulimit -l unlimited`")
        raise exc
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "any amount" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    exc.add_note(
        f"{length} bytes could not be registered. An adapter locks registered memory, and this process may lock "
        f"{limit}. Raise the limit: `ulimit -l unlimited`; for a service LimitMEMLOCK=infinity; for a container "
        "--ulimit memlock=-1. `rdmanet doctor` says more")
    raise exc


cdef int check_kernel(int rc, str call) except -1:
    """check() for the first calls on a device of the kernel, with a note about permissions and modules."""
    if rc >= 0:
        return rc
    exc = OSError(-rc, f"{call}: {reason_of(rc)}")
    if exc.errno in (EACCES, EPERM):
        exc.add_note("This user may not open the device nodes (`ls -l /dev/infiniband`). Allow it by `chmod 666 "
                     "/dev/infiniband/*`, or by udev's rules (`apt-get install rdma-core`). "
                     "`rdmanet doctor` says more")
    elif exc.errno in (ENOSYS, ENODEV, ENOENT):
        exc.add_note("The kernel has no RDMA support, or has not loaded it: `modprobe -a ib_uverbs rdma_ucm`. A "
                     "container needs --device=/dev/infiniband. `rdmanet doctor` says more")
    raise exc


cdef object enum_of(object kind, int value):
    """The member of an enumeration; a new UNKNOWN_n if the device returned a value that it does not have."""
    member = (<dict>kind._value2member_map_).get(value)  # what kind(value) does, by three calls of Python code
    if member is None:
        member = int.__new__(kind, value)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
    return member


cdef int read_size(object value, str what, object error, size_t *size) except -1:
    """Convert an argument to a number of bytes; raise `error` if it is out of range."""
    cdef object number = PyNumber_Index(value)
    try:
        size[0] = number
    except OverflowError:
        is_what = "negative" if number < 0 else "more than an address space has"
        raise error(f"{what} {shown(value)} is {is_what}") from None
    return 0


cdef object field(object record, str name, uint64_t most, bint optional=False):
    """An integer field of a record, or 0 for None if it is optional. Errors name the record and the field."""
    cdef object value = getattr(record, name)
    if value is None and optional:
        return 0
    try:
        value = PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{type(record).__name__}.{name}: {shown(value)} is not an integer") from None
    if not 0 <= value <= most:
        raise OverflowError(f"{type(record).__name__}.{name}: {shown(value)} is not in 0..{most}")
    return value


cdef bytes copy_of(object data):
    """A copy of a buffer. bytes() alone would also take a number, and return that many zeros."""
    return bytes(memoryview(data))


cdef inline bint copy_carefully(char *to, const char *data, size_t size) noexcept:
    """Copy where one side is memory that a program has named. False: it is of a file that has been shortened."""
    cdef const void *lost
    verbs.rn_bus_watch()
    return verbs.rn_bus_copy(to, data, size, &lost)


cdef object memory_is_gone(str call):
    return OSError(EFAULT, f"{call}: memory of the program's is gone: the file that it maps has been shortened")
