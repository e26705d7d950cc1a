/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers.  peer.h has the picture; here are the objects behind it.
 *
 *     struct peer      one for each port asked for; counted; what the device sees
 *     struct process   one open device of another process: what several peers share, and its pidfd
 *     struct link      our socket to it: what we ask for and get
 *     struct served    its socket to us: what it asks for and gets
 *     struct port      a port of ours, with its listening socket
 *
 * Who is let in.  Both ends of a link compare user (SO_PEERCRED, by the kernel's word), boot, and
 * network and pid namespaces (a pid must mean the same to both), before a descriptor passes.  What
 * is mapped was checked first: a memfd that can't shrink, of the size that was told.  A socket
 * that hasn't introduced itself in five seconds is closed.
 *
 * Death.  A process is dead for us when its pidfd says so, or when the link to it ends: then it
 * may live, but has closed its device, and all that we knew of it is gone.  A link from it that
 * ends tells nothing: it dropped what it kept in store.
 *
 * What is kept.  Nothing is thrown away with the last reference, because the next connection is
 * likely to go to the same process; only when it has been idle for a second, or the engine stops.
 *
 * Locking.  peers.lock guards all of this, and is not held in callbacks: notices, replies and
 * deaths run on the engine with no lock.  Sources and timers are removed on the engine only,
 * where that doesn't wait.  Two things are read without the lock, as they are on the data path: a
 * segment's place (see find_segment), and channels, which have their own lock, so that a
 * wake-up never writes to a descriptor that was just closed.
 */
#define _GNU_SOURCE
#include "peer.h"

#include "engine.h"
#include "log.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* --- the wire ----------------------------------------------------------------------------------- */

enum { MAGIC = 0x524e504c /* "RNPL" */, VERSION = 1 };

enum message_type {
	HELLO = 1,    /* identity */
	WELCOME,      /* identity, + arena */
	REFUSED,      /* value: enum refusal */
	WANT_SEGMENT, /* value: id */
	SEGMENT,      /* value: id, size (0: there is none), + memfd */
	WANT_CHANNEL, /* value: id */
	CHANNEL,      /* value: id, size (0: there is none), + eventfd */
	REQUEST,      /* value: serial, bytes */
	ANSWER,       /* value: serial, size: of the bytes, or -errno; bytes */
	GONE_SEGMENT, /* value: id */
	GONE_CHANNEL, /* value: id */
};

struct message {
	uint32_t magic;
	uint16_t version, type;
	uint32_t value, reserved;
	int64_t size;
};

/* Who is at the other end. */
struct identity {
	char boot_id[40];
	uint64_t net_namespace, pid_namespace;
	uint64_t instance; /* of the device: another after it was closed and opened */
	int64_t arena_size;
	int32_t pid;
	uint32_t reserved;
};

enum refusal { REFUSED_USER = 1, REFUSED_HOST, REFUSED_NAMESPACE, REFUSED_VERSION, REFUSED_CLOSED };

static const char *const refusal_names[] = {
	[REFUSED_USER] = "another user",
	[REFUSED_HOST] = "another boot of the host",
	[REFUSED_NAMESPACE] = "another network or pid namespace",
	[REFUSED_VERSION] = "another version",
	[REFUSED_CLOSED] = "its device is closed",
};

/* A message that has to wait until the socket takes it. */
struct packet {
	struct packet *next;
	size_t length;
	int fd; /* -1, or a duplicate to pass along */
	unsigned char bytes[];
};

struct outbox {
	struct packet *first, **end;
	uint32_t waiting; /* the events to watch while there is something in it */
};

/* --- the objects -------------------------------------------------------------------------------- */

struct peer {
	struct rn_peer rn; /* first */
	unsigned refs;
	struct process *process; /* set before READY, for good */
	struct link *link;       /* while CONNECTING */
	struct rn_notice *notices, **notices_end;
	struct rn_timer idle;
	struct peer *next;         /* of all that rn_peer_get finds */
	struct peer *next_sibling; /* of the process */
	bool listed;
	unsigned round;
};

/* A segment's place. Nodes are never freed before their process, and stay in their bucket, so that
 * readers need no lock; a node whose segment has gone is used again. */
struct segment {
	struct segment *_Atomic next;
	_Atomic uint32_t id;
	_Atomic bool used;
	char *_Atomic base; /* NULL: asked for */
	_Atomic size_t size;
};

struct channel {
	uint32_t id;
	int fd; /* -1: asked for */
	uint64_t owed;
};

enum { SEGMENT_BUCKETS = 64 };

struct process {
	struct process *next;
	int pid;
	uint64_t instance;
	bool dead;
	unsigned peers_count, served_count; /* idle without peers, freed when it has neither */
	struct peer *peers;
	struct link *link; /* NULL: it is only served */
	struct rn_source pidfd;
	struct rn_timer idle;

	char *arena;
	size_t arena_size;
	struct segment *_Atomic segments[SEGMENT_BUCKETS];

	pthread_mutex_t channel_lock; /* guards channels; taken after peers.lock or alone */
	struct channel *channels;
	unsigned channel_count, channel_room;

	struct rn_reply *replies, **replies_end; /* in the order of their requests */
	uint32_t serial;
};

struct link {
	struct rn_source source;
	struct rn_timer timer; /* connecting again, or waiting for WELCOME */
	uint64_t began_ns;
	struct peer *peer;       /* until WELCOME */
	struct process *process; /* from then on */
	struct outbox out;
};

struct served {
	struct served *next, **link;
	struct rn_source source;
	struct rn_timer timer; /* waiting for HELLO */
	struct process *process;
	struct outbox out;
	uint32_t *segments, *channels; /* that it was given */
	unsigned segment_count, channel_count;
	int pid;
};

struct port {
	struct port *next;
	struct rn_source source;
	struct rn_timer breathe; /* no descriptor left: accept again later */
	int tcp_fd;
	uint16_t port;
	bool claimed;
	struct rn_peer self;
};

static struct {
	pthread_mutex_t lock; /* guards all of this, and the objects */
	pthread_cond_t calm;  /* `running` changed and somebody waits */
	void *running;        /* the notice or reply whose callback is under way */
	unsigned waiters, round;

	struct peer *peers;
	struct process *processes;
	struct served *served;
	struct port *ports;

	struct identity self;
	bool self_known;
	unsigned links, served_count, mappings, peer_count;
} peers = {.lock = PTHREAD_MUTEX_INITIALIZER, .calm = PTHREAD_COND_INITIALIZER};

#define PEER(rn_peer) RN_OWNER(rn_peer, struct peer, rn)

enum { IDLE_MS = 1000, RETRY_MS = 1, BREATHE_MS = 100, UNNAMED_MAX = 256, FDS_MAX = 4 };
enum { LOWEST_PORT = 32768, HIGHEST_PORT = 60999 }; /* where no service is expected to listen */

static uint64_t silence_ms = 5000; /* RDMANET_SOFT_SILENCE: until a socket must have introduced itself */

static void stop_all(void);
static void forget_in_child(void);

static void start_once(void)
{
	silence_ms = rn_setting("RDMANET_SOFT_SILENCE", silence_ms);
	rn_at_engine_stop(stop_all);
	rn_at_fork_child(forget_in_child);
}

static void ensure_started(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start_once);
}

