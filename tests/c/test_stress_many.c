/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stress: many processes at what one of them shares, and any of them killed at any instruction.
 *
 *     child --- own ------> a queue pair with a receive ring of its own, and messages the other way
 *           --- shared ---> a queue pair on the SRQ that all children take from
 *           --- UD -------> the one UD queue pair
 *
 * All receives of the hub complete in one CQ, which it polls or sleeps on, while another of its threads posts.  Some
 * children reach it in its arena, by its engine or late, some by TCP and UDP.  One after the other is killed, stopped
 * for a while, stopped and killed, or told to end in good order; and another takes its place.
 *
 * What must hold.  A message that arrives is whole, from whom it says, and the next of its queue pair; datagrams
 * may be missing, but come in order and once.  Each receive completes once.  Who survives goes on.  Of a
 * queue pair whose peer was killed all receives and sends complete.  No receive of the SRQ or of the UD queue pair goes
 * with those who had taken it: in the end as many messages arrive as receives are left.
 *
 *   RDMANET_STRESS_KILLS     at least so many (40)
 *   and those of stress.h
 */
#include "stress_child.h"

#include <assert.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>

extern char **environ;

enum {
	CHILDREN = 4,
	POOL_RECEIVES = 64, /* of the SRQ, and of the UD queue pair */
	/* The hub's memory. */
	SHARED_AT = 0,
	DATAGRAMS_AT = SHARED_AT + POOL_RECEIVES * SLOT,
	OWN_AT = DATAGRAMS_AT + POOL_RECEIVES * SLOT,
	SENDS_AT = OWN_AT + CHILDREN * OWN_RECEIVES * SLOT,
};
static_assert(SENDS_AT + CHILDREN * SENDS * SLOT <= BUFFER, "all of it fits");

/* --- the hub ----------------------------------------------------------------------------------------------------- */

/* In wr_id: kind << 56 | id << 16 | slot. */
enum kind { RECEIVE_OWN = 1, RECEIVE_SHARED, RECEIVE_DATAGRAM, SEND, PROBE };

struct child {
	pthread_mutex_t hand; /* whoever posts; taken before book */
	uint32_t id;
	unsigned seed;
	pid_t pid;
	int fd;
	struct ibv_qp *own, *shared;
	uint32_t ud_qpn;
	bool posts, disturbed, last_wqe;
	bool used[OWN_RECEIVES];
	uint64_t arrived[QUEUES]; /* for UD: the next index at the earliest */
	uint64_t sent, done;
	uint32_t probes;
};

static struct end hub;
static struct ibv_srq *srq;
static struct ibv_qp *ud;
static struct ibv_mr *narrow; /* the same memory, and nobody's but ours: short messages go by eager buffers */
static struct child children[CHILDREN];
static bool shared_used[POOL_RECEIVES], datagram_used[POOL_RECEIVES];
/* Of what is in use and what has arrived; held while polling. */
static pthread_mutex_t book = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool poster_ends;
static unsigned random_;
static uint32_t next_id = 1;
static struct {
	uint32_t qpn;
	unsigned seed;
	uint64_t next;
} *senders; /* of datagrams, by id: what is late comes from the dead, too */
static uint64_t messages, bytes, wakes, kills, ends, pauses;

static unsigned roll(unsigned range)
{
	return rand_r(&random_) % range;
}

static struct child *by_id(uint32_t id)
{
	for (int i = 0; i < CHILDREN; i++)
		if (children[i].id == id)
			return &children[i];
	CHECK(false);
	return NULL;
}

static struct child *by_shared(uint32_t qpn)
{
	for (int i = 0; i < CHILDREN; i++)
		if (children[i].shared && children[i].shared->qp_num == qpn)
			return &children[i];
	CHECK(false);
	return NULL;
}

static void arrived(struct child *child, uint32_t queue, size_t at, uint32_t length)
{
	struct note note = check_message(hub.buffer + at, child->seed, length);

	CHECK_EQ(note.id, child->id);
	CHECK_EQ(note.queue, queue);
	CHECK_EQ(note.index, child->arrived[queue]++);
	messages++;
	bytes += length;
}

