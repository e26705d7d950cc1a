/* SPDX-License-Identifier: Apache-2.0 */
#include "base/engine.h"
#include "base/gid.h"
#include "base/proc_net.h"
#include "base/sock_diag.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <unistd.h>

enum { ANSWERS = 16384 }; /* the kernel puts no more into one message of a dump */

/* Ask the kernel one question, which it answers within sendto(). Returns the socket, or -1. */
static int ask(const void *question, size_t length)
{
	struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
	int fd = rn_fd_own(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));

	if (fd < 0)
		return -1;
	if (sendto(fd, question, length, 0, (struct sockaddr *)&kernel, sizeof(kernel)) > 0)
		return fd;
	rn_fd_close(fd);
	return -1;
}

static ssize_t hear(int fd, void *answer, size_t room)
{
	struct sockaddr_nl from = {0};
	socklen_t length = sizeof(from);
	ssize_t got = recvfrom(fd, answer, room, MSG_DONTWAIT, (struct sockaddr *)&from, &length);

	return from.nl_pid ? -1 : got; /* the kernel is 0 */
}

/* Visit all sockets that a question finds. False: the kernel does not tell. */
static bool for_each(const void *question, size_t length, void (*take)(const struct nlmsghdr *, void *), void *closure)
{
	alignas(struct nlmsghdr) char answers[ANSWERS];
	int fd = ask(question, length);
	bool more = fd >= 0, all = false;

	while (more) {
		ssize_t got = hear(fd, answers, sizeof(answers));
		const struct nlmsghdr *header = (const void *)answers;

		more = got > 0;
		for (size_t left = more ? (size_t)got : 0; NLMSG_OK(header, left); header = NLMSG_NEXT(header, left)) {
			all = header->nlmsg_type == NLMSG_DONE;
			if (all || header->nlmsg_type == NLMSG_ERROR)
				more = false;
			else if (header->nlmsg_type == SOCK_DIAG_BY_FAMILY)
				take(header, closure);
		}
	}
	rn_fd_close(fd);
	return all;
}

/* --- TCP ------------------------------------------------------------------------------------------------------- */

static void fill_in(const struct sockaddr *address, __be32 to[4], __be16 *port, __u32 *interface)
{
	const struct sockaddr_in *v4 = (const void *)address;
	const struct sockaddr_in6 *v6 = (const void *)address;

	if (address->sa_family == AF_INET) {
		to[0] = v4->sin_addr.s_addr;
		*port = v4->sin_port;
	} else {
		memcpy(to, &v6->sin6_addr, sizeof(v6->sin6_addr));
		*port = v6->sin6_port;
		*interface = v6->sin6_scope_id; /* of a link-local one */
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
		.header = {.nlmsg_len = sizeof(question), .nlmsg_type = SOCK_DIAG_BY_FAMILY,
			   .nlmsg_flags = NLM_F_REQUEST},
		.request = {
			.sdiag_family = (uint8_t)near->sa_family,
			.sdiag_protocol = IPPROTO_TCP,
			.idiag_states = ~0u,
			.id.idiag_cookie = {INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE},
		},
	};
	alignas(struct nlmsghdr) char answer[ANSWERS];
	const struct nlmsghdr *header = (const void *)answer;
	__u32 *interface = &question.request.id.idiag_if;
	ssize_t got;
	int fd;

	fill_in(near, question.request.id.idiag_src, &question.request.id.idiag_sport, interface);
	if (far)
		fill_in(far, question.request.id.idiag_dst, &question.request.id.idiag_dport, interface);
	fd = ask(&question, sizeof(question));
	if (fd < 0)
		return false;
	got = hear(fd, answer, sizeof(answer));
	rn_fd_close(fd);
	if (got < (ssize_t)NLMSG_LENGTH(sizeof(*found)) || header->nlmsg_type != SOCK_DIAG_BY_FAMILY)
		return false;
	memcpy(found, NLMSG_DATA(header), sizeof(*found));
	return found->idiag_inode; /* the kernel may report user 0 for a socket that is closed or not accepted yet */
}

static bool tells_of_tcp(void);

bool rn_tcp_listener(const struct sockaddr *address, uid_t *user, union ibv_gid *at)
{
	struct inet_diag_msg found;

	if (!look_up(address, NULL, &found) || found.idiag_state != TCP_LISTEN)
		return !tells_of_tcp() && rn_proc_tcp_listener(address, user, at);
	*user = found.idiag_uid;
	*at = rn_gid_any_v4;
	if (found.idiag_family == AF_INET)
		memcpy(&at->raw[12], found.id.idiag_src, 4);
	else
		memcpy(at->raw, found.id.idiag_src, sizeof(at->raw));
	return true;
}

