/* SPDX-License-Identifier: Apache-2.0 */
/* Peers: who is let in, what is mapped, and how the death of a process is noticed. */
#define _GNU_SOURCE
#include "base/gid.h"
#include "host_check.h"

#include "link.h"
#include "soft.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

/* --- helpers ------------------------------------------------------------------------------------ */

static struct ibv_context *open_device(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(devices[0]);

	CHECK(context);
	ibv_free_device_list(devices);
	CHECK(!rn_engine_hold());
	return context;
}

static void close_device(struct ibv_context *context)
{
	rn_engine_release();
	CHECK(!ibv_close_device(context));
}

static struct rn_peer_live live(void)
{
	struct rn_peer_live now;

	rn_peer_live(&now);
	return now;
}

struct witness {
	struct rn_notice notice;
	_Atomic int ready, failed, died, segments;
};

static void note(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
{
	struct witness *witness = RN_OWNER(notice, struct witness, notice);

	CHECK(rn_engine_inside() && peer == notice->peer);
	switch (why) {
	case RN_LINK_READY:
		CHECK(peer->state == RN_PEER_READY && peer->arena && peer->pid > 0);
		witness->ready++;
		break;
	case RN_LINK_MUTUAL:
		CHECK(peer->state == RN_PEER_READY);
		break;
	case RN_LINK_FAILED:
		CHECK(peer->state == RN_PEER_DEAD);
		witness->failed++;
		break;
	case RN_SEGMENT_READY:
		witness->segments++;
		break;
	case RN_PEER_DIED:
		CHECK(peer->state == RN_PEER_DEAD && peer->arena); /* until the last put */
		witness->died++;
		break;
	}
}

static struct rn_peer *get(uint16_t port, struct witness *witness)
{
	struct rn_peer *peer = rn_peer_get(port);

	CHECK(peer);
	*witness = (struct witness){.notice.run = note};
	rn_peer_subscribe(peer, &witness->notice);
	return peer;
}

static void put(struct rn_peer *peer, struct witness *witness)
{
	rn_peer_unsubscribe(&witness->notice);
	rn_peer_put(peer);
}

struct child {
	pid_t pid;
	int to, from;
};

static struct child start(const char *role)
{
	int down[2], up[2];
	struct child child;

	CHECK(!pipe2(down, O_CLOEXEC) && !pipe2(up, O_CLOEXEC));
	fflush(NULL);
	child.pid = fork();
	if (!child.pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(down[0], 0);
		dup2(up[1], 1);
		execl("/proc/self/exe", "test_peer", role, (char *)NULL);
		_exit(127);
	}
	close(down[0]);
	close(up[1]);
	child.to = down[1];
	child.from = up[0];
	return child;
}

static uint16_t port_of(struct child *child)
{
	uint16_t port = 0;

	CHECK(read(child->from, &port, sizeof port) == sizeof port);
	return port;
}

static int finish(struct child *child)
{
	int status;

	close(child->to);
	close(child->from);
	CHECK(waitpid(child->pid, &status, 0) == child->pid);
	return status;
}

/* All its threads, really. */
static void stop(struct child *child)
{
	int status;

	kill(child->pid, SIGSTOP);
	CHECK(waitpid(child->pid, &status, WUNTRACED) == child->pid && WIFSTOPPED(status));
}

static void tell_port(uint16_t port)
{
	CHECK(write(1, &port, sizeof port) == sizeof port);
}

/* Until our parent closes the pipe. */
static void wait_for_end(void)
{
	char byte;

	while (read(0, &byte, 1) > 0)
		;
}

static void role_owner(const char *role)
{
	struct ibv_context *context = open_device();
	uint16_t first = rn_port_bind(), second = rn_port_bind();

	CHECK(first && second && first != second);
	/* A child that the device's fork handler doesn't know of: it has all our sockets. (aarch64 has no SYS_fork.) */
	if (!strcmp(role, "raw-fork") && !syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)) {
		close(0);
		close(1);
		prctl(PR_SET_PDEATHSIG, 0);
		alarm(5);
		for (;;)
			pause();
	}
	tell_port(first);
	tell_port(second);
	if (!strcmp(role, "closer")) {
		char byte;

		CHECK(read(0, &byte, 1) == 1);
		close_device(context);
		context = open_device();
		first = rn_port_bind();
		CHECK(first);
		tell_port(first);
	}
	wait_for_end();
	close_device(context);
}

