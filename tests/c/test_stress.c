/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stress: random work between this process and two others, every byte checked, while something happens
 * to one of them.
 *
 * In each round both children exchange random requests with us: messages of every kind, writes and
 * reads of a mirrored area, fetch-and-add, long writes; signaled or not, inline or not, in several
 * pieces, with receives posted late, polling or sleeping.  Contents, lengths, order and number
 * of completions are determined by the seed, and a wake-up that doesn't come is found.  The first child is then
 * killed, or stopped and torn away from, or loses our memory, or our queue pair; the second must
 * not notice.
 *
 *   RDMANET_STRESS_FATE      always this one
 *   and those of stress.h
 */
#include "stress.h"

#include <assert.h>

enum {
	SLOT = 8192,
	SLOTS = 16,
	TARGET = 65536,
	LONG = 320 * 1024,
	RECEIVES_AT = 0,
	SENDS_AT = RECEIVES_AT + SLOTS * SLOT,
	TARGET_AT = SENDS_AT + SLOTS * SLOT,
	LONG_FROM = TARGET_AT + TARGET,
	LONG_TO = LONG_FROM + LONG,
	COUNTER = TARGET - 8,
	SENTINEL = 0xee,
};
static_assert(LONG_TO + LONG <= BUFFER, "all of it fits");
#define RECEIVE (1ull << 63)

enum fate {
	NOTHING_HAPPENS,
	PAUSES,   /* the child is stopped and continued, many times */
	KILLED,   /* and we must be told */
	STOPPED,  /* while we leave; then it wakes up, or is killed */
	WITHDRAWN, /* our memory is deregistered under it */
	BROKEN,    /* our queue pair goes to ERR, and back to RESET */
	LEFT,      /* both sides go at any moment */
	FATES,
};
static const char *const fate_names[FATES] = {"nothing", "pauses", "killed", "stopped", "withdrawn", "broken", "left"};

/* AddressSanitizer's allocator doesn't survive the fork of a process with threads. */
#ifdef __SANITIZE_ADDRESS__
static const bool can_fork_at_work = false;
#else
static const bool can_fork_at_work = true;
#endif

static enum fate fate;
static uint64_t requests, bytes, wakes, rounds[FATES], quarantined;

enum kind { MESSAGE, WRITE, READ, ADD, LONG_WRITE };

struct side {
	struct end end;
	struct address far;
	unsigned random;
	unsigned me;     /* which direction: 0 or 1 */
	bool disturbed;  /* errors are to be expected */
	bool interrupted; /* the other side may sleep: no word about wake-ups */
	bool failed;
	struct ibv_mr *narrow; /* receives go to memory that is nobody's but its owner's: the short ones go by eager buffers */
	uint64_t posted, done, signaled; /* sends: counts, the last up to the last signaled one */
	uint64_t messages;               /* of those, that need a receive */
	uint64_t receives, received;
	uint64_t counter;
	struct request {
		enum kind kind;
		uint32_t length, offset;
		uint64_t before;
		uint8_t expected[SLOT];
	} requests[SLOTS];
	uint8_t mirror[TARGET];
};

static unsigned roll(struct side *side, unsigned range)
{
	return rand_r(&side->random) % range;
}

/* --- what the seed determines: both sides compute it ------------------------------------------------ */

struct planned {
	enum ibv_wr_opcode opcode;
	uint32_t length, start;
};

static struct planned plan(unsigned direction, uint64_t index)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM,
						     IBV_WR_RDMA_WRITE_WITH_IMM};
	uint64_t h = mix(stress_seed * 2 + direction + 1, index);

	return (struct planned){
		.opcode = opcodes[h % 4],
		.length = (h >> 8) % 3 ? (h >> 16) % 129 : (h >> 16) % (SLOT + 1),
		.start = h >> 40,
	};
}

/* --- posting ------------------------------------------------------------------------------------------- */

static int cut(struct side *side, struct ibv_sge *sge, size_t at, uint32_t length)
{
	int count = 0;

	while (length && count < 3) {
		uint32_t piece = count == 2 ? length : roll(side, length) + 1;

		sge[count++] = sge_of(&side->end, at, piece);
		at += piece;
		length -= piece;
	}
	if (length)
		sge[count++] = sge_of(&side->end, at, length);
	return count;
}