static void set_timer_ms(struct rn_timer *timer, uint64_t ms)
{
	rn_timer_set(timer, ms * 1000000u);
}

/* --- who we are --------------------------------------------------------------------------------- */

static uint64_t namespace_of(const char *path)
{
	struct stat st;

	return stat(path, &st) ? 0 : (uint64_t)st.st_dev << 32 ^ (uint64_t)st.st_ino;
}

/* Known once for each time the engine runs. peers.lock held. */
static const struct identity *self(void)
{
	FILE *file;

	if (peers.self_known)
		return &peers.self;
	memset(&peers.self, 0, sizeof peers.self);
	file = fopen("/proc/sys/kernel/random/boot_id", "re");
	if (file) {
		if (!fgets(peers.self.boot_id, sizeof peers.self.boot_id, file))
			peers.self.boot_id[0] = 0;
		fclose(file);
	}
	peers.self.net_namespace = namespace_of("/proc/self/ns/net");
	peers.self.pid_namespace = namespace_of("/proc/self/ns/pid");
	peers.self.pid = getpid();
	if (getrandom(&peers.self.instance, sizeof peers.self.instance, GRND_NONBLOCK) < 0)
		peers.self.instance = rn_now_ns();
	peers.self_known = true;
	/* Peers that can't map our memory use process_vm_*; Yama asks us to allow it. Elsewhere the
	 * call fails, and nothing depends on it. */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	return &peers.self;
}

/* 0, or why not. */
static enum refusal judge(int fd, const struct identity *other, int *pid)
{
	struct ucred cred = {.pid = 0};
	socklen_t length = sizeof cred;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length) || cred.uid != geteuid())
		return REFUSED_USER;
	if (memcmp(other->boot_id, self()->boot_id, sizeof other->boot_id))
		return REFUSED_HOST;
	if (other->net_namespace != self()->net_namespace || other->pid_namespace != self()->pid_namespace ||
	    cred.pid <= 0 || cred.pid != other->pid)
		return REFUSED_NAMESPACE;
	*pid = cred.pid;
	return 0;
}

/* --- sockets ------------------------------------------------------------------------------------ */

static socklen_t name_of(uint16_t port, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	/* Abstract: gone with the process that has it, and nothing in the file system. */
	int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "rdmanet-soft/%u", (unsigned)port);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static void outbox_clear(struct outbox *out)
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
static int send_message(struct rn_source *source, struct outbox *out, const struct message *message, const void *bytes,
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

static void flush(struct rn_source *source, struct outbox *out)
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

static struct message message_of(enum message_type type, uint32_t value, int64_t size)
{
	return (struct message){.magic = MAGIC, .version = VERSION, .type = (uint16_t)type, .value = value, .size = size};
}

/* What came in: the engine's only, so one buffer does for all. */
static struct {
	struct message message;
	unsigned char bytes[RN_PEER_MESSAGE_MAX];
	size_t length; /* of the bytes */
	int fd;        /* -1, or one that came along: whoever keeps it sets -1 */
} inbox;

enum arrival { NOTHING, ARRIVED, ENDED };

static enum arrival receive(int socket_fd)
{
	struct iovec iov[2] = {{&inbox.message, sizeof inbox.message}, {inbox.bytes, sizeof inbox.bytes}};
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
	inbox.fd = -1;
	if (got <= 0)
		return ENDED;
	for (struct cmsghdr *each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
		size_t count = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(each) + i * sizeof fd, sizeof fd);
			rn_fd_close(inbox.fd);
			inbox.fd = rn_fd_own(fd);
		}
	}
	fits = got >= (ssize_t)sizeof inbox.message && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
	if (!fits || inbox.message.magic != MAGIC) {
		rn_fd_close(inbox.fd);
		rn_log("a peer's message makes no sense: link closed");
		return ENDED;
	}
	inbox.length = (size_t)got - sizeof inbox.message;
	return ARRIVED;
}

static void discard_fd(void)
{
	rn_fd_close(inbox.fd);
	inbox.fd = -1;
}

/* A memfd of exactly this size that can't change it: mapped; or NULL. */
static char *map_sealed(int fd, int64_t size)
{
	int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
	int needed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
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
	peers.mappings++;
	return base;
}

static void unmap(char *base, size_t size)
{
	if (!base)
		return;
	munmap(base, size);
	peers.mappings--;
}

/* --- callbacks: the engine's, without the lock -------------------------------------------------- */

/* Both with the lock held. */
static void begin(void *object)
{
	peers.running = object;
	pthread_mutex_unlock(&peers.lock);
}

static void end(void)
{
	pthread_mutex_lock(&peers.lock);
	peers.running = NULL;
	if (peers.waiters)
		pthread_cond_broadcast(&peers.calm);
}

static void settle(void *object)
{
	if (rn_engine_inside()) {
		if (peers.running == object)
			peers.running = NULL;
		return;
	}
	while (peers.running == object) {
		peers.waiters++;
		pthread_cond_wait(&peers.calm, &peers.lock);
		peers.waiters--;
	}
}

static void notice_append(struct peer *peer, struct rn_notice *notice)
{
	notice->next = NULL;
	notice->link = peer->notices_end;
	*peer->notices_end = notice;
	peer->notices_end = &notice->next;
}

static void notice_unlink(struct peer *peer, struct rn_notice *notice)
{
	*notice->link = notice->next;
	if (notice->next)
		notice->next->link = notice->link;
	else
		peer->notices_end = notice->link;
	notice->next = NULL;
	notice->link = NULL;
}

static void peer_put(struct peer *peer);

/* Everybody who subscribes now, once; they may come and go meanwhile. Those that were told move to
 * the end, so the first that is marked ends the round. Lock held, but not while they run. */
