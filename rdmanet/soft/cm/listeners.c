/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Listeners: which there are, by the number that the kernel gave their sockets; and the connections that they were asked
 * for by a link (asked.c), as far as there is a limit for all of them.
 *
 * Addresses.  Who asks by a link has no port of TCP's.  Programs tell their clients apart by port, so the side that is
 * asked gives each a number that no other such client of its own has, and REP tells the asker.  They are numbers from
 * which the kernel lets no connection begin unless a program wants that very one: those below
 * net.ipv4.ip_local_port_range.  Where that leaves none, as "1024 65535" does, every connection goes by TCP.
 */
#include "cm/wire.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum {
	FIRST_PORT = 1024, /* those below are root's */
	PORTS = 32768 - FIRST_PORT, /* at most */
	WAITING_MAX = 1024, /* that were asked for and are not established: more go by TCP, which takes descriptors */
};

/* All under rn_cm_lock. */
static struct rn_list listeners = {&listeners, &listeners};
static uint64_t taken[PORTS / 64];
static unsigned ports; /* that may be used: since a listener last began */
static unsigned next_port, waiting;

/* --- listeners ------------------------------------------------------------------------------------ */

/* How many numbers lie below the kernel's own; none, if it does not tell. */
static unsigned count_ports(void)
{
	int fd = rn_fd_own(open("/proc/sys/net/ipv4/ip_local_port_range", O_RDONLY | O_CLOEXEC));
	unsigned long first = 0;
	char text[32] = "";

	if (fd >= 0 && read(fd, text, sizeof text - 1) > 0)
		first = strtoul(text, NULL, 10);
	rn_fd_close(fd);
	if (first <= FIRST_PORT)
		return 0;
	return first - FIRST_PORT < PORTS ? (unsigned)(first - FIRST_PORT) : PORTS;
}

void rn_cm_listener_begins(struct rn_cm_id *id)
{
	socklen_t length = sizeof id->cookie;

	rn_list_init(&id->listening);
	ports = count_ports();
	if (!getsockopt(id->bound_fd, SOL_SOCKET, SO_COOKIE, &id->cookie, &length))
		rn_list_add(&listeners, &id->listening);
}

struct rn_cm_id *rn_cm_listener_find(uint64_t cookie)
{
	for (struct rn_list *at = listeners.next; at != &listeners; at = at->next) {
		struct rn_cm_id *id = RN_OWNER(at, struct rn_cm_id, listening);

		if (id->cookie == cookie && id->state == RN_CM_LISTENING)
			return id;
	}
	return NULL;
}

/* By name: programs of one host have no two that cover the same address (name.c). */
static struct rn_cm_id *find_by_name(const union ibv_gid *gid, uint16_t port)
{
	for (struct rn_list *at = listeners.next; at != &listeners; at = at->next) {
		struct rn_cm_id *id = RN_OWNER(at, struct rn_cm_id, listening);

		if (id->by_name && id->state == RN_CM_LISTENING &&
		    be16toh(rn_cm_port(&id->id.route.addr.src_addr)) == port && rn_cm_name_covers(id, gid))
			return id;
	}
	return NULL;
}

struct rn_cm_id *rn_cm_listener_asked(const struct rn_cm_link_request *request)
{
	struct rn_cm_id *listener;

	if (!request->cookie)
		return request->port <= UINT16_MAX ? find_by_name(&request->near, (uint16_t)request->port) : NULL;
	listener = rn_cm_listener_find(request->cookie);
	return listener && !listener->by_name ? listener : NULL;
}

uint32_t rn_cm_listener_number(const struct rn_cm_wire *wire)
{
	const struct rn_cm_id *listener = rn_cm_listener_find(wire->listener_cookie);

	return listener && listener->id.channel == wire->id->id.channel ? rn_cm_channel_number(wire->id) : 0;
}

void rn_cm_listener_resume(struct rn_cm_id *listener)
{
	listener->unread_requests--;
	if (!listener->paused || listener->unread_requests >= listener->backlog)
		return;
	listener->paused = false;
	rn_source_modify(&listener->accepting, EPOLLIN);
}

void rn_cm_listener_gone(struct rn_cm_id *listener)
{
	rn_list_del(&listener->listening);
	for (struct rn_list *item = rn_cm_wires.next; item != &rn_cm_wires; item = item->next) {
		struct rn_cm_wire *wire = RN_OWNER(item, struct rn_cm_wire, link);

		if (wire->listener == listener)
			wire->listener = NULL; /* a request that still comes is rejected */
	}
}

/* --- connections that they were asked for ----------------------------------------------------------- */

uint16_t rn_cm_asked_take_number(void)
{
	for (unsigned i = 0; i < ports; i++) {
		unsigned at = next_port++ % ports;

		if (!(taken[at / 64] & 1ull << at % 64)) {
			taken[at / 64] |= 1ull << at % 64;
			return (uint16_t)(FIRST_PORT + at);
		}
	}
	return 0;
}

bool rn_cm_asked_is_full(void)
{
	return waiting >= WAITING_MAX;
}

void rn_cm_asked_begins(struct rn_cm_wire *wire)
{
	wire->is_waiting = true;
	waiting++;
}

void rn_cm_asked_look(struct rn_cm_wire *wire)
{
	bool waits = !wire->over && (wire->phase == RN_CM_WIRE_ACCEPTED || wire->phase == RN_CM_WIRE_REQ_RECEIVED ||
				     wire->phase == RN_CM_WIRE_REP_SENT);

	if (!wire->is_waiting || waits)
		return;
	wire->is_waiting = false;
	waiting--;
}

void rn_cm_asked_forget(struct rn_cm_wire *wire)
{
	unsigned at = wire->asker_number - FIRST_PORT;

	if (wire->asker_number)
		taken[at / 64] &= ~(1ull << at % 64);
	wire->asker_number = 0;
}

void rn_cm_listeners_forked(void)
{
	rn_list_init(&listeners);
	memset(taken, 0, sizeof taken);
	waiting = 0;
}
