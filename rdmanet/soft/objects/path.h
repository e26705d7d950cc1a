/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A queue pair's path: how its requests reach a responder whose memory is not mapped here.
 *
 * If the peer's memory is mapped, requester and responder are plain calls.  Each other path has a table of these, and
 * each queue pair has the table for its kind from its creation on: TCP's for connected queue pairs, which may switch to
 * it at any time, and that of datagrams.  Calls that a path does not need are NULL.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/wait.h"
#include "verbs.h"

struct rn_cq;
struct rn_qp;
struct rn_task;

struct rn_path_ops {
	/* Its life. 0 or errno. */
	int (*open)(struct rn_qp *qp);
	void (*free)(struct rn_qp *qp);

	/* On the way to RTR: become reachable for peers with this address. Without locks. 0 or errno. */
	int (*listen)(struct rn_qp *qp, const struct ibv_ah_attr *ah);
	/* RTR: find out whose requests may take this path. Without locks. */
	void (*expect)(struct rn_qp *qp);

	/* These with the send lock held. From here on requests take this path. */
	void (*use)(struct rn_qp *qp);
	/* Go on with what is queued. */
	void (*progress)(struct rn_qp *qp);
	/* Is anything on its way? */
	bool (*in_flight)(const struct rn_qp *qp);
	/* Has a request of the peer taken this path? */
	bool (*has_heard)(const struct rn_qp *qp);
	/* Execute one request now. */
	enum rn_wait (*execute)(struct rn_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status,
				uint32_t *byte_len);
	/* About to become ERR: take what has come already. */
	void (*last_look)(struct rn_qp *qp);
	/* ERR: say goodbye. */
	void (*leave)(struct rn_qp *qp);

	/* A reset, in three steps: let go of the peer; of senders, once none is inside; of places in the queue. The
	 * last one with the send lock held, the others without locks. */
	void (*close)(struct rn_qp *qp);
	void (*clear)(struct rn_qp *qp);
	void (*forget)(struct rn_qp *qp);
	/* May it not be destroyed yet? */
	bool (*is_in_use)(const struct rn_qp *qp);
	/* About to be destroyed with its context: leave groups. */
	void (*detach)(struct rn_qp *qp);
};

enum rn_path_kind { RN_PATH_TCP, RN_PATH_DATAGRAM, RN_PATHS };

/* Before the first queue pair; ops stay for ever. */
void rn_path_register(enum rn_path_kind kind, const struct rn_path_ops *ops);
const struct rn_path_ops *rn_path_of(enum ibv_qp_type type);

/* What the requester does for its queue pairs; likewise. */
struct rn_requester_ops {
	/* Go on with what is queued. Takes the send lock; on the engine. */
	void (*progress)(struct rn_qp *qp);
	/* The responder is given up: a receive that was claimed from its pool goes back. With the send lock held. */
	void (*forget_responder)(struct rn_qp *qp);
	/* Copy some of a long request of this CQ's, if there is one. True: it did. */
	bool (*take_turn)(struct rn_cq *cq);
	/* Go on helping the peer with its READ: the run of rn_qp.help.task. */
	void (*help)(struct rn_task *task);
};
void rn_requester_register(const struct rn_requester_ops *ops);
extern const struct rn_requester_ops *rn_requester;

/* A completion queue's other source: receives that arrive by a path that must be polled. */
struct rn_cq_source_ops {
	/* Look for some. True: there may be completions now. */
	bool (*poll)(struct rn_cq *cq);
	/* The program is about to sleep: let the engine poll. */
	void (*arm)(struct rn_cq *cq);
};
