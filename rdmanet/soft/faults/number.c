/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers in the text of faults: number.h. */
#include <ctype.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "faults/number.h"

const char *rn_read_number(const char *text, uint64_t *number)
{
	char *end;

	if (!isdigit((unsigned char)*text))
		return NULL;
	errno = 0;
	*number = strtoull(text, &end, 10);
	return errno || *number > UINT64_MAX / 4 ? NULL : end;
}

const char *rn_read_decimal(const char *text, uint64_t *billionths)
{
	uint64_t weight = 100000000;
	const char *at = rn_read_number(text, billionths);

	if (!at || *billionths > UINT32_MAX)
		return NULL;
	*billionths *= 1000000000;
	if (*at != '.' || !isdigit((unsigned char)at[1]))
		return at;
	for (at++; isdigit((unsigned char)*at); at++, weight /= 10)
		*billionths += weight * (*at - '0');
	return at;
}

static const struct {
	const char *name;
	uint64_t ns;
} units[] = {{"ns", 1}, {"us", 1000}, {"ms", 1000000}, {"s", 1000000000}};

const char *rn_read_time(const char *text, uint64_t *ns)
{
	uint64_t billionths;
	const char *at = rn_read_decimal(text, &billionths);

	for (size_t i = 0; at && i < sizeof(units) / sizeof(units[0]); i++) {
		size_t length = strlen(units[i].name);

		if (strncmp(at, units[i].name, length) || isalnum((unsigned char)at[length]))
			continue;
		if (billionths / 1000000000 > 86400 * (1000000000 / units[i].ns))
			return NULL; /* more than a day */
		*ns = (__uint128_t)billionths * units[i].ns / 1000000000;
		return at + length;
	}
	return NULL;
}

bool rn_read_times(const char *text, uint64_t *low, uint64_t *high)
{
	const char *at = rn_read_time(text, low);

	*high = *low;
	if (at && !strncmp(at, "..", 2))
		at = rn_read_time(at + 2, high);
	return at && !*at && *low <= *high;
}

bool rn_read_size(const char *text, uint64_t *bytes)
{
	const char *at = rn_read_number(text, bytes);
	unsigned shift = 0;

	if (!at)
		return false;
	switch (toupper((unsigned char)*at)) {
	case 'K':
		shift = 10;
		break;
	case 'M':
		shift = 20;
		break;
	case 'G':
		shift = 30;
	}
	if (shift)
		at++;
	if (*bytes > UINT64_MAX >> (shift + 2))
		return false;
	*bytes <<= shift;
	return !*at || !strcasecmp(at, "iB") || !strcasecmp(at, "B");
}
