# Memory that regions own: whole pages, mapped and unmapped together with the region.
#
#     private     ordinary pages, for a device of the kernel
#     a memfd     sealed, for the embedded device, whose peers map it
#     huge pages  a memfd of huge pages, on every device. An adapter, and the CPU, then keep one translation instead of
#                 512
#
# The administrator reserves huge pages (vm.nr_hugepages); a system may have none. They are allocated when the region is
# created, so that a shortage is an error there, and not a SIGBUS when the memory is first touched: mmap reserves them,
# which fails at once and costs nothing; fallocate then allocates them, because a control group may still refuse. As
# with PostgreSQL's `huge_pages`, a program can insist on huge pages (True), or take the best there is ("try"):
# otherwise ordinary pages that the kernel may turn into huge ones (MADV_HUGEPAGE).

cdef extern from * nogil:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #ifndef MFD_CLOEXEC
    #define MFD_CLOEXEC 1u
    #define MFD_ALLOW_SEALING 2u
    #endif
    #ifndef MFD_HUGETLB
    #define MFD_HUGETLB 4u
    #endif
    #ifndef F_ADD_SEALS
    #define F_ADD_SEALS 1033
    #define F_SEAL_SEAL 1
    #define F_SEAL_SHRINK 2
    #define F_SEAL_GROW 4
    #endif

    struct rn_pages {
        char *address;
        size_t length;
        size_t page_size;
        int fd; /* of their memfd, or negative */
    };

    /* Give everything back. */
    static void rn_pages_free(struct rn_pages *pages)
    {
        if (pages->address)
            munmap(pages->address, pages->length);
        if (pages->fd >= 0)
            close(pages->fd);
        *pages = (struct rn_pages){.fd = -1};
    }

    /* Memory of a fixed length that other processes may map. By syscall(2), because the C library of an older
       distribution has no memfd_create(). */
    static int rn_pages_memfd(struct rn_pages *pages, unsigned flags)
    {
        pages->fd = (int)syscall(SYS_memfd_create, "rdmanet-mr", flags | MFD_CLOEXEC | MFD_ALLOW_SEALING);
        return pages->fd < 0 || ftruncate(pages->fd, (off_t)pages->length) < 0 ||
                       fcntl(pages->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0
                   ? -1
                   : 0;
    }

    static int rn_pages_map(struct rn_pages *pages)
    {
        int flags = pages->fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
        void *mapped = mmap(NULL, pages->length, PROT_READ | PROT_WRITE, flags, pages->fd, 0);

        pages->address = mapped == MAP_FAILED ? NULL : mapped;
        return mapped == MAP_FAILED ? -1 : 0;
    }

    /* At least `length` zeroed bytes in pages of this size; 0 or -errno. */
    static int rn_pages_take(struct rn_pages *pages, size_t length, size_t page_size, int is_huge, int by_memfd)
    {
        int failed;

        *pages = (struct rn_pages){.fd = -1, .page_size = page_size};
        if (__builtin_add_overflow(length, page_size - 1, &pages->length))
            return -ENOMEM;
        pages->length -= pages->length % page_size;

        failed = is_huge || by_memfd ? rn_pages_memfd(pages, is_huge ? MFD_HUGETLB : 0) : 0;
        if (!failed)
            failed = rn_pages_map(pages);
        while (!failed && is_huge && (failed = fallocate(pages->fd, 0, 0, (off_t)pages->length)) && errno == EINTR)
            failed = 0;
        if (failed) {
            int saved = errno;

            rn_pages_free(pages);
            return -saved;
        }
        return 0;
    }

    /* May the kernel make huge ones of them? What it answers changes nothing. */
    static void rn_pages_may_be_huge(const struct rn_pages *pages)
    {
        (void)madvise(pages->address, pages->length, MADV_HUGEPAGE);
    }
    """
    struct rn_pages:
        char *address
        size_t length
        size_t page_size
        int fd
    int rn_pages_take(rn_pages *pages, size_t length, size_t page_size, bint is_huge, bint by_memfd)
    void rn_pages_may_be_huge(const rn_pages *pages)
    void rn_pages_free(rn_pages *pages)
    int munmap(void *address, size_t length)
    int close_fd "close"(int fd)

cdef size_t PAGE = os.sysconf("SC_PAGESIZE")


cdef int take_pages(rn_pages *pages, size_t length, bint by_memfd, huge_pages) except -1:
    """Zeroed memory for alloc_mr()."""
    cdef size_t huge = 0
    cdef int rc = -EOPNOTSUPP
    if huge_pages not in (False, True, "try"):
        raise ValueError(f'alloc_mr: huge_pages={shown(huge_pages)} is not True, False or "try"')
    if huge_pages:
        system = huge_pages_of_the_system()
        huge = system.get("Hugepagesize", 0)
        if huge:
            with nogil:
                rc = rn_pages_take(pages, length, huge, True, True)
            if rc == 0:
                return 0
        if huge_pages != "try":
            raise no_huge_pages(rc, length, system)
    with nogil:
        rc = rn_pages_take(pages, length, PAGE, False, by_memfd)
    check(rc, f"alloc_mr: {length} bytes of memory")
    if huge_pages:
        rn_pages_may_be_huge(pages)
    return 0


cdef dict huge_pages_of_the_system():
    """The entries of /proc/meminfo for huge pages; sizes in bytes."""
    found = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "Hugepagesize":
                found[name] = int(value.split()[0]) << 10
            elif name.startswith("HugePages_"):
                found[name] = int(value)
    return found


cdef object no_huge_pages(int rc, size_t length, dict system):
    """The exception for alloc_mr(huge_pages=True), with a note that names the command that helps."""
    if rc not in (-ENOMEM, -ENOSPC):
        exc = OSError(-rc, f"alloc_mr: huge pages: {reason_of(rc)}")
        exc.add_note('This kernel has no huge pages. huge_pages="try" falls back to ordinary pages')
        return exc
    size, total = system["Hugepagesize"], system["HugePages_Total"]
    free = system["HugePages_Free"] - system["HugePages_Rsvd"]
    needed = (length - 1) // size + 1
    exc = OSError(ENOMEM, f"alloc_mr: {length} bytes need {needed} huge pages of {size >> 10} KiB, "
                          f"and {free} of the system's {total} are free")
    if free >= needed:
        exc.add_note("A limit forbids it, such as hugetlb.*.max of the control group. "
                     'huge_pages="try" falls back to ordinary pages')
    else:
        exc.add_note(f"`sysctl vm.nr_hugepages={total - free + needed}`, as root of the host, reserves enough, unless "
                     "its memory is fragmented (best soon after booting). "
                     'huge_pages="try" falls back to ordinary pages')
    return exc