static void notify(struct peer *peer, enum rn_notice_why why)
{
	unsigned round = ++peers.round;

	peer->refs++;
	while (peer->notices && peer->notices->round != round) {
		struct rn_notice *notice = peer->notices;

		notice_unlink(peer, notice);
		notice_append(peer, notice);
		notice->round = round;
		begin(notice);
		notice->run(notice, &peer->rn, why);
		end();
	}
	peer_put(peer);
}

/* All peers of a process. A peer that comes in between needn't be told; it looks by itself. */
static void notify_process(struct process *process, enum rn_notice_why why)
{
	unsigned round = ++peers.round;
	struct peer *peer;

	process->peers_count++; /* it stays */
	do {
		for (peer = process->peers; peer && peer->round == round; peer = peer->next_sibling)
			;
		if (peer) {
			peer->round = round;
			notify(peer, why);
		}
	} while (peer);
	process->peers_count--;
}

void rn_peer_subscribe(struct rn_peer *rn_peer, struct rn_notice *notice)
{
	notice->peer = rn_peer;
	notice->round = 0;
	notice->link = NULL;
	if (atomic_load(&rn_peer->state) == RN_PEER_SELF)
		return; /* nothing ever happens to it */
	pthread_mutex_lock(&peers.lock);
	notice_append(PEER(rn_peer), notice);
	pthread_mutex_unlock(&peers.lock);
}

void rn_peer_unsubscribe(struct rn_notice *notice)
{
	if (!notice->peer || atomic_load(&notice->peer->state) == RN_PEER_SELF)
		return;
	pthread_mutex_lock(&peers.lock);
	if (notice->link)
		notice_unlink(PEER(notice->peer), notice);
	settle(notice);
	notice->peer = NULL;
	pthread_mutex_unlock(&peers.lock);
}

/* --- what a process has given us ---------------------------------------------------------------- */

static void release_memory(struct process *process)
{
	unmap(process->arena, process->arena_size);
	process->arena = NULL;
	for (unsigned i = 0; i < SEGMENT_BUCKETS; i++) {
		struct segment *segment = process->segments[i];

		process->segments[i] = NULL;
		while (segment) {
			struct segment *next = segment->next;

			unmap(segment->base, segment->size);
			free(segment);
			segment = next;
		}
	}
	pthread_mutex_lock(&process->channel_lock);
	for (unsigned i = 0; i < process->channel_count; i++)
		rn_fd_close(process->channels[i].fd);
	free(process->channels);
	process->channels = NULL;
	process->channel_count = process->channel_room = 0;
	pthread_mutex_unlock(&process->channel_lock);
}

static void link_close(struct link *link)
{
	rn_source_remove(&link->source);
	rn_timer_cancel(&link->timer);
	rn_fd_close(link->source.fd);
	outbox_clear(&link->out);
	if (link->peer)
		link->peer->link = NULL;
	if (link->process)
		link->process->link = NULL;
	peers.links--;
	free(link);
}

static void process_unlist(struct process *process)
{
	struct process **at = &peers.processes;

	while (*at && *at != process)
		at = &(*at)->next;
	if (*at)
		*at = process->next;
}

/* The engine's, or of a dead process, whose sources have been removed: any thread. */
static void process_free(struct process *process)
{
	if (!process->dead) {
		process_unlist(process);
		if (process->link)
			link_close(process->link);
		rn_source_remove(&process->pidfd);
		rn_timer_cancel(&process->idle);
		rn_fd_close(process->pidfd.fd);
	}
	release_memory(process);
	pthread_mutex_destroy(&process->channel_lock);
	free(process);
}

/* Somebody has let go of it. */
static void process_let_go(struct process *process)
{
	if (process->peers_count)
		return;
	if (!process->dead)
		set_timer_ms(&process->idle, IDLE_MS);
	else if (!process->served_count)
		process_free(process);
}

/* Nobody has asked for it since: our link and its memory go, though it may keep its own link. */
static void process_idle(struct rn_timer *timer)
{
	struct process *process = RN_OWNER(timer, struct process, idle);

	pthread_mutex_lock(&peers.lock);
	if (!process->peers_count && !process->served_count) {
		process_free(process);
	} else if (!process->peers_count) {
		if (process->link)
			link_close(process->link);
		release_memory(process);
	}
	pthread_mutex_unlock(&peers.lock);
}

static void peer_unlist(struct peer *peer)
{
	struct peer **at = &peers.peers;

	if (!peer->listed)
		return;
	while (*at != peer)
		at = &(*at)->next;
	*at = peer->next;
	peer->listed = false;
}

/* The engine's, or of a dead peer: any thread. */
static void peer_free(struct peer *peer)
{
	struct process *process = peer->process;

	peer_unlist(peer);
	if (peer->link)
		link_close(peer->link);
	if (process) {
		struct peer **at = &process->peers;

		while (*at != peer)
			at = &(*at)->next_sibling;
		*at = peer->next_sibling;
		process->peers_count--;
	}
	peers.peer_count--;
	free(peer);
	if (process)
		process_let_go(process);
}

static void peer_put(struct peer *peer)
{
	assert(peer->refs);
	if (--peer->refs)
		return;
	if (atomic_load(&peer->rn.state) == RN_PEER_DEAD)
		peer_free(peer);
	else
		set_timer_ms(&peer->idle, IDLE_MS);
}

static void peer_idle(struct rn_timer *timer)
{
	struct peer *peer = RN_OWNER(timer, struct peer, idle);

	pthread_mutex_lock(&peers.lock);
	if (!peer->refs)
		peer_free(peer);
	pthread_mutex_unlock(&peers.lock);
}

/* Every request without its answer: the owner is gone. */
static void fail_replies(struct process *process)
{
	while (process->replies) {
		struct rn_reply *reply = process->replies;

		process->replies = reply->next;
		if (reply->next)
			reply->next->link = &process->replies;
		else
			process->replies_end = &process->replies;
		reply->link = NULL;
		begin(reply);
		reply->done(reply, NULL, -ECONNRESET);
		end();
	}
}

static void served_close(struct served *served);

