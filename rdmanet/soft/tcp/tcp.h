/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The path by TCP, to peers whose memory can't be mapped.
 *
 *     requester's process                                 responder's process
 *     post_send, or the engine                            engine, or poll_cq
 *       send.c   frames ------------------------------->  serve.c --> responder/responder.c
 *                <------------------- ACK, RNR, NAK, READ data        straight into the memory meant
 *
 * There is one connection for each direction of a queue pair, from the requester's GID to the port in the responder's
 * number; each side sends its own requests on the one that it made, and answers on the other, where short replies are
 * piggybacked.  It is opened when the requester comes to RTS, and ends with the queue pair.
 *
 *     tcp.c        its life: accepting, the end
 *     connect.c    making it
 *     expect.c     is that the peer?  One that maps our memory does not connect by TCP
 *     hello.c      who is it?  Both ends of a fresh connection, up to the first frame
 *     wire.c       bytes in and out
 *     send.c       the requester: frames out
 *     answers.c    and answers in
 *     serve.c      the responder: frames in, answers out
 *     tail.c       the end of a READ's answer
 *     piggyback.c  a reply goes where the request came from
 *     poll.c       poll_cq looks after the sockets itself
 *     timeout.c    an answer that never comes
 *
 * Copies.  writev takes a payload from the memory of the work request, readv puts it into the
 * memory that it is for; only what arrives with a header goes through the input buffer.
 *
 * Order.  The responder executes one frame after the other, in order, and answers in order.  A
 * request without a receive gets an RNR NAK, and then the responder discards everything until that
 * request comes again: the requester goes back to it when the responder's RNR timer has expired.  ACKs are
 * cumulative, and go along with requests the other way where there are any.  Requests that are only the requester's
 * business (bindings, invalidations of its own keys) wait until all before them is done, and are then done here,
 * whether or not anybody is there; the next frame says how many of them there were.
 *
 * Trust.  Any process may be at the other end.  Each field of a frame is checked before it is used; the
 * memory of a region is touched with the send lock held, after its key was looked at again, so
 * never after deregistration; what a READ's answer or a frame may write is fixed by our own work
 * request or receive.  A peer that breaks the rules loses the connection, and the queue pair goes to ERR.
 *
 * Death.  If a connection ends after BYE, the peer's queue pair has gone to ERR or RESET.  Then nobody answers any
 * more, and a request that is posted all the same uses up its retries, as on a wire.  Without BYE the peer's process
 * was killed or its host is gone: requests fail at once.
 *
 * UC.  A request that fails at its requester (SQE) ends nothing but the connection, and only if it was cut off in the
 * midst.  The responder drops what has come of it, and goes on counting requests on the next connection, which it
 * accepts when it has read the one before to its end.
 *
 * Locks.  What belongs to a queue pair is under its send lock, including the memory that is touched.
 * A stream is taken apart by the engine, or by the reset that waits for the engine, since whoever has the
 * send lock mustn't wait for callbacks: `ended` marks it until then.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/engine.h"
#include "base/stranger.h"
#include "objects/qp.h"
#include "responder/responder.h"
#include "tcp/frames.h"

struct rn_qp;
struct rn_cq;

/* --- the objects --------------------------------------------------------------------------------- */

enum rn_tcp_state {
	RN_TCP_CONNECTING, /* ours: TCP isn't there yet */
	RN_TCP_GREETING,   /* hello.c has it */
	RN_TCP_OPEN,
	RN_TCP_LINGERING, /* without a queue pair: our last answers are on their way */
};

enum { RN_TCP_INPUT = 32 * 1024, RN_TCP_OUTPUT = 2048 };
static_assert(RN_TCP_OUTPUT >= sizeof(struct rn_tcp_answer) + RN_PIGGYBACK_MAX, "piggybacked requests go in one piece");

/* The user who has a TCP port. */
struct rn_holder {
	bool is_known;
	uid_t user;
};

/* One connection, in one of two roles. */
struct rn_tcp {
	struct rn_source source;
	struct rn_timer timer; /* the peer is silent, or the stream lingers, for too long */
	struct rn_task task;   /* it has ended */
	struct rn_task again;  /* go on after other streams had their turn */
	struct rn_tcp *next, **link; /* of all */
	struct rn_stranger stranger;
	enum rn_whose {
		RN_WHOSE_UNKNOWN,
		RN_WHOSE_ASKED,
		RN_WHOSE_PEERS,  /* a socket of this host, and of the user who has the peer's port */
		RN_WHOSE_OTHERS, /* of this host, but not that user's */
	} whose;
	struct rn_qp *qp;      /* NULL: not known yet, or let go of */
	bool is_out;           /* we connected, our requests go out */
	bool ended;
	enum rn_tcp_state state;
	uint32_t events; /* that the engine watches */
	bool wants_out;  /* the socket was full */

