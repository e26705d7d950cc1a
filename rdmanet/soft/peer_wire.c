/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wire between peers: messages, each a datagram with at most one descriptor, over an abstract
 * Unix socket; and the question who is at the other end of it.
 */
#define _GNU_SOURCE
#include "peers.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FDS_MAX = 4 }; /* room for more than there should be: so that they can be closed */


const char *const rn_refusal_names[REFUSALS] = {
	[REFUSED_USER] = "another user",
	[REFUSED_HOST] = "another boot of the host",
	[REFUSED_NAMESPACE] = "another network or pid namespace",
	[REFUSED_VERSION] = "another version",
	[REFUSED_CLOSED] = "its device is closed",
};

/* --- who we are --------------------------------------------------------------------------------- */

static uint64_t namespace_of(const char *path)
{
	struct stat st;

	return stat(path, &st) ? 0 : (uint64_t)st.st_dev << 32 ^ (uint64_t)st.st_ino;
}

/* Known once for each time the engine runs. rn_peers.lock held. */
const struct identity *rn_self(void)
{
	FILE *file;

	if (rn_peers.self_known)
		return &rn_peers.self;
	memset(&rn_peers.self, 0, sizeof rn_peers.self);
	file = fopen("/proc/sys/kernel/random/boot_id", "re");
	if (file) {
		if (!fgets(rn_peers.self.boot_id, sizeof rn_peers.self.boot_id, file))
			rn_peers.self.boot_id[0] = 0;
		fclose(file);
	}
	rn_peers.self.net_namespace = namespace_of("/proc/self/ns/net");
	rn_peers.self.pid_namespace = namespace_of("/proc/self/ns/pid");
	rn_peers.self.pid = getpid();
	if (getrandom(&rn_peers.self.instance, sizeof rn_peers.self.instance, GRND_NONBLOCK) < 0)
		rn_peers.self.instance = rn_now_ns();
	rn_peers.self_known = true;
	/* Peers that can't map our memory use process_vm_*; Yama asks us to allow it. Elsewhere the
	 * call fails, and nothing depends on it. */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	return &rn_peers.self;
}

/* 0, or why not. */
enum refusal rn_judge(int fd, const struct identity *other, int *pid)
{
	struct ucred cred = {.pid = 0};
	socklen_t length = sizeof cred;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length) || cred.uid != geteuid())
		return REFUSED_USER;
	if (memcmp(other->boot_id, rn_self()->boot_id, sizeof other->boot_id))
		return REFUSED_HOST;
	if (other->net_namespace != rn_self()->net_namespace || other->pid_namespace != rn_self()->pid_namespace ||
	    cred.pid <= 0 || cred.pid != other->pid)
		return REFUSED_NAMESPACE;
	*pid = cred.pid;
	return 0;
}

/* --- sockets ------------------------------------------------------------------------------------ */

socklen_t rn_peer_name(uint16_t port, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	/* Abstract: gone with the process that has it, and nothing in the file system. */
	int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "rdmanet-soft/%u", (unsigned)port);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

void rn_outbox_clear(struct outbox *out)
{
	while (out->first) {
		struct packet *packet = out->first;

		out->first = packet->next;
		rn_fd_close(packet->fd);
		free(packet);
	}
	out->end = &out->first;
}

