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
 *             |  "loss" "=" "rtu" [ ":" range ]              an RTU of the connection manager doesn't
 *             |  "ackloss" "=" which [ ":" TRIES ]           it does, but its acknowledgement is lost
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
 * pairs of the context since the text was set.
 *
 * Files.  text.c reads the text, and number.c its numbers.  fault.c decides what happens to a call, a request, a receive, and
 * does nothing about it: the caller does.  device/fault_bench.c sets faults, and takes the link or the device down.
 *
 * Where it is asked.  A context with faults (or with iWARP's rules: iwarp.h) gives its queue pairs an injector
 * (rn_qp.injector): that is the one branch the data path has.  Their requests go through the send queue's
 * ring, each with a plan (struct rn_plan) that is made when it is posted; what waits and ends there are
 * the requester's own timers and budgets, so a lost request costs what it costs on a wire.  Chance is a
 * function of the seed, the queue pair's number in order of creation, the request's number, and the try:
 * the same program meets the same faults again, however its threads and the engine take turns.
 *
 * Counting.  Each fault of a text has a count of what has come to pass: a test of one that never does tests nothing,
 * whatever others do.  A plan only says what is meant for a request, which may end before, or not be of the sort that
 * can meet it.  So it notes its rules (rn_plan.due), and one is counted when it is carried out: once for a request
 * that it was certain to hit, and at each try that chance has hit.  A text set for all contexts is counted in each, and
 * added up by device/fault_bench.c; what a request of an earlier text meets is not counted.
 *
 * The link.  A port is down for this context: its requests find no peer, and those of
 * its peers neither, since its blocks carry RN_FAULT_UNPLUGGED, which keeps everybody out as any fault does.
 *
 * A dead device.  Its program gets DEVICE_FATAL, and all its queue pairs go to ERR, where their work is flushed; from
 * then on whatever asks something of the device fails with EIO.  What is given back is given back.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/counters.h"
#include "base/engine.h"
#include "base/lock.h"
#include "base/wait.h"
#include "shm/arena.h"
#include "verbs.h"

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
	RN_RTU, /* a message of the connection manager: it gets lost */
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
	bool is_setting; /* set by RDMANET_SOFT_DEFER: not a fault, so not counted */
	unsigned place;  /* of the fault in its text */
	uint64_t seen;
};

enum {
	RN_RULES_MAX = 32,
	RN_FAULTS_MAX = RN_RULES_MAX + 4, /* each rule; overrun, memlock, fatal, link */
};

struct rn_faults {
	uint64_t seed, overrun, memlock;
	bool link_down, is_fatal;
	uint64_t fatal_after_ns; /* 0: at once */
	uint64_t link_after_ns, link_for_ns; /* 0: at once; for good */
	struct rn_rule rules[RN_RULES_MAX];
	unsigned count;
	bool is_set; /* there is any */

	/* Where in the text each fault is (a seed is none), by its place: from 0 in the order of the text. */
	struct rn_span {
		size_t at, length;
	} spans[RN_FAULTS_MAX];
	unsigned places;
	unsigned overrun_place, memlock_place, fatal_place, link_place;
};

/* False: error says what is expected. text.c */
bool rn_faults_read(const char *text, struct rn_faults *faults, char *error, size_t size);

/* A context's faults. */
struct rn_injector {
	struct rn_lock lock; /* innermost; guards what follows */
	struct rn_faults faults;
	uint64_t completions;
	uint32_t qps; /* numbered so far */
	uint32_t version; /* of the text: each that is set has another */
	uint64_t happened[RN_FAULTS_MAX]; /* by place */
	char *text; /* if it is for this context only; else NULL; with the mutex of rdmanet_soft_chaos held */

	_Atomic bool may_overrun;  /* for poll_cq, which looks first */
	_Atomic bool link_is_down; /* changed with the context's mutex held */
	uint64_t pinned;           /* bytes registered now; with the context's mutex held */
	_Atomic bool is_dead;      /* for good; likewise */
	struct rn_timer timer, end; /* of the link; of the device */
	struct rn_injector *next, **link; /* of all: with the mutex of rdmanet_soft_chaos held */
};

