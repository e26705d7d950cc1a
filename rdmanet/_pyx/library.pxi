# Verbs libraries, and the base class of all verbs objects.
#
# A library is the embedded device's shared object, or the system's libibverbs.so.1 with librdmacm.so.1. Each is opened
# once, on first use, and stays open, because device memory may be mapped and threads of the library may run until the
# process ends. Every object leads to its library through its parents, so that objects of two libraries are never mixed
# unnoticed.

EMBEDDED_ENVIRONMENT = "RDMANET_SOFT_LIBRARY"

cdef dict _libraries = {}   # name to Library
cdef dict _missing = {}     # name to the reason why there is none


ctypedef uint64_t (*happened_fn)() noexcept nogil
ctypedef void (*log_to_fn)(int fd) noexcept nogil
ctypedef void (*settings_error_fn)(char *text, size_t size) noexcept nogil
ctypedef int (*check_fn)(char *text, size_t size) noexcept nogil
ctypedef int (*is_gone_fn)(void *of) noexcept nogil
ctypedef int (*of_id_fn)(void *id) noexcept nogil
ctypedef int (*peer_user_fn)(void *id, uint32_t *user) noexcept nogil

cdef object _HERE = object()


cdef int made_here(object token, str instead) except -1:
    """For the __cinit__ of classes that only this module may instantiate: raise TypeError unless it does."""
    if token is not _HERE:
        raise TypeError(instead)
    return 0