/* Once. On the engine, lock held, but not while the others are told. */
static void process_died(struct process *process)
{
	int pid = process->pid;

	if (process->dead)
		return;
	process->dead = true;
	process_unlist(process);
	process->peers_count++; /* it stays until all is said */
	if (process->link)
		link_close(process->link);
	rn_source_remove(&process->pidfd);
	rn_timer_cancel(&process->idle);
	rn_fd_close(process->pidfd.fd);
	for (struct served *served = peers.served, *next; served; served = next) {
		next = served->next;
		if (served->process == process)
			served_close(served);
	}
	for (struct peer *peer = process->peers; peer; peer = peer->next_sibling) {
		peer_unlist(peer);
		rn_timer_cancel(&peer->idle);
		atomic_store(&peer->rn.state, RN_PEER_DEAD);
	}
	/* Those that nobody has any more. */
	for (struct peer *peer = process->peers, *next; peer; peer = next) {
		next = peer->next_sibling;
		if (!peer->refs)
			peer_free(peer);
	}
	pthread_mutex_unlock(&peers.lock);
	rn_peer_died(pid);
	pthread_mutex_lock(&peers.lock);
	fail_replies(process);
	notify_process(process, RN_PEER_DIED);
	process->peers_count--;
	process_let_go(process);
}

static void pidfd_ready(struct rn_source *source, uint32_t epoll_events)
{
	(void)epoll_events;
	pthread_mutex_lock(&peers.lock);
	process_died(RN_OWNER(source, struct process, pidfd));
	pthread_mutex_unlock(&peers.lock);
}

/* The process at the other end of this socket. */
static int open_pidfd(int socket_fd, int pid)
{
	int fd = -1;
	socklen_t length = sizeof fd;

	/* By the socket where the kernel can, so that the pid can't have been given away meanwhile. */
	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length))
		fd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (fd >= 0)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	return rn_fd_own(fd);
}

/* The known one, or a new one; NULL when out of memory. On the engine. */
static struct process *process_of(int pid, uint64_t instance, int socket_fd)
{
	struct process *process;

	for (process = peers.processes; process; process = process->next)
		if (process->pid == pid && process->instance == instance)
			return process;
	/* The same process with another instance: that device was closed; say so before anybody
	 * learns of the new one. Its own end may be in the queue yet. */
	for (process = peers.processes; process; process = process->next)
		if (process->pid == pid)
			break;
	if (process)
		process_died(process);

	process = calloc(1, sizeof *process);
	if (!process)
		return NULL;
	process->pid = pid;
	process->instance = instance;
	process->replies_end = &process->replies;
	process->idle.fire = process_idle;
	pthread_mutex_init(&process->channel_lock, NULL);
	process->pidfd = (struct rn_source){.fd = open_pidfd(socket_fd, pid), .ready = pidfd_ready};
	if (process->pidfd.fd >= 0)
		rn_source_add(&process->pidfd, EPOLLIN); /* without, the link tells */
	process->next = peers.processes;
	peers.processes = process;
	return process;
}

/* --- links: we ask ------------------------------------------------------------------------------ */

static void link_ready(struct rn_source *source, uint32_t epoll_events);
static void link_timer(struct rn_timer *timer);

/* The link of a peer that isn't READY came to nothing. */
static void link_failed(struct link *link)
{
	struct peer *peer = link->peer;

	peer->refs++;
	link_close(link);
	peer_unlist(peer);
	rn_timer_cancel(&peer->idle);
	atomic_store(&peer->rn.state, RN_PEER_DEAD);
	notify(peer, RN_LINK_FAILED);
	peer_put(peer);
}

/* 0, or -errno: -EAGAIN when its queue is full. Any thread. */
static int link_connect(struct link *link)
{
	struct sockaddr_un address;
	socklen_t length = name_of(link->peer->rn.port, &address);
	struct ucred cred;
	socklen_t cred_length = sizeof cred;
	struct message hello = message_of(HELLO, 0, sizeof(struct identity));
	int rc;

	if (connect(link->source.fd, (struct sockaddr *)&address, length))
		return -errno;
	/* Whoever took the name may not be ours: it learns nothing. */
	if (getsockopt(link->source.fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_length) || cred.uid != geteuid())
		return -EACCES;
	rc = send_message(&link->source, &link->out, &hello, self(), sizeof(struct identity), -1);
	return rc ? rc : rn_source_add(&link->source, EPOLLIN);
}

/* The first try is made at once, by whoever wants it: a Unix socket connects without waiting. */
static int link_start(struct peer *peer)
{
	struct link *link = calloc(1, sizeof *link);
	int rc;

	if (!link)
		return -ENOMEM;
	link->out = (struct outbox){.end = &link->out.first, .waiting = EPOLLIN | EPOLLOUT};
	link->timer.fire = link_timer;
	link->began_ns = rn_now_ns();
	link->peer = peer;
	link->source.ready = link_ready;
	link->source.fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	rc = link->source.fd < 0 ? -errno : link_connect(link);
	if (rc && rc != -EAGAIN) {
		rn_fd_close(link->source.fd);
		free(link);
		return rc;
	}
	peer->link = link;
	peers.links++;
	set_timer_ms(&link->timer, rc ? RETRY_MS : silence_ms);
	return 0;
}

static void link_timer(struct rn_timer *timer)
{
	struct link *link = RN_OWNER(timer, struct link, timer);
	int rc = -ETIMEDOUT;

	pthread_mutex_lock(&peers.lock);
	if (!link->process) {
		if (!link->source.slot && rn_now_ns() - link->began_ns < silence_ms * 1000000u)
			rc = link_connect(link);
		if (!rc)
			set_timer_ms(&link->timer, silence_ms);
		else if (rc == -EAGAIN)
			set_timer_ms(&link->timer, RETRY_MS);
		else
			link_failed(link);
	}
	pthread_mutex_unlock(&peers.lock);
}

static void peer_attach(struct peer *peer, struct process *process)
{
	peer->process = process;
	peer->next_sibling = process->peers;
	process->peers = peer;
	process->peers_count++;
	peer->rn.pid = process->pid;
	peer->rn.arena = process->arena;
	peer->rn.arena_size = process->arena_size;
	atomic_store(&peer->rn.state, RN_PEER_READY);
}

/* Or REFUSED. The link may be gone after it. */
static void on_welcome(struct link *link)
{
	struct peer *peer = link->peer;
	struct identity other;
	enum refusal refusal = REFUSED_VERSION;
	struct process *process = NULL;
	int pid;

	if (inbox.message.type == REFUSED && inbox.message.value < sizeof refusal_names / sizeof *refusal_names &&
	    inbox.message.value) {
		rn_log("port %u lets us not in: %s", peer->rn.port, refusal_names[inbox.message.value]);
	} else if (inbox.message.type == WELCOME && inbox.message.version == VERSION && inbox.length == sizeof other) {
		memcpy(&other, inbox.bytes, sizeof other);
		refusal = judge(link->source.fd, &other, &pid);
		if (!refusal)
			process = process_of(pid, other.instance, link->source.fd);
		else
			rn_log("port %u is not trusted: %s", peer->rn.port, refusal_names[refusal]);
	}
	/* process_of may have let callbacks run, but this link and its peer are the engine's. */
	if (process && !process->arena) {
		process->arena = map_sealed(inbox.fd, other.arena_size);
		process->arena_size = (size_t)other.arena_size;
		if (!process->arena) {
			process_let_go(process);
			process = NULL;
		}
	}
	if (!process) {
		link_failed(link);
		return;
	}
	peer->link = NULL;
	link->peer = NULL;
	rn_timer_cancel(&link->timer);
	peer_attach(peer, process);
	if (process->link) {
		link_close(link); /* by another of its ports we have one */
	} else {
		process->link = link;
		link->process = process;
	}
	notify(peer, RN_LINK_READY);
}

