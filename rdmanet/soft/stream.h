/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: the way to peers whose memory can't be mapped, over TCP.
 *
 *     requester's process                                        responder's process
 *     post_send, or the engine                                   engine, or poll_cq
 *       stream_send.c   frames ------------------------------->  stream_serve.c --> respond.c
 *                       <------------ ACK, RNR, NAK, READ data     straight into the memory meant
 *
 * One connection for each direction of a queue pair, from the requester's GID to the port in the
 * responder's number; each side sends its own requests on the one that it made, and answers on
 * the other, where short replies ride along.  Opened when the requester comes to RTS, and over with the queue pair.
 *
 *     stream.c        life: which way, connecting, accepting, the end
 *     stream_expect.c is that the peer?  Nobody comes by TCP for one who maps us
 *     stream_hello.c  who is it?  Both ends of a fresh connection, up to the first frame
 *     stream_wire.c   bytes in and out
 *     stream_send.c   the requester: frames out, answers in
 *     stream_serve.c  the responder: frames in, answers out
 *     stream_ride.c   a reply goes where the request came from
 *     stream_poll.c   poll_cq looks after the sockets itself
 *     stream_timeout.c  an answer that never comes
 *
 * Copies.  writev takes a payload from the memory of the work request, readv puts it into the
 * memory that it is for; only what arrives along with a header goes through the input buffer.
 *
 * Order.  The responder executes one frame after the other, in order, and answers in order.  A
 * request without a receive gets an RNR NAK, and then everything is thrown away until that very request
 * comes again: the requester goes back to it when the responder's RNR timer is over.  ACKs are
 * cumulative, and go along with requests the other way where there are any.  Requests that are only the requester's
 * business (bindings, invalidations of its own keys) wait until all before them is done, and are then done here,
 * whether or not anybody is there; the next frame says how many of them there were.
 *
 * Trust.  The other end may be anybody.  Each field of a frame is checked before it is used; the
 * memory of a region is touched with the send lock held, after its key was looked at again, so
 * never after deregistration; what a READ's answer or a frame may write is fixed by our own work
 * request or receive.  Who breaks the rules loses the connection, and that queue pair is in ERR.
 *
 * Death.  A connection that ends after BYE was left in good order: the peer's queue pair has gone to
 * ERR or RESET.  Then nobody answers any more, and who posts nonetheless spends his retry budget, as
 * on a wire.  Without BYE its process was killed or its host has gone: that is told at once.
 *
 * Locks.  What belongs to a queue pair is under its send lock, the memory that is touched included.
 * A stream is taken apart by the engine, or by the reset that waits for the engine, since whoever has the
 * send lock mustn't wait for callbacks: `ended` marks it until then.
 */
#ifndef RDMANET_SOFT_STREAM_H
#define RDMANET_SOFT_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "engine.h"
#include "respond.h"
#include "stranger.h"
#include "stream_frames.h"

struct rn_qp;
struct rn_cq;

/* --- the objects --------------------------------------------------------------------------------- */

enum rn_stream_state {
	RN_STREAM_CONNECTING, /* ours: TCP isn't there yet */
	RN_STREAM_GREETING,   /* stream_hello.c has it */
	RN_STREAM_OPEN,
	RN_STREAM_LINGERING, /* nobody's: what we said last is on its way */
};

enum { RN_STREAM_INPUT = 32 * 1024, RN_STREAM_OUTPUT = 2048 };
static_assert(RN_STREAM_OUTPUT >= sizeof(struct rn_wire_answer) + RN_RIDER_MAX, "a rider goes in one piece");

/* The user whose a TCP port is. */
struct rn_holder {
	bool is_known;
	uid_t user;
};

