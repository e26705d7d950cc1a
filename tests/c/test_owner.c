/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the owner of memory does for a peer who asks over the link (responder/owner.c): what its queue pair, its key and
 * their rights permit, and nothing else.
 *
 * Each case is a request that is right but for one thing. It must get that thing's error, and leave both the memory and
 * the answer empty-handed.
 */
#include "pair.h"

#include "processes.h"
#include "soft.h"

enum { REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC, LENGTH = 8 };

struct question {
	struct rn_remote request;
	char data[RN_REMOTE_CHUNK];
};

static struct {
	struct rn_remote_answer head;
	char data[RN_REMOTE_CHUNK];
} answer;

/* That is right: a asks b for LENGTH bytes at the begin of b's memory. */
static struct rn_remote right(uint32_t kind)
{
	return (struct rn_remote){
		.kind = kind,
		.source_qpn = a.qp->qp_num,
		.dest_qpn = b.qp->qp_num,
		.generation = ((struct rn_qp *)b.qp)->generation,
		.key = b.mr->rkey,
		.addr = at_b(0),
		.length = LENGTH,
		.swap = 0x5353535353535353,
		.compare_add = 0x6262626262626262, /* what b's memory is full of */
	};
}

static int ask_with(struct rn_remote request, size_t num_data, size_t room)
{
	static struct question question;
	int length;

	question.request = request;
	memset(question.data, 'w', sizeof(question.data));
	memset(&answer, 0, sizeof(answer));
	length = rn_serve_request(0, &question, sizeof(request) + num_data, &answer, sizeof(answer.head) + room);
	if (length < 0)
		return length;
	CHECK_EQ(length, sizeof(answer.head) + answer.head.length);
	return answer.head.error;
}

static int ask(struct rn_remote request)
{
	return ask_with(request, request.kind == RN_REMOTE_WRITE ? request.length : 0, sizeof(answer.data));
}

static void expect_untouched(void)
{
	for (size_t i = 0; i < BUFFER; i++)
		CHECK_EQ(b.buffer[i], 'b');
	CHECK_EQ(answer.head.length, 0);
	for (size_t i = 0; i < sizeof(answer.data); i++)
		CHECK_EQ(answer.data[i], 0);
}

#define REFUSED(error, ...)                                                \
	do {                                                               \
		for (uint32_t kind = RN_REMOTE_WRITE; kind <= RN_REMOTE_FAA; kind++) { \
			struct rn_remote request = right(kind);            \
			__VA_ARGS__;                                       \
			CHECK_EQ(ask(request), error);                     \
			expect_untouched();                                \
		}                                                          \
	} while (0)

static void test_what_is_right_is_done(void)
{
	uint64_t word;

	open_pair();
	CHECK_EQ(ask(right(RN_REMOTE_READ)), 0);
	CHECK_EQ(answer.head.length, LENGTH);
	CHECK(!memcmp(answer.data, "bbbbbbbb", LENGTH) && !answer.data[LENGTH]);
	CHECK_EQ(ask(right(RN_REMOTE_CAS)), 0);
	CHECK(!memcmp(answer.data, "bbbbbbbb", LENGTH));
	CHECK(!memcmp(b.buffer, "SSSSSSSSb", LENGTH + 1));
	CHECK_EQ(ask(right(RN_REMOTE_FAA)), 0);
	CHECK(!memcmp(answer.data, "SSSSSSSS", LENGTH));
	memcpy(&word, b.buffer, sizeof(word));
	CHECK_EQ(word, 0x5353535353535353ull + 0x6262626262626262ull);
	CHECK_EQ(ask(right(RN_REMOTE_WRITE)), 0);
	CHECK(!memcmp(b.buffer, "wwwwwwwwb", LENGTH + 1));
	CHECK_EQ(answer.head.length, 0);
	close_pair();
}

