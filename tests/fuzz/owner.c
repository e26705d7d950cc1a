/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The owner lies: a process on this host lets us map its arena, and what it says on the link is fuzz: its challenge and
 * its welcome, the memory and the channel that it was asked for, its answers to requests, what it takes back.  Its
 * arena is a copy of our own, in which a queue pair waits for us; so there is something to ask for.  Whatever it says,
 * each request completes once and in order, and nothing is written but where the READ wants it.
 *
 * The first byte: 1 challenge and welcome are proper ones; 2 memory is never reached by process_vm_*, so the owner is
 * asked; 4 the challenge is a proper one. A piece is a message: type, value, size, descriptor (each from the lists
 * below, by its number), then bytes. See fuzz.h.
 */
#include "fuzz.h"

#include <sys/eventfd.h>

#include "../c/link.h"
#include "peer/peers.h"
#include "../c/soft.h"

enum { REQUESTS = 4, LENGTH = 64, ROOM = 4096, CANARY = 0xc5 };

static struct end end, owner;
static struct ibv_mr *user_memory;
static char *user_buffer;
static int listener, arena_fd;
static uint16_t port;
static char *arena, *pristine; /* what it gives us, and a copy of what was written in there */
static struct extent {
	off_t at;
	size_t length;
} extents[64];
static int num_extents;

/* --- the owner --------------------------------------------------------------------------------------------- */

static int sealed_memory(size_t size)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	CHECK(fd >= 0 && !ftruncate(fd, size) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
	return fd;
}

static void copy_arena(void)
{
	size_t total = 0;
	off_t at = 0, hole;

	arena_fd = sealed_memory(RN_ARENA_SIZE);
	arena = mmap(NULL, RN_ARENA_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd, 0);
	CHECK(arena != MAP_FAILED);
	while ((at = lseek(rn_arena_fd(), at, SEEK_DATA)) >= 0) {
		hole = lseek(rn_arena_fd(), at, SEEK_HOLE);
		CHECK(hole > at && num_extents < 64);
		extents[num_extents++] = (struct extent){at, hole - at};
		total += hole - at;
		at = hole;
	}
	CHECK(num_extents);
	pristine = malloc(total);
	for (int i = 0; i < num_extents; i++)
		memcpy(arena + extents[i].at, rn_arena + extents[i].at, extents[i].length);
	for (uint32_t group = 0; group < RN_PORTS_MAX; group++)
		if (rn_arena_head(arena)->ports[group] == owner.qp->qp_num >> 8)
			rn_arena_head(arena)->ports[group] = port;
	rn_arena_locate(arena, port << 8 | (owner.qp->qp_num & 0xff))->qpn = port << 8 | (owner.qp->qp_num & 0xff);
	total = 0;
	for (int i = 0; i < num_extents; total += extents[i++].length)
		memcpy(pristine + total, arena + extents[i].at, extents[i].length);
}

static void restore_arena(void)
{
	size_t total = 0;

	for (int i = 0; i < num_extents; total += extents[i++].length)
		memcpy(arena + extents[i].at, pristine + total, extents[i].length);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	struct sockaddr_un name;

	(void)argc, (void)argv;
	setenv("RDMANET_SOFT_TRANSPORT", "direct", 1);
	signal(SIGPIPE, SIG_IGN);
	end_open(&end, &(struct end_options){.memory = USER_MEMORY, .sig_all = true});
	end_open(&owner, &(struct end_options){.memory = DEVICE_MEMORY, .share = &end});
	user_memory = make_memory(owner.pd, USER_MEMORY, BUFFER, &user_buffer);
	to_init(end.qp);
	connect_to(owner.qp, end.qp->qp_num);
	for (int i = 0; i < REQUESTS; i++)
		CHECK_EQ(post_recv(&owner, i, i * ROOM, LENGTH), 0);
	CHECK_EQ(ibv_req_notify_cq(owner.cq, 0), 0);

	/* Where no queue pair is ever numbered, and other runs are not, either. */
	port = 1024 + getpid() % 30000;
	listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(!bind(listener, (struct sockaddr *)&name, rn_peer_name(port, &name)));
	CHECK(!listen(listener, 8));
	copy_arena();
	return 0;
}

/* --- what it says ------------------------------------------------------------------------------------------ */

static void say(int fd, const struct rn_link_message *message, const void *bytes, size_t length, int passed)
{
	struct iovec iov[2] = {{(void *)message, sizeof(*message)}, {(void *)bytes, length}};
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct msghdr header = {.msg_iov = iov, .msg_iovlen = 2};

	if (passed >= 0) {
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(passed));
		header.msg_control = &control;
		header.msg_controllen = sizeof(control);
	}
	(void)(sendmsg(fd, &header, MSG_NOSIGNAL) < 0); /* it may have hung up on us */
}

