/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena: what other processes see of this one.
 *
 * One sealed memfd per process, mapped by every peer.  It holds what a requester needs to play
 * the responder's adapter: a block for each queue pair with its receive ring, the table of memory
 * keys, and a block for each completion queue.  Everything else (work request ids, send queues,
 * addresses of user objects) stays in private memory.
 *
 *     +--------+-----------------+-------------+-----------+---------+---------------------------+
 *     | head   | queue pairs     | memory keys | CQ blocks | pools   | heap: receive rings       |
 *     | ports  | [port*256+slot] | [key >> 16] |           |         | (offsets, in 64 B units)  |
 *     +--------+-----------------+-------------+-----------+---------+---------------------------+
 *
 * Trust.  Peers run as the same user, so nothing here keeps secrets from them; but a peer may be
 * killed at any instruction, or be confused.  Whatever is read from a peer's arena, or from words
 * of our own arena that peers write, is read once into a local variable and checked before it is
 * used as an index, an offset or a length.  What only we may write is never read from the arena: own.h.
 *
 * Ownership of words.  Each word has one writer, but for these: a QP block's `fault` and `shared`, a CQ block's
 * dirty bits and `armed`, and what pools of receives are claimed and finished by (pool.h), which
 * are changed by atomic read-modify-write only.  Words that the owner writes and words that its peer writes never
 * share a pair of cache lines, except in the slots of a receive ring, which pass to and fro as a whole, and for READs that
 * take so long that it does not matter.
 *
 * A queue pair's slot and its users.  `generation_state` is generation << 8 | state: each queue pair in the
 * slot, and each reset of one, is another generation.  A requester that wants in
 *
 *     1. makes `busy` odd, from the even value it left there, by a sequentially consistent read-modify-write,
 *     2. reads `generation_state`, and every memory key it uses, again, by sequentially consistent loads,
 *     3. works, publishes, and makes `busy` even.
 *
 * The owner that wants it out (destroy, RESET, ERR, deregistration) changes `generation_state` or the key, with
 * a full fence, then waits until `busy` is even (for a key: or has moved on, since keys are read
 * again then).  Either the requester saw the change, or the owner sees it busy: both are
 * store-fence-load, so one of the two must hold.  (The requester's fence is that both accesses are sequentially
 * consistent.  The read-modify-write alone is a fence on x86, but not on ARM, where a weaker load may pass its store.)
 * The wait is bounded; when the peer lives but doesn't move (it was stopped), slot and memory are put aside until it
 * does, instead of being reused.
 * A slot that is given to another pair continues the count of `busy`: it never starts anew.
 *
 * docs/developers/shared-words.md says for each word who writes and reads it, in which order, and why; `make litmus` checks
 * the protocols with these orders and with weaker ones.
 */
#pragma once

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	RN_PORTS_MAX = 64, /* each port numbers 256 queue pairs */
	RN_QPS_MAX = RN_PORTS_MAX * 256,
	RN_MRS_MAX = 1 << 16,
	RN_CQS_MAX = 1 << 12,
	RN_CQ_QPS_MAX = 64 * 64, /* queue pairs that can receive into one CQ */
	RN_POOLS_MAX = 1 << 12,
	RN_MAX_SGE = 16,
};

/* Apart from the sizes above: from gcc 13 on, one value that no int holds makes every constant of its enum unsigned. */
enum {
	RN_NO_CHANNEL = UINT32_MAX,
	RN_NO_POOL = UINT32_MAX,
};

/*
 * One posted receive: what the owner offers, and, in the same place, the result.
 *
 * `owner_sequence` says who owns it: it is the receive's index while that is posted, and one more when the peer is
 * done with it; both ends count receives from the same start.  So neither has to read a count that the other writes:
 * offer, message and completion move in the slot's own line.  In a ring of at least two slots no value means both.
 */