static struct segment *segment_node(struct process *process, uint32_t id, bool add)
{
	struct segment *_Atomic *bucket = &process->segments[id % SEGMENT_BUCKETS];
	struct segment *segment, *unused = NULL;

	for (segment = *bucket; segment; segment = segment->next) {
		if (segment->used && segment->id == id)
			return segment;
		if (!segment->used)
			unused = segment;
	}
	if (!add)
		return NULL;
	if (!unused) {
		unused = calloc(1, sizeof *unused);
		if (!unused)
			return NULL;
		unused->next = *bucket;
		*bucket = unused;
	}
	unused->base = NULL;
	unused->id = id;
	unused->used = true;
	return unused;
}

static void on_segment(struct process *process)
{
	struct segment *segment = segment_node(process, inbox.message.value, false);
	char *base = NULL;

	if (!segment || segment->base)
		return;
	if (inbox.message.size)
		base = map_sealed(inbox.fd, inbox.message.size);
	if (base) {
		segment->size = (size_t)inbox.message.size;
		segment->base = base; /* the size was there before */
	} else {
		segment->used = false;
	}
	notify_process(process, RN_SEGMENT_READY);
}

static void on_gone_segment(struct process *process)
{
	struct segment *segment = segment_node(process, inbox.message.value, false);
	char *base;

	if (!segment)
		return;
	base = segment->base;
	segment->base = NULL;
	segment->used = false;
	unmap(base, segment->size);
}

/* With channel_lock held. */
static struct channel *channel_find(struct process *process, uint32_t id)
{
	for (unsigned i = 0; i < process->channel_count; i++)
		if (process->channels[i].id == id)
			return &process->channels[i];
	return NULL;
}

static void channel_forget(struct process *process, struct channel *channel)
{
	rn_fd_close(channel->fd);
	*channel = process->channels[--process->channel_count];
}

static void channel_write(int fd, uint64_t count)
{
	ssize_t written = write(fd, &count, sizeof count);

	(void)written; /* fails only at 2^64 unread events */
}

/* Is it one, so that a write can't do harm elsewhere, or wait? */
static bool is_eventfd(int fd)
{
	char path[32], target[64];
	ssize_t length;

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	length = readlink(path, target, sizeof target - 1);
	if (length < 0)
		return true; /* no /proc: it is a process of our own user, after all */
	target[length] = 0;
	return strstr(target, "[eventfd]") != NULL;
}

static void on_channel(struct process *process)
{
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, inbox.message.value);
	if (channel && channel->fd < 0) {
		if (inbox.message.size && inbox.fd >= 0 && is_eventfd(inbox.fd)) {
			channel->fd = inbox.fd;
			inbox.fd = -1;
			channel_write(channel->fd, channel->owed);
			channel->owed = 0;
		} else {
			channel_forget(process, channel); /* destroyed meanwhile: nobody waits there */
		}
	}
	pthread_mutex_unlock(&process->channel_lock);
}

static void on_gone_channel(struct process *process)
{
	struct channel *channel;

	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, inbox.message.value);
	if (channel)
		channel_forget(process, channel);
	pthread_mutex_unlock(&process->channel_lock);
}

static void on_answer(struct process *process)
{
	struct rn_reply *reply;
	int64_t size = inbox.message.size;

	for (reply = process->replies; reply && reply->serial != inbox.message.value; reply = reply->next)
		;
	if (!reply)
		return; /* cancelled */
	*reply->link = reply->next;
	if (reply->next)
		reply->next->link = reply->link;
	else
		process->replies_end = reply->link;
	reply->link = NULL;
	if (size >= 0 && (uint64_t)size != inbox.length)
		size = -EPROTO;
	begin(reply);
	reply->done(reply, inbox.bytes, (long)size);
	end();
}

static void link_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct link *link = RN_OWNER(source, struct link, source);
	struct process *process;

	pthread_mutex_lock(&peers.lock);
	if (epoll_events & EPOLLOUT)
		flush(&link->source, &link->out);
	/* One message a turn: the callbacks it causes may end the link. */
	switch (receive(source->fd)) {
	case NOTHING:
		break;
	case ENDED:
		if (link->process)
			process_died(link->process);
		else
			link_failed(link);
		break;
	case ARRIVED:
		process = link->process;
		if (!process)
			on_welcome(link);
		else if (inbox.message.type == SEGMENT)
			on_segment(process);
		else if (inbox.message.type == CHANNEL)
			on_channel(process);
		else if (inbox.message.type == ANSWER)
			on_answer(process);
		else if (inbox.message.type == GONE_SEGMENT)
			on_gone_segment(process);
		else if (inbox.message.type == GONE_CHANNEL)
			on_gone_channel(process);
		discard_fd();
		break;
	}
	pthread_mutex_unlock(&peers.lock);
}

struct rn_peer *rn_peer_get(uint16_t number)
{
	struct peer *peer;
	struct port *port;

	ensure_started();
	pthread_mutex_lock(&peers.lock);
	for (port = peers.ports; port; port = port->next) {
		if (port->port == number) {
			pthread_mutex_unlock(&peers.lock);
			return &port->self;
		}
	}
	for (peer = peers.peers; peer; peer = peer->next)
		if (peer->rn.port == number)
			break;
	if (!peer) {
		peer = calloc(1, sizeof *peer);
		if (!peer)
			goto out;
		peers.peer_count++;
		peer->rn.port = number;
		peer->notices_end = &peer->notices;
		peer->idle.fire = peer_idle;
		peer->rn.state = RN_PEER_CONNECTING;
		if (link_start(peer)) {
			peer->rn.state = RN_PEER_DEAD;
		} else {
			peer->next = peers.peers;
			peers.peers = peer;
			peer->listed = true;
		}
	}
	peer->refs++;
out:
	pthread_mutex_unlock(&peers.lock);
	return peer ? &peer->rn : NULL;
}