cdef class Library:
    """A verbs library: the embedded device's, or the system's rdma-core.

    :ivar name: "embedded" or "rdma-core"
    :ivar path: the file of libibverbs, or of the embedded device
    """

    cdef verbs.rn_library *c
    cdef readonly str name
    cdef readonly str path
    cdef object contexts  # ibv_context address to weakref of its Context, for those that librdmacm opened
    cdef int channels     # event channels that are open
    cdef object ids       # rdma_cm_id address to weakref of its CMID
    cdef pid_t pid        # the process that the three above are about; see this_process()
    cdef dict symbols     # exports of the embedded device that were looked up: name to address
    cdef of_id_fn leaves  # one of them
    cdef object __weakref__

    def __cinit__(self, token=None):
        made_here(token, "use Library.embedded() or Library.system()")
        self.symbols = {}

    def __repr__(self):
        return f"<Library {self.name} {self.path}>"

    @staticmethod
    def embedded():
        """The embedded device's library.

        It is part of the package; RDMANET_SOFT_LIBRARY names another file.

        :raises DeviceNotFoundError: the file is not there or cannot be loaded
        """
        if "embedded" in _libraries:
            return _libraries["embedded"]
        path = os.environ.get(EMBEDDED_ENVIRONMENT)
        if not path:
            path = os.path.join(os.path.dirname(__file__), "soft", "librdmanet_soft.so")    # an extension's is absolute
        library = _open_library("embedded", path, path)
        if library is None:
            raise DeviceNotFoundError(ENODEV, f"the embedded device cannot be loaded: {_missing['embedded']}")
        return library

    @staticmethod
    def system():
        """The system's libibverbs and librdmacm, or None if they are not installed; missing() says why."""
        return _open_library("rdma-core", "libibverbs.so.1", "librdmacm.so.1")

    @staticmethod
    def missing():
        """The libraries that could not be opened so far: name to reason."""
        return dict(_missing)

    @property
    def embedded_device(self):
        """Whether this is the embedded device's library."""
        return self.name == "embedded"

    def devices(self):
        """This library's devices.

        :raises OSError: the library cannot list them, for instance because the kernel lacks RDMA support
        """
        cdef verbs.ibv_device **devices
        cdef int count, i
        check_kernel(verbs.rn_get_device_list(self.c, &count, &devices), "ibv_get_device_list")
        try:
            return [_device(self, devices[i]) for i in range(count)]
        finally:
            verbs.rn_free_device_list(self.c, devices)

    def optional_calls(self):
        """The calls that only some versions of the library have: name to whether this one has it.

        Whatever needs a missing one raises OSError with EOPNOTSUPP.
        """
        cdef dict calls = {}
        cdef const char *name
        cdef bint present = False
        while True:
            name = verbs.rn_library_optional(self.c, len(calls), &present)
            if name is NULL:
                return calls
            calls[name.decode()] = bool(present)

    def live(self):
        """The number of objects of the embedded device in this process, by kind; empty for another library."""
        return library_live(self)

    def set_faults(self, str text):
        """Inject faults into all contexts of this process, including future ones.

        The text is as for Context.set_faults(); None restores the environment's RDMANET_SOFT_CHAOS.
        """
        set_faults(self, NULL, text)

    def faults_happened(self):
        """How many faults have happened in this process since the last call of set_faults().

        A test uses it to check that the fault that it set has happened. faults() has each fault's own number.
        """
        cdef happened_fn call = <happened_fn>self.symbol("rdmanet_soft_chaos_happened")
        return 0 if call is NULL else call()

    def faults(self):
        """The faults that are set for all contexts of this process, each with how often it has happened since.

        Contexts that have a text of their own (Context.set_faults()) do not count here. Faults that are written alike
        are one.
        """
        return counted_faults(self, NULL)

    def log_to(self, int fd):
        """Write the embedded device's warnings to a non-blocking descriptor, one write per line; -1 is standard error.
        Returns False for another library, which has no such warnings.
        """
        cdef log_to_fn call = <log_to_fn>self.symbol("rdmanet_soft_log_to")
        if call is NULL:
            return False
        with nogil:
            call(fd)
        return True

    cdef str settings_error(self):
        """What was wrong with the environment variables when the embedded device was last opened; "" if nothing."""
        cdef settings_error_fn call = <settings_error_fn>self.symbol("rdmanet_soft_settings_error")
        cdef char text[1024]
        if call is NULL:
            return ""
        with nogil:
            call(text, sizeof(text))
        return text.decode(errors="backslashreplace")

    def check_environment(self):
        """Raise an error if environment variables keep the embedded device from opening. It is not opened here.

        :raises OSError: one of them makes no sense, or is misspelt (EINVAL)
        """
        cdef check_fn call = <check_fn>self.symbol("rdmanet_soft_check")
        cdef char text[1024]
        cdef int rc
        if call is NULL:
            return
        with nogil:
            rc = call(text, sizeof(text))
        if rc:
            raise OSError(rc, text.decode(errors="backslashreplace"))

    cdef bint is_gone(self, str name, void *of) except -1:
        """Whether the embedded device knows that the peer's process is gone; False for another library."""
        cdef is_gone_fn call = <is_gone_fn>self.symbol(name)
        return call is not NULL and call(of) != 0

    cdef tuple peer_user(self, void *id):
        """The user of this host that asked for a connection, and whether by name; (None, False) if unknown."""
        cdef peer_user_fn call = <peer_user_fn>self.symbol("rdmanet_soft_cm_peer_user")
        cdef uint32_t user = 0
        cdef int way = call(id, &user) if call is not NULL else 0
        return user if way else None, way == 2

    cdef int by_name_alone(self, void *id) except -1:
        """Have an identifier of the embedded device connect by name only. An older one takes TCP all the same."""
        cdef of_id_fn call = <of_id_fn>self.symbol("rdmanet_soft_cm_by_name_alone")
        return call(id) if call is not NULL else 0

    cdef int leave(self, verbs.rdma_cm_id *id) noexcept nogil:
        """Disconnect, where no DISCONNECTED is needed: from the embedded device none comes. 0 or -errno."""
        if self.leaves is NULL:     # the system's, or RDMANET_SOFT_LIBRARY names an older one
            return verbs.rn_disconnect(self.c, id)
        return -errno if self.leaves(id) else 0

    cdef void *symbol(self, str name) except? NULL:
        """An export of the embedded device's library, or NULL for another library."""
        cdef bytes c_name
        address = self.symbols.get(name)
        if address is None:
            c_name = name.encode()
            address = <uintptr_t>verbs.rn_library_symbol(self.c, c_name) if self.embedded_device else 0
            self.symbols[name] = address
        return <void *><uintptr_t>address

    cdef int this_process(self) except -1:
        """Call this before contexts, channels or ids are used: forget those of the parent in a forked child, where the
        library has none of them open.

        If they were kept, the child's last channel would not be noticed, and a new context at the address of one that
        was closed would be taken for it."""
        if self.pid != verbs.rn_pid:
            self.pid = verbs.rn_pid
            self.contexts = {}
            self.channels = 0
            self.ids = {}
        return 0

    cdef int forget_contexts(self) except -1:
        """Called when librdmacm's last channel is closed, which closes the contexts that nothing else needs."""
        cdef Context context
        for key, reference in list(self.contexts.items()):
            context = reference()
            if context is None or not context.children:
                del self.contexts[key]      # or each new address would leave an entry behind
                if context is not None:
                    context.gone = True
        return 0

    cdef Context context_for(self, verbs.ibv_context *ptr):
        """The one Context for a context that librdmacm has opened, and will close."""
        cdef Context context
        cdef object key = <uintptr_t>ptr
        self.this_process()
        reference = self.contexts.get(key)
        if reference is not None:
            context = reference()
            if context is not None and not context.gone:
                return context
        context = _context(self, ptr, self.c.ibv_get_device_name(ptr.device).decode(), False)
        context.pid = verbs.rn_pid
        self.contexts[key] = weakref.ref(context)
        return context


cdef int check_open(Library library, int rc, str call) except -1:
    """check_kernel(), for calls that open a device: the embedded device knows which environment variable is wrong."""
    cdef str why = library.settings_error() or why_no_faults(library) if rc == -EINVAL else ""
    if why:
        raise OSError(EINVAL, f"{call}: {why}")
    return check_kernel(rc, call)