struct rn_slot {
	_Atomic uint32_t owner_sequence; /* written last by either */
	uint16_t num_sge;
	/* written by the peer */
	uint16_t destination; /* in a pool only: the block of the queue pair it is for */
	uint32_t byte_len;
	uint32_t imm_data;
	uint8_t status;
	uint8_t opcode;
	uint8_t wc_flags;
	uint8_t vendor_err;
	uint32_t source_qpn; /* in a pool only: a ring has one peer */
	struct rn_slot_sge {
		uint64_t addr;
		uint32_t length;
		uint32_t lkey;
	} sge[]; /* two of them fill the cache line */
};

/* In wc_flags, beside those of struct ibv_wc: the message is in the slot's room, for the owner to carry on; the header
 * in front of a datagram is IPv4's. */
enum { RN_SLOT_EAGER = 1 << 7, RN_SLOT_IPV4 = 1 << 6 };

static_assert(sizeof(struct rn_slot) == 24, "two scatter entries share a line with their completion");

/* When it was completed, for a CQ that has time stamps: the last word of the slot, which then has room for it. */
static inline _Atomic uint64_t *rn_slot_stamp(struct rn_slot *slot, uint32_t stride)
{
	return (_Atomic uint64_t *)((char *)slot + stride) - 1;
}

/*
 * One receive in a pool, which many may take from: pool.h has the theory.  `word` says who owns it.
 * In the slot, `owner_sequence` is the next in the list of what has finished.
 */
struct rn_entry {
	_Atomic uint64_t word; /* position << 32 | who << 2 | enum rn_entry_kind */
	struct rn_slot slot;
};
static_assert(sizeof(struct rn_entry) == 32, "as above");

enum rn_entry_kind {
	RN_ENTRY_FREE,    /* the owner's */
	RN_ENTRY_POSTED,  /* anybody's; who: the ring's nonce */
	RN_ENTRY_CLAIMED, /* who: its claimer */
	RN_ENTRY_DONE,    /* the same, and the completion is in it */
};

/* A pool of receives: an SRQ, or a UD queue pair's receive queue, as senders see it. */
struct rn_pool_block {
	/* The owner's. `ring` is all that is known of the ring, in one word: 0 when it is closed. */
	alignas(128) _Atomic uint64_t ring; /* nonce << 32 | size (log2) << 28 | stride / 64 << 23 | offset / 64 */
	_Atomic uint32_t tail;              /* positions posted so far */
	_Atomic uint32_t pd;
	_Atomic uint32_t limit;   /* wake the owner when fewer are left; 0: don't */
	_Atomic uint32_t arming;  /* counts the settings of limit */
	_Atomic uint32_t number;  /* of an XRC SRQ; 0: it is not one */
	_Atomic uint32_t domain;  /* its XRC domain */
	_Atomic uint32_t cq, cq_bit; /* where an XRC SRQ's completions go */
	_Atomic uint64_t older;      /* the ring before, while it holds receives; else 0 */

	/* The claimers'. */
	alignas(128) _Atomic uint32_t head; /* no posted one is before this position, but for strays */
	_Atomic uint32_t strays;            /* how often one was given back or moved, so that it may be anywhere */
	_Atomic uint32_t strays_found;      /* of which all are in order or taken again */
	_Atomic uint32_t woken;             /* the arming for which the owner was woken */
	_Atomic uint32_t finished;          /* of an XRC SRQ: as in a QP block */
	alignas(128) char end[];
};

/* Room behind a ring: see objects/eager.c. Each message has a line more than it needs, so that they spread. */
static inline uint64_t rn_eager_bytes(uint32_t slots, uint32_t room)
{
	return room ? (uint64_t)slots * (room + 64) : 0;
}
static inline char *rn_eager_room(const char *rooms, uint32_t slot, uint32_t room)
{
	return (char *)rooms + (uint64_t)slot * (room + 64);
}

