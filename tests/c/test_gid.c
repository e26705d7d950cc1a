/* SPDX-License-Identifier: Apache-2.0 */
/* The GID table: what is in it, in which order, and what becomes of it when the network changes. */
#include "harness.h"
#include "namespace.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <sys/resource.h>

#include "base/gid.h"
#include "objects/ah.h"

/* How often the netlink socket was asked for news: nothing else in this program is received from in this way. */
static _Atomic unsigned looks;

ssize_t recv(int fd, void *to, size_t room, int flags)
{
	looks += flags == MSG_DONTWAIT;
	return recvfrom(fd, to, room, flags, NULL, NULL);
}

/* What verbs.h's inline functions do. */
static int query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
			uint32_t flags)
{
	return _ibv_query_gid_ex(context, port, index, entry, flags, sizeof(*entry));
}

static ssize_t query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t room, uint32_t flags)
{
	return _ibv_query_gid_table(context, entries, room, flags, sizeof(*entries));
}

static union ibv_gid gid_of(const char *text)
{
	union ibv_gid gid;
	char mapped[INET6_ADDRSTRLEN];

	snprintf(mapped, sizeof(mapped), "%s%s", strchr(text, ':') ? "" : "::ffff:", text);
	CHECK_EQ(inet_pton(AF_INET6, mapped, &gid), 1);
	return gid;
}

