/* SPDX-License-Identifier: Apache-2.0 */
/* What the device says to whoever debugs it. */
#ifndef RDMANET_SOFT_LOG_H
#define RDMANET_SOFT_LOG_H

/* With RDMANET_SOFT_LOG set, one line to stderr. */
void rn_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