	/* Input that was not handled yet: buffer[at..end).  There is room for a piggybacked request before it. */
	char *input;
	uint32_t input_at, input_end;
	bool drained; /* the last read got less than it asked for */
	bool hung_up; /* the other end's kernel did */

	/* Greetings and answers that the socket didn't take at once. */
	char output[RN_TCP_OUTPUT];
	uint32_t output_at, output_end;

	struct rn_tcp_hello hello;
	uint8_t nonce[32]; /* the responder's */
	bool challenged;
	bool denied; /* a stream of ours: the two ends have different secrets, or versions */
	struct rn_holder listener; /* a stream of ours: who listens at the port that it has reached */

	/* The requester: a frame that the socket took in part. */
	struct rn_tcp_frame frame;
	uint32_t frame_sent; /* header included; 0: there is none */
	bool frame_is_void;  /* it will be discarded */
	/* And the answer that is being received. */
	struct rn_tcp_answer answer;
	uint32_t answer_left; /* payload bytes of it to come */
	bool receiving;       /* in the midst of it */

	/* The responder. */
	struct rn_responder_ctx ctx;
	uint32_t expected;  /* serial of the next request */
	uint32_t told;      /* up to here the requester was told what was executed */
	bool waits;         /* after an RNR NAK, for that request to come again */
	bool is_piggybacked; /* the next in the buffer came by the other connection, */
	bool was_piggybacked; /* and so did the last one; */
	bool held;          /* the next is behind one that has yet to */
	bool failed;        /* after a NAK: what arrives is ignored */
	bool serving;
	bool confirmed;     /* the requester has accepted us as its responder, so its end means something */
	bool said_bye;      /* the requester did */
	struct rn_tcp_frame head; /* of the frame at hand */
	uint32_t payload_left;     /* bytes of it to come */
	bool discards;             /* them */
	bool drops;                /* the message: UC, and it doesn't fit */
	bool is_gone;              /* the responder went to ERR, or its link down, within the message */
	uint32_t message_done;     /* bytes of the message, in earlier frames too */
	struct rn_request request;
	struct rn_transfer transfer;
	bool reading; /* a READ is being answered */
	bool padding; /* its memory is gone: zeros fill up what the header announced */
	uint32_t chunk_left;
};

/* Of a CQ's list of queue pairs with streams. */
struct rn_tcp_link {
	struct rn_list link;
	struct rn_qp *qp;
	uint32_t round; /* the arming after which it was left to the engine */
};

/* Wrong sequence numbers. */
struct rn_attempts {
	uint64_t since_ns;
	uint32_t count;
};

/* A queue pair's part of it, under its send lock. */
struct rn_tcp_path {
	struct rn_qp *qp;
	struct rn_tcp *out, *in;
	bool listed; /* the CQs' pollers know it */
	struct rn_tcp_link send_link, recv_link;

	/* The requester, connecting. */
	bool met;  /* the responder's process was there, and refused */
	uint32_t tried; /* requests before this one were posted before the last attempt */
	bool left; /* our peer has said BYE, which is final */
	bool denied; /* its secret or version differs from ours, so trying again is useless */
	uint64_t retry_ns, backoff_ns;
	uint64_t kept_until_ns; /* UC: that the peer refuses us is no reason yet to drop anything */

	uint32_t served; /* the responder, UC: requests that came by earlier connections */

	struct rn_holder holder; /* of the peer's port, when the queue pair came to RTR */

	/* Attempts to be the peer: by the peer's user or from its host, and by other users of this host. */
	struct rn_attempts its, others;

	/* The requester's place in the send queue: executed <= acked <= next <= posted. */
	uint32_t acked;
	uint32_t next, offset; /* the first byte that was not framed yet */
	uint32_t skipped_from, skipped_to; /* the last requests that got no frame, and won't */
	uint32_t reads;        /* READs and atomics on their way */
	uint32_t behind_piggyback; /* the request after a piggybacked one */
	uint32_t stray_end;    /* frames sent before this one may still arrive, to be discarded */
	uint64_t rnr_until_ns;
	enum ibv_wc_status broken; /* a request that can't be sent fails with this, when its turn comes: */
	uint32_t broken_at;

