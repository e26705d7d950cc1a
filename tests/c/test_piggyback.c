/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replies on the connection that the request came by (tcp/piggyback.c): when they go that way, what keeps them in
 * order with those that don't, and piggybacked requests that no device of ours would send.
 */
#include "processes.h"
#include "responder.h"

#include <sys/ioctl.h>

#include "soft.h"

enum { PSN = 17, SHORT = 64, RECV_ID = 100, RECVS = 4 };

static struct responder responder;
static struct end end;
static uint32_t serial; /* of the responder's next request */

/* --- a queue pair, and its peer by hand ------------------------------------------------------------------------ */

/* An ACK is put off while the program polls, and a reply takes its place.  As of now it polls, and nobody takes that
 * back: no timer is set. */
static void poll_from_now_on(void)
{
	struct rn_qp *qp = rn_qp(end.qp);

	rn_lock(&qp->sq_lock);
	qp->tcp->polled = true;
	rn_tcp_watch(qp->tcp->in);
	rn_tcp_watch(qp->tcp->out);
	rn_unlock(&qp->sq_lock);
}

static void hear_here(void)
{
	struct rn_tcp_frame here;

	hear_all(responder.answers, &here, sizeof(here));
	CHECK_EQ(here.kind, RN_FRAME_HERE);
}

static void open_all(void)
{
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	memset(end.buffer, 'a', BUFFER);
	responder_open(&responder);
	responder_invite(&responder, end.qp, PSN);
	for (int i = 0; i < RECVS; i++)
		CHECK_EQ(post_recv(&end, RECV_ID + i, i * SHORT, SHORT), 0);
	responder_accept(&responder, PSN);
	responder_welcome(&responder);
	hear_here();
	CHECK(responder_call(&responder, end.qp->qp_num, PSN));
	poll_from_now_on();
	serial = 0;
}

static void close_all(void)
{
	responder_hang_up(&responder);
	close(responder.listener);
	end_close(&end);
	expect_live_nothing();
}

static struct rn_tcp_frame make_send(uint32_t ack)
{
	return (struct rn_tcp_frame){
		.kind = RN_FRAME_SEND, .serial = serial++, .length = SHORT, .total = SHORT, .ack = ack};
}

static void say(int fd, const struct rn_tcp_frame *frame, const struct rn_tcp_answer *carrier, char fill)
{
	char whole[sizeof(*carrier) + sizeof(*frame) + 2 * RN_PIGGYBACK_BYTES];
	size_t length = 0;

	if (carrier) {
		memcpy(whole, carrier, sizeof(*carrier));
		length = sizeof(*carrier);
	}
	memcpy(whole + length, frame, sizeof(*frame));
	memset(whole + length + sizeof(*frame), fill, frame->length);
	length += sizeof(*frame) + frame->length;
	CHECK_EQ(send(fd, whole, length, MSG_NOSIGNAL), (ssize_t)length);
}

static void ask(const struct rn_tcp_frame *frame, char fill)
{
	say(responder.requests, frame, NULL, fill);
}

static void piggyback(const struct rn_tcp_frame *frame, char fill)
{
	struct rn_tcp_answer carrier = {.kind = RN_ANSWER_PIGGYBACK, .length = sizeof(*frame) + frame->length};

	say(responder.answers, frame, &carrier, fill);
}

static void answer(int fd, enum rn_answer_kind kind, uint8_t code, uint32_t about)
{
	struct rn_tcp_answer answer = {.kind = kind, .code = code, .serial = about};

	CHECK_EQ(send(fd, &answer, sizeof(answer), MSG_NOSIGNAL), (ssize_t)sizeof(answer));
}

/* A request has come, and the ACK is due. */
static void be_asked(int receive, uint32_t ack, char fill)
{
	struct rn_tcp_frame frame = make_send(ack);

	ask(&frame, fill);
	expect(end.cq, RECV_ID + receive, IBV_WC_SUCCESS);
	CHECK_EQ(end.buffer[receive * SHORT], fill);
}

