/* SPDX-License-Identifier: Apache-2.0 */
/* What every file of the preloaded library needs: its own definition of a function, and the one that it stands before. */
#pragma once

#include <dlfcn.h>

#define EXPORT __attribute__((visibility("default")))

/* The next definition of this function: libc's. */
#define NEXT(function)                                                        \
	static __typeof__(&function) next_##function;                         \
	if (!next_##function)                                                 \
		*(void **)&next_##function = dlsym(RTLD_NEXT, #function)
