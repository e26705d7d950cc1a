/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device's log.
 *
 * rn_log() is for debugging the device: lines on standard error, if RDMANET_SOFT_LOG is set.
 *
 * rn_warn() is for administrators: what strangers try, and what the host denies us. It is always written, but at most
 * once a second for each cause; the next line says how many were left out. It goes to standard error, or to
 * the descriptor that rdmanet_soft_log_to() was given, with one write() per line: the Python package passes
 * the lines to its logger. When nobody reads them, lines are dropped and counted: strangers must not be able to
 * stop the engine by filling a pipe.
 *
 * A text that a peer has chosen never goes into a line as it is: control characters are written as \xNN.
 */
#pragma once

enum rn_warning {
	RN_WARN_NAME,        /* another user has the name of our listener, or of the one we look for */
	RN_WARN_SECRET,      /* a wrong secret, or none */
	RN_WARN_LINK,        /* a process that may not see our memory, or that shows us none of its own */
	RN_WARN_ATTACH,      /* a TCP connection for a queue pair that doesn't expect it */
	RN_WARN_LANGUAGE,    /* messages that make no sense */
	RN_WARN_SILENCE,     /* silent strangers, or too many of them */
	RN_WARN_KEY,         /* an invalid memory key */
	RN_WARN_DESCRIPTORS, /* none left: newcomers are refused */
	RN_WARN_ARENA,       /* our own words in the arena were written over */
	RN_WARN_MAPPING,     /* a peer's memory can't be mapped */
	RN_WARN_LIMIT,       /* the program exceeds a limit of the device */
	RN_WARNINGS,
};

void rn_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void rn_warn(enum rn_warning cause, const char *format, ...) __attribute__((format(printf, 2, 3)));