/* A request that also says that ours was executed. Two queues have no order between them. */
static void be_asked_and_told(int receive, uint32_t ack, char fill, uint64_t sent)
{
	struct rn_tcp_frame frame = make_send(ack);
	struct ibv_wc wc[2];

	ask(&frame, fill);
	wc[0] = poll_one(end.cq);
	wc[1] = poll_one(end.cq);
	CHECK(wc[0].status == IBV_WC_SUCCESS && wc[1].status == IBV_WC_SUCCESS);
	CHECK(wc[0].wr_id == sent || wc[1].wr_id == sent);
	CHECK_EQ(wc[0].wr_id + wc[1].wr_id, sent + RECV_ID + receive);
	CHECK_EQ(end.buffer[receive * SHORT], fill);
}

static struct rn_tcp_frame hear_frame(int fd, uint32_t number)
{
	struct rn_tcp_frame frame;
	char payload[2 * RN_PIGGYBACK_BYTES];

	hear_all(fd, &frame, sizeof(frame));
	CHECK_EQ(frame.kind, RN_FRAME_SEND);
	CHECK_EQ(frame.serial, number);
	hear_all(fd, payload, frame.length);
	return frame;
}

static struct rn_tcp_frame hear_piggyback(uint32_t number)
{
	struct rn_tcp_answer carrier;
	struct rn_tcp_frame frame;

	hear_all(responder.requests, &carrier, sizeof(carrier));
	CHECK_EQ(carrier.kind, RN_ANSWER_PIGGYBACK);
	frame = hear_frame(responder.requests, number);
	CHECK_EQ(carrier.length, sizeof(frame) + frame.length);
	CHECK_EQ(frame.length, frame.total);
	return frame;
}

static bool is_silent(int fd)
{
	int waiting = 0;

	CHECK_EQ(ioctl(fd, FIONREAD, &waiting), 0);
	return !waiting;
}

/* --- which way ---------------------------------------------------------------------------------------------------- */

static void test_a_reply_takes_the_place_of_the_ack(void)
{
	open_all();
	be_asked(0, 0, 'p');
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	CHECK_EQ(hear_piggyback(0).ack, 1);
	CHECK(is_silent(responder.requests) && is_silent(responder.answers));
	/* And again, when the next request has told that this was executed. */
	be_asked_and_told(1, 1, 'q', 1);
	CHECK_EQ(post_send(&end, 2, BUFFER / 2, RN_PIGGYBACK_BYTES), 0);
	CHECK_EQ(hear_piggyback(1).ack, 2);
	close_all();
}

static void test_the_reply_to_a_piggyback_goes_by_its_own_connection(void)
{
	struct rn_tcp_frame frame;

	open_all();
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	CHECK_EQ(hear_frame(responder.answers, 0).ack, 0);
	for (uint32_t i = 0; i < RECVS; i++) {
		struct ibv_wc wc[2];

		frame = make_send(i + 1);
		piggyback(&frame, 'r');
		/* Both at once: that the request was executed, and the reply. */
		wc[0] = poll_one(end.cq);
		wc[1] = poll_one(end.cq);
		CHECK(wc[0].status == IBV_WC_SUCCESS && wc[1].status == IBV_WC_SUCCESS);
		CHECK_EQ(wc[0].wr_id + wc[1].wr_id, i + 1 + RECV_ID + i);
		CHECK_EQ(end.buffer[i * SHORT], 'r');
		CHECK_EQ(post_send(&end, i + 2, BUFFER / 2, SHORT), 0);
		CHECK_EQ(hear_frame(responder.answers, i + 1).ack, i + 1);
	}
	CHECK(is_silent(responder.requests));
	close_all();
}

static void test_some_are_never_piggybacked(void)
{
	open_all();
	/* Too long. */
	be_asked(0, 0, 'p');
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, RN_PIGGYBACK_BYTES + 1), 0);
	CHECK_EQ(hear_frame(responder.answers, 0).ack, 1);
	/* Something of ours is under way. */
	be_asked(1, 0, 'q');
	CHECK_EQ(post_send(&end, 2, BUFFER / 2, SHORT), 0);
	CHECK_EQ(hear_frame(responder.answers, 1).ack, 2);
	CHECK(is_silent(responder.requests));
	close_all();
}

