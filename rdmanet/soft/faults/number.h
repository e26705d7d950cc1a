/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers, times and sizes in the text of faults (text.c). None of these changes the text. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* These read from the start, and return where they ended; NULL: there is none. */

/* A whole number. */
const char *rn_read_number(const char *text, uint64_t *number);
/* A decimal number, in billionths. */
const char *rn_read_decimal(const char *text, uint64_t *billionths);
/* A time with its unit. */
const char *rn_read_time(const char *text, uint64_t *ns);

/* These read all of it. */

/* "2ms", "2ms..5ms" */
bool rn_read_times(const char *text, uint64_t *low, uint64_t *high);
/* "64K" */
bool rn_read_size(const char *text, uint64_t *bytes);
