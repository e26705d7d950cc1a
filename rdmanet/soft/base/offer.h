/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Offering this CPU to others.  A thread that polls may keep the CPU from the peer it waits for, so it yields now and
 * then.  But its caller may hold a lock, as UCX does while it polls, and another thread may spin for that lock: it takes
 * the CPU for a whole time slice, in vain.  So rn_offer_cpu() returns who ran, and its caller yields less if that was
 * this process.
 *
 * It is offered only by threads that poll and never sleep.  Since Linux 6.6 whoever yields runs again after all others
 * had a time slice each, but a thread that sleeps is woken ahead of those that compute.  So a thread that has armed a
 * completion queue of late, and therefore sleeps when nothing comes, gives its CPU away best by that, and keeps it now.
 */
#pragma once

enum rn_taker {
	RN_TAKER_NOBODY,    /* or it was not offered */
	RN_TAKER_OTHERS,    /* threads of other processes, or one of ours for a moment */
	RN_TAKER_OURSELVES, /* this process's threads, for a time slice, here or on another CPU */
};
enum rn_taker rn_offer_cpu(void);

/* This thread has armed a queue: for a second nothing is offered on its behalf. */
void rn_offer_later(void);