/* --- order -------------------------------------------------------------------------------------------------------- */

static void test_what_follows_a_piggyback_says_so(void)
{
	open_all();
	be_asked(0, 0, 'p');
	for (int i = 0; i < 3; i++)
		CHECK_EQ(post_send(&end, i, BUFFER / 2, SHORT), 0);
	CHECK_EQ(hear_piggyback(0).flags, 0);
	CHECK_EQ(hear_frame(responder.answers, 1).flags, RN_FRAME_BEHIND_PIGGYBACK);
	CHECK_EQ(hear_frame(responder.answers, 2).flags, 0);
	CHECK(is_silent(responder.requests));
	close_all();
}

static bool is_held(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool is;

	rn_lock(&qp->sq_lock);
	is = qp->tcp->in && qp->tcp->in->held;
	rn_unlock(&qp->sq_lock);
	return is;
}

/* The piggybacked request comes last, though it was sent first.  By both who may read: the poller, and the engine. */
static void wait_for_piggyback(bool polls)
{
	struct rn_tcp_frame piggybacked, behind, last;

	open_all();
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	hear_frame(responder.answers, 0);
	if (!polls)
		CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
	piggybacked = make_send(1);
	behind = make_send(1);
	behind.flags = RN_FRAME_BEHIND_PIGGYBACK;
	last = make_send(1);
	ask(&behind, '1');
	ask(&last, '2');
	while (!is_held()) {
		if (polls)
			expect_nothing(end.cq);
		usleep(100);
	}
	CHECK_EQ(end.buffer[0], 'a');
	piggyback(&piggybacked, '0');
	for (int i = 0, received = 0; i < 4; i++) {
		struct ibv_wc wc = poll_one(end.cq);

		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		if (wc.opcode == IBV_WC_RECV) {
			CHECK_EQ(wc.wr_id, RECV_ID + received);
			CHECK_EQ(end.buffer[received * SHORT], '0' + received);
			received++;
		}
	}
	close_all();
}

static void test_what_follows_a_piggyback_waits_for_it(void)
{
	wait_for_piggyback(true);
	wait_for_piggyback(false);
}

/* What was sent behind a request that found no receive is thrown away there; meanwhile none may be piggybacked instead. */
static void test_after_an_rnr_nak_the_old_way_is_taken(void)
{
	struct rn_tcp_frame frame;

	open_all();
	be_asked(0, 0, 'p');
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	hear_piggyback(0);
	answer(responder.answers, RN_ANSWER_RNR, 1, 0);
	be_asked(1, 0, 'q');
	while (is_silent(responder.answers))
		expect_nothing(end.cq);
	hear_frame(responder.answers, 0);
	frame = make_send(1);
	ask(&frame, 'r');
	/* Its receive, and the send that it acknowledges: two queues have no order between them. */
	for (int i = 0, first = 0; i < 2; i++) {
		struct ibv_wc wc = poll_one(end.cq);

		CHECK_EQ(wc.status, IBV_WC_SUCCESS);
		CHECK((wc.wr_id == 1 || wc.wr_id == RECV_ID + 2) && (int)wc.wr_id != first);
		first = (int)wc.wr_id;
	}
	CHECK_EQ(end.buffer[2 * SHORT], 'r');
	CHECK_EQ(post_send(&end, 2, BUFFER / 2, SHORT), 0);
	/* What was asked before may have been acknowledged by itself. */
	for (struct rn_tcp_answer ack;;) {
		hear_all(responder.requests, &ack, sizeof(ack));
		if (ack.kind == RN_ANSWER_PIGGYBACK)
			break;
		CHECK_EQ(ack.kind, RN_ANSWER_ACK);
	}
	CHECK_EQ(hear_frame(responder.requests, 1).ack, 3);
	close_all();
}

/* It had been sent before the other connection ended, in good order or not. */
static void end_behind_piggyback(bool says_bye)
{
	struct rn_tcp_frame frame, bye = {.kind = RN_FRAME_BYE};

	open_all();
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	hear_frame(responder.answers, 0);
	frame = make_send(1);
	piggyback(&frame, 'r');
	if (says_bye)
		say(responder.requests, &bye, NULL, 0);
	else
		hang_up(&responder.requests);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(poll_one(end.cq).status, IBV_WC_SUCCESS);
	CHECK_EQ(end.buffer[0], 'r');
	close_all();
}

