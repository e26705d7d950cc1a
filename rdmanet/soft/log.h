/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the device says.
 *
 * rn_log() is for whoever debugs the device: lines on standard error, with RDMANET_SOFT_LOG set.
 *
 * rn_warn() is for whoever runs it: what strangers try, and what the host denies us. It is always said, but at most
 * once a second for each cause; the next line tells how many were left out. It goes to standard error, or to
 * the descriptor that rdmanet_soft_log_to() was given, one write() a line: the Python package has one, and passes
 * the lines to its logger. Where nobody reads them they are left out, and counted: strangers must not be able to
 * stop the engine by filling a pipe.
 *
 * A text that a peer has chosen never goes into a line as it is: control characters are written as \xNN.
 */
#ifndef RDMANET_SOFT_LOG_H
#define RDMANET_SOFT_LOG_H

enum rn_warning {
	RN_WARN_NAME,        /* somebody else has the name of our listener, or of the one we look for */
	RN_WARN_SECRET,      /* a wrong secret, or none */
	RN_WARN_LINK,        /* a process that may not see our memory, or that shows us none of its own */
	RN_WARN_ATTACH,      /* a TCP connection for a queue pair that doesn't expect it */
	RN_WARN_LANGUAGE,    /* what makes no sense */
	RN_WARN_SILENCE,     /* strangers who say nothing, or too many of them */
	RN_WARN_KEY,         /* a memory key that isn't one */
	RN_WARN_DESCRIPTORS, /* none left: newcomers are refused */
	RN_WARN_ARENA,       /* our own words in the arena were written over */
	RN_WARN_MAPPING,     /* a peer's memory can't be mapped */
	RN_WARN_LIMIT,       /* the device has no more of what the program asks for */
	RN_WARNINGS,
};

void rn_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void rn_warn(enum rn_warning cause, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
