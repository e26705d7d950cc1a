/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void rn_log(const char *format, ...)
{
	char line[256];
	va_list arguments;

	if (!getenv("RDMANET_SOFT_LOG"))
		return;
	va_start(arguments, format);
	vsnprintf(line, sizeof line, format, arguments);
	va_end(arguments);
	fprintf(stderr, "rdmanet soft0: %s\n", line);
}