static void test_a_piggyback_before_the_end_counts(void)
{
	end_behind_piggyback(true);
	end_behind_piggyback(false);
}

/* As many as the socket takes, behind the end of the other connection: they are no way to fill our stack. */
static void test_piggybacks_behind_the_end_cost_no_stack(void)
{
	struct rn_tcp_frame frame = {.kind = RN_FRAME_NOTHING}, bye = {.kind = RN_FRAME_BYE};
	struct rn_tcp_answer carrier = {.kind = RN_ANSWER_PIGGYBACK, .length = sizeof(frame)};
	struct iovec whole[] = {{&carrier, sizeof(carrier)}, {&frame, sizeof(frame)}};
	struct msghdr message = {.msg_iov = whole, .msg_iovlen = 2};
	struct rn_qp *qp;

	open_all();
	qp = rn_qp(end.qp);
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	hear_frame(responder.answers, 0);
	while (sendmsg(responder.answers, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(carrier) + sizeof(frame))
		frame.serial++;
	CHECK(frame.serial > 1000);
	say(responder.requests, &bye, NULL, 0);
	CHECK(readable(qp->tcp->in->source.fd, 20000));
	rn_lock(&qp->sq_lock);
	rn_tcp_serve(qp);
	CHECK(!qp->tcp->in || qp->tcp->in->ended);
	rn_unlock(&qp->sq_lock);
	close_all();
}

/* --- lies --------------------------------------------------------------------------------------------------------- */

/* The piggybacked request is refused, and has no effect. */
static void refuse(void (*lie)(void))
{
	struct ibv_wc wc;

	open_all();
	CHECK_EQ(post_send(&end, 1, BUFFER / 2, SHORT), 0);
	hear_frame(responder.answers, 0);
	lie();
	for (int i = 0; i < 1 + RECVS; i++) {
		wc = poll_one(end.cq);
		CHECK(wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_WR_FLUSH_ERR);
	}
	CHECK_EQ(state_of(end.qp), IBV_QPS_ERR);
	for (size_t i = 0; i < BUFFER; i++)
		CHECK_EQ(end.buffer[i], 'a');
	close_all();
}

static void lie_of_length(uint32_t length, struct rn_tcp_frame frame)
{
	struct rn_tcp_answer carrier = {.kind = RN_ANSWER_PIGGYBACK, .length = length};

	say(responder.answers, &frame, &carrier, 'x');
}

enum { HEADER = sizeof(struct rn_tcp_frame) };

static void lie_no_frame(void) { lie_of_length(HEADER - 1, make_send(0)); }
static void lie_nothing(void) { lie_of_length(0, make_send(0)); }
static void lie_endless(void) { lie_of_length(UINT32_MAX, make_send(0)); }

static void lie_too_long(void)
{
	struct rn_tcp_frame frame = make_send(0);

	frame.length = frame.total = RN_PIGGYBACK_BYTES + 1;
	lie_of_length(HEADER + frame.length, frame);
}

static void lie_less_than_said(void)
{
	struct rn_tcp_frame frame = make_send(0);

	lie_of_length(HEADER + SHORT - 1, frame);
}

static void lie_a_part(void)
{
	struct rn_tcp_frame frame = make_send(0);

	frame.total = 2 * SHORT;
	piggyback(&frame, 'x');
}

static void lie_a_read(void)
{
	struct rn_tcp_frame frame = {.kind = RN_FRAME_READ, .total = SHORT};

	piggyback(&frame, 'x');
}

static void lie_another_number(void)
{
	serial = 1;
	lie_of_length(HEADER + SHORT, make_send(0));
}

static void lie_behind_itself(void)
{
	struct rn_tcp_frame frame;

	serial = 1;
	frame = make_send(0);
	frame.flags = RN_FRAME_BEHIND_PIGGYBACK;
	piggyback(&frame, 'x');
}

static void lie_into_a_message(void)
{
	struct rn_tcp_frame frame = make_send(0), piggybacked = make_send(0);

	CHECK_EQ(send(responder.requests, &frame, sizeof(frame), MSG_NOSIGNAL), (ssize_t)sizeof(frame));
	for (bool has_begun = false; !has_begun;) {
		struct rn_qp *qp = rn_qp(end.qp);

		expect_nothing(end.cq);
		rn_lock(&qp->sq_lock);
		has_begun = qp->tcp->in->payload_left;
		rn_unlock(&qp->sq_lock);
	}
	piggyback(&piggybacked, 'x');
}

/* Its READ is being answered, and nobody takes the answer. */
static void lie_while_reading(void)
{
	struct rn_tcp_frame piggybacked, read = {
		.kind = RN_FRAME_READ, .total = BUFFER, .addr = (uintptr_t)end.buffer, .rkey = end.mr->rkey};
	struct rn_qp *qp = rn_qp(end.qp);
	int bytes = 32 * 1024;

	CHECK(!setsockopt(qp->tcp->in->source.fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes)));
	ask(&read, 0);
	for (bool is_full = false; !is_full;) {
		expect_nothing(end.cq);
		rn_lock(&qp->sq_lock);
		is_full = qp->tcp->in->reading && qp->tcp->in->wants_out;
		rn_unlock(&qp->sq_lock);
	}
	serial = 1;
	piggybacked = make_send(0);
	piggyback(&piggybacked, 'x');
}