static int descriptor(unsigned kind)
{
	int fd;

	switch (kind) {
	case 1:
		return sealed_memory(BUFFER);
	case 2:
		return sealed_memory(4096);
	case 3:
		fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		CHECK(!ftruncate(fd, BUFFER));
		return fd;
	case 4:
		return eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
	case 5:
		return open("/dev/null", O_RDWR | O_CLOEXEC);
	case 6:
		return fcntl(arena_fd, F_DUPFD_CLOEXEC, 3);
	default:
		return -1;
	}
}

/* What the device may have asked for, and what it hasn't; from 8 on: serials of requests. */
static uint32_t value_of(unsigned number)
{
	uint32_t segment = container_of(owner.mr, struct rn_mr, mr)->segment->id;
	uint32_t channel = ((struct rn_channel *)owner.channel)->id;
	const uint32_t values[8] = {segment,    channel,      RN_CHANNEL_WAKEUP, segment + 1,
				    UINT32_MAX, RN_REFUSED_USER, RN_REFUSALS,        0};

	return number < 8 ? values[number] : number - 7;
}

static int64_t size_of(unsigned number, size_t length)
{
	const int64_t sizes[] = {0, 1, 4096, BUFFER, RN_ARENA_SIZE, INT64_MAX, INT64_MIN, -1, -EACCES, -ENOTCONN};

	return number < sizeof(sizes) / sizeof(*sizes) ? sizes[number] : (int64_t)length + (number & 1);
}

static void say_piece(int fd, const uint8_t *piece, size_t length)
{
	uint8_t head[4] = {0};
	struct rn_link_message message;
	int passed;

	memcpy(head, piece, length < sizeof(head) ? length : sizeof(head));
	piece += sizeof(head);
	length = length < sizeof(head) ? 0 : length - sizeof(head);
	message = rn_link_message(head[0] % (RN_LINK_MESSAGES + 1), value_of(head[1]), size_of(head[2], length));
	passed = descriptor(head[3] % 8);
	if (message.type == RN_LINK_WELCOME && head[1] == 0) {
		struct wire_words words = wire_words(WIRE_WELCOME, 0);

		words.identity.arena_size = RN_ARENA_SIZE;
		memcpy(&words.identity, piece, length < sizeof(words.identity) ? length : 0);
		say(fd, &message, &words.identity, sizeof(words.identity), passed);
	} else {
		say(fd, &message, piece, length, passed);
	}
	if (passed >= 0)
		close(passed);
}

/* --- what is asked of it ----------------------------------------------------------------------------------- */

static void post_all(void)
{
	struct address segment = end_address(&owner);

	memset(end.buffer, CANARY, REQUESTS * ROOM);
	CHECK_EQ(post_send(&end, 0, 0, LENGTH), 0); /* into a segment, with a wake-up */
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 1, ROOM, LENGTH, (uintptr_t)user_buffer, user_memory->rkey), 0);
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_READ, 2, 2 * ROOM, LENGTH, (uintptr_t)user_buffer, user_memory->rkey), 0);
	CHECK_EQ(post_rdma(&end, IBV_WR_RDMA_WRITE, 3, 3 * ROOM, ROOM, segment.buffer, segment.rkey), 0);
}

static void await_hang_up(int fd)
{
	struct timeval patience = {.tv_sec = 20};
	char asked[4096];
	ssize_t got;

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	shutdown(fd, SHUT_WR);
	while ((got = recv(fd, asked, sizeof(asked), 0)) > 0)
		;
	CHECK(got == 0 || errno == ECONNRESET);
	close(fd);
}

static void expect_untouched(int request)
{
	const uint8_t *at = (uint8_t *)end.buffer + request * ROOM;

	for (uint32_t i = request == 2 ? LENGTH : 0; i < ROOM; i++)
		CHECK_EQ(at[i], CANARY);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct ibv_qp_attr attr = default_attr(port << 8 | (owner.qp->qp_num & 0xff));
	const uint8_t *piece;
	size_t length;
	int fd;

	if (!size)
		return 0;
	restore_arena();
	rn_settings.no_cma = *data & 2;
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTR, RTR_MASK), 0);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RTS, RTS_MASK), 0);
	fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	CHECK(fd >= 0);
	post_all();
	if (*data & 5)
		CHECK(wire_challenge(fd));
	if (*data++ & 1)
		wire_welcome(fd, arena_fd, RN_ARENA_SIZE);
	size--;
	while ((piece = next_piece(&data, &size, &length)))
		say_piece(fd, piece, length);
	await_hang_up(fd);

	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_ERR, 0), 0);
	for (int i = 0; i < REQUESTS; i++) {
		CHECK_EQ(poll_one(end.cq).wr_id, i);
		expect_untouched(i);
	}
	expect_nothing(end.cq);
	CHECK_EQ(to_state(end.qp, &attr, IBV_QPS_RESET, 0), 0);
	to_init(end.qp);
	return 0;
}