bool rn_tcp_listener_user(const struct sockaddr *address, uid_t *user)
{
	return rn_tcp_listener(address, user, &(union ibv_gid){0});
}

bool rn_tcp_listener_cookie(const struct sockaddr *address, uint64_t *cookie, uid_t *user)
{
	struct inet_diag_msg found;

	if (!look_up(address, NULL, &found) || found.idiag_state != TCP_LISTEN)
		return false;
	*user = found.idiag_uid;
	*cookie = (uint64_t)found.id.idiag_cookie[1] << 32 | found.id.idiag_cookie[0];
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
	if (found.idiag_state == TCP_LISTEN || found.idiag_state == TCP_SYN_RECV ||
	    found.idiag_state == TCP_TIME_WAIT || found.idiag_state > TCP_CLOSING)
		return false;
	*user = found.idiag_uid;
	return true;
}

/* The bytecode: source port >= port, else refused; source port <= port, else refused. */
static bool hear_sockets(uint8_t family, uint16_t port, uint32_t states,
			 void (*take)(const struct nlmsghdr *, void *), void *closure)
{
	struct {
		struct nlmsghdr header;
		struct inet_diag_req_v2 request;
		struct nlattr attribute;
		struct inet_diag_bc_op at_least[2], at_most[2];
	} question = {
		.header = {.nlmsg_len = sizeof(question), .nlmsg_type = SOCK_DIAG_BY_FAMILY,
			   .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP},
		.request = {.sdiag_family = family, .sdiag_protocol = IPPROTO_TCP, .idiag_states = states},
		.attribute = {.nla_len = sizeof(question.attribute) + sizeof(question.at_least) +
					 sizeof(question.at_most),
			      .nla_type = INET_DIAG_REQ_BYTECODE},
		.at_least = {{.code = INET_DIAG_BC_S_GE, .yes = sizeof(question.at_least),
			      .no = sizeof(question.at_least) + sizeof(question.at_most) + 4}, {.no = port}},
		.at_most = {{.code = INET_DIAG_BC_S_LE, .yes = sizeof(question.at_most),
			     .no = sizeof(question.at_most) + 4}, {.no = port}},
	};

	return for_each(&question, sizeof(question), take, closure);
}

struct beside {
	const struct inet_diag_msg *one;
	uint32_t *inodes;
	unsigned count, room;
};

static void take_beside(const struct nlmsghdr *header, void *closure)
{
	const struct inet_diag_msg *found = NLMSG_DATA(header);
	struct beside *beside = closure;

	if (header->nlmsg_len >= NLMSG_LENGTH(sizeof(*found)) && beside->count < beside->room &&
	    found->id.idiag_sport == beside->one->id.idiag_sport &&
	    !memcmp(found->id.idiag_src, beside->one->id.idiag_src, sizeof(found->id.idiag_src)))
		beside->inodes[beside->count++] = found->idiag_inode;
}

unsigned rn_tcp_listener_inodes(const struct sockaddr *address, uint32_t *inodes, unsigned room)
{
	struct inet_diag_msg found;
	struct beside beside = {.one = &found, .inodes = inodes, .room = room};

	if (look_up(address, NULL, &found) && found.idiag_state == TCP_LISTEN)
		hear_sockets(found.idiag_family, ntohs(found.id.idiag_sport), 1 << TCP_LISTEN, take_beside, &beside);
	return beside.count;
}

static void take_none(const struct nlmsghdr *header, void *closure)
{
	(void)header;
	(void)closure;
}

/* Does the kernel answer questions about TCP sockets? Without its modules it says of each address that nobody is there;
 * but a list of sockets it refuses. */
static bool tells_of_tcp(void)
{
	static atomic_bool tells; /* and will go on to */

	if (!tells && hear_sockets(AF_INET, 0, 1 << TCP_LISTEN, take_none, NULL))
		tells = true;
	return tells;
}

bool rn_tcp_is_told(void)
{
	return tells_of_tcp() || rn_proc_tells_of_tcp();
}

enum { BOUND_INACTIVE = 13 }; /* a state, since Linux 6.8: older headers don't have it */

struct bound {
	uint16_t port;
	unsigned count;
	uid_t user;
	bool differs;
};

static void take_bound(const struct nlmsghdr *header, void *closure)
{
	const struct inet_diag_msg *found = NLMSG_DATA(header);
	struct bound *bound = closure;

	if (header->nlmsg_len < NLMSG_LENGTH(sizeof(*found)) || ntohs(found->id.idiag_sport) != bound->port)
		return;
	bound->differs |= bound->count++ && bound->user != found->idiag_uid;
	bound->user = found->idiag_uid;
}