/* Nobody reads a connection that waits for a piggybacked request, but its end is seen. */
static void lie_and_leave(void)
{
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE}, behind;

	ask(&here, 0);
	serial = 1;
	behind = make_send(0);
	behind.flags = RN_FRAME_BEHIND_PIGGYBACK;
	ask(&behind, 'x');
	while (!is_held())
		expect_nothing(end.cq);
	hang_up(&responder.requests);
}

static void test_lies(void)
{
	refuse(lie_no_frame);
	refuse(lie_nothing);
	refuse(lie_endless);
	refuse(lie_too_long);
	refuse(lie_less_than_said);
	refuse(lie_a_part);
	refuse(lie_a_read);
	refuse(lie_another_number);
	refuse(lie_behind_itself);
	refuse(lie_into_a_message);
	refuse(lie_while_reading);
	refuse(lie_and_leave);
}

/* The connection by which the piggybacked request would come ends with BYE: no more waiting. */
static void test_nothing_waits_for_who_has_left(void)
{
	struct rn_tcp_frame here = {.kind = RN_FRAME_HERE}, behind;

	open_all();
	ask(&here, 0);
	serial = 1;
	behind = make_send(0);
	behind.flags = RN_FRAME_BEHIND_PIGGYBACK;
	ask(&behind, 'x');
	while (!is_held())
		expect_nothing(end.cq);
	answer(responder.answers, RN_ANSWER_BYE, 0, 0);
	/* Nothing is under way, so the program doesn't look there; the engine does when it polls no more. */
	CHECK_EQ(ibv_req_notify_cq(end.cq, 0), 0);
	EVENTUALLY(!is_held());
	CHECK_EQ(end.buffer[0], 'a');
	close_all();
}

/* --- two devices -------------------------------------------------------------------------------------------------- */

/* To and fro, one to four messages at a time, short and long, and now and then receives are posted too late: each
 * message comes once, whole, and in order. */
enum { TURNS = 2000, AT_ONCE = 4, SLOTS = 32, SLOT = 8192 };

struct talk {
	uint32_t state; /* of the random numbers: the same on both sides, so each knows what the other will say */
	uint32_t sent, executed, posted, received;
};

static uint32_t draw(struct talk *talk, uint32_t below)
{
	talk->state = talk->state * 1664525 + 1013904223;
	return (talk->state >> 8) % below;
}

static uint32_t draw_length(struct talk *talk)
{
	static const uint32_t lengths[] = {4, 64, 64, 64, 64, 1020, RN_PIGGYBACK_BYTES, RN_PIGGYBACK_BYTES + 4, SLOT};

	return lengths[draw(talk, sizeof(lengths) / sizeof(lengths[0]))];
}