static void datagram_arrived(const struct ibv_wc *wc, size_t at)
{
	struct note note;

	CHECK_EQ(wc->wc_flags & IBV_WC_GRH, IBV_WC_GRH);
	CHECK(wc->byte_len >= GRH + sizeof(note));
	memcpy(&note, hub.buffer + at + GRH, sizeof(note));
	CHECK(note.id < next_id && note.queue == DATAGRAM);
	CHECK_EQ(wc->src_qp, senders[note.id].qpn);
	check_message(hub.buffer + at + GRH, senders[note.id].seed, wc->byte_len - GRH);
	CHECK(note.index >= senders[note.id].next); /* nothing twice, and nothing late */
	senders[note.id].next = note.index + 1;
	for (int i = 0; i < CHILDREN; i++)
		if (children[i].id == note.id)
			children[i].arrived[DATAGRAM]++;
	messages++;
	bytes += wc->byte_len;
}

static void take(bool *used, uint32_t slot)
{
	CHECK(used[slot]); /* it completes once */
	used[slot] = false;
}

/* With book held. */
static void on_completion(const struct ibv_wc *wc)
{
	enum kind kind = wc->wr_id >> 56;
	uint32_t slot = wc->wr_id & 0xffff, id = wc->wr_id >> 16;
	struct child *child;

	switch (kind) {
	case RECEIVE_SHARED:
		CHECK_EQ(wc->status, IBV_WC_SUCCESS);
		take(shared_used, slot);
		arrived(by_shared(wc->qp_num), SHARED, SHARED_AT + slot * SLOT, wc->byte_len);
		break;
	case RECEIVE_DATAGRAM:
		CHECK_EQ(wc->status, IBV_WC_SUCCESS);
		take(datagram_used, slot);
		datagram_arrived(wc, DATAGRAMS_AT + slot * SLOT);
		break;
	case RECEIVE_OWN:
		child = by_id(id);
		take(child->used, slot);
		if (wc->status == IBV_WC_SUCCESS)
			arrived(child, OWN, OWN_AT + ((child - children) * OWN_RECEIVES + slot) * SLOT, wc->byte_len);
		else
			CHECK(child->disturbed);
		break;
	case PROBE:
		by_id(id)->probes--; /* whatever became of it */
		break;
	default:
		child = by_id(id);
		CHECK_EQ(kind, SEND);
		CHECK_EQ(slot, child->done % SENDS);
		CHECK(child->done++ < child->sent);
		CHECK(wc->status == IBV_WC_SUCCESS || child->disturbed);
	}
}

static int drain(void)
{
	struct ibv_wc wc[16];
	int count;

	pthread_mutex_lock(&book);
	count = ibv_poll_cq(hub.cq, 1 + roll(16), wc);
	CHECK(count >= 0);
	for (int i = 0; i < count; i++)
		on_completion(&wc[i]);
	pthread_mutex_unlock(&book);
	return count;
}

static void take_async_events(void)
{
	struct ibv_async_event event;

	while (readable(hub.context->async_fd, 0)) {
		CHECK_EQ(ibv_get_async_event(hub.context, &event), 0);
		if (event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED)
			for (int i = 0; i < CHILDREN; i++)
				if (children[i].shared == event.element.qp)
					children[i].last_wqe = true;
		ibv_ack_async_event(&event);
	}
}

/* Sleep until something comes. What comes after arming must wake us. */
static void rest(void)
{
	struct ibv_cq *cq;
	void *context;

	while (readable(hub.channel->fd, 0)) {
		CHECK_EQ(ibv_get_cq_event(hub.channel, &cq, &context), 0);
		ibv_ack_cq_events(cq, 1);
		wakes++;
	}
	CHECK_EQ(ibv_req_notify_cq(hub.cq, 0), 0);
	if (drain() || readable(hub.channel->fd, 1 + roll(3)))
		return;
	if (drain() && !readable(hub.channel->fd, 5000)) {
		fprintf(stderr, "a wake-up was lost\n");
		abort();
	}
}

