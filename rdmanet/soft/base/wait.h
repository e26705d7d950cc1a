/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Why a request can't be executed yet. */
enum rn_wait {
	RN_WAIT_NOT,
	RN_WAIT_LINK,    /* for the peer's process to let us in */
	RN_WAIT_PEER,    /* for its queue pair to come to life */
	RN_WAIT_RNR,     /* for a receive to be posted */
	RN_WAIT_SEGMENT, /* for its memory to be mapped */
	RN_WAIT_OWNER,   /* for its engine to answer */
	RN_WAIT_DUE,     /* deferred execution */
	RN_WAIT_TURN,    /* for its next turn: there is more to copy */
	RN_WAIT_SHARED,  /* for its owner's part of the copy */
	RN_WAIT_LOST,    /* for an acknowledgement that doesn't come: faults/fault.h */
};
