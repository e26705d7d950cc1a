/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The wire between peers: messages, each a datagram with at most one descriptor, over an abstract
 * Unix socket.
 */
#include "peer/peers.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FDS_MAX = 4 }; /* room for more than there should be: so that they can be closed */

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

/* 0, or -errno. If too many descriptors are on their way, the message goes without this one. */
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
	if (sent < 0 && errno == ETOOMANYREFS && fd >= 0)
		return transmit(socket_fd, bytes, length, -1);
	return sent < 0 ? -errno : 0;
}

int rn_send(struct rn_source *source, struct outbox *out, const struct rn_link_message *message, const void *bytes,
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

enum arrival rn_receive(int socket_fd, bool expects_fd)
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
	if (message.msg_flags & MSG_CTRUNC) {
		/* What it was for is missing, and is asked for again or omitted. */
		rn_fd_close(rn_inbox.fd);
		rn_inbox.fd = -1;
		if (expects_fd)
			rn_warn(RN_WARN_DESCRIPTORS, "no descriptor was free to receive one that another process sent");
	}
	fits = got >= (ssize_t)sizeof rn_inbox.message && !(message.msg_flags & MSG_TRUNC);
	if (!fits || rn_inbox.message.magic != RN_LINK_MAGIC) {
		rn_inbox_discard();
		rn_warn(RN_WARN_LANGUAGE,
			"closed a link: the other process sent a message of another protocol or of the wrong length");
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

bool rn_has_hung_up(int socket_fd)
{
	struct pollfd end = {.fd = socket_fd, .events = POLLRDHUP};

	return poll(&end, 1, 0) > 0 && end.revents & (POLLRDHUP | POLLHUP);
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
	int needed = F_SEAL_SHRINK | F_SEAL_GROW; /* as ibv_reg_dmabuf_mr asks for: seals don't come off */
	struct stat st;
	char *base;
	int seals;

	if (fd < 0)
		return NULL; /* no descriptor was free for it, which was logged */
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & needed) != needed || size <= 0 || fstat(fd, &st) || st.st_size != size) {
		rn_warn(RN_WARN_MAPPING,
			"refused another process's memory: it is not sealed, or not of the size that it gave");
		return NULL;
	}
	base = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED) {
		rn_warn(RN_WARN_MAPPING, "cannot map %lld bytes of another process's memory: %s", (long long)size,
			strerror(errno));
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