static void work(void)
{
	if (!roll(64))
		rest();
	else if (!drain())
		sched_yield();
	if (!roll(256))
		take_async_events();
}

/* --- what its other thread does ------------------------------------------------------------------------------ */

static void post_receive(struct ibv_qp *qp, uint64_t wr_id, size_t at, unsigned *random)
{
	struct ibv_sge sge = sge_of(&hub, at, SLOT);
	struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1}, *bad;

	if (rand_r(random) % 2)
		sge.lkey = narrow->lkey;
	CHECK_EQ(qp ? ibv_post_recv(qp, &wr, &bad) : ibv_post_srq_recv(srq, &wr, &bad), 0);
}

/* A slot that is free, taken; or -1. */
static int choose(bool *used, uint32_t count, unsigned *random)
{
	uint32_t slot = rand_r(random) % count;
	bool was;

	pthread_mutex_lock(&book);
	was = used[slot];
	used[slot] = true;
	pthread_mutex_unlock(&book);
	return was ? -1 : (int)slot;
}

/* With its hand held. In order of posting they complete, so in that order they are posted. */
static void post_own(struct child *child, unsigned *random)
{
	int slot = choose(child->used, OWN_RECEIVES, random);

	if (slot >= 0)
		post_receive(child->own, (uint64_t)RECEIVE_OWN << 56 | (uint64_t)child->id << 16 | slot,
			     OWN_AT + ((child - children) * OWN_RECEIVES + slot) * SLOT, random);
}

static void send_to(struct child *child, unsigned *random)
{
	size_t at = SENDS_AT + ((child - children) * SENDS + child->sent % SENDS) * SLOT;
	struct note note = {.id = child->id, .queue = OWN, .index = child->sent};
	struct ibv_sge sge = sge_of(&hub, at, 0);
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)SEND << 56 | (uint64_t)child->id << 16 | child->sent % SENDS,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.sg_list = &sge,
		.num_sge = 1,
	}, *bad;
	bool is_room;

	pthread_mutex_lock(&book);
	is_room = child->sent - child->done < SENDS && !child->disturbed;
	if (is_room)
		child->sent++;
	pthread_mutex_unlock(&book);
	if (!is_room)
		return;
	sge.length = make_message(hub.buffer + at, ~child->seed, note);
	if (sge.length <= 128 && rand_r(random) % 2)
		wr.send_flags |= IBV_SEND_INLINE;
	CHECK_EQ(ibv_post_send(child->own, &wr, &bad), 0);
}

static void *post_for_ever(void *arg)
{
	unsigned random = stress_seed + 1;

	while (!poster_ends) {
		struct child *child = &children[rand_r(&random) % CHILDREN];
		int slot = choose(shared_used, POOL_RECEIVES, &random);

		if (slot >= 0)
			post_receive(NULL, (uint64_t)RECEIVE_SHARED << 56 | slot, SHARED_AT + slot * SLOT, &random);
		slot = choose(datagram_used, POOL_RECEIVES, &random);
		if (slot >= 0)
			post_receive(ud, (uint64_t)RECEIVE_DATAGRAM << 56 | slot, DATAGRAMS_AT + slot * SLOT, &random);
		pthread_mutex_lock(&child->hand);
		if (child->posts) {
			post_own(child, &random);
			if (!(rand_r(&random) % 4))
				send_to(child, &random);
		}
		pthread_mutex_unlock(&child->hand);
		if (!(rand_r(&random) % 16))
			sched_yield();
	}
	return arg;
}

/* --- children come and go ----------------------------------------------------------------------------------------- */