bool rn_tcp_bound_user(uint16_t port, uid_t *user)
{
	struct bound bound = {.port = port};

	hear_sockets(AF_INET6, port, 1 << BOUND_INACTIVE, take_bound, &bound);
	if (!bound.count)
		hear_sockets(AF_INET, port, 1 << BOUND_INACTIVE, take_bound, &bound);
	*user = bound.user;
	return bound.count && !bound.differs;
}

/* What a program would bind. */
struct wanted {
	const struct sockaddr *address;
	bool v6_only;
	uid_t self;
};

static __be16 port_of(const struct sockaddr *address)
{
	return address->sa_family == AF_INET ? ((const struct sockaddr_in *)address)->sin_port
					     : ((const struct sockaddr_in6 *)address)->sin6_port;
}

/* Does the socket take connections of IPv6 alone? Only of a listener, or one that is only bound, the kernel says so. */
static bool is_v6_only(const struct nlmsghdr *header, const struct inet_diag_msg *found)
{
	const struct nlattr *at = (const void *)(found + 1);
	size_t left = header->nlmsg_len - NLMSG_LENGTH(sizeof(*found)), step;

	for (; left >= sizeof(*at) && at->nla_len >= sizeof(*at) && at->nla_len <= left; left -= step) {
		if (at->nla_type == INET_DIAG_SKV6ONLY && at->nla_len > sizeof(*at))
			return *(const uint8_t *)(at + 1);
		step = NLMSG_ALIGN(at->nla_len) < left ? NLMSG_ALIGN(at->nla_len) : left;
		at = (const void *)((const char *)at + step);
	}
	return false;
}

/* An address of both families: one of IPv4 is mapped. False: it is a wildcard. */
static bool in_both(uint8_t family, const void *address, struct in6_addr *mapped)
{
	*mapped = (struct in6_addr){.s6_addr = {[10] = 0xff, [11] = 0xff}};
	if (family == AF_INET)
		memcpy(&mapped->s6_addr[12], address, 4);
	else
		memcpy(mapped, address, sizeof(*mapped));
	return family == AF_INET ? mapped->s6_addr32[3] : !IN6_IS_ADDR_UNSPECIFIED(mapped);
}

static bool overlaps(const struct wanted *wanted, const struct nlmsghdr *header, const struct inet_diag_msg *found)
{
	const struct sockaddr *address = wanted->address;
	const void *at = address->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)address)->sin_addr
						       : (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr;
	struct in6_addr ours, its;
	bool ours_is_one = in_both((uint8_t)address->sa_family, at, &ours);
	bool its_is_one = in_both(found->idiag_family, found->id.idiag_src, &its);
	bool ours_is_v4 = IN6_IS_ADDR_V4MAPPED(&ours), its_is_v4 = IN6_IS_ADDR_V4MAPPED(&its);

	if (ours_is_one && its_is_one)
		return !memcmp(&ours, &its, sizeof(ours));
	if (ours_is_v4 == its_is_v4)
		return true; /* a wildcard of the same family */
	return ours_is_v4 ? !its_is_one && !is_v6_only(header, found) : !ours_is_one && !wanted->v6_only;
}

struct heard {
	struct wanted wanted;
	enum rn_port_holder holder;
};

static void take_listener(const struct nlmsghdr *header, void *closure)
{
	const struct inet_diag_msg *found = NLMSG_DATA(header);
	struct heard *heard = closure;

	if (header->nlmsg_len < NLMSG_LENGTH(sizeof(*found)) || heard->holder == RN_PORT_OURS ||
	    !overlaps(&heard->wanted, header, found))
		return;
	heard->holder = !found->idiag_uid || found->idiag_uid == heard->wanted.self ? RN_PORT_OURS : RN_PORT_OTHERS;
}

enum rn_port_holder rn_tcp_port_holder(const struct sockaddr *address, bool v6_only)
{
	struct heard heard = {.wanted = {address, v6_only, geteuid()}, .holder = RN_PORT_NOBODYS};
	uint16_t port = ntohs(port_of(address));

	if (!hear_sockets(AF_INET, port, 1 << TCP_LISTEN, take_listener, &heard))
		return RN_PORT_UNKNOWN;
	hear_sockets(AF_INET6, port, 1 << TCP_LISTEN, take_listener, &heard); /* a host may be without */
	return heard.holder;
}

struct using {
	struct wanted wanted;
	struct rn_port_use *use;
};