/* --- ports -------------------------------------------------------------------------------------- */

static void ports_are_bound(void)
{
	struct ibv_context *context = open_device();
	uint16_t a = rn_port_bind(), b = rn_port_bind();
	struct rn_peer *self = rn_peer_get(a);
	struct sockaddr_in tcp = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(a)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(a && b && a != b && rn_port_is_mine(a) && !rn_port_is_mine(1));
	CHECK(self->state == RN_PEER_SELF && self->pid == getpid());
	CHECK(bind(fd, (struct sockaddr *)&tcp, sizeof tcp) == -1 && errno == EADDRINUSE);
	CHECK(connect(fd, (struct sockaddr *)&tcp, sizeof tcp) == -1 && errno == ECONNREFUSED);
	close(fd);
	rn_peer_put(self);
	rn_port_release(a);
	CHECK(rn_port_bind() == a); /* kept for us */
	close_device(context);
	CHECK(rn_fd_count() == 0);
}

/* By hand: how connecting to this address of ours ends. */
static int knock(const union ibv_gid *gid, uint16_t port)
{
	struct sockaddr_storage to;
	socklen_t length = rn_gid_address(gid, 0, port, &to);
	int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), error;

	CHECK(fd >= 0);
	error = connect(fd, (struct sockaddr *)&to, length) ? errno : 0;
	close(fd);
	return error;
}

/* The port is ours on every address; open only where we listen. */
static void ports_listen_where_told(void)
{
	struct ibv_context *context = open_device();
	uint16_t port = rn_port_bind();
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)};
	union ibv_gid lo = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}}, other = lo;
	static const int on = 1;
	int fd;

	other.raw[15] = 2; /* 127.0.0.2 */
	CHECK(knock(&lo, port) == ECONNREFUSED);
	CHECK(rn_port_listen(1, &lo, 0) == EADDRNOTAVAIL);
	CHECK(!rn_port_listen(port, &lo, 0));
	CHECK(!knock(&lo, port));
	CHECK(knock(&other, port) == ECONNREFUSED);
	CHECK(!rn_port_listen(port, &lo, 0)); /* it does so already */
	CHECK(!rn_port_listen(port, &other, 0));
	CHECK(!knock(&other, port));
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
	any.sin_addr.s_addr = htonl(0x7f000003);
	CHECK(bind(fd, (struct sockaddr *)&any, sizeof any) == -1 && errno == EADDRINUSE);
	close(fd);
	rn_port_release(port);
	close_device(context);
	CHECK(rn_fd_count() == 0);
	CHECK(knock(&lo, port) == ECONNREFUSED);
}

/* --- links -------------------------------------------------------------------------------------- */

static void links_are_shared_and_kept(void)
{
	struct ibv_context *context = open_device();
	struct child child = start("owner");
	uint16_t first = port_of(&child), second = port_of(&child);
	struct witness one, two;
	struct rn_peer *a = get(first, &one), *b;

	EVENTUALLY(a->state == RN_PEER_READY);
	CHECK(a->pid == child.pid && a->arena_size == rn_arena_size());
	b = get(second, &two);
	EVENTUALLY(b->state == RN_PEER_READY);
	CHECK(b->arena == a->arena && a != b);
	CHECK(live().links == 1 && live().mappings == 1);
	put(a, &one);
	put(b, &two);
	a = get(first, &one);
	CHECK(a->state == RN_PEER_READY); /* it was kept */
	put(a, &one);
	EVENTUALLY(live().links == 0 && live().mappings == 0 && live().peers == 0); /* but not for ever */
	CHECK(finish(&child) == 0);
	close_device(context);
}