/* By another program's start, not by a fork: that of a process with threads is no place to begin. */
static void spawn_child(struct child *child)
{
	char id[16], seed[16], *argv[] = {(char *)"test_stress_many", (char *)"child", seed, id, NULL};
	unsigned way = mix(stress_seed, child->id) % 8;
	posix_spawn_file_actions_t actions;
	int fds[2];

	snprintf(id, sizeof(id), "%u", child->id);
	snprintf(seed, sizeof(seed), "%u", stress_seed);
	setenv("RDMANET_SOFT_TRANSPORT", way < 2 ? "stream" : "auto", 1);
	setenv("RDMANET_SOFT_CMA", way == 2 || way == 3 ? "0" : "1", 1);
	setenv("RDMANET_SOFT_DEFER", way == 3 || way == 4 ? "50" : "0", 1);
	CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
	CHECK_EQ(posix_spawn_file_actions_init(&actions), 0);
	CHECK_EQ(posix_spawn_file_actions_adddup2(&actions, fds[1], CHILD_FD), 0);
	CHECK_EQ(posix_spawn(&child->pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	close(fds[1]);
	child->fd = fds[0];
}

/* Hear it while the others go on. */
static void hear_meanwhile(int fd, void *data, size_t size)
{
	while (!readable(fd, 0))
		work();
	CHECK(hear(fd, data, size));
}

static void start(struct child *child)
{
	struct introduction mine = {.id = 0}, theirs;
	struct ibv_qp *own = make_qp(&hub, IBV_QPT_RC, NULL, OWN_RECEIVES);
	struct ibv_qp *shared = make_qp(&hub, IBV_QPT_RC, srq, 0);
	uint32_t id = next_id;
	char mark = 'm';

	senders = realloc(senders, (id + 1) * sizeof(*senders));
	CHECK(senders);
	pthread_mutex_lock(&child->hand);
	pthread_mutex_lock(&book);
	next_id++;
	child->id = id;
	child->seed = mix(stress_seed, id);
	child->posts = child->disturbed = child->last_wqe = false;
	child->own = own;
	child->shared = shared;
	child->sent = child->done = 0;
	memset(child->arrived, 0, sizeof(child->arrived));
	memset(child->used, 0, sizeof(child->used));
	pthread_mutex_unlock(&book);
	pthread_mutex_unlock(&child->hand);
	spawn_child(child);
	mine = (struct introduction){.id = id, .qpns = {own->qp_num, shared->qp_num, ud->qp_num}};
	hear_meanwhile(child->fd, &theirs, sizeof(theirs));
	pthread_mutex_lock(&book);
	senders[id].qpn = theirs.qpns[DATAGRAM];
	senders[id].seed = child->seed;
	senders[id].next = 0;
	pthread_mutex_unlock(&book);
	tell(child->fd, &mine, sizeof(mine));
	connect_patiently(own, theirs.qpns[OWN]);
	connect_patiently(shared, theirs.qpns[SHARED]);
	tell(child->fd, &mark, 1);
	pthread_mutex_lock(&child->hand);
	child->posts = true;
	pthread_mutex_unlock(&child->hand);
	hear_meanwhile(child->fd, &mark, 1);
}

static void stop_posting(struct child *child, bool disturbed)
{
	pthread_mutex_lock(&child->hand);
	child->posts = false;
	pthread_mutex_lock(&book);
	child->disturbed = disturbed;
	pthread_mutex_unlock(&book);
	pthread_mutex_unlock(&child->hand);
}

/* Gone from here, with nothing of it on the CQ. */
static void put_away(struct child *child)
{
	while (drain())
		;
	pthread_mutex_lock(&book);
	CHECK_EQ(ibv_destroy_qp(child->own), 0);
	CHECK_EQ(ibv_destroy_qp(child->shared), 0);
	child->own = child->shared = NULL;
	child->id = 0;
	pthread_mutex_unlock(&book);
	close(child->fd);
}

/* A peer that was killed before it had let us in is missed by who wants something of it. */
static void probe(struct child *child, struct ibv_qp *qp)
{
	struct ibv_send_wr wr = {.wr_id = (uint64_t)PROBE << 56 | (uint64_t)child->id << 16, .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;

	pthread_mutex_lock(&book);
	child->probes++;
	pthread_mutex_unlock(&book);
	CHECK_EQ(ibv_post_send(qp, &wr, &bad), 0);
}

static bool is_over(const struct child *child)
{
	bool over = !child->probes && child->done == child->sent && child->last_wqe && state_of(child->own) == IBV_QPS_ERR &&
		    state_of(child->shared) == IBV_QPS_ERR;

	for (int i = 0; i < OWN_RECEIVES; i++)
		over &= !child->used[i];
	return over;
}

static void kill_it(struct child *child)
{
	uint64_t limit = now_ns() + 60000000000ull;

	stop_posting(child, true);
	CHECK_EQ(kill(child->pid, SIGKILL), 0);
	CHECK_EQ(waitpid(child->pid, NULL, 0), child->pid);
	probe(child, child->own);
	probe(child, child->shared);
	while (!is_over(child)) {
		work();
		take_async_events();
		CHECK(now_ns() < limit);
	}
	put_away(child);
	kills++;
}

static void end_it(struct child *child)
{
	uint64_t limit = now_ns() + 60000000000ull, theirs[QUEUES];
	char mark = 'm';
	int status;

	tell(child->fd, "q", 1);
	hear_meanwhile(child->fd, theirs, sizeof(theirs));
	while (child->arrived[OWN] != theirs[OWN] || child->arrived[SHARED] != theirs[SHARED]) {
		work();
		CHECK(now_ns() < limit);
	}
	stop_posting(child, false);
	tell(child->fd, &child->sent, sizeof(child->sent));
	while (child->done != child->sent) {
		work();
		CHECK(now_ns() < limit);
	}
	hear_meanwhile(child->fd, &mark, 1);
	stop_posting(child, true); /* its queue pairs go before ours */
	tell(child->fd, &mark, 1);
	while (!waitpid(child->pid, &status, WNOHANG))
		work();
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	put_away(child);
	ends++;
}

/* Everybody else gets something through. */
static void expect_progress(void)
{
	uint64_t limit = now_ns() + 60000000000ull, before[CHILDREN][QUEUES];

	for (int i = 0; i < CHILDREN; i++)
		memcpy(before[i], children[i].arrived, sizeof(before[i]));
	for (int i = 0; i < CHILDREN; i++)
		for (uint32_t queue = 0; children[i].id && queue < QUEUES; queue++)
			while (children[i].arrived[queue] == before[i][queue]) {
				work();
				CHECK(now_ns() < limit);
			}
}

static void work_for(uint64_t ns)
{
	uint64_t until = now_ns() + ns;

	do
		work();
	while (now_ns() < until);
}

/* Something happens to one of them. */
static void round_of(bool no_kill)
{
	static const char *const names[] = {"killed", "killed", "killed", "stopped and killed", "stopped and going on",
					    "ending"};
	unsigned fate = no_kill ? 4 + roll(2) : roll(6);
	struct child *child = &children[roll(CHILDREN)];

	alarm(150);
	stress_what = names[fate];
	work_for(roll(4000) * 1000ull);
	if (fate == 3 || fate == 4) {
		CHECK_EQ(kill(child->pid, SIGSTOP), 0);
		work_for(roll(4000) * 1000ull);
		pauses++;
	}
	if (fate == 4)
		CHECK_EQ(kill(child->pid, SIGCONT), 0);
	else if (fate < 4)
		kill_it(child);
	else
		end_it(child);
	expect_progress();
	if (!child->id)
		start(child);
}

/* --- nothing was lost ----------------------------------------------------------------------------------------- */

static uint32_t count_used(const bool *used)
{
	uint32_t count = 0;

	for (int i = 0; i < POOL_RECEIVES; i++)
		count += used[i];
	return count;
}

/* Each receive that is posted takes one more message. */
static void use_up(struct ibv_qp *from, bool *used, enum kind kind)
{
	uint32_t left = count_used(used);
	struct ibv_ah *ah = make_ah(&hub);
	struct ibv_wc wc;

	for (uint32_t i = 0; i < left; i++) {
		struct ibv_sge sge = sge_of(&hub, SENDS_AT, 64);
		struct ibv_send_wr wr = {.wr_id = 0, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1,
					 .send_flags = IBV_SEND_SIGNALED}, *bad;

		if (kind == RECEIVE_DATAGRAM) {
			wr.wr.ud.ah = ah;
			wr.wr.ud.remote_qpn = ud->qp_num;
			wr.wr.ud.remote_qkey = QKEY;
		}
		CHECK_EQ(ibv_post_send(from, &wr, &bad), 0);
		for (int two = 0; two < 2; two++) {
			wc = poll_one(hub.cq);
			CHECK_EQ(wc.status, IBV_WC_SUCCESS);
			if (!wc.wr_id)
				continue;
			CHECK_EQ(wc.wr_id >> 56, kind);
			take(used, wc.wr_id & 0xffff);
		}
	}
	CHECK_EQ(count_used(used), 0);
	CHECK_EQ(ibv_destroy_ah(ah), 0);
}

static void use_all_up(void)
{
	struct ibv_qp *from = make_qp(&hub, IBV_QPT_RC, NULL, 1);
	struct ibv_qp *to = make_qp(&hub, IBV_QPT_RC, srq, 0);

	connect_to(from, to->qp_num);
	connect_to(to, from->qp_num);
	use_up(from, shared_used, RECEIVE_SHARED);
	use_up(ud, datagram_used, RECEIVE_DATAGRAM);
	CHECK_EQ(ibv_destroy_qp(from), 0);
	CHECK_EQ(ibv_destroy_qp(to), 0);
}

int main(int argc, char **argv)
{
	struct ibv_srq_init_attr init = {.attr = {.max_wr = POOL_RECEIVES, .max_sge = 2}};
	uint64_t goal, until;
	pthread_t poster;

	if (argc == 4 && !strcmp(argv[1], "child"))
		return child(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
	until = stress_begin(argc, argv);
	goal = getenv("RDMANET_STRESS_KILLS") ? strtoull(getenv("RDMANET_STRESS_KILLS"), NULL, 10) : 40;
	random_ = stress_seed;
	end_open(&hub, &(struct end_options){.memory = USER_MEMORY, .cqe = 4096});
	narrow = ibv_reg_mr(hub.pd, hub.buffer, BUFFER, IBV_ACCESS_LOCAL_WRITE);
	srq = ibv_create_srq(hub.pd, &init);
	CHECK(narrow && srq);
	ud = make_qp(&hub, IBV_QPT_UD, NULL, POOL_RECEIVES);
	start_ud(ud);
	for (int i = 0; i < CHILDREN; i++)
		pthread_mutex_init(&children[i].hand, NULL);
	CHECK_EQ(pthread_create(&poster, NULL, post_for_ever, NULL), 0);
	for (int i = 0; i < CHILDREN; i++)
		start(&children[i]);
	do
		round_of(!goal);
	while (now_ns() < until || kills < goal);
	for (int i = 0; i < CHILDREN; i++)
		end_it(&children[i]);
	poster_ends = true;
	CHECK_EQ(pthread_join(poster, NULL), 0);
	while (drain())
		;
	use_all_up();
	CHECK_EQ(ibv_destroy_qp(ud), 0);
	CHECK_EQ(ibv_destroy_srq(srq), 0);
	CHECK_EQ(ibv_dereg_mr(narrow), 0);
	take_async_events();
	end_close(&hub);
	expect_live_nothing();
	free(senders);
	printf("  %llu killed, %llu ended, %llu stopped for a while: %llu messages, %.0f MB, %llu wake-ups\n",
	       (unsigned long long)kills, (unsigned long long)ends, (unsigned long long)pauses,
	       (unsigned long long)messages, bytes / 1e6, (unsigned long long)wakes);
	return 0;
}