/* One connection, in one of two roles. */
struct rn_stream {
	struct rn_source source;
	struct rn_timer timer; /* says nothing, or lingers too long */
	struct rn_task task;   /* it has ended */
	struct rn_task again;  /* others had their turn: go on */
	struct rn_stream *next, **link; /* of all */
	struct rn_stranger stranger;
	enum rn_whose {
		RN_WHOSE_UNKNOWN,
		RN_WHOSE_ASKED,
		RN_WHOSE_PEERS,  /* a socket of this host, and of the user who has the peer's port */
		RN_WHOSE_OTHERS, /* of this host, but not his */
	} whose;
	struct rn_qp *qp;      /* NULL: a stranger's still, or nobody's any more */
	bool is_out;           /* we connected, our requests go out */
	bool ended;
	enum rn_stream_state state;
	uint32_t events; /* that the engine watches */
	bool wants_out;  /* the socket was full */

	/* What came in and waits for its turn: buffer[at..end).  There is room for a rider before it. */
	char *input;
	uint32_t input_at, input_end;
	bool drained; /* the last read got less than it asked for */
	bool hung_up; /* the other end's kernel did */

	/* Greetings and answers that the socket didn't take at once. */
	char output[RN_STREAM_OUTPUT];
	uint32_t output_at, output_end;

	struct rn_wire_hello hello;
	uint8_t nonce[32]; /* the responder's */
	bool challenged;
	bool denied; /* ours: the two ends have not the same secret */
	struct rn_holder listener; /* ours: at the port that it has reached */

	/* The requester: a frame of which the socket took a part. */
	struct rn_wire_frame frame;
	uint32_t frame_sent; /* header included; 0: there is none */
	/* And the answer that is coming in. */
	struct rn_wire_answer answer;
	uint32_t answer_left; /* payload bytes of it to come */
	bool receiving;       /* in the midst of it */

	/* The responder. */
	struct rn_view view;
	uint32_t expected;  /* serial of the next request */
	uint32_t told;      /* up to here the requester knows what was executed */
	bool waits;         /* after an RNR NAK, for that request to come again */
	bool rides;         /* the next in the buffer came by the other connection, */
	bool rode;          /* and so did the last one; */
	bool held;          /* the next is behind one that has yet to */
	bool failed;        /* after a NAK: nothing counts any more */
	bool serving;
	bool confirmed;     /* the requester has taken us for its responder: its end means something */
	bool said_bye;      /* the requester did */
	struct rn_wire_frame head; /* of the frame at hand */
	uint32_t payload_left;     /* bytes of it to come */
	bool discards;             /* them */
	bool drops;                /* the message: UC, and it doesn't fit */
	uint32_t message_done;     /* bytes of the message, in earlier frames too */
	struct rn_request request;
	struct rn_transfer transfer;
	bool reading; /* a READ is being answered */
	bool padding; /* its memory has gone: zeros fill what was promised */
	uint32_t chunk_left;
};

/* Of a CQ's list of queue pairs with streams. */
struct rn_stream_link {
	struct rn_list link;
	struct rn_qp *qp;
	uint32_t round; /* of arming, in which it was left to the engine */
};

/* Wrong sequence numbers. */
struct rn_attempts {
	uint64_t since_ns;
	uint32_t count;
};

/* What a queue pair has of it, under its send lock. */
struct rn_streams {
	struct rn_stream *out, *in;
	bool listed; /* the CQs' pollers know it */
	struct rn_stream_link send_link, recv_link;

	/* The requester, connecting. */
	bool met;  /* somebody was there, and said no */
	bool left; /* our peer has said BYE: there is no coming back */
	bool denied; /* it has another secret than we: trying again is in vain */
	uint64_t retry_ns, backoff_ns;

	struct rn_holder holder; /* of the peer's port, when the queue pair came to RTR */

	/* Of those who want to be the peer: by the peer's user or from its host, and by other users of this one. */
	struct rn_attempts its, others;

