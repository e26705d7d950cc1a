/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the embedded device exports beyond the verbs ABI.
 *
 * Found by dlsym, by our own core and by tests; a program that doesn't know of it misses nothing.
 * An exported struct only ever grows, at its end.
 */
#pragma once

#include <stddef.h>
#include <sys/types.h>

#include "base/block.h"
#include "base/counters.h"

struct ibv_context;
struct ibv_qp;
struct rdma_cm_id;
struct sockaddr;

/* What a context, or one of its queue pairs, has done so far. 0 or errno. */
int rdmanet_soft_counters(struct ibv_context *context, struct rn_counters *counters);
int rdmanet_soft_qp_counters(struct ibv_qp *qp, struct rn_counters *counters);

/* What this process holds now; and how much of it is put aside for peers that are stopped. */
void rdmanet_soft_live(struct rn_live *live);
uint32_t rdmanet_soft_quarantined(void);

/*
 * Inject faults: the text has the grammar of faults/fault.h, as in RDMANET_SOFT_CHAOS, and replaces the previous one;
 * "" ends all faults, NULL restores the environment's. Without a context: for all contexts of this process, including
 * future ones. 0, or errno; with EINVAL, error says what is expected.
 */
int rdmanet_soft_chaos(struct ibv_context *context, const char *text, char *error, size_t size);

/* How many faults have happened since they were last set for the whole process: with this a test checks that the fault
 * it set has happened. */
uint64_t rdmanet_soft_chaos_happened(void);

/* The fault at this place, from 0, of the text that was set for a context, or without one for the whole process: its
 * text, cut to size, and how often it has happened since. 0 or errno; ENOENT: the text has no more. */
int rdmanet_soft_chaos_fault(struct ibv_context *context, unsigned place, char *text, size_t size, uint64_t *happened);

/* Read the settings, and RDMANET_SOFT_CHAOS, as when the device is opened, but open nothing. 0, or EINVAL: one is wrong,
 * as a line on standard error says; error has the same. */
int rdmanet_soft_check(char *error, size_t size);

/* Which path a queue pair's requests take to its peer: chosen when it comes to RTR, by trying. */
enum {
	RDMANET_SOFT_WAY_NONE,   /* no peer yet, or nobody has answered */
	RDMANET_SOFT_WAY_SELF,   /* the same process: by pointer */
	RDMANET_SOFT_WAY_MAPPED, /* the same host and user: in its mapped arena */
	RDMANET_SOFT_WAY_STREAM, /* TCP */
};
int rdmanet_soft_qp_way(struct ibv_qp *qp);

/* For how long, in nanoseconds, the host of a peer by TCP has left unanswered what it must answer, whatever the peer's
 * process does; 0 if it owes no answer. 0 or errno. */
int rdmanet_soft_qp_silence(struct ibv_qp *qp, uint64_t *ns);

/* Whether the peer's process is known to have ended while it was connected, for instance because it was killed; for a
 * queue pair and for an identifier, either of which may know first. False for a peer that disconnected, or that cannot
 * be reached. */
int rdmanet_soft_qp_peer_is_gone(struct ibv_qp *qp);
int rdmanet_soft_cm_peer_is_gone(struct rdma_cm_id *id);

/* Which user of this host has asked for the connection of this identifier, and by which way, as the kernel tells. Only
 * the passive side knows, and only while there is a connection. */
enum {
	RDMANET_SOFT_PEER_UNKNOWN, /* another host, or the kernel does not tell; the user is not set */
	RDMANET_SOFT_PEER_BY_TCP,
	RDMANET_SOFT_PEER_BY_NAME, /* by a Unix socket, or in memory */
};
int rdmanet_soft_cm_peer_user(struct rdma_cm_id *id, uid_t *user);

/* Have rdma_connect ask for the connection by the listener's name on this host, and never by TCP: for whoever knows that
 * a TCP program has the port, beside which an RDMA program listens by name. 0; -1 and errno. */
int rdmanet_soft_cm_by_name_alone(struct rdma_cm_id *id);

/* rdma_disconnect, but the program needs no event that says when the peer has heard of it: so nobody waits for that. 0; -1
 * and errno. */
int rdmanet_soft_cm_leave(struct rdma_cm_id *id);

/* rdma_resolve_addr and rdma_resolve_route in one, for an identifier with a channel: the device has nothing to wait for. 1:
 * both are done, and no event says so; 0: an event says why not; -1 and errno. */
int rdmanet_soft_cm_resolve(struct rdma_cm_id *id, struct sockaddr *src, struct sockaddr *dst);

/* Keep the connection manager's context open until it is released, which rdma_get_devices() does for good. NULL and
 * errno. What was held before a fork is not the child's to release: nothing happens then. */
struct ibv_context *rdmanet_soft_cm_hold(void);
void rdmanet_soft_cm_release(struct ibv_context *context);

/* Where warnings go: a non-blocking descriptor, one write() per line; -1: standard error, as in every forked child. The
 * previous descriptor is not used any more. log.h says what warnings are. */
void rdmanet_soft_log_to(int fd);

/* What was wrong with the settings when the device was last opened, as written to standard error; "" if nothing. */
void rdmanet_soft_settings_error(char *text, size_t size);

/* What is now in this file of the kernel's, if the device were the kernel's: its length; -1 and errno: EINVAL when it
 * cannot be read, and ENOENT when it does not change, or there is none. device/files.c has the list. */
ssize_t rdmanet_soft_file(const char *path, char *text, size_t size);

/* An access flag for ibv_reg_mr of the whole address space: its user vouches for every range that it
 * posts, so none is tried first. See objects/on_demand.c. */
extern const uint32_t rdmanet_soft_access_vouched;

/* From how many bytes on an RDMA WRITE into the reader's memory beats SENDs that the reader copies.  With an adapter it
 * saves the CPU a copy. Here a CPU copies in any case, so it pays only for what is larger than the caches. */
extern const uint32_t rdmanet_soft_place_bytes;

/* A flag of a WRITE or READ (send_flags): it is a part of so many bytes that the caches do not hold them. So the device
 * copies it past the caches, which is faster then. See responder/stream.h. */
extern const uint32_t rdmanet_soft_send_of_much;

/* Execute the first of these READs or WRITEs (opcode), as far as that can be done at once, and up to so many bytes; returns
 * how many.  A short one counts as 256 bytes; one that the kernel copies, as 1024 more than it has.  They are done then,
 * without a completion.  The others are to be posted; requester/at_once.c says why. */
uint32_t rdmanet_soft_move(struct ibv_qp *qp, int opcode, unsigned send_flags, const struct rn_block *blocks, uint32_t count,
			   uint64_t most_bytes);