static void test_queue_pairs(void)
{
	open_pair();
	REFUSED(ENOTCONN, request.dest_qpn = a.qp->qp_num);
	REFUSED(ENOTCONN, request.dest_qpn ^= 0x800000);
	REFUSED(ENOTCONN, request.source_qpn ^= 1);
	REFUSED(ENOTCONN, request.generation++);
	CHECK_EQ(ask(right(RN_REMOTE_READ)), 0);

	CHECK_EQ(ibv_modify_qp(b.qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_ERR}, IBV_QP_STATE), 0);
	REFUSED(ENOTCONN, (void)request);
	CHECK_EQ(ibv_modify_qp(b.qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_RESET}, IBV_QP_STATE), 0);
	REFUSED(ENOTCONN, (void)request);
	close_pair();
}

/* What makes no sense whatever the memory: lengths, kinds. */
static void test_forms(void)
{
	struct rn_remote request;

	open_pair();
	request = right(RN_REMOTE_WRITE);
	CHECK_EQ(rn_serve_request(0, &request, sizeof(request) - 1, &answer, sizeof(answer)), -EPROTO);
	CHECK_EQ(rn_serve_request(0, &request, sizeof(request), &answer, sizeof(answer.head) - 1), -EPROTO);
	REFUSED(EACCES, request.kind = 0);
	REFUSED(EACCES, request.kind = RN_REMOTE_HELP + 1);
	REFUSED(EACCES, request.kind = UINT32_MAX);
	REFUSED(EACCES, request.length = RN_REMOTE_CHUNK + 1);
	CHECK_EQ(ask_with(right(RN_REMOTE_WRITE), LENGTH - 1, sizeof(answer.data)), EACCES); /* less than it says */
	expect_untouched();
	for (uint32_t kind = RN_REMOTE_READ; kind <= RN_REMOTE_FAA; kind++) {
		CHECK_EQ(ask_with(right(kind), 0, LENGTH - 1), EACCES); /* no room for the answer */
		expect_untouched();
		if (kind == RN_REMOTE_READ)
			continue;
		request = right(kind);
		request.length = 4;
		CHECK_EQ(ask(request), EACCES);
		request = right(kind);
		request.addr += 4;
		CHECK_EQ(ask(request), EACCES);
		expect_untouched();
	}
	CHECK_EQ(ask(right(RN_REMOTE_READ)), 0);
	close_pair();
}

static void test_keys_and_bounds(void)
{
	struct ibv_pd *pd;
	struct ibv_mr *mr;

	open_pair();
	REFUSED(EACCES, request.key ^= 1);
	REFUSED(EACCES, request.key ^= 0x100);
	REFUSED(EACCES, request.addr -= 8);
	REFUSED(EACCES, request.addr += BUFFER);
	REFUSED(EACCES, request.addr += BUFFER - LENGTH + 1);
	REFUSED(EACCES, request.addr = UINT64_MAX - 7);

	pd = ibv_alloc_pd(b.context);
	CHECK(pd);
	mr = ibv_reg_mr(pd, b.buffer, BUFFER, ALL_ACCESS);
	CHECK(mr);
	REFUSED(EACCES, request.key = mr->rkey);
	REFUSED(EACCES, {
		request.key = mr->rkey;
		request.is_receive = 1;
	});
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	CHECK_EQ(ibv_dealloc_pd(pd), 0);

	mr = ibv_reg_mr(b.pd, b.buffer, BUFFER, ALL_ACCESS);
	CHECK(mr);
	{
		uint32_t key = mr->rkey;
		struct rn_remote request = right(RN_REMOTE_READ);

		request.key = key;
		CHECK_EQ(ask(request), 0);
		CHECK_EQ(ibv_dereg_mr(mr), 0);
		REFUSED(EACCES, request.key = key);
	}
	close_pair();
}

static uint32_t right_of(uint32_t kind)
{
	return kind == RN_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE
	       : kind == RN_REMOTE_READ ? IBV_ACCESS_REMOTE_READ
					: IBV_ACCESS_REMOTE_ATOMIC;
}