struct rn_qp_block {
	/* The owner's, rarely written: a peer keeps these lines in its cache. All but generation_state, access and
	 * min_rnr_timer are fixed from RTR on, for one generation. */
	alignas(128) _Atomic uint64_t generation_state;
	_Atomic uint32_t qpn;
	_Atomic uint32_t dest_qpn;
	uint32_t pd;
	uint32_t rq_psn;
	_Atomic uint32_t access;
	_Atomic uint32_t min_rnr_timer;
	uint64_t rq_offset;
	uint32_t rq_size; /* slots, a power of two, at least 2 */
	uint32_t rq_stride;
	uint32_t rq_max_sge;
	uint32_t rq_eager; /* bytes of room for a short message behind the ring, for each slot: objects/eager.c */
	uint32_t cq; /* the receive CQ's block, and this QP's bit there */
	uint32_t cq_bit;
	uint32_t max_dest_rd_atomic;
	uint32_t pool; /* where its receives come from instead of the ring, or RN_NO_POOL */
	uint32_t type; /* enum ibv_qp_type */
	_Atomic uint32_t qkey;   /* of a UD queue pair */
	uint32_t domain;         /* XRC domain of an XRC_RECV queue pair */
	uint32_t stamped;        /* note the time of each receive: see rn_slot_stamp */

	/* The peer's; the owner looks here only when it wants the peer out, or was woken for it. */
	alignas(128) _Atomic uint32_t busy;
	_Atomic uint32_t done;        /* index of the next receive to be used */
	_Atomic uint32_t fault;       /* enum rn_fault: the responder has failed, its owner doesn't know yet */
	_Atomic uint32_t established; /* something came while in RTR */
	_Atomic uint32_t finished;    /* receives from a pool, last first: offset / 64 in the arena; 0: none */

	/* A long READ of the peer's that both carry: objects/share.h. */
	alignas(128) _Atomic uint64_t shared; /* both's */
	_Atomic uint64_t given;               /* the owner's */
	alignas(128) char end[];
};

/* UNPLUGGED is no failure: the owner's link is down, by its own doing, and will be up again. See faults/fault.h. */
enum rn_fault {
	RN_FAULT_NONE,
	RN_FAULT_REQUEST,
	RN_FAULT_ACCESS,
	RN_FAULT_LOCAL,
	RN_FAULT_TERMINATED, /* by iWARP's rules */
	RN_FAULT_UNPLUGGED,
};

/*
 * A CQ as its pushers see it.  A peer that has published in its queue pair's ring sets the QP's
 * bit in `dirty`, then the word's bit in `summary`; the owner clears them the other way round.
 * So a pusher that dies or stops between any two steps hides nobody's completions but its own.
 * The first line has all that a push touches while no more than 384 queue pairs share the CQ.
 */
struct rn_cq_block {
	alignas(128) _Atomic uint64_t summary;
	_Atomic uint32_t armed; /* enum rn_armed in the low bits; above them a count of armings */
	uint32_t channel;       /* id, or RN_NO_CHANNEL; fixed for life */
	_Atomic uint64_t dirty[RN_CQ_QPS_MAX / 64];
	/* Moderated: which arming (the whole word) << 32 | completions since. By pushers, by compare-and-swap. */
	_Atomic uint64_t held;
	_Atomic uint32_t hold;  /* the owner's: the number at which its event is due */
	_Atomic uint32_t timed; /* the owner's engine has its timer set for this arming */
	alignas(128) char end[];
};

enum rn_armed {
	RN_ARMED_NOT,
	RN_ARMED_SOLICITED,
	RN_ARMED_NEXT,
	RN_ARMED_SIGNALLED, /* it was, and its token has been written */
	RN_ARMED_KIND = 3,  /* the bits of these */
	RN_ARMED_MODERATED = 4, /* and its event waits for more: objects/cq_event.c */
	RN_ARMED_FLAGS = 7,
};

enum rn_mr_kind {
	RN_MR_USER,      /* ordinary memory of its owner: process_vm_*, or its owner's engine */
	RN_MR_ON_DEMAND, /* the same, but each range is tried before its owner touches it */
	RN_MR_SEGMENT,   /* a sealed memfd: mapped by the peers that need it */
	RN_MR_NULL,      /* of any address, which doesn't count: objects/null_mr.c */
};