	/* The requester's place in the send queue: executed <= acked <= next <= posted. */
	uint32_t acked;
	uint32_t next, offset; /* the first byte that was not framed yet */
	uint32_t skipped_from, skipped_to; /* the last requests that got no frame, and won't */
	uint32_t reads;        /* READs and atomics on their way */
	uint32_t behind_rider; /* the request after one that rode */
	uint32_t stray_end;    /* what was sent before this one may come to be thrown away */
	uint64_t rnr_until_ns;
	uint8_t rnr_timer;
	enum ibv_wc_status broken; /* of request `next`, when its turn comes */

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

/* --- stream.c -------------------------------------------------------------------------------------- */

void rn_stream_init(struct rn_qp *qp);
/* Which way to a peer with this address, as far as it is known before anybody was asked. */
bool rn_address_is_ours(const struct ibv_ah_attr *ah);
bool rn_stream_is_only_way(const struct ibv_ah_attr *ah);
/* To become RTR: be reachable by such peers. Without locks. 0 or errno. */
int rn_stream_listen(struct rn_qp *qp, const struct ibv_ah_attr *ah);
/* All of these with the send lock held. */
void rn_stream_use(struct rn_qp *qp);      /* from here on it is the way; it was RTS, or will be */
void rn_stream_progress(struct rn_qp *qp); /* do what can be done */
bool rn_stream_in_flight(const struct rn_qp *qp);
void rn_stream_leave(struct rn_qp *qp); /* to ERR: say BYE */
/* Of a reset, without locks: nothing of it is left afterwards. */
void rn_stream_close(struct rn_qp *qp);
void rn_stream_forget(struct rn_qp *qp); /* places in the queue; with the send lock held */

/* Who has introduced himself becomes his queue pair's. False: it isn't there, or doesn't expect him. */
bool rn_stream_attach(struct rn_stream *in);

/* It is over: the engine takes it apart. With the send lock of its queue pair held. */
void rn_stream_end(struct rn_stream *stream);
/* The other end has vanished without a word, or broken the rules. Likewise. */
void rn_stream_lost(struct rn_stream *stream);
void rn_stream_watch(struct rn_stream *stream);
/* Stopped in the midst of it, to let others have their turn, or for the engine to take over. No event
 * tells of what has been read from the socket already. */
void rn_stream_go_on(struct rn_stream *stream);
void rn_stream_free(struct rn_stream *stream); /* sources and timers are removed; on the engine, or nobody else's */
void rn_stream_attempt_failed(struct rn_stream *stream, bool met);

/* --- stream_expect.c --------------------------------------------------------------------------------- */

/* With the queue pair's send lock held. Where `whose` is asked then: let it be found out, and ask again. */
bool rn_stream_is_expected(struct rn_stream *in, struct rn_qp *qp);
void rn_stream_ask_whose(struct rn_stream *in);

/* Whose is the peer's port, if that is one of this host? Without locks, when the queue pair has come to RTR; then when
 * a connection to it stands. */
void rn_stream_ask_holder(struct rn_qp *qp);
void rn_stream_ask_listener(struct rn_stream *out);
/* With the send lock held: is it still his? */
bool rn_stream_is_holders(struct rn_stream *out);

/* --- stream_hello.c ----------------------------------------------------------------------------------- */

/* Each returns false when it is over with this connection. */
bool rn_hello_send(struct rn_stream *out);
bool rn_hello_answered(struct rn_stream *out);
bool rn_hello_arrived(struct rn_stream *in);
/* To be sent before anything else. */
bool rn_hello_welcome(struct rn_stream *in);

/* --- stream_wire.c ------------------------------------------------------------------------------------- */

enum { RN_WIRE_ENDED = -1, RN_WIRE_NOTHING = 0 };

/* Into the given memory first, if any, then into the input buffer, which is empty or starts with what
 * came before. How many bytes went into the memory given and the buffer; NOTHING or ENDED. EFAULT: the memory
 * isn't there, nothing was read. */
ssize_t rn_wire_read(struct rn_stream *stream, const struct iovec *direct, int count, size_t length, bool *fault);
static inline uint32_t rn_wire_available(const struct rn_stream *stream)
{
	return stream->input_end - stream->input_at;
}
/* Bytes of the buffer, taken. They must be available. */
const char *rn_wire_take(struct rn_stream *stream, uint32_t length);

/* A rider, before what is in the buffer. False: no memory. */
bool rn_wire_put_back(struct rn_stream *stream, const char *rider, uint32_t length);

/* Append to what is to be sent; false: no room. */
bool rn_wire_put(struct rn_stream *stream, const void *data, uint32_t length);
static inline uint32_t rn_wire_room(const struct rn_stream *stream)
{
	return RN_STREAM_OUTPUT - stream->output_end;
}
/* Send that, then this. Bytes of `more` that were taken, NOTHING (wants_out is set), or ENDED. */
ssize_t rn_wire_write(struct rn_stream *stream, const struct iovec *more, int count, bool *fault);
/* Only what was put: true when nothing of it is left. */
bool rn_wire_flush(struct rn_stream *stream);

/* The part [skip, skip + length) of mapped pieces, as far as the array goes. Bytes that it covers. */
size_t rn_wire_slice(const struct rn_piece *pieces, int count, uint64_t skip, uint64_t length, struct iovec *to,
		     int room, int *used);

/* --- stream_send.c ------------------------------------------------------------------------------------- */

void rn_stream_push(struct rn_qp *qp);
/* Bindings and invalidations at the head of the queue: they need no stream. False: one has failed. */
bool rn_stream_execute_local(struct rn_qp *qp);
/* Answers. False: the stream is over (ended or lost). */
bool rn_stream_receive(struct rn_qp *qp);
/* UC, and nobody there: what is posted is done. */
void rn_stream_drop(struct rn_qp *qp);
/* So many of our requests were executed, says the peer. False: that can't be. */
bool rn_stream_acknowledged(struct rn_qp *qp, uint32_t count);

/* --- stream_serve.c ------------------------------------------------------------------------------------ */

/* The stream is the queue pair's: from now on it serves. False: its block makes no sense. */
bool rn_stream_serve_begin(struct rn_qp *qp, struct rn_stream *in);
/* Frames. False: the stream is over. */
bool rn_stream_serve(struct rn_qp *qp);
/* Before the queue pair goes to ERR: what has arrived here has arrived. */
void rn_stream_last_look(struct rn_qp *qp);
/* Tell the requester what was executed, if it doesn't know. */
void rn_stream_tell(struct rn_qp *qp);

/* --- stream_ride.c -------------------------------------------------------------------------------------- */

/* May request `next` of an open stream go as a rider? */
bool rn_rider_may_go(const struct rn_qp *qp);
enum ibv_wc_status rn_rider_send(struct rn_qp *qp, const struct rn_wire_frame *frame);
bool rn_rider_makes_sense(uint32_t length);
/* All of the answer at hand is there. False: the peer breaks the rules. */
bool rn_rider_came(struct rn_qp *qp);
/* The frame at hand has to wait for one. */
bool rn_rider_is_ahead(const struct rn_qp *qp);

/* --- stream_timeout.c ----------------------------------------------------------------------------------- */

/* A request may be on its way: it is to be answered in time. With the send lock held. */
void rn_stream_expect(struct rn_qp *qp);
void rn_stream_patience(struct rn_timer *timer);

/* --- stream_poll.c ------------------------------------------------------------------------------------- */

void rn_stream_list(struct rn_qp *qp);   /* with the send lock held */
void rn_stream_unlist(struct rn_qp *qp); /* without locks */
/* poll_cq has found nothing: look at the sockets. True: look at the CQ again. */
bool rn_stream_poll(struct rn_cq *cq);
/* The program is about to sleep: the engine looks after them. */
void rn_stream_arm(struct rn_cq *cq);
void rn_stream_tick(struct rn_timer *timer);

#endif