static void post_receives(struct side *side)
{
	while (side->receives - side->received < SLOTS && !side->failed) {
		size_t at = RECEIVES_AT + side->receives % SLOTS * SLOT;
		struct ibv_sge sge[4];
		struct ibv_recv_wr wr = {.wr_id = RECEIVE | side->receives, .sg_list = sge}, *bad;

		wr.num_sge = side->narrow ? 1 : cut(side, sge, at, SLOT);
		if (side->narrow)
			sge[0] = (struct ibv_sge){(uintptr_t)side->end.buffer + at, SLOT, side->narrow->lkey};
		CHECK_EQ(ibv_post_recv(side->end.qp, &wr, &bad), 0);
		side->receives++;
	}
}

static void post_request(struct side *side)
{
	struct request *request = &side->requests[side->posted % SLOTS];
	size_t at = SENDS_AT + side->posted % SLOTS * SLOT;
	uint8_t *slot = (uint8_t *)side->end.buffer + at;
	struct ibv_sge sge[4];
	struct ibv_send_wr wr = {.wr_id = side->posted, .sg_list = sge}, *bad;
	static const enum kind kinds[] = {MESSAGE, MESSAGE, MESSAGE, MESSAGE, WRITE, WRITE, READ, READ, ADD, LONG_WRITE};
	struct planned planned;

	if (side->posted - side->done >= SLOTS || side->failed)
		return;
	request->kind = kinds[roll(side, sizeof(kinds) / sizeof(*kinds))];
	request->length = roll(side, 3) ? roll(side, 129) : roll(side, SLOT + 1);
	request->offset = roll(side, COUNTER - request->length);
	wr.wr.rdma.rkey = side->far.rkey;
	switch (request->kind) {
	case MESSAGE:
		planned = plan(side->me, side->messages);
		request->length = planned.length;
		fill(slot, planned.length, planned.start);
		wr.opcode = planned.opcode;
		wr.imm_data = side->messages++;
		if (wr.opcode != IBV_WR_RDMA_WRITE_WITH_IMM)
			break;
		/* fall through: it writes as well */
		request->offset = planned.start % (COUNTER - request->length);
		memcpy(side->mirror + request->offset, slot, request->length);
		break;
	case WRITE:
		fill(slot, request->length, roll(side, 256));
		memcpy(side->mirror + request->offset, slot, request->length);
		wr.opcode = IBV_WR_RDMA_WRITE;
		break;
	case READ:
		memcpy(request->expected, side->mirror + request->offset, request->length);
		memset(slot, SENTINEL, request->length);
		wr.opcode = IBV_WR_RDMA_READ;
		break;
	case ADD:
		request->length = 8;
		request->before = side->counter;
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.remote_addr = side->far.buffer + TARGET_AT + COUNTER;
		wr.wr.atomic.compare_add = roll(side, 1000);
		wr.wr.atomic.rkey = side->far.rkey;
		side->counter += wr.wr.atomic.compare_add;
		break;
	case LONG_WRITE:
		request->length = roll(side, LONG + 1);
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = side->far.buffer + LONG_TO;
		at = LONG_FROM;
		break;
	}
	if (wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || request->kind == WRITE || request->kind == READ)
		wr.wr.rdma.remote_addr = side->far.buffer + TARGET_AT + request->offset;
	wr.num_sge = request->kind == ADD ? (sge[0] = sge_of(&side->end, at, 8), 1) : cut(side, sge, at, request->length);
	if (request->length <= 128 && wr.opcode < IBV_WR_RDMA_READ && roll(side, 2))
		wr.send_flags |= IBV_SEND_INLINE;
	if (roll(side, 3) || side->posted - side->signaled >= SLOTS / 2) {
		wr.send_flags |= IBV_SEND_SIGNALED;
		side->signaled = side->posted + 1;
	}
	CHECK_EQ(ibv_post_send(side->end.qp, &wr, &bad), 0);
	side->posted++;
	requests++;
	bytes += request->length;
}

/* --- completions ------------------------------------------------------------------------------------------ */

static void check_request(struct side *side, const struct request *request, size_t slot_at)
{
	if (request->kind == READ)
		CHECK(!memcmp(side->end.buffer + slot_at, request->expected, request->length));
	if (request->kind == ADD)
		CHECK_EQ(*(uint64_t *)(void *)(side->end.buffer + slot_at), request->before);
}

