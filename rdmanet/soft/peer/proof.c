/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is at the other end of a link, and may it see our memory anyhow?
 *
 * A process that the kernel lets trace another can read and write all of its memory, and take its descriptors; so
 * giving it the arena gives nothing away.  Only the kernel knows which processes these are: users, user namespaces,
 * capabilities, dumpability and security modules decide together.  So each end shows that it may trace the other, by
 * something that only such a process can read: the names of the other's open files, in /proc/PID/fd.
 *
 *     client                                               server
 *     a memfd, named for the server's pid
 *       HELLO its number --------------------------------> reads its name: the client's nonce
 *                                                          a memfd, named for the client's pid
 *     reads its name: the server's nonce  <--------------- CHALLENGE its number, the client's nonce
 *       PROOF the server's nonce [, secret] -------------> may trace us: it gets
 *     may trace us: is mapped             <--------------- WELCOME the arena [, secret]
 *
 * A name is read (readlink), never opened: nothing blocks, nothing is touched, whatever the number stands for.  Pids
 * come from the kernel (SO_PEERCRED), as seen from here; a process that we can't see has none, and isn't let in.
 *
 * A name contains the pid of the process that is to read it, and the reader insists that this is its own.  So an
 * attacker can't trick an honest process into reading a nonce that was meant for another process.  And a pid that was
 * given to another process in between shows at the end: the process that made the socket must still be alive
 * (SO_PEERPIDFD, from Linux 6.5 on; before that nobody can tell).
 *
 * The user is compared first, because other users may connect as often as they like and should cost nothing.  A process
 * that has failed should cost nothing either: it isn't looked at again for a second.
 *
 * If there is a secret, it is proven here as well: the proofs cover both nonces.  Links join processes of one host;
 * between hosts see cm/secret.c and tcp/hello.c.
 */
#include "base/equal.h"
#include "base/sock_diag.h"
#include "peer/peers.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

enum { REMEMBERED = 32, REMEMBERED_MS = 1000, HEX = 2 * RN_NONCE };

/* Worded so that they are true at both ends. */
const char *const rn_refusal_names[RN_REFUSALS] = {
	[RN_REFUSED_USER] = "another user, or one that is unknown in this user namespace",
	[RN_REFUSED_UNSEEN] = "another pid namespace",
	[RN_REFUSED_NO_TRACE] = "the kernel does not let one trace the other (other capabilities, another user namespace, "
			     "not dumpable, or no /proc)",
	[RN_REFUSED_VERSION] = "another version",
	[RN_REFUSED_CLOSED] = "its device is closed",
	[RN_REFUSED_NONCE] = "one cannot see the other's descriptors",
	[RN_REFUSED_SECRET] = "they do not have the same secret",
	[RN_REFUSED_TRANSPORT] = "one of them uses TCP only",
	[RN_REFUSED_AGAIN] = "it failed a moment ago",
	[RN_REFUSED_BUSY] = "no descriptor is left",
};

/* With rn_peers.lock held. */
static struct {
	int pid;
	uint64_t until_ns;
} failed[REMEMBERED];
static unsigned next_failed;

static bool has_failed(int pid)
{
	uint64_t now = rn_now_ns();

	for (int i = 0; i < REMEMBERED; i++)
		if (failed[i].pid == pid && now < failed[i].until_ns)
			return true;
	return false;
}

/* --- ourselves ---------------------------------------------------------------------------------- */

/* Chosen once for each time the engine runs. */
uint64_t rn_instance(void)
{
	if (rn_peers.instance)
		return rn_peers.instance;
	if (getrandom(&rn_peers.instance, sizeof rn_peers.instance, GRND_NONBLOCK) < 0)
		rn_peers.instance = rn_now_ns();
	rn_peers.instance |= 1; /* 0: not chosen */
	/* Peers that can't map our memory use process_vm_*; where Yama forbids it to all but ancestors, who runs us may
	 * allow it: to every process of this user. */
	if (rn_settings.ptracer)
		prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	return rn_peers.instance;
}

