/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Another user on the same host gets nothing: no descriptor, no byte of memory, not even an introduction.  Abstract
 * names have no permissions, so it is the kernel's word for who is at the other end (SO_PEERCRED) that decides, on
 * both ends.  The other user is played by a child that gives up being root; who isn't root can't test this.
 */
#include "processes.h"

#include <dirent.h>
#include <grp.h>
#include <sys/uio.h>

#include "link.h"
#include "soft.h"

enum { NOBODY = 65534 };

struct secret {
	pid_t pid;
	uint32_t qpn;
	uint64_t address;
};

static void become_nobody(void)
{
	CHECK(!setgroups(0, NULL) && !setgid(NOBODY) && !setuid(NOBODY));
	CHECK(geteuid() == NOBODY);
}

static void expect_no_access(const char *format, pid_t pid, const char *name, int flags)
{
	char path[128];

	snprintf(path, sizeof(path), format, (int)pid, name);
	CHECK(open(path, flags) < 0);
	CHECK(errno == EACCES || errno == EPERM || errno == ENOENT);
}

/* What is open there has no name elsewhere, and not this way either. */
static void expect_no_way_by_proc(const struct secret *secret)
{
	char byte, path[64];
	struct iovec here = {&byte, 1}, there = {(void *)(uintptr_t)secret->address, 1};

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)secret->pid);
	CHECK(!opendir(path) && (errno == EACCES || errno == EPERM));
	for (int fd = 0; fd < 64; fd++) {
		char number[12];

		snprintf(number, sizeof(number), "%d", fd);
		expect_no_access("/proc/%d/fd/%s", secret->pid, number, O_RDONLY);
		expect_no_access("/proc/%d/fd/%s", secret->pid, number, O_RDWR);
	}
	expect_no_access("/proc/%d/%s", secret->pid, "mem", O_RDWR);
	CHECK(process_vm_readv(secret->pid, &here, 1, &there, 1, 0) < 0 && errno == EPERM);
	CHECK(process_vm_writev(secret->pid, &here, 1, &there, 1, 0) < 0 && errno == EPERM);
}

/* It says that it is one of us, and says it well. */
static void expect_refused(const struct secret *secret)
{
	struct sockaddr_un address;
	socklen_t length = wire_name(secret->qpn >> 8, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), arena;
	struct wire_words words;

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&address, length));
	CHECK_EQ(wire_introduce(fd, &arena), WIRE_USER);
	CHECK(arena < 0);
	CHECK(wire_hear(fd, &words, NULL) <= 0);
	close(fd);
}

static void stranger_looks_in(int fd)
{
	struct secret secret;

	CHECK(hear(fd, &secret, sizeof(secret)));
	become_nobody();
	expect_no_way_by_proc(&secret);
	expect_refused(&secret);
	meet(fd);
}

static void test_nothing_for_another_user(void)
{
	struct other other = spawn(stranger_looks_in);
	struct secret secret = {.pid = getpid()};
	struct end end;

	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	to_init(end.qp);
	secret.qpn = end.qp->qp_num;
	secret.address = (uintptr_t)end.buffer;
	tell(other.fd, &secret, sizeof(secret));
	meet(other.fd);
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

/* A name of ours, taken before us: whoever connects there says nothing. */
static void stranger_takes_a_name(int fd)
{
	struct sockaddr_un address;
	socklen_t length;
	uint32_t port = 1024;
	int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), guest;
	char bytes[64];

	become_nobody();
	do
		length = wire_name(++port, &address);
	while (bind(listener, (struct sockaddr *)&address, length));
	CHECK(!listen(listener, 8));
	tell(fd, &port, sizeof(port));
	guest = accept(listener, NULL, NULL);
	CHECK(guest >= 0);
	CHECK_EQ(recv(guest, bytes, sizeof(bytes), 0), 0);
	meet(fd);
}

static void test_nothing_for_who_took_the_name(void)
{
	struct other other = spawn(stranger_takes_a_name);
	struct end end;
	uint32_t port;

	CHECK(hear(other.fd, &port, sizeof(port)));
	end_open(&end, &(struct end_options){.memory = DEVICE_MEMORY});
	connect_impatiently(end.qp, port << 8 | 5);
	CHECK_EQ(post_send(&end, 1, 0, 64), 0);
	expect(end.cq, 1, IBV_WC_RETRY_EXC_ERR);
	meet(other.fd);
	join(&other);
	end_close(&end);
	expect_live_nothing();
}

int main(void)
{
	if (geteuid()) {
		printf("  not root: nobody else to be\n");
		return 0;
	}
	RUN(test_nothing_for_another_user);
	RUN(test_nothing_for_who_took_the_name);
	return 0;
}