static void check_receive(struct side *side, const struct ibv_wc *wc)
{
	uint64_t index = side->received++;
	struct planned planned = plan(!side->me, index);
	bool is_write = planned.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	uint8_t expected[SLOT];

	CHECK_EQ(wc->wr_id, RECEIVE | index);
	if (wc->status != IBV_WC_SUCCESS)
		return;
	CHECK_EQ(wc->opcode, is_write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
	CHECK_EQ(wc->byte_len, planned.length);
	CHECK_EQ(!!(wc->wc_flags & IBV_WC_WITH_IMM), planned.opcode != IBV_WR_SEND);
	if (wc->wc_flags & IBV_WC_WITH_IMM)
		CHECK_EQ(wc->imm_data, (uint32_t)index);
	if (is_write)
		return; /* later writes may lie over it; what was written is read back by its writer */
	fill(expected, planned.length, planned.start);
	CHECK(!memcmp(side->end.buffer + RECEIVES_AT + index % SLOTS * SLOT, expected, planned.length));
}

static int drain(struct side *side)
{
	struct ibv_wc wc[8];
	int count = ibv_poll_cq(side->end.cq, 1 + roll(side, 8), wc);

	CHECK(count >= 0);
	for (int i = 0; i < count; i++) {
		if (wc[i].status != IBV_WC_SUCCESS) {
			if (!side->disturbed)
				fprintf(stderr, "request %llx: %s\n", (unsigned long long)wc[i].wr_id,
					ibv_wc_status_str(wc[i].status));
			CHECK(side->disturbed);
			side->failed = true;
		}
		if (wc[i].wr_id & RECEIVE) {
			check_receive(side, &wc[i]);
			continue;
		}
		CHECK(wc[i].wr_id >= side->done && wc[i].wr_id < side->posted);
		for (; side->done <= wc[i].wr_id; side->done++)
			if (wc[i].status == IBV_WC_SUCCESS || side->done < wc[i].wr_id)
				check_request(side, &side->requests[side->done % SLOTS],
					      SENDS_AT + side->done % SLOTS * SLOT);
	}
	return count;
}

static void take_events(struct side *side)
{
	struct ibv_cq *cq;
	void *context;

	while (readable(side->end.channel->fd, 0)) {
		CHECK_EQ(ibv_get_cq_event(side->end.channel, &cq, &context), 0);
		CHECK(cq == side->end.cq);
		ibv_ack_cq_events(cq, 1);
		wakes++;
	}
}

/* Sleep until something comes. What comes after arming must wake us. */
static void rest(struct side *side, int limit_ms)
{
	take_events(side);
	CHECK_EQ(ibv_req_notify_cq(side->end.cq, 0), 0);
	if (drain(side) || readable(side->end.channel->fd, limit_ms) || side->interrupted || side->disturbed)
		return;
	if (drain(side) && !readable(side->end.channel->fd, 5000)) {
		fprintf(stderr, "a wake-up was lost\n");
		abort();
	}
}

static void step(struct side *side, bool post)
{
	if (roll(side, 4))
		post_receives(side);
	for (unsigned i = roll(side, 4); post && i; i--)
		post_request(side);
	if (roll(side, 3))
		drain(side);
	else if (!roll(side, 8))
		rest(side, roll(side, 3));
}

/* --- the sides ----------------------------------------------------------------------------------------------- */

static void side_open(struct side *side, unsigned me, int fd)
{
	struct ibv_qp_attr attr = default_attr(0);

	memset(side, 0, sizeof(*side));
	side->me = me;
	side->random = stress_seed * 2 + me;
	end_open(&side->end, &(struct end_options){.memory = roll(side, 2) ? DEVICE_MEMORY : USER_MEMORY});
	fill((uint8_t *)side->end.buffer + LONG_FROM, LONG, 0);
	if (roll(side, 2)) {
		side->narrow = ibv_reg_mr(side->end.pd, side->end.buffer, SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE);
		CHECK(side->narrow);
	}
	to_init(side->end.qp);
	post_receives(side);
	attr.timeout = 20; /* whoever is stopped has 4 times 4 seconds */
	side->far = connect_over_with(&side->end, fd, attr);
}

static void withdraw_narrow(struct side *side)
{
	if (side->narrow)
		CHECK_EQ(ibv_dereg_mr(side->narrow), 0);
	side->narrow = NULL;
}

static void side_close(struct side *side)
{
	CHECK_EQ(ibv_destroy_qp(side->end.qp), 0);
	side->end.qp = NULL;
	withdraw_narrow(side);
	end_close(&side->end);
}

/* Everything posted has completed, once, whatever became of it; but unsignaled sends that succeeded. */
static void expect_all_completed(struct side *side)
{
	uint64_t limit = now_ns() + LIMIT_MS * 1000000ull;

	while (side->done < side->signaled || side->received < side->receives) {
		drain(side);
		CHECK(now_ns() < limit);
	}
	while (drain(side))
		;
	CHECK_EQ(side->received, side->receives);
}

/* No more requests; come to an end with the other side. */
static void side_finish(struct side *side, int fd)
{
	uint64_t limit = now_ns() + 20000000000, theirs[2], mine[2];
	bool heard = false;

	/* Of those after the last signaled one nothing will be heard. */
	while (side->done < side->signaled) {
		step(side, false);
		CHECK(now_ns() < limit);
	}
	mine[0] = side->messages;
	mine[1] = side->counter;
	tell(fd, mine, sizeof(mine));
	while (!heard || side->received < theirs[0]) {
		if (!heard && readable(fd, 0)) {
			CHECK(hear(fd, theirs, sizeof(theirs)));
			heard = true;
		}
		step(side, false);
		CHECK(now_ns() < limit);
	}
	CHECK_EQ(side->received, theirs[0]);
	expect_nothing(side->end.cq);
	meet(fd);
	side_close(side);
}

static void serve(int fd)
{
	static struct side side;
	char word = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	side_open(&side, 1, fd);
	side.disturbed = fate >= KILLED;
	side.interrupted = fate == PAUSES;
	while (!side.failed && recv(fd, &word, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
		step(&side, true);
	if (!side.disturbed) {
		CHECK(word == 'q');
		side_finish(&side, fd);
	} else {
		if (side.failed)
			expect_all_completed(&side);
		side_close(&side);
	}
	expect_live_nothing();
}

/* What a forked child leaves of its parent's device, where locks and lists may be in anybody's hands,
 * is no leak of its own. */
static void serve_and_vanish(int fd)
{
	serve(fd);
	_exit(0);
}

static void serve_in_peace(int fd)
{
	fate = NOTHING_HAPPENS;
	serve(fd);
}

/* --- what happens ------------------------------------------------------------------------------------------------ */

static struct side victim, bystander;

static void work_for(uint64_t ns)
{
	uint64_t until = now_ns() + ns;

	do {
		step(&victim, true);
		step(&bystander, true);
	} while (now_ns() < until);
}

static uint64_t some_time(unsigned limit_us)
{
	return (uint64_t)roll(&bystander, limit_us) * 1000;
}

static void kill_it(struct other *child)
{
	uint64_t limit;

	victim.disturbed = true;
	CHECK_EQ(kill(child->pid, SIGKILL), 0);
	limit = now_ns() + 25000000000; /* who never let us in is given up with the retry budget only */
	while (!victim.failed && state_of(victim.end.qp) != IBV_QPS_ERR) {
		step(&victim, roll(&victim, 2));
		step(&bystander, true);
		CHECK(now_ns() < limit);
	}
	expect_all_completed(&victim);
	join_killed(child);
	side_close(&victim);
}

static void pause_it(struct other *child)
{
	victim.interrupted = true;
	for (int i = 0; i < 10; i++) {
		CHECK_EQ(kill(child->pid, SIGSTOP), 0);
		work_for(some_time(3000));
		CHECK_EQ(kill(child->pid, SIGCONT), 0);
		work_for(some_time(3000));
	}
}

static void end_it(struct other *child)
{
	if (roll(&bystander, 2)) {
		CHECK_EQ(kill(child->pid, SIGCONT), 0);
		send(child->fd, "q", 1, MSG_NOSIGNAL);
		join(child);
	} else {
		join_killed(child);
	}
}

static void leave_it_stopped(struct other *child)
{
	uint64_t began;

	victim.disturbed = true;
	CHECK_EQ(kill(child->pid, SIGSTOP), 0);
	work_for(some_time(2000));
	began = now_ns();
	side_close(&victim);
	CHECK(now_ns() - began < 2000000000);
	quarantined += rdmanet_soft_quarantined() != 0;
	end_it(child);
}

static void expect_untouched(const char *from, size_t length)
{
	for (size_t i = 0; i < length; i++)
		CHECK_EQ((uint8_t)from[i], SENTINEL);
}

static void take_memory_away(struct other *child)
{
	victim.disturbed = true;
	if (roll(&bystander, 2))
		CHECK_EQ(kill(child->pid, SIGSTOP), 0);
	CHECK_EQ(ibv_dereg_mr(victim.end.mr), 0);
	victim.end.mr = NULL;
	withdraw_narrow(&victim);
	if (!rdmanet_soft_quarantined()) {
		memset(victim.end.buffer, SENTINEL, BUFFER);
		kill(child->pid, SIGCONT);
		usleep(some_time(2000) / 1000);
		expect_untouched(victim.end.buffer, BUFFER);
	} else {
		quarantined++;
	}
	side_close(&victim);
	end_it(child);
}

static void break_it(struct other *child)
{
	struct ibv_qp_attr attr = {0};
	bool stop = roll(&bystander, 2);
	int err;

	victim.disturbed = true;
	if (stop)
		CHECK_EQ(kill(child->pid, SIGSTOP), 0);
	CHECK_EQ(to_state(victim.end.qp, &attr, IBV_QPS_ERR, 0), 0);
	victim.failed = true;
	expect_all_completed(&victim);
	err = to_state(victim.end.qp, &attr, IBV_QPS_RESET, 0);
	if (!err) {
		memset(victim.end.buffer, SENTINEL, BUFFER);
		kill(child->pid, SIGCONT);
		usleep(some_time(2000) / 1000);
		expect_untouched(victim.end.buffer, BUFFER);
	} else {
		CHECK_EQ(err, EBUSY); /* who is stopped inside must move first */
		CHECK_EQ(state_of(victim.end.qp), IBV_QPS_ERR);
		quarantined++;
	}
	side_close(&victim);
	end_it(child);
}

static void leave_it(struct other *child)
{
	victim.disturbed = true;
	send(child->fd, "q", 1, MSG_NOSIGNAL);
	usleep(some_time(300) / 1000);
	side_close(&victim);
	join(child);
}

static void play(void)
{
	enum fate chosen;
	struct other first, second;
	unsigned choice = stress_seed * 2654435761u;

	chosen = getenv("RDMANET_STRESS_FATE") ? (enum fate)atoi(getenv("RDMANET_STRESS_FATE")) : choice >> 8 & 0xff;
	chosen %= FATES;
	stress_what = fate_names[chosen];
	setenv("RDMANET_SOFT_DEFER", choice >> 16 & 3 ? "0" : "50", 1);
	setenv("RDMANET_SOFT_CMA", choice >> 18 & 3 ? "1" : "0", 1);
	second = spawn(serve_in_peace);
	if (can_fork_at_work)
		side_open(&bystander, 0, second.fd);
	/* The device is open here, and at work: the child opens its own. */
	fate = chosen;
	first = spawn(serve_and_vanish);
	if (!can_fork_at_work)
		side_open(&bystander, 0, second.fd);
	side_open(&victim, 0, first.fd);
	work_for(some_time(20000));

	switch (fate) {
	case NOTHING_HAPPENS:
	case PAUSES:
		if (fate == PAUSES)
			pause_it(&first);
		tell(first.fd, "q", 1);
		side_finish(&victim, first.fd);
		join(&first);
		break;
	case KILLED:
		kill_it(&first);
		break;
	case STOPPED:
		leave_it_stopped(&first);
		break;
	case WITHDRAWN:
		take_memory_away(&first);
		break;
	case BROKEN:
		break_it(&first);
		break;
	default:
		leave_it(&first);
		break;
	}
	/* Where somebody was stopped, he has moved on or died: nothing stays aside. */
	for (uint64_t limit = now_ns() + LIMIT_MS * 1000000ull; rdmanet_soft_quarantined();) {
		step(&bystander, true);
		CHECK(now_ns() < limit);
	}
	for (int i = 0; i < 50; i++)
		step(&bystander, true);
	tell(second.fd, "q", 1);
	side_finish(&bystander, second.fd);
	join(&second);
	expect_live_nothing();
	rounds[chosen]++;
}

int main(int argc, char **argv)
{
	uint64_t until = stress_begin(argc, argv), count = 0;

	do {
		alarm(60); /* a round that hangs */
		play();
		count++;
		stress_seed++;
	} while (now_ns() < until);
	printf("  %llu rounds, %llu requests, %.0f MB, %llu wake-ups, put aside %llu times:", (unsigned long long)count,
	       (unsigned long long)requests, bytes / 1e6, (unsigned long long)wakes, (unsigned long long)quarantined);
	for (int i = 0; i < FATES; i++)
		printf(" %s %llu", fate_names[i], (unsigned long long)rounds[i]);
	printf("\n");
	return 0;
}