static uint32_t *slot(uint32_t number, bool is_ours)
{
	return (uint32_t *)(end.buffer + (is_ours ? BUFFER / 2 : 0) + number % SLOTS * SLOT);
}

static void speak(struct talk *talk, uint32_t length)
{
	uint32_t *words = slot(talk->sent, true);

	for (uint32_t i = 0; i < length / 4; i++)
		words[i] = talk->sent * 31 + i;
	CHECK_EQ(post_send(&end, talk->sent, (char *)words - end.buffer, length), 0);
	talk->sent++;
}

static void take(struct talk *talk, const struct ibv_wc *wc)
{
	CHECK_EQ(wc->status, IBV_WC_SUCCESS);
	CHECK_EQ(wc->wr_id, wc->opcode == IBV_WC_RECV ? talk->received++ : talk->executed++);
}

static void take_one(struct talk *talk)
{
	struct ibv_wc wc = poll_one(end.cq);

	take(talk, &wc);
}

static void post_receives(struct talk *talk)
{
	while (talk->posted - talk->received < AT_ONCE) {
		CHECK_EQ(post_recv(&end, talk->posted, (char *)slot(talk->posted, false) - end.buffer, SLOT), 0);
		talk->posted++;
	}
}

static bool has_refused(void)
{
	struct rn_qp *qp = rn_qp(end.qp);
	bool has;

	rn_lock(&qp->sq_lock);
	has = qp->tcp->in && qp->tcp->in->waits;
	rn_unlock(&qp->sq_lock);
	return has;
}

static void listen_to(struct talk *talk, uint32_t number, uint32_t length)
{
	const uint32_t *words = slot(number, false);

	if (number == talk->posted) {
		while (!has_refused()) {
			struct ibv_wc wc;

			if (ibv_poll_cq(end.cq, 1, &wc) > 0)
				take(talk, &wc);
		}
		post_receives(talk);
	}
	while (talk->received <= number)
		take_one(talk);
	for (uint32_t i = 0; i < length / 4; i++)
		CHECK_EQ(words[i], number * 31 + i);
}

static void talk(int fd, uint32_t seed, bool is_first)
{
	struct talk talk = {.state = seed};
	uint32_t heard = 0;

	end_open(&end, &(struct end_options){.memory = USER_MEMORY});
	connect_over(&end, fd);
	post_receives(&talk);
	meet(fd);
	for (int turn = 0; turn < TURNS; turn++) {
		bool is_ours = turn % 2 != is_first, is_late = !draw(&talk, 8);

		for (int left = 1 + draw(&talk, AT_ONCE); left; left--) {
			uint32_t length = draw_length(&talk);

			if (is_ours)
				speak(&talk, length);
			else
				listen_to(&talk, heard++, length);
		}
		if (!is_late && !is_ours)
			post_receives(&talk);
	}
	post_receives(&talk);
	while (talk.executed != talk.sent)
		take_one(&talk);
	meet(fd);
	end_close(&end);
}

static uint32_t seed;

static void talk_back(int fd)
{
	talk(fd, seed, false);
}

static void test_to_and_fro(void)
{
	for (seed = 1; seed <= 4; seed++) {
		struct other other = spawn(talk_back);

		talk(other.fd, seed, true);
		join(&other);
		expect_live_nothing();
	}
}

int main(void)
{
	RUN(test_a_reply_takes_the_place_of_the_ack);
	RUN(test_the_reply_to_a_piggyback_goes_by_its_own_connection);
	RUN(test_some_are_never_piggybacked);
	RUN(test_what_follows_a_piggyback_says_so);
	RUN(test_what_follows_a_piggyback_waits_for_it);
	RUN(test_after_an_rnr_nak_the_old_way_is_taken);
	RUN(test_a_piggyback_before_the_end_counts);
	RUN(test_piggybacks_behind_the_end_cost_no_stack);
	RUN(test_lies);
	RUN(test_nothing_waits_for_who_has_left);
	RUN(test_to_and_fro);
	return 0;
}