static void nobody_there(void)
{
	struct ibv_context *context = open_device();
	struct witness witness;
	struct rn_peer *peer = get(1, &witness);

	CHECK(peer->state == RN_PEER_DEAD);
	put(peer, &witness);
	CHECK(live().peers == 0 && live().links == 0);
	close_device(context);
}

static _Atomic long answered;
static _Atomic int answers;

static void answer(struct rn_reply *reply, const void *data, long length)
{
	(void)reply;
	(void)data;
	CHECK(rn_engine_inside());
	answered = length;
	answers++;
}

static void requests_are_answered(void)
{
	struct ibv_context *context = open_device();
	struct child child = start("owner");
	uint16_t port = port_of(&child);
	struct rn_reply replies[64] = {{.done = answer}};
	static char noise[RN_PEER_MESSAGE_MAX];
	struct witness witness;
	struct rn_peer *peer = get(port, &witness);

	EVENTUALLY(peer->state == RN_PEER_READY);
	answered = 1;
	CHECK(!rn_peer_request(peer, noise, 16, &replies[0]));
	EVENTUALLY(answered != 1);
	CHECK(answered < 0); /* it makes no sense to the device */
	CHECK(rn_peer_request(peer, noise, sizeof noise + 1, &replies[0]) == -EMSGSIZE);
	/* More than the socket takes at once, from an owner that doesn't run. */
	stop(&child);
	for (int i = 0; i < 64; i++) {
		replies[i].done = answer;
		CHECK(!rn_peer_request(peer, noise, sizeof noise, &replies[i]));
	}
	for (int i = 0; i < 64; i += 2)
		rn_reply_cancel(&replies[i]);
	answers = 0;
	kill(child.pid, SIGCONT);
	EVENTUALLY(answers == 32);
	/* Without an answer: it dies. */
	stop(&child);
	answered = 1;
	CHECK(!rn_peer_request(peer, noise, sizeof noise, &replies[0]));
	kill(child.pid, SIGKILL);
	EVENTUALLY(answered == -ECONNRESET);
	EVENTUALLY(witness.died == 1);
	CHECK(rn_peer_request(peer, noise, 1, &replies[0]) == -ENOTCONN);
	finish(&child);
	put(peer, &witness);
	CHECK(live().mappings == 0);
	close_device(context);
}

/* --- death -------------------------------------------------------------------------------------- */

static struct rn_death death;
static _Atomic int deaths;
static _Atomic int watched; /* what rn_peer_watch_death said */
static uint16_t watched_port;

static void watch(struct rn_task *task)
{
	(void)task;
	watched = rn_peer_watch_death(watched_port, &death);
}

static void on_death(struct rn_death *it, bool failed)
{
	CHECK(it == &death && !failed && rn_engine_inside());
	rn_peer_unwatch_death(it);
	deaths++;
}

static void deaths_are_noticed(void)
{
	struct ibv_context *context = open_device();
	static const char *const roles[] = {"owner", "raw-fork"};
	struct rn_task task = {.run = watch};

	for (int i = 0; i < 2; i++) {
		struct child child = start(roles[i]);
		uint16_t port = port_of(&child);
		struct witness witness;
		struct rn_peer *peer = get(port, &witness);

		death = (struct rn_death){.dead = on_death};
		deaths = 0;
		watched = 1;
		watched_port = port;
		rn_task_post(&task);
		EVENTUALLY(watched != 1);
		CHECK(watched == 0);
		EVENTUALLY(peer->state == RN_PEER_READY);
		kill(child.pid, SIGKILL);
		EVENTUALLY(witness.died == 1 && deaths == 1); /* the second one's child lives on */
		CHECK(peer->arena[0] == peer->arena[0]); /* mapped still */
		finish(&child);
		put(peer, &witness);
		CHECK(live().mappings == 0 && live().peers == 0 && live().links == 0);
	}
	close_device(context);
}