void rn_peer_put(struct rn_peer *peer)
{
	if (!peer || atomic_load(&peer->state) == RN_PEER_SELF)
		return;
	pthread_mutex_lock(&peers.lock);
	peer_put(PEER(peer));
	pthread_mutex_unlock(&peers.lock);
}

/* Without the lock. A node is written in the order base = NULL, id, used, size, base; so a base
 * that is seen between two looks at a matching id belongs to it. */
static void *find_segment(struct process *process, uint32_t id, size_t *size)
{
	for (struct segment *segment = process->segments[id % SEGMENT_BUCKETS]; segment; segment = segment->next) {
		char *base;

		if (!segment->used || segment->id != id)
			continue;
		base = segment->base;
		*size = segment->size;
		if (base && segment->base == base && segment->id == id)
			return base;
	}
	return NULL;
}

void *rn_peer_segment(struct rn_peer *rn_peer, uint32_t id, size_t *size)
{
	struct process *process;
	struct message want = message_of(WANT_SEGMENT, id, 0);
	void *base;

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return NULL;
	process = PEER(rn_peer)->process;
	base = find_segment(process, id, size);
	if (base)
		return base;
	pthread_mutex_lock(&peers.lock);
	if (!process->dead && process->link && !segment_node(process, id, false)) {
		struct segment *segment = segment_node(process, id, true);

		if (segment && send_message(&process->link->source, &process->link->out, &want, NULL, 0, -1))
			segment->used = false;
	}
	base = find_segment(process, id, size);
	pthread_mutex_unlock(&peers.lock);
	return base;
}

/* With channel_lock held. */
static struct channel *channel_add(struct process *process, uint32_t id)
{
	if (process->channel_count == process->channel_room) {
		unsigned room = process->channel_room ? process->channel_room * 2 : 4;
		struct channel *channels = realloc(process->channels, room * sizeof *channels);

		if (!channels)
			return NULL;
		process->channels = channels;
		process->channel_room = room;
	}
	process->channels[process->channel_count] = (struct channel){.id = id, .fd = -1};
	return &process->channels[process->channel_count++];
}

void rn_peer_signal(struct rn_peer *rn_peer, uint32_t id)
{
	struct process *process;
	struct channel *channel;
	struct message want = message_of(WANT_CHANNEL, id, 0);

	if (atomic_load(&rn_peer->state) != RN_PEER_READY)
		return; /* the dead sleep */
	process = PEER(rn_peer)->process;
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	if (channel && channel->fd >= 0)
		channel_write(channel->fd, 1);
	else if (channel)
		channel->owed++;
	pthread_mutex_unlock(&process->channel_lock);
	if (channel)
		return;

	pthread_mutex_lock(&peers.lock);
	pthread_mutex_lock(&process->channel_lock);
	channel = channel_find(process, id);
	if (channel && channel->fd >= 0) {
		channel_write(channel->fd, 1);
	} else if (channel) {
		channel->owed++;
	} else if (!process->dead && process->link && (channel = channel_add(process, id))) {
		channel->owed = 1;
		if (send_message(&process->link->source, &process->link->out, &want, NULL, 0, -1))
			channel_forget(process, channel);
	}
	pthread_mutex_unlock(&process->channel_lock);
	pthread_mutex_unlock(&peers.lock);
}

int rn_peer_request(struct rn_peer *rn_peer, const void *bytes, size_t length, struct rn_reply *reply)
{
	struct process *process;
	struct message request;
	int rc = -ENOTCONN;

	if (length > RN_PEER_MESSAGE_MAX)
		return -EMSGSIZE;
	pthread_mutex_lock(&peers.lock);
	if (atomic_load(&rn_peer->state) == RN_PEER_READY) {
		process = PEER(rn_peer)->process;
		request = message_of(REQUEST, ++process->serial, (int64_t)length);
		if (!process->dead && process->link)
			rc = send_message(&process->link->source, &process->link->out, &request, bytes, length, -1);
		if (!rc) {
			reply->peer = rn_peer;
			reply->serial = process->serial;
			reply->next = NULL;
			reply->link = process->replies_end;
			*process->replies_end = reply;
			process->replies_end = &reply->next;
		}
	}
	pthread_mutex_unlock(&peers.lock);
	return rc;
}

void rn_reply_cancel(struct rn_reply *reply)
{
	pthread_mutex_lock(&peers.lock);
	if (reply->link) {
		struct process *process = PEER(reply->peer)->process;

		*reply->link = reply->next;
		if (reply->next)
			reply->next->link = reply->link;
		else
			process->replies_end = reply->link;
		reply->link = NULL;
	}
	settle(reply);
	pthread_mutex_unlock(&peers.lock);
}

/* --- serving: they ask -------------------------------------------------------------------------- */

static void served_close(struct served *served)
{
	struct process *process = served->process;

	rn_source_remove(&served->source);
	rn_timer_cancel(&served->timer);
	rn_fd_close(served->source.fd);
	outbox_clear(&served->out);
	*served->link = served->next;
	if (served->next)
		served->next->link = served->link;
	peers.served_count--;
	free(served->segments);
	free(served->channels);
	free(served);
	if (process) {
		process->served_count--;
		process_let_go(process);
	}
}

static bool remembers(const uint32_t *ids, unsigned count, uint32_t id)
{
	for (unsigned i = 0; i < count; i++)
		if (ids[i] == id)
			return true;
	return false;
}

static bool remember(uint32_t **ids, unsigned *count, uint32_t id)
{
	uint32_t *grown;

	if (remembers(*ids, *count, id))
		return true;
	grown = realloc(*ids, (*count + 1) * sizeof **ids);
	if (!grown)
		return false;
	*ids = grown;
	grown[(*count)++] = id;
	return true;
}

static bool forget(uint32_t *ids, unsigned *count, uint32_t id)
{
	for (unsigned i = 0; i < *count; i++) {
		if (ids[i] == id) {
			ids[i] = ids[--*count];
			return true;
		}
	}
	return false;
}

static void answer(struct served *served, enum message_type type, uint32_t value, int64_t size, const void *bytes,
		   size_t length, int fd)
{
	struct message message = message_of(type, value, size);

	if (send_message(&served->source, &served->out, &message, bytes, length, fd))
		rn_log("out of memory: a peer's question stays without an answer");
}

/*
 * The device is asked without our lock, since it calls us with its own.  On the engine nobody
 * takes `served` away meanwhile.
 */