	/* Who looks after the sockets: poll_cq while the program polls, else the engine. */
	bool polled;
	uint32_t idle_polls, polls, polls_seen;
	struct rn_timer tick;

	/* How far requests had come when patience began anew. */
	struct rn_timer patience;
	bool expects; /* it is set */
	uint32_t seen_executed, seen_acked;
	uint64_t seen_moved, since_ns;
};

/* Of requests, counted modulo 2^32. */
static inline bool rn_is_before(uint32_t a, uint32_t b)
{
	return (int32_t)(a - b) < 0;
}

/* --- tcp.c -------------------------------------------------------------------------------------- */

/* For queue pairs that send requests by TCP, or whose peer may. */
extern const struct rn_path_ops rn_tcp_path_ops;

/* Called on the way to RTR: become reachable for such peers. Without locks. 0 or errno. */
int rn_tcp_listen(struct rn_qp *qp, const struct ibv_ah_attr *ah);
/* All of these with the send lock held. */
void rn_tcp_use(struct rn_qp *qp);      /* TCP is the path from here on; the queue pair was in RTS, or will be */
void rn_tcp_leave(struct rn_qp *qp); /* to ERR: say BYE */
/* For a reset, without locks: nothing of it is left afterwards. */
void rn_tcp_close(struct rn_qp *qp);

/* A connection with this descriptor; NULL: no memory. */
struct rn_tcp *rn_tcp_make(int fd, bool is_out);
/* Whether it is still its queue pair's stream, and usable. With the send lock held. */
bool rn_tcp_is_current(const struct rn_tcp *stream);

/* Give a connection that has identified itself to its queue pair. False: that is not there, or does not expect it. */
bool rn_tcp_attach(struct rn_tcp *in);

/* It is over: the engine takes it apart. With the send lock of its queue pair held. */
void rn_tcp_end(struct rn_tcp *stream);
/* The other end has vanished without a word, or broken the rules. Likewise. */
void rn_tcp_lost(struct rn_tcp *stream);
void rn_tcp_watch(struct rn_tcp *stream);
/* Work was interrupted, for other streams' turn or for the engine to take over: go on with it later. No event is raised
 * for what has been read from the socket already. */
void rn_tcp_go_on(struct rn_tcp *stream);
void rn_tcp_free(struct rn_tcp *stream); /* sources and timers are removed; on the engine, or if nobody else has it */

/* --- connect.c: with the send lock held, but for the last ----------------------------------------- */

void rn_tcp_progress(struct rn_qp *qp); /* do what can be done */
bool rn_tcp_in_flight(const struct rn_qp *qp);
void rn_tcp_attempt_failed(struct rn_tcp *stream, bool met);
void rn_tcp_out_ready(struct rn_source *source, uint32_t events); /* on the engine */

/* --- expect.c --------------------------------------------------------------------------------- */

/* With the queue pair's send lock held. If `whose` is RN_WHOSE_ASKED then, find that out and call this again. */
bool rn_tcp_is_expected(struct rn_tcp *in, struct rn_qp *qp);
void rn_tcp_ask_whose(struct rn_tcp *in);

/* Find out which user has the peer's port, if the peer is on this host. Without locks, when the queue pair has come to
 * RTR, and again when a connection to it stands. */
void rn_tcp_ask_holder(struct rn_qp *qp);
void rn_tcp_ask_listener(struct rn_tcp *out);
/* With the send lock held: does the same user still have it? */
bool rn_tcp_is_holders(struct rn_tcp *out);

/* --- hello.c ----------------------------------------------------------------------------------- */

/* Each returns false when this connection is finished. */
bool rn_tcp_hello_send(struct rn_tcp *out);
bool rn_tcp_hello_answered(struct rn_tcp *out);
bool rn_tcp_hello_arrived(struct rn_tcp *in);
/* The stream has got its queue pair: begin to serve. False: the queue pair's block makes no sense. */
bool rn_tcp_serve_begin(struct rn_qp *qp, struct rn_tcp *in);
/* To be sent before anything else. */
bool rn_tcp_hello_welcome(struct rn_tcp *in);

/* --- wire.c ------------------------------------------------------------------------------------- */

enum { RN_TCP_ENDED = -1, RN_TCP_NOTHING = 0 };

/* Into the given memory first, if any, then into the input buffer, which is empty or starts with what
 * came before. How many bytes went into the memory given and the buffer; NOTHING or ENDED. EFAULT: the memory
 * is not there, and nothing was read. */
