/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The responder lies: requests of every kind have gone out on a stream, and the answers are fuzz.  Whatever they say,
 * each request completes once and in order, and nothing is written but where a READ or an atomic wants it.
 *
 * The first byte: 1 the greeting is a proper one; 2 we have the other direction too, for acknowledgements that are
 * sent along, and pieces whose length has its uppermost bit set go there; 4 a piece is no bytes but what an
 * answer is made of (kind, code, serial, length, in steps of 8), with a payload of that length; a piggybacked
 * request's code is its frame's kind.  See fuzz.h.
 */
#include "fuzz.h"

#include "../c/responder.h"

enum { REQUESTS = 9, ROOM = 8192, CANARY = 0xc5 };

static struct responder responder;
static struct end end;
static uint32_t psn;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	signal(SIGPIPE, SIG_IGN);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY, .sig_all = true});
	responder_open(&responder);
	return 0;
}

static uint32_t fetched(int request)
{
	static const uint32_t lengths[REQUESTS] = {[1] = 64, [3] = 5000, [4] = 8, [5] = 8};

	return lengths[request];
}

/* Requests of every kind, those that bring something back into memory of their own. */
static void post_all(void)
{
	static const enum ibv_wr_opcode opcodes[REQUESTS] = {
		IBV_WR_SEND, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
		IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM,
	};

	memset(end.buffer, CANARY, REQUESTS * ROOM);
	for (int i = 0; i < REQUESTS; i++) {
		uint32_t length = fetched(i) ? fetched(i) : i == 6 ? 0 : 100 + i * 300;
		struct ibv_sge sge[2] = {sge_of(&end, i * ROOM, length / 2),
					 sge_of(&end, i * ROOM + length / 2, length - length / 2)};
		struct ibv_send_wr wr = {.wr_id = i, .opcode = opcodes[i], .sg_list = sge, .num_sge = 2}, *bad;

		wr.wr.rdma.remote_addr = 0x1000; /* an atomic's too */
		CHECK_EQ(ibv_post_send(end.qp, &wr, &bad), 0);
	}
}

static void say(const uint8_t *data, size_t size, bool composed)
{
	const uint8_t *piece;
	size_t length;

	while (size > 2) {
		bool other_way = data[1] & 0x80;
		uint8_t head[2] = {data[0], data[1] & 0x7f};
		uint8_t *copy = malloc(size); /* the same, without that bit */
		const uint8_t *at = copy;
		size_t left = size;
		int fd = other_way && responder.requests >= 0 ? responder.requests : responder.answers;

		memcpy(copy, data, size);
		memcpy(copy, head, sizeof(head));
		piece = next_piece(&at, &left, &length);
		if (piece && composed && !other_way && length >= 4) {
			struct {
				struct rn_tcp_answer answer;
				char payload[256 * 8];
			} whole = {.answer = {.kind = piece[0] % 8, .code = piece[1], .serial = (int8_t)piece[2],
					      .length = piece[3] * 8}};

			memset(whole.payload, 0xd7, sizeof(whole.payload));
			if (whole.answer.kind == RN_ANSWER_PIGGYBACK) {
				struct rn_tcp_frame frame = {.kind = piece[1] % (RN_FRAME_KINDS + 1), .serial = piece[2],
							      .total = piece[3], .length = piece[3]};

				memcpy(whole.payload, &frame, sizeof(frame));
				whole.answer.length = sizeof(frame) + frame.length;
			}
			send(fd, &whole, sizeof(whole.answer) + whole.answer.length, MSG_NOSIGNAL | MSG_DONTWAIT);
		} else if (piece && composed && length >= 4) {
			struct rn_tcp_frame frame = {.kind = piece[0] % (RN_FRAME_KINDS + 1), .serial = piece[1],
						      .ack = (int8_t)piece[2], .total = piece[3], .length = piece[3],
						      .flags = length > 4 ? piece[4] : 0};
			char whole[sizeof(frame) + 256] = {0};

			memcpy(whole, &frame, sizeof(frame));
			send(fd, whole, sizeof(frame) + frame.length, MSG_NOSIGNAL | MSG_DONTWAIT);
		} else if (piece) {
			send(fd, piece, length, MSG_NOSIGNAL | MSG_DONTWAIT);
		}
		data += size - left;
		size = piece ? left : 0;
		free(copy);
	}
}

/* Until the device has hung up, or has taken all that was said. */
static void await_the_end(int fd)
{
	shutdown(fd, SHUT_WR);
	hear_the_end(fd);
}

/* All but what it may fetch into. */
static void expect_untouched(int request)
{
	const uint8_t *at = (uint8_t *)end.buffer + request * ROOM;

	for (uint32_t i = fetched(request); i < ROOM; i++)
		CHECK_EQ(at[i], CANARY);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct ibv_qp_attr attr = {0};
	struct ibv_wc wc;
	char rest[4096];

	if (!size)
		return 0;
	responder_invite(&responder, end.qp, ++psn);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(post_recv(&end, 100 + i, (REQUESTS + i) * ROOM, 64), 0);
	post_all();
	responder_accept(&responder, psn);
	if (data[0] & 2)
		responder_call(&responder, end.qp->qp_num, psn);
	if (data[0] & 1)
		responder_welcome(&responder);
	say(data + 1, size - 1, data[0] & 4);
	await_the_end(responder.answers);
	while (responder.requests >= 0 && recv(responder.requests, rest, sizeof(rest), MSG_DONTWAIT) > 0)
		;
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_ERR, 0), 0);
	for (int done = 0, received = 0; done < REQUESTS || received < 4;) {
		wc = poll_one(end.cq);
		if (wc.wr_id >= 100) {
			CHECK_EQ(wc.wr_id, 100 + received++);
			continue;
		}
		CHECK_EQ(wc.wr_id, done);
		expect_untouched(done++);
	}
	expect_nothing(end.cq);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RESET, 0), 0);
	responder_hang_up(&responder);
	return 0;
}
