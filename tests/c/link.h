/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The links between processes, spoken by hand: either end, up to the point where the other is let in.  What goes over
 * the wire is written down here again, on purpose.  Include it behind what defines CHECK.
 */
#ifndef LINK_H
#define LINK_H

#include "base/version.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { WIRE_MAGIC = 0x524e504c, WIRE_VERSION = RN_WIRE_VERSION };
enum { WIRE_HELLO = 1, WIRE_WELCOME = 2, WIRE_REFUSED = 3, WIRE_BY_STREAM = 14, WIRE_CHALLENGE = 12, WIRE_PROOF = 13 };
enum { WIRE_WANT_SEGMENT = 4, WIRE_SEGMENT = 5 };
enum { WIRE_USER = 1, WIRE_NO_TRACE = 3, WIRE_OTHER_VERSION = 4, WIRE_NONCE = 6, WIRE_TRANSPORT = 8, WIRE_AGAIN = 9 };

struct wire_message {
	uint32_t magic;
	uint16_t version, type;
	uint32_t value, reserved;
	int64_t size;
};
struct wire_identity {
	uint8_t nonce[32], secret[32];
	uint64_t instance;
	int64_t arena_size;
	uint64_t witness[2];
};
struct wire_words {
	struct wire_message message;
	struct wire_identity identity;
};

static inline struct wire_words wire_words(unsigned type, uint32_t value)
{
	static uint64_t instance = 1;

	return (struct wire_words){
		.message = {.magic = WIRE_MAGIC, .version = WIRE_VERSION, .type = (uint16_t)type, .value = value},
		.identity.instance = instance += 2, /* another each time, of which nothing is known */
	};
}

static inline socklen_t wire_name(uint16_t port, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			   (size_t)sprintf(address->sun_path + 1, "rdmanet-soft/%u", port));
}

static inline int wire_peer(int fd)
{
	struct ucred cred = {0};
	socklen_t length = sizeof(cred);

	CHECK(!getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &length));
	return cred.pid;
}

/* A memfd for that process to read. */
static inline int wire_offer(int pid, uint8_t nonce[32])
{
	char name[128];
	int length = sprintf(name, "rdmanet-link-%d-", pid), fd;

	CHECK(getrandom(nonce, 32, 0) == 32);
	for (int i = 0; i < 32; i++)
		length += sprintf(name + length, "%02x", nonce[i]);
	fd = memfd_create(name, MFD_CLOEXEC);
	CHECK(fd >= 0);
	return fd;
}

/* The other's nonce; zeros when it can't be had. */
static inline void wire_read(int pid, uint32_t number, uint8_t nonce[32])
{
	char path[64], link[256] = "", *at = link;
	unsigned byte;

	sprintf(path, "/proc/%d/fd/%u", pid, number);
	memset(nonce, 0, 32);
	if (readlink(path, link, sizeof(link) - 1) < 0)
		return;
	for (int dashes = 0; *at && dashes < 3; at++)
		dashes += *at == '-';
	for (int i = 0; i < 32 && sscanf(at, "%2x", &byte) == 1; i++, at += 2)
		nonce[i] = (uint8_t)byte;
}

static inline ssize_t wire_hear(int fd, struct wire_words *words, int *passed)
{
	struct iovec iov = {words, sizeof(*words)};
	char control[CMSG_SPACE(sizeof(int))] = {0};
	struct msghdr message = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *header;
	ssize_t got;

	do
		got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	header = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
	if (passed)
		*passed = -1;
	if (header && passed)
		memcpy(passed, CMSG_DATA(header), sizeof(*passed));
	return got;
}

static inline ssize_t wire_say(int fd, const struct wire_words *words, size_t length, int passed)
{
	struct iovec iov = {(void *)words, length};
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

	if (passed >= 0) {
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(passed));
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
	}
	return sendmsg(fd, &message, MSG_NOSIGNAL);
}

/* As a client, up to the answer to our proof: 0 and the arena, or what the server refuses us for. */
static inline uint32_t wire_introduce(int fd, int *arena)
{
	struct wire_words words = wire_words(WIRE_HELLO, 0);
	int offered = wire_offer(wire_peer(fd), words.identity.nonce);
	uint8_t ours[32];

	*arena = -1;
	memcpy(ours, words.identity.nonce, sizeof(ours));
	words.message.value = (uint32_t)offered;
	CHECK(wire_say(fd, &words, sizeof(words.message), -1) == sizeof(words.message));
	CHECK(wire_hear(fd, &words, NULL) >= (ssize_t)sizeof(words.message));
	close(offered);
	if (words.message.type == WIRE_CHALLENGE) {
		CHECK(!memcmp(words.identity.nonce, ours, sizeof(ours)));
		offered = (int)words.message.value;
		words = wire_words(WIRE_PROOF, 0);
		wire_read(wire_peer(fd), (uint32_t)offered, words.identity.nonce);
		CHECK(wire_say(fd, &words, sizeof(words), -1) == sizeof(words));
		CHECK(wire_hear(fd, &words, arena) >= (ssize_t)sizeof(words.message));
	}
	if (words.message.type == WIRE_WELCOME)
		return 0;
	CHECK(words.message.type == WIRE_REFUSED && words.message.value);
	return words.message.value;
}

/* As a server: has the client proven itself? */
static inline int wire_challenge(int fd)
{
	struct wire_words hello, words = wire_words(WIRE_CHALLENGE, 0);
	uint8_t ours[32];
	int offered;

	if (wire_hear(fd, &hello, NULL) != sizeof(hello.message) || hello.message.type != WIRE_HELLO)
		return 0;
	offered = wire_offer(wire_peer(fd), ours);
	words.message.value = (uint32_t)offered;
	wire_read(wire_peer(fd), hello.message.value, words.identity.nonce);
	CHECK(wire_say(fd, &words, sizeof(words), -1) == sizeof(words));
	if (wire_hear(fd, &words, NULL) != sizeof(words))
		words.message.type = 0;
	close(offered);
	return words.message.type == WIRE_PROOF && !memcmp(words.identity.nonce, ours, sizeof(ours));
}

/* And lets it in: takes this memory for our arena. */
static inline void wire_welcome(int fd, int memory, int64_t size)
{
	struct wire_words words = wire_words(WIRE_WELCOME, 0);

	words.identity.arena_size = size;
	CHECK(wire_say(fd, &words, sizeof(words), memory) == sizeof(words));
}

#endif