/* Every set of rights permits just what it names. */
static void test_rights_of_memory(void)
{
	open_pair();
	for (int access = 0; access <= ALL_ACCESS; access++) {
		struct ibv_mr *mr;

		if (access & ~ALL_ACCESS)
			continue;
		mr = ibv_reg_mr(b.pd, b.buffer, BUFFER, access);
		if (!mr)
			continue; /* rights that there are only together with IBV_ACCESS_LOCAL_WRITE */
		for (uint32_t kind = RN_REMOTE_WRITE; kind <= RN_REMOTE_FAA; kind++) {
			struct rn_remote request = right(kind);
			int expected = access & right_of(kind) ? 0 : EACCES;

			request.key = mr->rkey;
			CHECK_EQ(ask(request), expected);
			if (expected)
				expect_untouched();
			memset(b.buffer, 'b', BUFFER);
		}
		{
			struct rn_remote request = right(RN_REMOTE_WRITE);

			request.key = mr->rkey;
			request.is_receive = 1;
			CHECK_EQ(ask(request), access & IBV_ACCESS_LOCAL_WRITE ? 0 : EACCES);
			memset(b.buffer, 'b', BUFFER);
		}
		CHECK_EQ(ibv_dereg_mr(mr), 0);
	}
	close_pair();
}

static void test_rights_of_the_queue_pair(void)
{
	for (int bit = 0; bit < 3; bit++) {
		int access = (int[]){IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC}[bit];
		struct ibv_qp_attr attr;

		open_pair_with((struct end_options){0});
		attr = default_attr(b.qp->qp_num);
		connect_with(a.qp, attr);
		attr = default_attr(a.qp->qp_num);
		attr.qp_access_flags = REMOTE & ~access;
		connect_with(b.qp, attr);
		for (uint32_t kind = RN_REMOTE_WRITE; kind <= RN_REMOTE_FAA; kind++) {
			int expected = right_of(kind) == (uint32_t)access ? EACCES : 0;

			CHECK_EQ(ask(right(kind)), expected);
			if (expected)
				expect_untouched();
			memset(b.buffer, 'b', BUFFER);
		}
		close_pair();
	}
}

/* To a receive's memory is written, and nothing else done. */
static void test_receives(void)
{
	open_pair();
	for (uint32_t kind = RN_REMOTE_READ; kind <= RN_REMOTE_FAA; kind++) {
		struct rn_remote request = right(kind);

		request.is_receive = 1;
		CHECK_EQ(ask(request), EACCES);
		expect_untouched();
	}
	close_pair();
}

/* A window is for its queue pair, and gone when a peer has invalidated it, of which only the arena tells. */
static void test_windows(void)
{
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED};
	struct rn_mr_entry *entry;
	struct ibv_mw *mw;

	open_pair();
	mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
	CHECK(mw);
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = (mw->rkey & ~0xffu) | ((mw->rkey + 1) & 0xff);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = b.mr, .addr = at_b(0), .length = LENGTH, .mw_access_flags = REMOTE};
	CHECK_EQ(ibv_post_send(b.qp, &wr, &bad), 0);
	expect(b.cq, 0, IBV_WC_SUCCESS);

	REFUSED(EACCES, {
		request.key = wr.bind_mw.rkey;
		request.source_qpn = b.qp->qp_num;
		request.dest_qpn = a.qp->qp_num;
		request.generation = ((struct rn_qp *)a.qp)->generation;
	});
	REFUSED(EACCES, {
		request.key = wr.bind_mw.rkey;
		request.addr++;
	});
	for (int invalidated = 0; invalidated < 2; invalidated++) {
		struct rn_remote request = right(RN_REMOTE_READ);

		request.key = wr.bind_mw.rkey;
		CHECK_EQ(ask(request), invalidated ? EACCES : 0);
		entry = &rn_arena_mrs(rn_arena)[rn_mr_index(wr.bind_mw.rkey)];
		atomic_store(&entry->key, invalidated ? wr.bind_mw.rkey : 0);
	}
	CHECK_EQ(ibv_dealloc_mw(mw), 0);
	close_pair();
}