/* What will happen to one queued request. */
struct rn_plan {
	uint64_t number;             /* within the queue pair, from 1 */
	uint64_t delay_ns;
	enum rn_kind kind;
	bool needs_receive;
	uint32_t lost, unheard, rnr; /* how many tries are certain to fail so */
	uint32_t tries;              /* to get it across, that have failed */
	uint32_t draws;
	uint32_t due;     /* rules that hit it and are still to be carried out: a bit for each */
	uint32_t version; /* of the text that they are of */
	uint8_t status;  /* how it ends, whatever it does; 0: by itself */
	bool is_twice;
	bool is_dropped; /* an unreliable one: on a stream its place is taken by nothing */
	bool is_refused; /* on a stream: its frame asks for the answer in status */
	bool is_away;    /* this try has met its fate already */
	bool is_done;    /* executed over there, but not acknowledged */
	uint32_t byte_len; /* of that */
};

/* A queue pair's share of its context's. */
struct rn_qp_faults {
	struct rn_injector *injector; /* NULL: none, and nothing is asked */
	struct rn_counters *count;
	bool unreliable;
	uint32_t number;   /* of this one among the context's */
	uint64_t requests; /* so far */
	uint64_t failed;   /* receives; under recv_cq->lock */
};

/* Since the last text for all contexts, and of any text. */
extern _Atomic uint64_t rn_faults_happened;

/* --- a context's ----------------------------------------------------------------------------------- */

/* The fault at this place of the text has come to pass. With injector->lock. */
void rn_fault_happened(struct rn_injector *injector, unsigned place);
/* 0, or the errno for a call to fail with. Without locks of the device held. */
int rn_fault_call(struct rn_injector *injector, enum rn_call call);
/* Memory is registered, or released: 0, or ENOMEM. With the context's mutex held. */
int rn_fault_pin(struct rn_injector *injector, uint64_t bytes);
void rn_fault_unpin(struct rn_injector *injector, uint64_t bytes);
/* Completions were polled: returns how many come before the one that overruns; usually all. With the CQ's lock. */
int rn_fault_overrun(struct rn_injector *injector, int polled);

static inline bool rn_fault_link_is_down(const struct rn_injector *injector)
{
	return atomic_load_explicit(&injector->link_is_down, memory_order_relaxed);
}

/* --- a request's: with sq_lock held ---------------------------------------------------------------- */

/* What will become of it. */
void rn_fault_plan(struct rn_qp_faults *faults, enum ibv_wr_opcode opcode, struct rn_plan *plan);
/* It is about to set off: RN_WAIT_NOT, or what becomes of it. *status: as in rn_execute. */
enum rn_wait rn_fault_set_off(struct rn_qp_faults *faults, struct rn_plan *plan, enum ibv_wc_status *status);
/* The fault code that a responder notes for this answer; NONE: responders don't give it. */
enum rn_fault rn_fault_note(uint32_t status);
/* The request has arrived: SUCCESS, or the status with which it is refused, and the responder goes to ERR. */
enum ibv_wc_status rn_fault_refuse(struct rn_qp_faults *faults, struct rn_plan *plan);
/* It would find no receive. */
bool rn_fault_finds_no_receive(struct rn_qp_faults *faults, struct rn_plan *plan);
/* It was executed: RN_WAIT_NOT, or RN_WAIT_LOST if the acknowledgement is lost. */
enum rn_wait rn_fault_acknowledge(struct rn_qp_faults *faults, struct rn_plan *plan);

/* --- a receive's: with rq_lock held ---------------------------------------------------------------- */

/* What will become of one receive. */
struct rn_receive_plan {
	uint8_t status; /* it fails with this; 0: it does not */
	uint8_t place;  /* by the fault at this place */
	uint16_t version; /* of this text: the lower bits */
};

/* A receive is posted, with this number within the queue pair. */
struct rn_receive_plan rn_fault_receive(struct rn_qp_faults *faults, uint64_t number);
/* It has failed so. With recv_cq->lock. */
void rn_fault_received(struct rn_injector *injector, const struct rn_receive_plan *plan);