cdef Library _open_library(str name, str verbs_path, str cm_path):
    cdef verbs.rn_library *c
    cdef char reason[512]
    cdef Library library
    cdef bytes verbs_name = os.fsencode(verbs_path), cm_name = os.fsencode(cm_path)
    cdef const char *verbs_c = verbs_name
    cdef const char *cm_c = cm_name
    cdef int rc
    if name in _libraries:
        return _libraries[name]
    if name in _missing:
        return None
    tell_unknown()
    with nogil:
        rc = verbs.rn_library_open(verbs_c, cm_c, &c, reason, sizeof(reason))
    if rc < 0:
        _missing[name] = reason.decode(errors="replace")
        return None
    library = Library.__new__(Library, _HERE)
    library.c = c
    library.name = name
    library.path = verbs_path
    library.leaves = <of_id_fn>library.symbol("rdmanet_soft_cm_leave")
    library.this_process()
    _libraries[name] = library
    return library


def is_in_environment(bytes name):
    """Whether os.environ has this name, asked without a call of Python code."""
    return getenv(name) is not NULL


def process_id():
    """os.getpid() without a system call: a fork handler updates the value."""
    return verbs.rn_pid


# ---- The base class of all owners of C objects ---------------------------------------------------------

cdef enum Kind:
    CONTEXTS, PDS, MRS, COMP_CHANNELS, CQS, QPS, EVENT_CHANNELS, CM_IDS, SRQS, XRCDS, AHS, MWS, DMS, KINDS

_KIND_NAMES = ("contexts", "pds", "mrs", "comp_channels", "cqs", "qps", "event_channels", "cm_ids",
               "srqs", "xrcds", "ahs", "mws", "dms")

cdef Py_ssize_t live[<int>KINDS]
cdef pid_t live_pid = 0     # the process that they are counted in: a forked child begins with none


cdef Py_ssize_t *live_here() noexcept:
    global live_pid
    if live_pid != verbs.rn_pid:
        live_pid = verbs.rn_pid
        memset(live, 0, sizeof(live))
    return live


def live_objects():
    """The number of C objects that this process holds, by kind. A test can compare it before and after."""
    live_here()
    return {name: live[i] for i, name in enumerate(_KIND_NAMES)}


@cython.no_gc_clear
cdef class Resource:
    """The owner of one C object of a verbs library.

    close() or `with` frees the C object. An object that is not closed causes a ResourceWarning. In a forked child every
    use raises RuntimeError, except close(), which does nothing.
    """

    # Rules for every subclass:
    #
    # - It holds a strong reference to each object that its C object needs. Cython runs __dealloc__ before it drops the
    #   references, so children are destroyed before their parents. In a reference cycle the collector would clear the
    #   references first, hence no_gc_clear on every class.
    # - destroy() frees the C object, or raises and leaves everything as it was. It clears the pointer first, since
    #   another thread may run while the library works. The user calls it through close(); otherwise __dealloc__ does,
    #   which every subclass has to define: that of the base class would run when the references are gone.
    # - C objects do not survive a fork: in a child the destructor does nothing, because the C object is the parent's.

    cdef object __weakref__
    cdef pid_t pid
    cdef int kind

    cdef bint is_open(self) noexcept:
        return False

    cdef int destroy(self) except -1:
        return 0

    cdef bint is_here(self) noexcept:
        """Whether its C object can be looked at: it exists, and belongs to this process."""
        return self.is_open() and self.pid == verbs.rn_pid

    cdef void opened(self, int kind) noexcept:
        """Count the C object, which was just created."""
        self.kind = kind
        self.pid = verbs.rn_pid
        live_here()[kind] += 1

    cdef int unmade(self) except -1:
        """Raise if __init__ was called before: its C object would be lost, and still active."""
        if self.is_open():
            raise RuntimeError(f"{self!r} is already initialized")
        return 0

    cdef void destroyed(self) noexcept:
        live_here()[self.kind] -= 1

    cdef int usable(self) except -1:
        """Raise unless the C object exists and belongs to this process."""
        if not self.is_open():
            raise ValueError(f"this {type(self).__name__} is closed")
        if self.pid != verbs.rn_pid:
            raise RuntimeError(
                f"this {type(self).__name__} was opened by process {self.pid}; open it again after fork"
            )
        return 0

    cdef void drop(self) noexcept:
        """For __dealloc__: destroy the C object if it is still open. Errors are logged, as nobody could catch them."""
        if self.is_here():
            try:
                self.destroy()
            except Exception as exc:
                try:
                    logger.error("an unclosed %s cannot be destroyed, and leaks: %s", type(self).__name__, exc)
                except Exception:  # the interpreter is ending
                    pass

    def close(self):
        """Free the object. Closing it again, or in a forked child, does nothing.

        :raises OSError: EBUSY while other objects need this one, which then stays open
        """
        if self.is_here():
            self.destroy()

    @property
    def closed(self):
        """Whether close() was called."""
        return not self.is_open()

    def __enter__(self):
        self.usable()
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        if self.is_here():
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)


cdef str state_of(Resource resource):
    """For a repr, which must not raise: not in a forked child, either."""
    if not resource.is_open():
        return " closed"
    return "" if resource.pid == verbs.rn_pid else f" of process {resource.pid}"