static void a_device_closed_and_opened_is_another(void)
{
	struct ibv_context *context = open_device();
	struct child child = start("closer");
	uint16_t port = port_of(&child), again;
	struct witness witness, next;
	struct rn_peer *peer = get(port, &witness), *other;

	port_of(&child);
	EVENTUALLY(peer->state == RN_PEER_READY);
	CHECK(write(child.to, "x", 1) == 1);
	again = port_of(&child);
	other = get(again, &next);
	EVENTUALLY(other->state == RN_PEER_READY);
	EVENTUALLY(witness.died == 1);
	CHECK(next.died == 0 && peer->state == RN_PEER_DEAD && other->pid == peer->pid);
	put(peer, &witness);
	put(other, &next);
	CHECK(finish(&child) == 0);
	close_device(context);
}

static void a_hundred_that_come_and_go(void)
{
	struct ibv_context *context = open_device();
	unsigned fds = descriptors();

	for (int i = 0; i < 100; i++) {
		struct child child = start("owner");
		uint16_t port = port_of(&child);
		struct witness witness;
		struct rn_peer *peer = get(port, &witness);

		EVENTUALLY(peer->state == RN_PEER_READY);
		if (i % 2)
			kill(child.pid, SIGKILL);
		else
			close(child.to), child.to = -1;
		EVENTUALLY(witness.died == 1);
		finish(&child);
		put(peer, &witness);
	}
	EVENTUALLY(descriptors() == fds && shared_mappings() <= 1);
	close_device(context);
}

/* --- strangers ---------------------------------------------------------------------------------- */

