/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "sock_diag.h"

#include <fcntl.h>
#include <stdalign.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

static void fill_in(const struct sockaddr *address, __be32 to[4], __be16 *port)
{
	const struct sockaddr_in *v4 = (const void *)address;
	const struct sockaddr_in6 *v6 = (const void *)address;

	if (address->sa_family == AF_INET) {
		to[0] = v4->sin_addr.s_addr;
		*port = v4->sin_port;
	} else {
		memcpy(to, &v6->sin6_addr, sizeof(v6->sin6_addr));
		*port = v6->sin6_port;
	}
}

/*
 * The socket that the kernel would give a segment to that goes from `far` to `near`: a connection, else a listener,
 * the one of that address before a wildcard's. False: there is none.
 */
static bool look_up(const struct sockaddr *near, const struct sockaddr *far, struct inet_diag_msg *found)
{
	struct {
		struct nlmsghdr header;
		struct inet_diag_req_v2 request;
	} question = {
		.header = {.nlmsg_len = sizeof(question), .nlmsg_type = SOCK_DIAG_BY_FAMILY, .nlmsg_flags = NLM_F_REQUEST},
		.request = {
			.sdiag_family = (uint8_t)near->sa_family,
			.sdiag_protocol = IPPROTO_TCP,
			.idiag_states = ~0u,
			.id.idiag_cookie = {INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE},
		},
	};
	struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
	alignas(struct nlmsghdr) char answer[8192];
	const struct nlmsghdr *header = (const void *)answer;
	ssize_t got = -1;
	int fd = rn_fd_own(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));

	if (fd < 0)
		return false;
	fill_in(near, question.request.id.idiag_src, &question.request.id.idiag_sport);
	if (far)
		fill_in(far, question.request.id.idiag_dst, &question.request.id.idiag_dport);
	/* The kernel answers within sendto(). */
	if (sendto(fd, &question, sizeof(question), 0, (struct sockaddr *)&kernel, sizeof(kernel)) > 0)
		got = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
	rn_fd_close(fd);
	if (got < (ssize_t)NLMSG_LENGTH(sizeof(*found)) || header->nlmsg_type != SOCK_DIAG_BY_FAMILY)
		return false;
	memcpy(found, NLMSG_DATA(header), sizeof(*found));
	return true;
}

bool rn_tcp_listener_user(const struct sockaddr *address, uid_t *user)
{
	struct inet_diag_msg found;

	if (!look_up(address, NULL, &found) || found.idiag_state != TCP_LISTEN)
		return false;
	*user = found.idiag_uid;
	return true;
}

bool rn_tcp_peer_user(int fd, uid_t *user)
{
	struct sockaddr_storage near = {0}, far = {0};
	socklen_t near_length = sizeof(near), far_length = sizeof(far);
	struct inet_diag_msg found;

	/* Its near end is our far one. */
	if (getsockname(fd, (struct sockaddr *)&near, &near_length) ||
	    getpeername(fd, (struct sockaddr *)&far, &far_length) ||
	    (far.ss_family != AF_INET && far.ss_family != AF_INET6) ||
	    !look_up((struct sockaddr *)&far, (struct sockaddr *)&near, &found))
		return false;
	/* Of those that are not made yet, or over, the kernel says 0, which would be root. */
	if (found.idiag_state == TCP_LISTEN || found.idiag_state == TCP_SYN_RECV ||
	    found.idiag_state == TCP_TIME_WAIT || found.idiag_state > TCP_CLOSING)
		return false;
	*user = found.idiag_uid;
	return true;
}

bool rn_is_overflow_user(uid_t user)
{
	char text[16] = "";
	int fd = open("/proc/sys/kernel/overflowuid", O_RDONLY | O_CLOEXEC);
	uid_t overflow = 65534;

	if (fd >= 0) {
		if (read(fd, text, sizeof(text) - 1) > 0)
			overflow = (uid_t)strtoul(text, NULL, 10);
		close(fd);
	}
	return user == overflow;
}
