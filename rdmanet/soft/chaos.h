/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault bench: what a device may do to a program on a bad day, done on purpose.
 *
 * Faults are a text, the same in the environment (RDMANET_SOFT_CHAOS, for every context that opens),
 * and for rdmanet_soft_chaos(), for one context or all of the process:
 *
 *     text    =  [ clause { "," clause } ]                   blanks don't matter
 *     clause  =  "seed" "=" NUMBER                           what all chance is drawn from (1)
 *             |  "delay" "=" [ which ":" ] time [ ".." time ]
 *             |  "loss" "=" which [ ":" TRIES ]              the request doesn't arrive
 *             |  "ackloss" "=" which [ ":" TRIES ]           it does, but nobody hears so
 *             |  "dup" "=" which                             it arrives twice
 *             |  "rnr" "=" which [ ":" TRIES ]               there is no receive for it
 *             |  "fail" "=" which [ ":" STATUS ]             it completes with this status
 *             |  "fail" "=" CALL [ ":" range ] [ ":" ERRNO ] the call fails (ENOMEM), or its event does (ETIMEDOUT)
 *             |  "overrun" "=" NUMBER                        that completion finds its CQ full
 *             |  "memlock" "=" SIZE                          more can't be registered at a time
 *             |  "fatal" "=" "now" | time                  the device dies, for this context and for good
 *             |  "link" "=" "up" | "down" [ ":" time [ ":" time ] ]   after so long, for so long
 *     which   =  KIND [ ":" range ] | range                  any kind, all of them
 *     range   =  N | N "+" | N ".." M | chance | "*"         the nth; from it on; from n to m
 *     chance  =  NUMBER "%" | "0." DIGITS
 *
 * KIND is a kind of request (any, send, write, read, atomic; recv with fail), counted from 1 over all queue
 * pairs of the context since the text was set.  chaos_text.c reads the text, chaos.c acts.
 *
 * Where it acts.  A context with faults (or with iWARP's rules: iwarp.h) marks its queue pairs
 * (rn_qp.chaos): that is the one branch the data path has.  Their requests go through the send queue's
 * ring, each with a plan (struct rn_plan) that is made when it is posted; what waits and ends there are
 * the requester's own timers and budgets, so a lost request costs what it costs on a wire.  Chance is a
 * function of the seed, the queue pair's number in order of creation, the request's number, and the try:
 * the same program meets the same faults again, however its threads and the engine take turns.
 *
 * The link.  A port that is down is so for this context: its requests find nobody, and those of
 * its peers neither, since its blocks carry RN_FAULT_UNPLUGGED, which keeps everybody out as any fault does.
 *
 * A dead device.  Its program gets DEVICE_FATAL, and all its queue pairs go to ERR, where their work is flushed; from
 * then on whatever asks something of the device fails with EIO.  What is given back is given back.
 */
#ifndef RDMANET_SOFT_CHAOS_H
#define RDMANET_SOFT_CHAOS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine.h"
#include "lock.h"
#include "verbs.h"

struct rn_context;
struct rn_qp;
struct rn_send;

enum rn_action { RN_DELAY, RN_LOSS, RN_ACKLOSS, RN_DUP, RN_RNR, RN_FAIL, RN_CALL };

enum rn_kind { RN_ANY, RN_SEND, RN_WRITE, RN_READ, RN_ATOMIC, RN_RECV };

/* Calls that can be made to fail; the creating ones first. */
enum rn_call {
	RN_ALLOC_PD,
	RN_REG_MR,
	RN_CREATE_COMP_CHANNEL,
	RN_CREATE_CQ,
	RN_CREATE_QP,
	RN_CREATE_SRQ,
	RN_CREATE_AH,
	RN_ALLOC_MW,
	RN_ALLOC_DM,
	RN_OPEN_XRCD,
	RN_ALLOC_TD,
	RN_CREATE_ID,
	RN_CREATE, /* any of the above */
	RN_MODIFY_QP,
	RN_POST_SEND,
	RN_POST_RECV,
	RN_RESOLVE_ADDR, /* these by their event, with the errno for its status */
	RN_RESOLVE_ROUTE,
	RN_CONNECT,
	RN_CALLS
};

#define RN_TRIES_ALL UINT32_MAX

struct rn_rule {
	enum rn_action action;
	unsigned kind;        /* enum rn_kind, or rn_call */
	uint64_t first, last; /* of those that match, from 1; 0: by chance */
	uint64_t chance;      /* of 2^32 */
	uint64_t low, high;   /* nanoseconds */
	uint32_t tries;
	int outcome; /* status, or errno */
	bool is_setting; /* of RDMANET_SOFT_DEFER: no fault, nobody counts it */
	uint64_t seen;
};

enum { RN_RULES_MAX = 32 };

struct rn_faults {
	uint64_t seed, overrun, memlock;
	bool link_down, is_fatal;
	uint64_t fatal_after_ns; /* 0: at once */
	uint64_t link_after_ns, link_for_ns; /* 0: at once; for good */
	struct rn_rule rules[RN_RULES_MAX];
	unsigned count;
	bool is_set; /* there is any */
};

/* False: error says what would have been understood. chaos_text.c */
bool rn_faults_read(const char *text, struct rn_faults *faults, char *error, size_t size);

/* A context's faults. */
struct rn_chaos {
	struct rn_lock lock; /* innermost; guards what follows */
	struct rn_faults faults;
	uint64_t completions;
	uint32_t qps; /* numbered so far */

	_Atomic bool may_overrun;  /* for poll_cq, which looks first */
	_Atomic bool link_is_down; /* changed with the context's mutex held */
	uint64_t pinned;           /* bytes registered now; with the context's mutex held */
	_Atomic bool is_dead;      /* for good; likewise */
	struct rn_timer timer, end; /* of the link; of the device */
	struct rn_chaos *next, **link; /* of all: with the mutex of rdmanet_soft_chaos held */
};

/* What is in store for one queued request. */
struct rn_plan {
	uint64_t number;             /* of the queue pair's, from 1 */
	uint32_t lost, unheard, rnr; /* so many tries, for certain */
	uint32_t tries;              /* to get it across, that have failed */
	uint32_t draws;
	uint8_t status;  /* how it ends, whatever it does; 0: by itself */
	bool is_twice;
	bool is_dropped; /* an unreliable one: on a stream its place is taken by nothing */
	bool is_refused; /* on a stream: its frame asks for the answer in status */
	bool is_away;    /* this try has met its fate already */
	bool is_done;    /* executed over there, but not acknowledged */
	uint32_t byte_len; /* of that */
};

/* --- a context's life: verbs.c ------------------------------------------------------------------ */

/* The faults that the environment asks for, or the program for all its contexts. 0, or EINVAL: it was said why. */
int rn_chaos_open(struct rn_context *context);
void rn_chaos_close(struct rn_context *context);
void rn_chaos_forked(void);

/* For the creating calls, and some others: 0, or the errno to fail with. Without locks of the device held. */
int rn_chaos_call(struct rn_context *context, enum rn_call call);
/* Has the device died? Then what it is asked fails with EIO, also what can't be made to fail by itself. */
bool rn_chaos_is_dead(const struct ibv_context *context);
/* Memory is registered, and let go of: 0, or ENOMEM. With the context's mutex held. */
int rn_chaos_pin(struct rn_context *context, uint64_t bytes);
void rn_chaos_unpin(struct rn_context *context, uint64_t bytes);

static inline bool rn_chaos_link_is_down(const struct rn_chaos *chaos)
{
	return atomic_load_explicit(&chaos->link_is_down, memory_order_relaxed);
}

/* --- a queue pair's: qp.c -------------------------------------------------------------------------- */

/* A new one; with the context's mutex held. */
void rn_chaos_adopt(struct rn_qp *qp);
/* Its block shows whether the link is up: when it becomes reachable, and when that changes. With sq_lock held. */
void rn_chaos_plug(struct rn_qp *qp);

/* --- a request's: post.c, with sq_lock held, of queue pairs that are marked ------------------------ */

/* It has been queued. */
void rn_chaos_plan(struct rn_qp *qp, struct rn_send *send);
/* It is about to set off: RN_WAIT_NOT, or what becomes of it. *status: as in rn_execute. */
enum rn_wait rn_chaos_set_off(struct rn_qp *qp, struct rn_send *send, enum ibv_wc_status *status);
/* What the responder notes of a request that it answers like this; NONE: that is no answer of a responder's. */
enum rn_fault rn_chaos_note(uint32_t status);
/* It has arrived: is it refused? SUCCESS, or the status, with the responder in ERR. */
enum ibv_wc_status rn_chaos_refuse(struct rn_qp *qp, struct rn_send *send);
/* It would find no receive. */
bool rn_chaos_finds_no_receive(struct rn_qp *qp, struct rn_send *send);
/* It was executed: RN_WAIT_NOT, or RN_WAIT_LOST when nobody hears of it. */
enum rn_wait rn_chaos_acknowledge(struct rn_qp *qp, struct rn_send *send);
/* A receive is posted, with rq_lock held: 0, or the status it fails with. */
uint8_t rn_chaos_receive(struct rn_qp *qp);
/* Completions were polled: how many of them before the one that finds no room; all, as a rule. With the CQ's lock. */
int rn_chaos_overrun(struct rn_context *context, int polled);

#endif