ssize_t rn_tcp_read(struct rn_tcp *stream, const struct iovec *direct, int count, size_t length, bool *fault);
static inline uint32_t rn_tcp_available(const struct rn_tcp *stream)
{
	return stream->input_end - stream->input_at;
}
/* Bytes of the buffer, taken. They must be available. */
const char *rn_tcp_take(struct rn_tcp *stream, uint32_t length);

/* Put a piggybacked request before what is in the buffer. False: no memory. */
bool rn_tcp_put_back(struct rn_tcp *stream, const char *request, uint32_t length);

/* Append to what is to be sent; false: no room. */
bool rn_tcp_put(struct rn_tcp *stream, const void *data, uint32_t length);
static inline uint32_t rn_tcp_room(const struct rn_tcp *stream)
{
	return RN_TCP_OUTPUT - stream->output_end;
}
/* Send that, then this. Bytes of `more` that were taken, NOTHING (wants_out is set), or ENDED. */
ssize_t rn_tcp_write(struct rn_tcp *stream, const struct iovec *more, int count, bool *fault);
/* Send only what was put. True: nothing of it is left. */
bool rn_tcp_flush(struct rn_tcp *stream);

/* --- send.c ------------------------------------------------------------------------------------- */

void rn_tcp_push(struct rn_qp *qp);
/* Do the bindings and invalidations at the head of the queue, which need no stream. False: one has failed. */
bool rn_tcp_execute_local(struct rn_qp *qp);
/* On UC, if nobody is there: complete what is posted. */
void rn_tcp_drop(struct rn_qp *qp, uint32_t end);

/* --- answers.c ---------------------------------------------------------------------------------- */

/* Handle answers. False: the stream is over (ended or lost). */
bool rn_tcp_receive(struct rn_qp *qp);
/* The peer says that this many of our requests were executed. False: that is impossible. */
bool rn_tcp_acknowledged(struct rn_qp *qp, uint32_t count);
/* Complete, in order, what is known to be done. */
void rn_tcp_advance(struct rn_qp *qp);

/* --- serve.c ------------------------------------------------------------------------------------ */

/* Handle frames. False: the stream is over. */
bool rn_tcp_serve(struct rn_qp *qp);
/* Before the queue pair goes to ERR: serve what has arrived. */
void rn_tcp_last_look(struct rn_qp *qp);
/* Tell the requester what was executed, if it doesn't know. */
void rn_tcp_tell(struct rn_qp *qp);

/* --- tail.c --------------------------------------------------------------------------------------- */

/*
 * A READ succeeds with its last byte, and what a header has announced must follow, if only zeros where the memory has gone
 * meanwhile.  So the last bytes are announced when they are at hand: as a copy, behind all others.
 */
enum { RN_TCP_TAIL = 64 };
struct rn_tcp_tail {
	struct rn_tcp_answer answer;
	char data[RN_TCP_TAIL];
};

static inline uint32_t rn_tcp_tail_length(const struct rn_transfer *t)
{
	return t->total < RN_TCP_TAIL ? t->total : RN_TCP_TAIL;
}

/* Its size with its header, or 0: the memory is gone. */
size_t rn_tcp_make_tail(const struct rn_tcp *in, struct rn_tcp_tail *tail);

/* --- piggyback.c -------------------------------------------------------------------------------------- */

/* May request `next` of an open stream be piggybacked? */
bool rn_piggyback_may_go(const struct rn_qp *qp);
enum ibv_wc_status rn_piggyback_send(struct rn_qp *qp, const struct rn_tcp_frame *frame);
bool rn_piggyback_makes_sense(uint32_t length);
/* The current answer, a piggybacked frame, is complete. False: the peer breaks the rules. */
bool rn_piggyback_came(struct rn_qp *qp);
/* The frame at hand has to wait for one. */
bool rn_piggyback_is_ahead(const struct rn_qp *qp);

/* --- timeout.c ----------------------------------------------------------------------------------- */

/* A request may be on its way: limit the time for its answer. With the send lock held. */
void rn_tcp_expect(struct rn_qp *qp);
void rn_tcp_patience(struct rn_timer *timer);

/* --- poll.c ------------------------------------------------------------------------------------- */

void rn_tcp_list(struct rn_qp *qp);   /* with the send lock held */
void rn_tcp_unlist(struct rn_qp *qp); /* without locks */
void rn_tcp_tick(struct rn_timer *timer);

/* For struct rn_peer_ops: a connection came to a queue pair's port. Takes the descriptor. */
void rn_tcp_accepted(int fd);