/* Memory that the program has unmapped, or may no longer write to, since it was registered. */
static void test_memory_that_has_gone(void)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *memory = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;

	CHECK(memory != MAP_FAILED);
	open_pair();
	mr = ibv_reg_mr(b.pd, memory, page, ALL_ACCESS);
	CHECK(mr);
	for (int step = 0; step < 3; step++) {
		for (uint32_t kind = RN_REMOTE_WRITE; kind <= RN_REMOTE_FAA; kind++) {
			struct rn_remote request = right(kind);
			bool reads = kind == RN_REMOTE_READ;

			request.key = mr->rkey;
			request.addr = (uintptr_t)memory;
			CHECK_EQ(ask(request), step == 0 || (step == 1 && reads) ? 0 : EFAULT);
		}
		if (step == 0)
			CHECK_EQ(mprotect(memory, page, PROT_READ), 0);
		if (step == 1)
			CHECK_EQ(munmap(memory, page), 0);
	}
	CHECK_EQ(ibv_dereg_mr(mr), 0);
	close_pair();
}

/* --- over the link ------------------------------------------------------------------------------------ */

static _Atomic int got;
static atomic_bool has_answered;

static void take(struct rn_reply *reply, const void *data, long length)
{
	const struct rn_remote_answer *told = data;

	(void)reply;
	got = length < (long)sizeof(*told) ? -1 : told->error;
	has_answered = true;
}

/* It wrote where it may, so that there is a link. Now it asks for what its peer's keys don't permit. */
static void ask_for_more(int fd)
{
	uint32_t keys[2]; /* to write to only; to read only */
	struct address to;
	struct end end;

	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	to = connect_over(&end, fd);
	CHECK(hear(fd, keys, sizeof(keys)));
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, 0, LENGTH, to.buffer, to.rkey), 0);
	expect(end.cq, 1, IBV_WC_SUCCESS);
	for (int i = 0; i < 4; i++) {
		static struct question question;
		struct rn_qp *qp = (struct rn_qp *)end.qp;
		struct rn_reply reply = {.done = take};
		bool writes = i % 2, may = i == 1 || i == 2;

		question.request = (struct rn_remote){
			.kind = writes ? RN_REMOTE_WRITE : RN_REMOTE_READ,
			.source_qpn = end.qp->qp_num,
			.dest_qpn = to.qpn,
			.generation = qp->responder.generation,
			.key = keys[i / 2],
			.addr = to.buffer,
			.length = LENGTH,
		};
		memcpy(question.data, may ? "may" : "no!", 4);
		has_answered = false;
		CHECK_EQ(rn_peer_request(qp->peer, &question, sizeof(question.request) + (writes ? LENGTH : 0), &reply), 0);
		EVENTUALLY(has_answered);
		CHECK_EQ(got, may ? 0 : EACCES);
	}
	meet(fd);
	end_close(&end);
}

static void test_asked_over_the_link(void)
{
	struct other other;
	struct ibv_mr *to_write, *to_read;
	struct end end;

	if (by_stream())
		return; /* there is no link */
	other = spawn(ask_for_more);
	end_open(&end, &(struct end_options){0});
	to_init(end.qp);
	to_write = ibv_reg_mr(end.pd, end.buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	to_read = ibv_reg_mr(end.pd, end.buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK(to_write && to_read);
	connect_over(&end, other.fd);
	tell(other.fd, (uint32_t[]){to_write->rkey, to_read->rkey}, 8);
	meet(other.fd);
	pthread_mutex_lock(&rn_process_lock); /* as the engine did, which served */
	CHECK(!strcmp(end.buffer, "may"));
	CHECK_EQ(((struct rn_qp *)end.qp)->count.wrong_keys, 2);
	pthread_mutex_unlock(&rn_process_lock);
	join(&other);
	CHECK_EQ(ibv_dereg_mr(to_write), 0);
	CHECK_EQ(ibv_dereg_mr(to_read), 0);
	end_close(&end);
	expect_live_nothing();
}

int main(void)
{
	RUN(test_what_is_right_is_done);
	RUN(test_queue_pairs);
	RUN(test_forms);
	RUN(test_keys_and_bounds);
	RUN(test_rights_of_memory);
	RUN(test_rights_of_the_queue_pair);
	RUN(test_receives);
	RUN(test_windows);
	RUN(test_memory_that_has_gone);
	RUN(test_asked_over_the_link);
	return 0;
}