/* A memory key: key = index << 16 | tag (objects/mr_key.c). `key` is 0 while the entry is not valid. */
struct rn_mr_entry {
	alignas(64) _Atomic uint32_t key;
	uint32_t pd;
	uint32_t access;
	uint32_t kind;
	uint64_t iova;
	uint64_t length;
	uint64_t base;    /* address in the owner's process */
	uint64_t offset;  /* within the segment */
	uint32_t segment; /* id */
	uint32_t qpn;     /* a window of type 2: the queue pair that it is for; else 0 */
	uint32_t last;    /* of the owner's own table: the key that it had before */
};
static_assert(sizeof(struct rn_mr_entry) == 64, "one key, one cache line");

/* Where its entry is: any upper half of a key is a place of the table. */
static inline uint32_t rn_mr_index(uint32_t key)
{
	return key >> 16;
}

struct rn_arena_head {
	uint64_t magic; /* says layout and sizes, too: see RN_ARENA_MAGIC */
	uint64_t size;
	_Atomic uint32_t ports[RN_PORTS_MAX];
};

#define RN_ARENA_MAGIC \
	(0x524e4152454e0600ull + sizeof(struct rn_qp_block) / 128 * 16 + sizeof(struct rn_cq_block) / 128)

enum {
	RN_ARENA_HEAD = 4096,
	RN_ARENA_QPS = RN_ARENA_HEAD,
	RN_ARENA_MRS = RN_ARENA_QPS + RN_QPS_MAX * sizeof(struct rn_qp_block),
	RN_ARENA_CQS = RN_ARENA_MRS + RN_MRS_MAX * sizeof(struct rn_mr_entry),
	RN_ARENA_POOLS = RN_ARENA_CQS + RN_CQS_MAX * sizeof(struct rn_cq_block),
	RN_ARENA_HEAP = RN_ARENA_POOLS + RN_POOLS_MAX * sizeof(struct rn_pool_block),
	RN_ARENA_SIZE = 512 << 20, /* sparse: only what is touched exists */
};

/* In an entry's access: it is good as an lkey. Regions are, windows aren't. */
#define RN_ACCESS_LOCAL (1u << 31)

static inline struct rn_arena_head *rn_arena_head(char *arena)
{
	return (struct rn_arena_head *)arena;
}
static inline struct rn_qp_block *rn_arena_qp(char *arena, uint32_t index)
{
	return (struct rn_qp_block *)(arena + RN_ARENA_QPS) + index;
}
static inline struct rn_mr_entry *rn_arena_mrs(char *arena)
{
	return (struct rn_mr_entry *)(arena + RN_ARENA_MRS);
}
static inline struct rn_cq_block *rn_arena_cq(char *arena, uint32_t index)
{
	return (struct rn_cq_block *)(arena + RN_ARENA_CQS) + index;
}

static inline struct rn_pool_block *rn_arena_pool(char *arena, uint32_t index)
{
	return (struct rn_pool_block *)(arena + RN_ARENA_POOLS) + index;
}

/* Words that a peer writes, or may have scribbled over: read exactly once. */
#define READ_ONCE(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
/* The same of a fact that may change with the generation: who then sees the old generation has the old fact. */
#define READ_FACT(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)

/* This process's arena; NULL when no context is open. */
extern char *rn_arena;

int rn_arena_open(void); /* counted; 0 or errno; both with rn_process_lock held */
void rn_arena_close(void);
void rn_arena_forked(void);
/* The block of the queue pair with this number in any process's arena; NULL: no such port there. */
struct rn_qp_block *rn_arena_locate(char *arena, uint32_t qpn);
int rn_arena_fd(void); /* the arena's own: not to be closed; -1: there is none */
size_t rn_arena_size(void);

/* Heap, for receive rings: an offset from the arena's start, or 0. Thread-safe; slow path. */
uint64_t rn_arena_alloc(uint64_t bytes);
void rn_arena_free(uint64_t offset, uint64_t bytes);