/* --- names -------------------------------------------------------------------------------------- */

static void name_for(int pid, const uint8_t nonce[RN_NONCE], char *name, size_t size)
{
	int length = snprintf(name, size, "rdmanet-link-%d-", pid);

	for (int i = 0; i < RN_NONCE; i++)
		length += snprintf(name + length, size - (size_t)length, "%02x", nonce[i]);
}

/* False: that is no digit. */
static bool read_digit(char c, uint8_t *digit)
{
	if (c >= '0' && c <= '9')
		*digit = (uint8_t)(c - '0');
	else if (c >= 'a' && c <= 'f')
		*digit = (uint8_t)(c - 'a' + 10);
	else
		return false;
	return true;
}

/* What /proc shows of a memfd that was named for us; false: it wasn't, or it is something else. */
static bool is_for_us(const char *link, uint8_t nonce[RN_NONCE])
{
	char before[48];
	int length = snprintf(before, sizeof before, "/memfd:rdmanet-link-%d-", getpid());

	if (strncmp(link, before, (size_t)length) || strlen(link) < (size_t)length + HEX)
		return false;
	link += length;
	for (int i = 0; i < RN_NONCE; i++, link += 2) {
		uint8_t high, low;

		if (!read_digit(link[0], &high) || !read_digit(link[1], &low))
			return false;
		nonce[i] = (uint8_t)(high << 4 | low);
	}
	return !strcmp(link, " (deleted)");
}

/* --- the proof ---------------------------------------------------------------------------------- */

enum rn_refusal rn_proof_begin(struct proof *proof, int socket_fd)
{
	struct ucred cred = {.pid = 0};
	socklen_t length = sizeof cred;

	*proof = (struct proof){.fd = -1};
	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &cred, &length))
		return RN_REFUSED_USER;
	proof->pid = cred.pid;
	proof->user = cred.uid;
	if (!rn_guarded(RN_GUARD_LINK_PROOF))
		return 0;
	if (cred.uid != geteuid() || rn_is_overflow_user(cred.uid))
		return RN_REFUSED_USER;
	if (cred.pid <= 0)
		return RN_REFUSED_UNSEEN;
	return has_failed(cred.pid) ? RN_REFUSED_AGAIN : 0;
}

enum rn_refusal rn_proof_offer(struct proof *proof)
{
	char name[HEX + 32];

	if (!rn_secret_nonce(proof->ours))
		return RN_REFUSED_BUSY;
	name_for(proof->pid, proof->ours, name, sizeof name);
	proof->fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
	if (proof->fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		proof->fd = memfd_create(name, MFD_CLOEXEC);
	rn_fd_own(proof->fd);
	return proof->fd < 0 ? RN_REFUSED_BUSY : 0;
}

enum rn_refusal rn_proof_read(struct proof *proof, uint32_t number)
{
	char path[40], link[HEX + 64];
	ssize_t length;

	snprintf(path, sizeof path, "/proc/%d/fd/%u", proof->pid, (unsigned)number);
	length = readlink(path, link, sizeof link - 1);
	if (length > 0)
		link[length] = 0;
	if ((length <= 0 || !is_for_us(link, proof->theirs)) && rn_guarded(RN_GUARD_LINK_PROOF))
		return RN_REFUSED_NO_TRACE;
	return 0;
}

enum rn_refusal rn_proof_check(struct proof *proof, const struct identity *other)
{
	rn_proof_end(proof);
	return memcmp(other->nonce, proof->ours, RN_NONCE) && rn_guarded(RN_GUARD_LINK_PROOF) ? RN_REFUSED_NONCE : 0;
}

/* --- the secret --------------------------------------------------------------------------------- */

static const char *const roles[] = {[RN_LINK_CLIENT] = "link client", [RN_LINK_SERVER] = "link server"};

/* Both nonces, the client's first. */
static void said(const struct proof *proof, enum rn_link_end ours, uint8_t both[2 * RN_NONCE])
{
	memcpy(both, ours == RN_LINK_CLIENT ? proof->ours : proof->theirs, RN_NONCE);
	memcpy(both + RN_NONCE, ours == RN_LINK_CLIENT ? proof->theirs : proof->ours, RN_NONCE);
}

void rn_proof_tell_secret(const struct proof *proof, enum rn_link_end ours, struct identity *self)
{
	uint8_t both[2 * RN_NONCE];

	if (!rn_settings.has_secret)
		return;
	said(proof, ours, both);
	rn_secret_prove(roles[ours], both, sizeof both, self->secret);
}

enum rn_refusal rn_proof_check_secret(const struct proof *proof, enum rn_link_end ours, const struct identity *other)
{
	uint8_t both[2 * RN_NONCE];
	const char *its_role;