static void take_use(const struct nlmsghdr *header, void *closure)
{
	const struct inet_diag_msg *found = NLMSG_DATA(header);
	const struct using *using = closure;

	if (header->nlmsg_len < NLMSG_LENGTH(sizeof(*found)) || found->id.idiag_sport != port_of(using->wanted.address) ||
	    found->idiag_state == TCP_LISTEN || !overlaps(&using->wanted, header, found))
		return;
	if (found->idiag_state == TCP_CLOSE || found->idiag_state == BOUND_INACTIVE) /* told as the former */
		using->use->is_held = true;
	else
		using->use->has_connections = true;
	using->use->is_held |= found->idiag_inode && found->idiag_uid != using->wanted.self;
}

bool rn_tcp_port_use(const struct sockaddr *address, bool v6_only, struct rn_port_use *use)
{
	struct using using = {.wanted = {address, v6_only, geteuid()}, .use = use};
	uint16_t port = ntohs(port_of(address));

	*use = (struct rn_port_use){0};
	if (!hear_sockets(AF_INET, port, ~0u, take_use, &using))
		return false;
	hear_sockets(AF_INET6, port, ~0u, take_use, &using); /* a host may be without */
	return true;
}

/* --- Unix ------------------------------------------------------------------------------------------------------ */

/* Of UDIAG_SHOW_ and UNIX_DIAG_, since Linux 5.3: older headers don't have them. */
enum { SHOW_USER = 0x40, NAME_USER = 7 };

/* Without a text: it has none, or a file's. */
static struct rn_unix_name read_socket(const struct nlmsghdr *header)
{
	const struct unix_diag_msg *message = NLMSG_DATA(header);
	const struct nlattr *at = (const void *)(message + 1);
	struct rn_unix_name name = {0};
	size_t left, step;

	if (header->nlmsg_len < NLMSG_LENGTH(sizeof(*message)) || message->udiag_type != SOCK_STREAM)
		return name;
	name.listens = message->udiag_state == TCP_LISTEN;
	for (left = header->nlmsg_len - NLMSG_LENGTH(sizeof(*message));
	     left >= sizeof(*at) && at->nla_len >= sizeof(*at) && at->nla_len <= left; left -= step) {
		const char *data = (const char *)(at + 1);
		size_t length = at->nla_len - sizeof(*at);

		if (at->nla_type == UNIX_DIAG_NAME && length && !*data) {
			name.text = data + 1;
			name.length = length - 1;
		}
		if (at->nla_type == NAME_USER && length == sizeof(name.user)) {
			memcpy(&name.user, data, sizeof(name.user));
			name.has_user = true;
		}
		step = NLMSG_ALIGN(at->nla_len) < left ? NLMSG_ALIGN(at->nla_len) : left;
		at = (const void *)((const char *)at + step);
	}
	return name;
}

/* Stream sockets that have a name, and neither are connected nor were: those that only are bound are closed, the kernel
 * says. */
static bool hear_names(uint32_t show, void (*take)(const struct nlmsghdr *, void *), void *closure)
{
	struct {
		struct nlmsghdr header;
		struct unix_diag_req request;
	} question = {
		.header = {.nlmsg_len = sizeof(question), .nlmsg_type = SOCK_DIAG_BY_FAMILY,
			   .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP},
		.request = {.sdiag_family = AF_UNIX, .udiag_states = 1 << TCP_CLOSE | 1 << TCP_LISTEN,
			    .udiag_show = show},
	};

	return for_each(&question, sizeof(question), take, closure);
}

struct named {
	const char *text;
	size_t length;
	uid_t user;
	bool found;
};

static void take_user(const struct nlmsghdr *header, void *closure)
{
	struct rn_unix_name name = read_socket(header);
	struct named *named = closure;

	if (!name.text || !name.has_user || name.length != named->length ||
	    memcmp(name.text, named->text, name.length) != 0)
		return;
	named->user = name.user;
	named->found = true;
}

bool rn_unix_name_user(const char *text, size_t length, uid_t *user)
{
	struct named named = {.text = text, .length = length};

	if (!hear_names(UDIAG_SHOW_NAME | SHOW_USER, take_user, &named) || !named.found)
		return false;
	*user = named.user;
	return true;
}

struct search {
	bool (*is_it)(const struct rn_unix_name *name, void *closure);
	void *closure;
	bool found;
};

static void take_match(const struct nlmsghdr *header, void *closure)
{
	struct rn_unix_name name = read_socket(header);
	struct search *search = closure;

	if (name.text && search->is_it(&name, search->closure))
		search->found = true;
}

int rn_unix_name_search(bool (*is_it)(const struct rn_unix_name *name, void *closure), void *closure)
{
	struct search search = {.is_it = is_it, .closure = closure};

	if (!hear_names(UDIAG_SHOW_NAME | SHOW_USER, take_match, &search))
		return rn_proc_unix_name_search(is_it, closure);
	return search.found;
}