/* False: not to be served. */
static bool on_hello(struct served *served)
{
	struct identity other, own;
	enum refusal refusal = REFUSED_VERSION;
	int pid = 0, arena_fd;
	size_t arena_size;

	pthread_mutex_unlock(&peers.lock);
	arena_fd = rn_arena_fd();
	arena_size = rn_arena_size();
	pthread_mutex_lock(&peers.lock);
	if (inbox.message.type == HELLO && inbox.message.version == VERSION && inbox.length == sizeof other) {
		memcpy(&other, inbox.bytes, sizeof other);
		refusal = arena_fd < 0 ? REFUSED_CLOSED : judge(served->source.fd, &other, &pid);
	}
	if (refusal) {
		rn_log("process %d is not let in: %s", pid, refusal_names[refusal]);
		answer(served, REFUSED, refusal, 0, NULL, 0, -1);
		return false;
	}
	served->process = process_of(pid, other.instance, served->source.fd);
	if (!served->process)
		return false;
	served->process->served_count++;
	served->pid = pid;
	rn_timer_cancel(&served->timer);
	own = *self();
	own.arena_size = (int64_t)arena_size;
	answer(served, WELCOME, 0, sizeof own, &own, sizeof own, arena_fd);
	return true;
}

/* Remembered before the device is asked: so when it takes the thing back in between, which it
 * does before it closes the descriptor, we know. */
static void on_want_segment(struct served *served)
{
	uint32_t id = inbox.message.value;
	size_t size = 0;
	int fd;

	if (!remember(&served->segments, &served->segment_count, id))
		goto none;
	pthread_mutex_unlock(&peers.lock);
	fd = rn_segment_fd(id, &size);
	pthread_mutex_lock(&peers.lock);
	if (fd >= 0 && remembers(served->segments, served->segment_count, id)) {
		answer(served, SEGMENT, id, (int64_t)size, NULL, 0, fd);
		return;
	}
	forget(served->segments, &served->segment_count, id);
none:
	answer(served, SEGMENT, id, 0, NULL, 0, -1);
}

static void on_want_channel(struct served *served)
{
	uint32_t id = inbox.message.value;
	int fd;

	if (!remember(&served->channels, &served->channel_count, id))
		goto none;
	pthread_mutex_unlock(&peers.lock);
	fd = rn_channel_fd(id);
	pthread_mutex_lock(&peers.lock);
	if (fd >= 0 && remembers(served->channels, served->channel_count, id)) {
		answer(served, CHANNEL, id, 1, NULL, 0, fd);
		return;
	}
	forget(served->channels, &served->channel_count, id);
none:
	answer(served, CHANNEL, id, 0, NULL, 0, -1);
}

static void on_request(struct served *served)
{
	static unsigned char room[RN_PEER_MESSAGE_MAX]; /* the engine's */
	int size;

	pthread_mutex_unlock(&peers.lock);
	size = rn_serve_request(served->pid, inbox.bytes, inbox.length, room, sizeof room);
	pthread_mutex_lock(&peers.lock);
	answer(served, ANSWER, inbox.message.value, size, room, size > 0 ? (size_t)size : 0, -1);
}

static void served_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct served *served = RN_OWNER(source, struct served, source);
	bool serve = true;

	pthread_mutex_lock(&peers.lock);
	if (epoll_events & EPOLLOUT)
		flush(&served->source, &served->out);
	if (served->out.first && !(epoll_events & (EPOLLHUP | EPOLLERR)))
		goto out;
	switch (receive(source->fd)) {
	case NOTHING:
		break;
	case ENDED:
		serve = false;
		break;
	case ARRIVED:
		if (!served->process) {
			serve = on_hello(served);
		} else if (inbox.message.type == WANT_SEGMENT) {
			on_want_segment(served);
		} else if (inbox.message.type == WANT_CHANNEL) {
			on_want_channel(served);
		} else if (inbox.message.type == REQUEST) {
			on_request(served);
		}
		discard_fd();
		break;
	}
	if (!serve)
		served_close(served);
out:
	pthread_mutex_unlock(&peers.lock);
}

static void served_silent(struct rn_timer *timer)
{
	struct served *served = RN_OWNER(timer, struct served, timer);

	pthread_mutex_lock(&peers.lock);
	if (!served->process) {
		rn_log("a socket on one of our ports said nothing for %llu ms: closed", (unsigned long long)silence_ms);
		served_close(served);
	}
	pthread_mutex_unlock(&peers.lock);
}

static void port_breathe(struct rn_timer *timer)
{
	rn_source_modify(&RN_OWNER(timer, struct port, breathe)->source, EPOLLIN);
}

static void port_ready(struct rn_source *source, uint32_t epoll_events)
{
	struct served *served;
	unsigned unnamed = 0;
	int fd = rn_fd_own(accept4(source->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));

	(void)epoll_events;
	if (fd < 0 && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) {
		rn_log("a peer can't be let in yet: %s", strerror(errno));
		rn_source_modify(source, 0);
		set_timer_ms(&RN_OWNER(source, struct port, source)->breathe, BREATHE_MS);
	}
	if (fd < 0)
		return;
	pthread_mutex_lock(&peers.lock);
	for (served = peers.served; served; served = served->next)
		unnamed += !served->process;
	served = unnamed < UNNAMED_MAX ? calloc(1, sizeof *served) : NULL;
	if (!served) {
		rn_fd_close(fd);
		goto out;
	}
	/* Who doesn't take its answers gets no more questions in: so little has to be kept. */
	served->out = (struct outbox){.end = &served->out.first, .waiting = EPOLLOUT};
	served->timer.fire = served_silent;
	served->source = (struct rn_source){.fd = fd, .ready = served_ready};
	served->link = &peers.served;
	served->next = peers.served;
	if (served->next)
		served->next->link = &served->next;
	peers.served = served;
	peers.served_count++;
	if (rn_source_add(&served->source, EPOLLIN))
		served_close(served);
	else
		set_timer_ms(&served->timer, silence_ms);
out:
	pthread_mutex_unlock(&peers.lock);
}

void rn_segment_gone(uint32_t id)
{
	struct message gone = message_of(GONE_SEGMENT, id, 0);

	pthread_mutex_lock(&peers.lock);
	for (struct served *served = peers.served; served; served = served->next)
		if (forget(served->segments, &served->segment_count, id))
			send_message(&served->source, &served->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&peers.lock);
}

void rn_channel_gone(uint32_t id)
{
	struct message gone = message_of(GONE_CHANNEL, id, 0);

	pthread_mutex_lock(&peers.lock);
	for (struct served *served = peers.served; served; served = served->next)
		if (forget(served->channels, &served->channel_count, id))
			send_message(&served->source, &served->out, &gone, NULL, 0, -1);
	pthread_mutex_unlock(&peers.lock);
}