	if (!rn_settings.has_secret)
		return 0;
	said(proof, ours, both);
	its_role = roles[ours == RN_LINK_CLIENT ? RN_LINK_SERVER : RN_LINK_CLIENT];
	return rn_secret_is_proven(its_role, both, sizeof both, other->secret) ? 0 : RN_REFUSED_SECRET;
}

/* --- the end ------------------------------------------------------------------------------------ */

enum rn_refusal rn_proof_hold(const struct proof *proof, int socket_fd, int *pidfd)
{
	socklen_t length = sizeof *pidfd;
	struct pollfd ended;

	*pidfd = -1;
	if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, pidfd, &length)) {
		if (errno == EMFILE || errno == ENFILE)
			return RN_REFUSED_BUSY;
		if (errno != ENOPROTOOPT && rn_guarded(RN_GUARD_LINK_PROOF))
			return RN_REFUSED_NO_TRACE;
		*pidfd = (int)syscall(SYS_pidfd_open, proof->pid, 0); /* or -1: the link will tell of its death */
	}
	if (*pidfd >= 0)
		fcntl(*pidfd, F_SETFD, FD_CLOEXEC);
	rn_fd_own(*pidfd);
	ended = (struct pollfd){.fd = *pidfd, .events = POLLIN};
	if (poll(&ended, 1, 0) <= 0 || !rn_guarded(RN_GUARD_LINK_PROOF))
		return 0;
	rn_fd_close(*pidfd);
	*pidfd = -1;
	return RN_REFUSED_NO_TRACE;
}

void rn_proof_end(struct proof *proof)
{
	rn_fd_close(proof->fd);
	proof->fd = -1;
}

void rn_proof_failed(const struct proof *proof, enum rn_refusal refusal)
{
	const char *why = rn_refusal_names[refusal];

	switch (refusal) {
	case RN_REFUSED_CLOSED:
	case RN_REFUSED_TRANSPORT:
		return; /* as configured */
	case RN_REFUSED_VERSION:
		if (rn_inbox.message.version == RN_WIRE_VERSION)
			rn_warn(RN_WARN_LANGUAGE, "process %d speaks another protocol on its link", proof->pid);
		else
			rn_warn(RN_WARN_LANGUAGE,
				"process %d speaks version %u of the device's protocol, this side speaks version %d",
				proof->pid, rn_inbox.message.version, RN_WIRE_VERSION);
		return;
	case RN_REFUSED_BUSY:
		rn_warn(RN_WARN_DESCRIPTORS, "using TCP with process %d: %s", proof->pid, why);
		return;
	case RN_REFUSED_SECRET:
		rn_warn(RN_WARN_SECRET, "not sharing memory with process %d: %s", proof->pid, why);
		break;
	default:
		rn_warn(RN_WARN_LINK,
			"not sharing memory with process %d of user %u, but using TCP: %s",
			proof->pid, (unsigned)proof->user, why);
	}
	if (refusal != RN_REFUSED_NO_TRACE && refusal != RN_REFUSED_NONCE && refusal != RN_REFUSED_SECRET)
		return;
	if (proof->pid == getpid())
		return; /* a test has made a link to itself: don't remember it */
	failed[next_failed].pid = proof->pid;
	failed[next_failed].until_ns = rn_now_ns() + REMEMBERED_MS * 1000000ull;
	next_failed = (next_failed + 1) % REMEMBERED;
}