static int connect_to(uint16_t port)
{
	struct sockaddr_un address;
	socklen_t length = wire_name(port, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(!connect(fd, (struct sockaddr *)&address, length));
	return fd;
}

static void closed_by_peer(int fd, unsigned refusal)
{
	struct pollfd ready = {.fd = fd, .events = POLLIN};
	struct wire_message message;

	if (refusal) {
		CHECK(poll(&ready, 1, 1000) == 1);
		CHECK(recv(fd, &message, sizeof message, 0) == sizeof message);
		CHECK(message.type == WIRE_REFUSED && message.value == refusal);
	}
	CHECK(poll(&ready, 1, 5000) == 1);
	CHECK(recv(fd, &message, sizeof message, 0) <= 0);
	close(fd);
}

/* Where no queue pair is ever numbered, and other runs of this test are not, either. */
static uint16_t own_port(void)
{
	return 1024 + getpid() % 30000;
}

/* A server by hand, there. */
static int listen_by_hand(void)
{
	struct sockaddr_un address;
	socklen_t length = wire_name(own_port(), &address);
	int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(!bind(server, (struct sockaddr *)&address, length) && !listen(server, 1));
	return server;
}

/* In a child that gives up being one of us in some way; its exit status is 0. */
static void in_child(void (*play)(uint16_t port), uint16_t port)
{
	pid_t child;
	int status;

	fflush(NULL);
	child = fork();
	if (!child) {
		play(port);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void play_another_user(uint16_t port)
{
	int fd = connect_to(port), arena;

	CHECK(!setresuid(65534, 65534, 65534));
	close(fd); /* made by who we were */
	fd = connect_to(port);
	CHECK(wire_introduce(fd, &arena) == WIRE_USER && arena < 0);
	closed_by_peer(fd, 0);
}

/* One of us when it connected, and no more. */
static void play_who_has_left(uint16_t port)
{
	int fd = connect_to(port), arena;

	CHECK(!setresuid(65533, 65533, 65533));
	CHECK(wire_introduce(fd, &arena) == WIRE_NONCE && arena < 0);
	closed_by_peer(fd, 0);
}

/* Whom the server may read, but who tells it another nonce than was there. */
static void play_guesser(uint16_t port)
{
	struct wire_words words = wire_words(WIRE_HELLO, 0);
	int fd = connect_to(port), arena, offered = wire_offer(getppid(), words.identity.nonce);

	words.message.value = (uint32_t)offered;
	CHECK(wire_say(fd, &words, sizeof words.message, -1) == sizeof words.message);
	CHECK(wire_hear(fd, &words, &arena) == sizeof words && words.message.type == WIRE_CHALLENGE && arena < 0);
	words = wire_words(WIRE_PROOF, 0);
	CHECK(wire_say(fd, &words, sizeof words, -1) == sizeof words);
	closed_by_peer(fd, WIRE_NONCE);
	fd = connect_to(port);
	CHECK(wire_introduce(fd, &arena) == WIRE_AGAIN && arena < 0);
	closed_by_peer(fd, 0);
}

/* A descriptor that is named for somebody else, or is none at all. */
static void play_misnamed(uint16_t port)
{
	struct wire_words words = wire_words(WIRE_HELLO, 0);
	int fd = connect_to(port);

	words.message.value = (uint32_t)wire_offer(getpid(), words.identity.nonce);
	CHECK(wire_say(fd, &words, sizeof words.message, -1) == sizeof words.message);
	closed_by_peer(fd, WIRE_NO_TRACE);
}

static void play_without(uint16_t port)
{
	struct wire_words words = wire_words(WIRE_HELLO, 1 << 20);
	int fd = connect_to(port);

	CHECK(wire_say(fd, &words, sizeof words.message, -1) == sizeof words.message);
	closed_by_peer(fd, WIRE_NO_TRACE);
}

static void play_one_of_us(uint16_t port)
{
	int fd = connect_to(port), arena;

	CHECK(!wire_introduce(fd, &arena) && arena >= 0);
	close(arena);
	close(fd);
}

static void strangers_are_not_let_in(void)
{
	struct ibv_context *context = open_device();
	uint16_t port = rn_port_bind();
	struct wire_words bad;
	int fd;

	fd = connect_to(port);
	CHECK(send(fd, "hello?", 6, MSG_NOSIGNAL) == 6);
	closed_by_peer(fd, 0);
	fd = connect_to(port); /* says nothing: RDMANET_SOFT_SILENCE */
	closed_by_peer(fd, 0);
	bad = wire_words(WIRE_HELLO, 0);
	bad.message.version = 9;
	fd = connect_to(port);
	CHECK(wire_say(fd, &bad, sizeof bad.message, -1) == sizeof bad.message);
	closed_by_peer(fd, WIRE_OTHER_VERSION);
	bad = wire_words(WIRE_PROOF, 0); /* before it was challenged */
	fd = connect_to(port);
	CHECK(wire_say(fd, &bad, sizeof bad, -1) == sizeof bad);
	closed_by_peer(fd, WIRE_OTHER_VERSION);
	in_child(play_one_of_us, port);
	in_child(play_guesser, port);
	in_child(play_misnamed, port);
	in_child(play_without, port);
	if (!geteuid()) {
		in_child(play_another_user, port);
		in_child(play_who_has_left, port);
	}
	EVENTUALLY(live().inbound == 0);
	close_device(context);
}

/* Where all goes by TCP nobody is let in. */
static void nobody_is_let_in(void)
{
	struct ibv_context *context;
	int fd, arena;

	setenv("RDMANET_SOFT_TRANSPORT", "stream", 1);
	context = open_device();
	fd = connect_to(rn_port_bind());
	CHECK(wire_introduce(fd, &arena) == WIRE_TRANSPORT && arena < 0);
	closed_by_peer(fd, 0);
	close_device(context);
	unsetenv("RDMANET_SOFT_TRANSPORT");
}

/* More processes than are met at a time have read nothing yet: the eldest leaves. */
static void who_is_challenged_may_not_wait(void)
{
	enum { MANY = 17 };
	struct ibv_context *context = open_device();
	uint16_t port = rn_port_bind();
	struct wire_words words[MANY];
	int fds[MANY], offered[MANY];

	for (int i = 0; i < MANY; i++) {
		struct wire_words hello = wire_words(WIRE_HELLO, 0);

		fds[i] = connect_to(port);
		offered[i] = wire_offer(getpid(), hello.identity.nonce);
		hello.message.value = (uint32_t)offered[i];
		CHECK(wire_say(fds[i], &hello, sizeof hello.message, -1) == sizeof hello.message);
		CHECK(wire_hear(fds[i], &words[i], NULL) == sizeof words[i] && words[i].message.type == WIRE_CHALLENGE);
	}
	closed_by_peer(fds[0], 0);
	CHECK(live().inbound == MANY - 1);
	for (int i = 0; i < MANY; i++) {
		close(offered[i]);
		if (i)
			close(fds[i]);
	}
	EVENTUALLY(live().inbound == 0);
	close_device(context);
}

/* A server that gives us memory which it could take away: with a SIGBUS for whoever is in it. */
static void unsealed_memory_is_refused(void)
{
	struct ibv_context *context = open_device();
	int server = listen_by_hand();

	for (int kind = 0; kind < 6; kind++) {
		struct witness witness;
		struct rn_peer *peer = get(own_port(), &witness);
		int memory = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		int fd = accept4(server, NULL, NULL, SOCK_CLOEXEC);

		CHECK(memory >= 0 && !ftruncate(memory, 8192));
		if (kind != 0)
			CHECK(!fcntl(memory, F_ADD_SEALS, F_SEAL_GROW | (kind == 1 ? 0 : F_SEAL_SHRINK) | F_SEAL_SEAL));
		if (kind != 5) {
			CHECK(wire_challenge(fd));
			wire_welcome(fd, memory, kind == 2 ? 16384 : kind == 3 ? 4096 : 8192);
		} else { /* from Linux 6.16 on the kernel lets it pass none */
			struct wire_words words = wire_words(WIRE_WELCOME, 0);

			words.identity.arena_size = 8192;
			if (wire_say(fd, &words, sizeof words, memory) < 0) {
				CHECK(errno == EPERM);
				wire_welcome(fd, -1, 8192);
			}
		}
		if (kind == 4) { /* all is well: so that the others fail for the right reason */
			EVENTUALLY(witness.ready == 1);
			CHECK(peer->arena_size == 8192);
			close(fd);
			EVENTUALLY(witness.died == 1);
		} else {
			EVENTUALLY(witness.failed == 1); /* 5: it has proven nothing */
			close(fd);
		}
		close(memory);
		put(peer, &witness);
	}
	close(server);
	EVENTUALLY(live().mappings == 0 && live().links == 0);
	close_device(context);
}

/* Whom we can't map we tell which queue pairs come by TCP, and nobody else's. */
static void who_is_not_mapped_is_told(void)
{
	struct ibv_context *context = open_device();
	uint16_t port = rn_port_bind();
	int server = listen_by_hand(), fd, arena;
	struct wire_words words;
	struct witness witness;
	struct rn_peer *peer = get(own_port(), &witness);

	fd = accept4(server, NULL, NULL, SOCK_CLOEXEC);
	CHECK(wire_challenge(fd));
	wire_welcome(fd, -1, 8192); /* as if no descriptor had been free for it */
	EVENTUALLY(witness.failed == 1);
	CHECK(peer->state == RN_PEER_DEAD);
	rn_peer_tell_stream(peer, 0x123456, 0x654321, false);
	CHECK(wire_hear(fd, &words, NULL) == sizeof words.message && words.message.type == WIRE_BY_STREAM);
	CHECK(words.message.value == 0x123456 && words.message.size == 0x654321);
	put(peer, &witness);
	close(fd);
	EVENTUALLY(live().links == 0);
	CHECK(witness.died == 0);

	/* The other way round; also when the numbers are used again. */
	fd = connect_to(port);
	CHECK(!wire_introduce(fd, &arena));
	for (uint32_t i = 0; i < 3; i++) {
		words = wire_words(WIRE_BY_STREAM, 7);
		words.message.size = 100 + i;
		CHECK(wire_say(fd, &words, sizeof words.message, -1) == sizeof words.message);
		EVENTUALLY(rn_peer_said_stream(7, 100 + i));
	}
	CHECK(!rn_peer_said_stream(7, 101) && !rn_peer_said_stream(102, 7) && !rn_peer_said_stream(8, 102));
	close(arena);
	close(fd);
	EVENTUALLY(!rn_peer_said_stream(7, 102)); /* it is nobody's word any more */
	close(server);
	close_device(context);
}

/* Of a thousand that know the owner of a segment one waits for it: that one is told, and none of the others is called. */
static void a_segment_is_news_to_who_waits(void)
{
	enum { MANY = 1000, PATIENT = 700 };
	struct ibv_context *context = open_device();
	int server = listen_by_hand(), memory = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING), fd;
	static struct witness crowd[MANY];
	struct witness *patient = &crowd[PATIENT];
	struct wire_words words;
	struct witness witness;
	struct rn_peer *peer = get(own_port(), &witness);
	size_t size = 0;
	char *base = NULL;

	fd = accept4(server, NULL, NULL, SOCK_CLOEXEC);
	CHECK(memory >= 0 && !ftruncate(memory, 8192));
	CHECK(!fcntl(memory, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL));
	CHECK(wire_challenge(fd));
	wire_welcome(fd, memory, 8192);
	EVENTUALLY(witness.ready == 1);
	for (int i = 0; i < MANY; i++) {
		crowd[i] = (struct witness){.notice.run = note};
		rn_peer_subscribe(peer, &crowd[i].notice);
	}
	/* The last is for one who has gone meanwhile. */
	for (uint32_t id = 1; id <= 3; id++) {
		struct witness *waits = id == 3 ? &crowd[0] : patient;

		CHECK(rn_peer_segment(peer, id, &base, &size, &waits->notice) == RN_SEGMENT_ASKED);
		CHECK(rn_peer_segment(peer, id, &base, &size, &waits->notice) == RN_SEGMENT_ASKED);
		CHECK(wire_hear(fd, &words, NULL) == sizeof words.message && words.message.type == WIRE_WANT_SEGMENT);
		CHECK(words.message.value == id);
		if (id == 3)
			rn_peer_unsubscribe(&crowd[0].notice);
		words = wire_words(WIRE_SEGMENT, id);
		words.message.size = 8192;
		CHECK(wire_say(fd, &words, sizeof words.message, memory) == sizeof words.message);
		if (id < 3)
			EVENTUALLY(patient->segments == (int)id);
		EVENTUALLY(rn_peer_segment(peer, id, &base, &size, NULL) == RN_SEGMENT_MAPPED && size == 8192);
	}
	CHECK(patient->segments == 2 && witness.segments == 0);
	for (int i = 0; i < MANY; i++)
		CHECK(i == PATIENT || crowd[i].segments == 0);
	close(fd);
	EVENTUALLY(witness.died == 1);
	for (int i = 1; i < MANY; i++) {
		EVENTUALLY(crowd[i].died == 1);
		rn_peer_unsubscribe(&crowd[i].notice);
	}
	CHECK(crowd[0].died == 0);
	put(peer, &witness);
	close(memory);
	close(server);
	close_device(context);
}

/* Any message, with or without a descriptor. */
static void send_nonsense(int fd, unsigned *seed)
{
	static char bytes[4096];
	struct wire_message message = {
		.magic = 0x524e504c,
		.version = WIRE_VERSION,
		.type = (uint16_t)(rand_r(seed) % 16),
		.value = rand_r(seed) % 3 ? (uint32_t)rand_r(seed) % 4 : (uint32_t)rand_r(seed),
		.size = (int64_t)((uint64_t)rand_r(seed) << (rand_r(seed) % 40)) - rand_r(seed) % 3,
	};
	struct iovec iov[2] = {{&message, sizeof message}, {bytes, (size_t)rand_r(seed) % sizeof bytes}};
	char control[CMSG_SPACE(sizeof(int))] = {0};
	struct msghdr header = {.msg_iov = iov, .msg_iovlen = 2};
	struct cmsghdr *rights = (struct cmsghdr *)(void *)control;
	int passed = rand_r(seed) % 2 ? memfd_create("x", MFD_CLOEXEC) : 0;

	for (size_t i = 0; i < iov[1].iov_len; i++)
		bytes[i] = (char)rand_r(seed);
	if (rand_r(seed) % 2) {
		*rights = (struct cmsghdr){
			.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof passed)};
		memcpy(CMSG_DATA(rights), &passed, sizeof passed);
		header.msg_control = control;
		header.msg_controllen = sizeof control;
	}
	(void)(sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0); /* it may have hung up on us */
	if (passed)
		close(passed);
}

static void nonsense_does_no_harm(void)
{
	struct ibv_context *context = open_device();
	uint16_t port = rn_port_bind();
	int server, fd, arena;
	unsigned seed = 3, fds;
	static char answer_room[RN_PEER_MESSAGE_MAX + 64];

	usleep(1000);
	fds = descriptors();
	fd = connect_to(port);
	CHECK(!wire_introduce(fd, &arena));
	close(arena);
	for (int i = 0; i < 3000; i++) {
		send_nonsense(fd, &seed);
		while (recv(fd, answer_room, sizeof answer_room, MSG_DONTWAIT) > 0)
			;
	}
	close(fd);

	server = listen_by_hand();
	for (int round = 0; round < 10; round++) {
		struct witness witness;
		struct rn_peer *peer = get(own_port(), &witness);
		int memory = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		struct rn_reply reply = {.done = answer};
		size_t size;
		char *base;

		fd = accept4(server, NULL, NULL, SOCK_CLOEXEC);
		CHECK(memory >= 0 && !ftruncate(memory, 8192));
		CHECK(!fcntl(memory, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL));
		CHECK(wire_challenge(fd));
		wire_welcome(fd, memory, 8192);
		close(memory);
		EVENTUALLY(witness.ready == 1);
		answered = 1;
		for (int i = 0; i < 300; i++) {
			if (i % 10 == 0) {
				CHECK(rn_peer_segment(peer, (uint32_t)i / 10 % 4, &base, &size, &witness.notice) !=
				      RN_SEGMENT_MAPPED);
				rn_peer_signal(peer, (uint32_t)i / 10 % 4);
			}
			if (i == 100)
				CHECK(!rn_peer_request(peer, "x", 1, &reply));
			send_nonsense(fd, &seed);
			while (recv(fd, answer_room, sizeof answer_room, MSG_DONTWAIT) > 0)
				;
		}
		close(fd);
		EVENTUALLY(witness.died == 1 && answered != 1);
		rn_reply_cancel(&reply);
		put(peer, &witness);
	}
	close(server);
	CHECK(live().mappings == 0);
	EVENTUALLY(descriptors() <= fds + 1);
	close_device(context);
}

int main(int argc, char **argv)
{
	unsigned fds;

	if (argc == 2) {
		role_owner(argv[1]);
		return 0;
	}
	fds = descriptors();
	RUN(ports_are_bound);
	RUN(ports_listen_where_told);
	RUN(nobody_there);
	RUN(links_are_shared_and_kept);
	RUN(requests_are_answered);
	RUN(deaths_are_noticed);
	RUN(a_device_closed_and_opened_is_another);
	RUN(a_hundred_that_come_and_go);
	setenv("RDMANET_SOFT_SILENCE", "800", 1); /* only here: a busy machine takes longer */
	RUN(strangers_are_not_let_in);
	unsetenv("RDMANET_SOFT_SILENCE");
	RUN(nobody_is_let_in);
	RUN(who_is_challenged_may_not_wait);
	RUN(who_is_not_mapped_is_told);
	RUN(unsealed_memory_is_refused);
	RUN(a_segment_is_news_to_who_waits);
	RUN(nonsense_does_no_harm);
	CHECK(rn_fd_count() == 0);
	CHECK(shared_mappings() == 0);
	CHECK(descriptors() == fds);
	return 0;
}