/* 0, or -errno. */
static int transmit(int socket_fd, const void *bytes, size_t length, int fd)
{
	struct iovec iov = {.iov_base = (void *)bytes, .iov_len = length};
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t sent;

	if (fd >= 0) {
		memset(&control, 0, sizeof control);
		message.msg_control = &control;
		message.msg_controllen = sizeof control;
		control.header = (struct cmsghdr){
			.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
		memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
	}
	do
		sent = sendmsg(socket_fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (sent < 0 && errno == EINTR);
	return sent < 0 ? -errno : 0;
}

/* Now, or when the socket has room. An error of the socket is no error here: its end is seen when
 * it is read. -ENOMEM. */
int rn_send(struct rn_source *source, struct outbox *out, const struct message *message, const void *bytes,
			size_t length, int fd)
{
	size_t total = sizeof *message + length;
	struct packet *packet = malloc(sizeof *packet + total);
	int rc;

	if (!packet)
		return -ENOMEM;
	memcpy(packet->bytes, message, sizeof *message);
	if (length)
		memcpy(packet->bytes + sizeof *message, bytes, length);
	if (!out->first) {
		rc = transmit(source->fd, packet->bytes, total, fd);
		if (rc != -EAGAIN) {
			free(packet);
			return 0;
		}
		rn_source_modify(source, out->waiting);
	}
	packet->next = NULL;
	packet->length = total;
	packet->fd = fd < 0 ? -1 : rn_fd_own(fcntl(fd, F_DUPFD_CLOEXEC, 3));
	*out->end = packet;
	out->end = &packet->next;
	return 0;
}

void rn_outbox_flush(struct rn_source *source, struct outbox *out)
{
	while (out->first) {
		struct packet *packet = out->first;

		if (transmit(source->fd, packet->bytes, packet->length, packet->fd) == -EAGAIN)
			return;
		out->first = packet->next;
		if (!out->first)
			out->end = &out->first;
		rn_fd_close(packet->fd);
		free(packet);
	}
	rn_source_modify(source, EPOLLIN);
}

struct inbox rn_inbox;

enum arrival rn_receive(int socket_fd)
{
	struct iovec iov[2] = {{&rn_inbox.message, sizeof rn_inbox.message}, {rn_inbox.bytes, sizeof rn_inbox.bytes}};
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(FDS_MAX * sizeof(int))];
	} control;
	struct msghdr message = {
		.msg_iov = iov, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control};
	bool fits;
	ssize_t got;

	do
		got = recvmsg(socket_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0 && errno == EAGAIN)
		return NOTHING;
	rn_inbox.fd = -1;
	if (got <= 0)
		return ENDED;
	for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
		size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(each) + i * sizeof fd, sizeof fd);
			rn_fd_close(rn_inbox.fd);
			rn_inbox.fd = rn_fd_own(fd);
		}
	}
	fits = got >= (ssize_t)sizeof rn_inbox.message && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
	if (!fits || rn_inbox.message.magic != MAGIC) {
		rn_fd_close(rn_inbox.fd);
		rn_log("a peer's message makes no sense, or no descriptor was free for what came along: link closed");
		return ENDED;
	}
	rn_inbox.length = (size_t)got - sizeof rn_inbox.message;
	return ARRIVED;
}

void rn_inbox_discard(void)
{
	rn_fd_close(rn_inbox.fd);
	rn_inbox.fd = -1;
}

/* --- what comes along ---------------------------------------------------------------------------- */

void rn_eventfd_add(int fd)
{
	struct pollfd room = {.fd = fd, .events = POLLOUT};
	uint64_t one = 1;

	while (poll(&room, 1, 0) == 1 && room.revents & POLLOUT)
		if (write(fd, &one, sizeof one) >= 0 || errno != EINTR)
			break;
}

bool rn_eventfd_take(int fd)
{
	uint64_t count;
	struct iovec to = {&count, sizeof count};
	ssize_t got = preadv2(fd, &to, 1, -1, RWF_NOWAIT);

	if (got < 0 && errno == EOPNOTSUPP) /* before Linux 5.8 */
		got = read(fd, &count, sizeof count);
	return got > 0;
}

/* A memfd of exactly this size that can't change it: mapped; or NULL. */
char *rn_map_sealed(int fd, int64_t size)
{
	int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
	int needed = F_SEAL_SHRINK | F_SEAL_GROW; /* as ibv_reg_dmabuf_mr asks for: seals don't come off */
	struct stat st;
	char *base;

	if (seals < 0 || (seals & needed) != needed || size <= 0 || fstat(fd, &st) || st.st_size != size) {
		rn_log("a peer's memory is not sealed, or not of the size it said: refused");
		return NULL;
	}
	base = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED) {
		rn_log("a peer's memory of %lld bytes can't be mapped: %s", (long long)size, strerror(errno));
		return NULL;
	}
	madvise(base, (size_t)size, MADV_DONTFORK); /* a child has no business in it */
	rn_peers.mappings++;
	return base;
}

void rn_unmap(char *base, size_t size)
{
	if (!base)
		return;
	munmap(base, size);
	rn_peers.mappings--;
}

