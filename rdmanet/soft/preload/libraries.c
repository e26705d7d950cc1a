/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The libraries that a program under soft-run opens: one that is called like libibverbs or librdmacm is the embedded
 * device, wherever it lies and whatever was added to its name. Wheels bundle their own, for instance
 * nixl_cu12.libs/libibverbs-1de1263b.so.1.14.48.0.
 *
 * A library that is linked with such a one needs nothing from here: the device is preloaded, and its symbols, which have
 * the same versions, come first.
 *
 * The loader looks for a library on the caller's own path (DT_RUNPATH, $ORIGIN), and knows the caller by the address to
 * which dlopen() returns. So our dlopen() must end in a jump, not in a call: a tail call.
 */
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "next.h"

#define DEVICE "librdmanet_soft.so"

#ifndef RTLD_DEEPBIND
#define RTLD_DEEPBIND 0 /* musl's loader has nothing like it */
#endif

#ifdef __has_attribute
#if __has_attribute(musttail)
#define TAIL_CALLS
#define JUMP __attribute__((musttail)) return
#endif
#endif
#ifndef JUMP
#define TAIL_CALLS __attribute__((optimize("O2"), no_sanitize("address", "thread", "undefined")))
#define JUMP return
#endif

/* Is it there? Only a device that was preloaded is. */
extern const char rdmanet_soft_file __attribute__((weak));

/* "libibverbs.so", "libibverbs.so.1", "libibverbs-1de1263b.so.1.14.48.0"; not "libibverbs_helper.so". */
static bool is_called(const char *name, const char *library)
{
	size_t length = strlen(library);
	const char *end;

	if (strncmp(name, library, length) != 0 || (name[length] != '.' && name[length] != '-'))
		return false;
	end = strstr(name + length, ".so");
	return end && (!end[3] || end[3] == '.');
}

static bool is_verbs(const char *path)
{
	const char *slash = path ? strrchr(path, '/') : NULL;
	const char *name = slash ? slash + 1 : path;

	return name && &rdmanet_soft_file && (is_called(name, "libibverbs") || is_called(name, "librdmacm"));
}

EXPORT TAIL_CALLS void *dlopen(const char *path, int flags)
{
	NEXT(dlopen);

	if (is_verbs(path)) {
		path = DEVICE;
		flags &= ~RTLD_DEEPBIND;
	}
	JUMP next_dlopen(path, flags);
}