static void expect_gid(struct ibv_context *context, int index, const char *text)
{
	union ibv_gid wanted = gid_of(text), gid;
	struct ibv_gid_entry entry;

	CHECK_EQ(ibv_query_gid(context, 1, index, &gid), 0);
	if (memcmp(&gid, &wanted, 16))
		fprintf(stderr, "index %d is not %s\n", index, text);
	CHECK(!memcmp(&gid, &wanted, 16));
	CHECK_EQ(query_gid_ex(context, 1, index, &entry, 0), 0);
	CHECK(!memcmp(&entry.gid, &wanted, 16));
	CHECK(entry.gid_index == (uint32_t)index && entry.port_num == 1 && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
}

static void expect_empty(struct ibv_context *context, int index)
{
	union ibv_gid zero = {0}, gid;
	struct ibv_gid_entry entry;

	CHECK_EQ(ibv_query_gid(context, 1, index, &gid), 0);
	CHECK(!memcmp(&gid, &zero, 16));
	CHECK_EQ(query_gid_ex(context, 1, index, &entry, 0), ENODATA);
}

static uint32_t interface_at(struct ibv_context *context, int index)
{
	struct ibv_gid_entry entry;

	CHECK_EQ(query_gid_ex(context, 1, index, &entry, 0), 0);
	return entry.ndev_ifindex;
}

static enum ibv_port_state port_state(struct ibv_context *context)
{
	struct ibv_port_attr attr;

	CHECK_EQ(ibv_query_port(context, 1, (struct _compat_ibv_port_attr *)&attr), 0);
	return attr.state;
}

/* --- on the network as it is ------------------------------------------------------------------------- */

static void bad_queries_are_refused(void)
{
	struct ibv_context *context = open_soft();
	struct ibv_gid_entry entries[RN_GIDS];
	union ibv_gid gid;
	ssize_t count = query_gid_table(context, entries, RN_GIDS, 0);

	CHECK(count >= 1);
	for (ssize_t i = 0; i < count; i++)
		CHECK(rn_gid_is_ours(&entries[i].gid));
	CHECK_EQ(query_gid_table(context, entries, count, 0), count);
	CHECK_EQ(query_gid_table(context, entries, count - 1, 0), -EINVAL);
	CHECK_EQ(query_gid_table(context, entries, RN_GIDS, 1), -EOPNOTSUPP);
	CHECK_EQ(query_gid_ex(context, 2, 0, entries, 0), EINVAL);
	CHECK_EQ(query_gid_ex(context, 1, RN_GIDS, entries, 0), EINVAL);
	CHECK_EQ(query_gid_ex(context, 1, 0, entries, 1), EOPNOTSUPP);
	CHECK(ibv_query_gid(context, 1, RN_GIDS, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_query_gid(context, 1, -1, &gid) == -1 && errno == EINVAL);
	CHECK(ibv_query_gid(context, 2, 0, &gid) == -1 && errno == EINVAL);
	CHECK_EQ(ibv_close_device(context), 0);
	expect_live_nothing();
}

static void loopback_only_when_asked(void)
{
	struct ibv_context *context;
	struct ibv_gid_entry entries[RN_GIDS];

	setenv("RDMANET_SOFT", "local", 1);
	context = open_soft();
	CHECK(query_gid_table(context, entries, RN_GIDS, 0) <= 2);
	expect_gid(context, 0, "127.0.0.1");
	CHECK_EQ(ibv_close_device(context), 0);
	unsetenv("RDMANET_SOFT");
}

static void addresses_and_gids(void)
{
	struct ibv_context *context = open_soft();
	struct sockaddr_storage address;
	struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(7), .sin_addr.s_addr = htonl(0x7f000203)};
	struct sockaddr_in6 *v6 = (void *)&address;
	union ibv_gid gid, local = gid_of("fe80::1");

	rn_gid_of((struct sockaddr *)&v4, &gid);
	CHECK(rn_gid_is_ours(&gid)); /* 127.0.2.3 */
	CHECK_EQ(rn_gid_address(&gid, 1, 7, &address), sizeof(v4));
	CHECK(!memcmp(&address, &v4, sizeof(v4)));
	CHECK(rn_gid_index_of((struct sockaddr *)&v4) >= 0);
	CHECK_EQ(rn_gid_address(&local, 3, 7, &address), sizeof(*v6));
	CHECK(v6->sin6_scope_id == 3 && v6->sin6_port == htons(7));
	gid = gid_of("198.51.100.77");
	CHECK(!rn_gid_is_ours(&gid));
	CHECK_EQ(ibv_close_device(context), 0);
}

/* --- in networks of our own ---------------------------------------------------------------------------- */

static void the_order(void)
{
	struct ibv_context *context;

	ip("link set v0 up && ip link set v1 up");
	ip("addr add 169.254.1.1/16 dev v1");
	ip("addr add 10.5.0.1/24 dev v0 && ip addr add 10.4.0.1/24 dev v1");
	ip("addr add fd01::1/64 dev v0 nodad");
	ip("addr add fe80::77/64 dev v0 nodad");
	ip("link set v0 addrgenmode none && ip link set v1 addrgenmode none");
	ip("route add default via 10.4.0.9");
	context = open_soft();
	expect_gid(context, 0, "10.4.0.1"); /* the way to others */
	expect_gid(context, 1, "10.5.0.1");
	expect_gid(context, 2, "169.254.1.1");
	expect_gid(context, 3, "fd01::1");
	CHECK_EQ(interface_at(context, 0), if_nametoindex("v1"));
	CHECK_EQ(interface_at(context, 1), if_nametoindex("v0"));
	CHECK_EQ(rn_gid_count() >= 6, 1);
	CHECK_EQ(ibv_close_device(context), 0);
}

static void changes_are_told(void)
{
	struct ibv_context *context, *other;
	struct ibv_async_event event;

	ip("link set v0 addrgenmode none && ip link set v1 addrgenmode none");
	ip("link set v0 up && ip link set v1 up");
	ip("addr add 10.4.0.1/24 dev v0 && ip addr add 10.5.0.1/24 dev v0");
	context = open_soft();
	other = open_soft();
	fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
	/* Nobody sees to it yet: but who asks is told what is. */
	ip("addr add 10.6.0.1/24 dev v0");
	expect_gid(context, 2, "127.0.0.1");
	CHECK(rn_gid_count() == 5);
	expect_gid(context, 4, "10.6.0.1");
	/* From here on the engine does, perhaps before this call looks. */
	if (ibv_get_async_event(context, &event) == 0)
		CHECK_EQ(event.event_type, IBV_EVENT_GID_CHANGE);
	else
		expect_event(context, IBV_EVENT_GID_CHANGE);
	ip("addr del 10.4.0.1/24 dev v0");
	expect_event(context, IBV_EVENT_GID_CHANGE);
	expect_empty(context, 0);
	expect_gid(context, 1, "10.5.0.1"); /* where it was */
	expect_gid(context, 2, "127.0.0.1");
	ip("addr add fd01::9/64 dev v0 nodad");
	expect_event(context, IBV_EVENT_GID_CHANGE);
	expect_gid(context, 0, "fd01::9");
	expect_event(other, IBV_EVENT_GID_CHANGE);
	CHECK_EQ(ibv_close_device(context), 0);
	CHECK_EQ(ibv_close_device(other), 0);
	expect_live_nothing();
}

/* An address that goes leaves a gap: nothing is read there, not what is behind it. */
static void gaps(void)
{
	union ibv_gid first = gid_of("10.4.0.1"), second = gid_of("10.5.0.1"), gid = first;
	struct ibv_gid_entry entries[RN_GIDS];
	uint32_t interface = 77, index, count = 0;
	struct ibv_context *context;

	ip("link set v0 addrgenmode none && ip link set v1 addrgenmode none");
	ip("link set v0 up && ip link set v1 up");
	ip("addr add 10.4.0.1/24 dev v1 && ip addr add 10.5.0.1/24 dev v0");
	context = open_soft();
	expect_gid(context, 0, "10.4.0.1");
	expect_gid(context, 1, "10.5.0.1");
	ip("addr del 10.4.0.1/24 dev v1");
	CHECK(!rn_gid_at(0, &gid, &interface));
	CHECK(rn_gid_is_same(&gid, &first) && interface == 77);
	CHECK(!rn_gid_at(RN_GIDS - 1, &gid, &interface) && !rn_gid_at(RN_GIDS, &gid, &interface));
	CHECK(rn_gid_is_same(&gid, &first) && interface == 77);
	index = 0;
	CHECK(rn_gid_next(&index, &gid, &interface) && index == 1);
	CHECK(rn_gid_is_same(&gid, &second) && interface == if_nametoindex("v0"));
	/* Who goes through the table meets an address that comes behind the place where he is, and misses one before it. */
	for (index = 0; rn_gid_next(&index, NULL, NULL); index++)
		if (!count++)
			ip("addr add 10.6.0.1/24 dev v0 && ip addr add 10.7.0.1/24 dev v0");
	CHECK_EQ(count, rn_gid_count() - 1);
	CHECK_EQ(index, RN_GIDS);
	expect_gid(context, 0, "10.6.0.1");
	CHECK_EQ(query_gid_table(context, entries, RN_GIDS, 0), rn_gid_count());
	CHECK_EQ(ibv_close_device(context), 0);
}

static void a_full_table(void)
{
	struct ibv_context *context;
	uint32_t index, count = 0, last = 0;

	ip("link set v0 up");
	CHECK(!system("for i in $(seq 150); do echo addr add 10.4.0.$i/24 dev v0; echo addr add 10.5.0.$i/24 dev v0; done "
		      "| ip -batch -"));
	context = open_soft();
	CHECK_EQ(rn_gid_count(), RN_GIDS);
	for (index = 0; rn_gid_next(&index, NULL, NULL); index++, count++)
		last = index;
	CHECK(count == RN_GIDS && last == RN_GIDS - 1 && index == RN_GIDS);
	CHECK(!rn_gid_next(&index, NULL, NULL) && index == RN_GIDS);
	CHECK_EQ(ibv_close_device(context), 0);
}

/* 127.0.0.1 is there always. */
static void without_addresses(void)
{
	struct ibv_context *context;
	struct ibv_gid_entry entry;
	uint32_t index = 0;

	ip("link set lo down");
	context = open_soft();
	CHECK_EQ(rn_gid_count(), 1);
	CHECK(rn_gid_next(&index, NULL, NULL) && index == 0);
	index = 1;
	CHECK(!rn_gid_next(&index, NULL, NULL) && index == RN_GIDS);
	CHECK_EQ(query_gid_table(context, &entry, 1, 0), 1);
	CHECK_EQ(query_gid_table(context, &entry, 0, 0), -EINVAL);
	CHECK_EQ(ibv_close_device(context), 0);
}

static uint32_t index_for_an_answer(struct ibv_context *context, const char *to)
{
	struct ibv_wc wc = {.wc_flags = IBV_WC_GRH};
	union ibv_gid from = gid_of("10.4.0.9"), near = gid_of(to);
	struct ibv_ah_attr attr;
	struct rn_grh grh;

	rn_grh_make(&grh, &from, &near, 0, 0, 17, 64);
	CHECK_EQ(ibv_init_ah_from_wc(context, 1, &wc, (struct ibv_grh *)&grh, &attr), 0);
	return attr.grh.sgid_index;
}

/* Who wants all addresses looks for news once for each, not once for each place in the table. */
static void few_looks_for_news(void)
{
	enum { FEW = 60 }; /* for four addresses */
	struct ibv_gid_entry entries[RN_GIDS];
	struct end end;

	ip("link set v0 addrgenmode none && ip link set v1 addrgenmode none");
	ip("link set v0 up && ip link set v1 up");
	ip("addr add 10.4.0.1/24 dev v0 && ip addr add 10.5.0.1/24 dev v0");
	looks = 0;
	end_open(&end, &(struct end_options){0});
	CHECK_EQ(rn_gid_count(), 4);
	CHECK(looks > 0 && looks < FEW);
	looks = 0;
	CHECK_EQ(query_gid_table(end.context, entries, RN_GIDS, 0), 4);
	CHECK(looks > 0 && looks < FEW);
	ip("addr del 10.4.0.1/24 dev v0");
	looks = 0;
	CHECK_EQ(index_for_an_answer(end.context, "10.5.0.1"), 1);
	CHECK_EQ(index_for_an_answer(end.context, "239.1.2.3"), 1);
	CHECK_EQ(index_for_an_answer(end.context, "127.0.0.1"), 2);
	CHECK_EQ(index_for_an_answer(end.context, "::1"), 3);
	CHECK(looks > 0 && looks < FEW);
	end_close(&end);
	expect_live_nothing();
}

/* What can't be read isn't gone. */
static void without_descriptors(void)
{
	union ibv_gid first = gid_of("10.4.0.1"), second = gid_of("10.6.0.1");
	struct ibv_context *context;
	struct rlimit before, none;

	ip("link set v0 up && ip addr add 10.4.0.1/24 dev v0");
	context = open_soft();
	ip("addr add 10.6.0.1/24 dev v0");
	CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = before;
	none.rlim_cur = 0;
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
	CHECK(rn_gid_is_ours(&first) && !rn_gid_is_ours(&second));
	CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
	CHECK(rn_gid_is_ours(&first) && rn_gid_is_ours(&second));
	CHECK_EQ(ibv_close_device(context), 0);
}

static void the_last_link_is_the_port(void)
{
	struct ibv_context *context = open_soft();
	struct ibv_async_event event;

	CHECK_EQ(port_state(context), IBV_PORT_ACTIVE); /* loopback is all there is */
	CHECK_EQ(ibv_close_device(context), 0);

	ip("link set v0 addrgenmode none && ip link set v1 addrgenmode none");
	ip("link set v0 up && ip link set v1 up");
	until_running("v0"); /* a link that is never seen to carry anything does not go down */
	until_running("v1");
	context = open_soft();
	CHECK_EQ(port_state(context), IBV_PORT_ACTIVE);
	fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
	CHECK(ibv_get_async_event(context, &event) == -1 && errno == EAGAIN);
	ip("link set v1 down"); /* the other end has no carrier, then */
	expect_event(context, IBV_EVENT_PORT_ERR);
	CHECK_EQ(port_state(context), IBV_PORT_DOWN);
	ip("link set v1 up");
	expect_event(context, IBV_EVENT_PORT_ACTIVE);
	CHECK_EQ(port_state(context), IBV_PORT_ACTIVE);
	CHECK_EQ(ibv_close_device(context), 0);
	expect_live_nothing();
}

int main(void)
{
	RUN(bad_queries_are_refused);
	RUN(loopback_only_when_asked);
	RUN(addresses_and_gids);
	RUN_IN_NETWORK(the_order);
	RUN_IN_NETWORK(changes_are_told);
	RUN_IN_NETWORK(gaps);
	RUN_IN_NETWORK(a_full_table);
	RUN_IN_NETWORK(without_addresses);
	RUN_IN_NETWORK(few_looks_for_news);
	RUN_IN_NETWORK(without_descriptors);
	RUN_IN_NETWORK(the_last_link_is_the_port);
	return 0;
}
