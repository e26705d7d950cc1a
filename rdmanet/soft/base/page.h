/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel's pages, which are what madvise() and mmap() deal in: 4 KiB on x86-64, and 4, 16 or 64 KiB on aarch64, by how
 * the kernel was built.  Where an address is not a multiple of theirs, these calls fail.
 */
#pragma once

#include <stdint.h>
#include <unistd.h>

/* No system call. */
static inline uint64_t rn_page(void)
{
	return (uint64_t)sysconf(_SC_PAGESIZE);
}

static inline uint64_t rn_page_down(uint64_t at)
{
	return at & ~(rn_page() - 1);
}
static inline uint64_t rn_page_up(uint64_t at)
{
	return rn_page_down(at + rn_page() - 1);
}