/* --- ports -------------------------------------------------------------------------------------- */

static void port_free(struct port *port)
{
	rn_source_remove(&port->source);
	rn_timer_cancel(&port->breathe);
	rn_fd_close(port->source.fd);
	rn_fd_close(port->tcp_fd);
	free(port);
}

/* NULL and errno: EADDRINUSE when another has it. */
static struct port *port_open(uint16_t number)
{
	struct port *port = calloc(1, sizeof *port);
	struct sockaddr_un name;
	socklen_t length = name_of(number, &name);
	/* Peers of other kinds will come by TCP: the number is ours there, too. */
	struct sockaddr_in tcp = {
		.sin_family = AF_INET, .sin_port = htons(number), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int error;

	if (!port)
		return NULL;
	port->port = number;
	port->tcp_fd = -1;
	port->source.ready = port_ready;
	port->breathe.fire = port_breathe;
	port->source.fd = rn_fd_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (port->source.fd < 0 || bind(port->source.fd, (struct sockaddr *)&name, length))
		goto failed;
	port->tcp_fd = rn_fd_own(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
	if (port->tcp_fd < 0 || bind(port->tcp_fd, (struct sockaddr *)&tcp, sizeof tcp))
		goto failed;
	if (listen(port->source.fd, SOMAXCONN))
		goto failed;
	errno = -rn_source_add(&port->source, EPOLLIN);
	if (errno)
		goto failed;
	port->self.port = number;
	port->self.pid = self()->pid;
	port->self.state = RN_PEER_SELF;
	return port;

failed:
	error = errno;
	rn_fd_close(port->tcp_fd);
	rn_fd_close(port->source.fd);
	free(port);
	errno = error;
	return NULL;
}

uint16_t rn_port_claim(void)
{
	enum { TRIES = 512, RANGE = HIGHEST_PORT - LOWEST_PORT + 1 };
	struct port *port;
	uint32_t start = 0;
	uint16_t number = 0;

	ensure_started();
	pthread_mutex_lock(&peers.lock);
	for (port = peers.ports; port && port->claimed; port = port->next)
		;
	if (!port) {
		if (getrandom(&start, sizeof start, GRND_NONBLOCK) < 0)
			start = (uint32_t)rn_now_ns();
		for (uint32_t i = 0; i < TRIES && !port; i++) {
			port = port_open((uint16_t)(LOWEST_PORT + (start + i * 7) % RANGE));
			if (!port && errno != EADDRINUSE && errno != EACCES)
				break;
		}
		if (port) {
			port->next = peers.ports;
			peers.ports = port;
		}
	}
	if (port) {
		port->claimed = true;
		number = port->port;
	}
	pthread_mutex_unlock(&peers.lock);
	return number;
}

void rn_port_release(uint16_t number)
{
	pthread_mutex_lock(&peers.lock);
	for (struct port *port = peers.ports; port; port = port->next)
		if (port->port == number)
			port->claimed = false;
	pthread_mutex_unlock(&peers.lock);
}

bool rn_port_is_mine(uint16_t number)
{
	bool mine = false;

	pthread_mutex_lock(&peers.lock);
	for (struct port *port = peers.ports; port; port = port->next)
		mine |= port->port == number;
	pthread_mutex_unlock(&peers.lock);
	return mine;
}

/* --- for the connection manager ----------------------------------------------------------------- */

void rn_peer_warm(uint16_t port)
{
	rn_peer_put(rn_peer_get(port)); /* kept for a while */
}

static void death_notice(struct rn_notice *notice, struct rn_peer *peer, enum rn_notice_why why)
{
	struct rn_death *death = RN_OWNER(notice, struct rn_death, notice);

	(void)peer;
	if (why == RN_LINK_FAILED || why == RN_PEER_DIED)
		death->dead(death, why == RN_LINK_FAILED);
}

int rn_peer_watch_death(uint16_t port, struct rn_death *death)
{
	death->peer = rn_peer_get(port);
	if (!death->peer)
		return -ENOMEM;
	death->notice.run = death_notice;
	rn_peer_subscribe(death->peer, &death->notice);
	if (atomic_load(&death->peer->state) != RN_PEER_DEAD)
		return 0;
	rn_peer_unwatch_death(death);
	return -ENOTCONN;
}

void rn_peer_unwatch_death(struct rn_death *death)
{
	struct rn_peer *peer = death->peer;

	if (!peer)
		return;
	rn_peer_unsubscribe(&death->notice);
	death->peer = NULL;
	rn_peer_put(peer);
}

/* --- the end ------------------------------------------------------------------------------------ */

/* On the engine, when nobody holds it. Peers that somebody has still are left to him, dead. */
static void stop_all(void)
{
	pthread_mutex_lock(&peers.lock);
	while (peers.served)
		served_close(peers.served);
	for (struct peer *peer = peers.peers, *next; peer; peer = next) {
		next = peer->next;
		peer_unlist(peer);
		rn_timer_cancel(&peer->idle);
		atomic_store(&peer->rn.state, RN_PEER_DEAD);
		if (!peer->refs)
			peer_free(peer);
		else if (peer->link)
			link_close(peer->link);
	}
	for (struct process *process = peers.processes, *next; process; process = next) {
		next = process->next;
		if (process->link)
			link_close(process->link);
		rn_source_remove(&process->pidfd);
		rn_timer_cancel(&process->idle);
		rn_fd_close(process->pidfd.fd);
		process->dead = true;
		if (!process->peers_count)
			process_free(process);
	}
	peers.processes = NULL;
	while (peers.ports) {
		struct port *port = peers.ports;

		peers.ports = port->next;
		port_free(port);
	}
	peers.self_known = false;
	pthread_mutex_unlock(&peers.lock);
}

static void forget_in_child(void)
{
	pthread_mutex_init(&peers.lock, NULL);
	pthread_cond_init(&peers.calm, NULL);
	peers.running = NULL;
	peers.waiters = 0;
	peers.peers = NULL;
	peers.processes = NULL;
	peers.served = NULL;
	peers.ports = NULL;
	peers.self_known = false;
	peers.links = peers.served_count = peers.mappings = peers.peer_count = 0;
}

void rn_peer_live(struct rn_peer_live *live)
{
	pthread_mutex_lock(&peers.lock);
	*live = (struct rn_peer_live){
		.peers = peers.peer_count,
		.links = peers.links,
		.served = peers.served_count,
		.mappings = peers.mappings,
	};
	pthread_mutex_unlock(&peers.lock);
}
