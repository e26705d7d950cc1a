/* SPDX-License-Identifier: Apache-2.0 */
/* Whose turn it is to leave, when too many connections have not said who they are. No device is needed. */
#define _GNU_SOURCE
#include "base/stranger.h"

#include <endian.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/engine.h"
#include "host_check.h"
#include "base/settings.h"

enum { MANY = 2000 };

struct visitor {
	struct rn_stranger stranger;
	unsigned left; /* the how manieth to leave; 0: is there */
};

static struct visitor visitors[MANY];
static unsigned departures;

static void leave(struct rn_stranger *stranger)
{
	struct visitor *visitor = RN_OWNER(stranger, struct visitor, stranger);

	CHECK(!visitor->left && !stranger->link);
	visitor->left = ++departures;
	rn_stranger_forget(stranger); /* nothing happens */
}

static void come(unsigned i, union ibv_gid from)
{
	visitors[i] = (struct visitor){.stranger = {.from = from, .leave = leave}};
	rn_stranger_add(&visitors[i].stranger, RN_STRANGER_SILENT);
}

static void get_on(unsigned i)
{
	rn_stranger_add(&visitors[i].stranger, RN_STRANGER_KNOWN);
}

static union ibv_gid v4(uint32_t address)
{
	union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};

	memcpy(&gid.raw[12], &address, sizeof(address));
	return gid;
}

static union ibv_gid v6(uint64_t network, uint64_t host)
{
	union ibv_gid gid;

	memcpy(&gid.raw[0], &network, sizeof(network));
	memcpy(&gid.raw[8], &host, sizeof(host));
	return gid;
}

static void begin(rlim_t descriptors)
{
	struct rlimit files;

	CHECK(!getrlimit(RLIMIT_NOFILE, &files));
	files.rlim_cur = descriptors;
	CHECK(!setrlimit(RLIMIT_NOFILE, &files));
	departures = 0;
}

static void end(unsigned count)
{
	unsigned there = 0;

	for (unsigned i = 0; i < count; i++) {
		there += visitors[i].stranger.link != NULL;
		rn_stranger_forget(&visitors[i].stranger);
		rn_stranger_forget(&visitors[i].stranger); /* once more is no harm */
	}
	CHECK(there + departures == count);
	CHECK(!rn_stranger_make_room());
}

/* A quarter of the descriptors, but no more than memory is for, and no fewer than a few. */
static void as_many_as_there_may_be(void)
{
	static const struct {
		rlim_t descriptors;
		unsigned limit;
	} cases[] = {{256, 64}, {1024, 256}, {1700, 425}, {1800, 448}, {4000, 448}, {12, 4}};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		begin(cases[i].descriptors);
		for (unsigned j = 0; j < 1000; j++) {
			come(j, v4(1));
			CHECK(departures == (j < cases[i].limit ? 0 : j + 1 - cases[i].limit));
			CHECK(visitors[j].stranger.link);
		}
		for (unsigned j = 0; j < departures; j++)
			CHECK(visitors[j].left == j + 1); /* the eldest first */
		end(1000);
	}
}

/* One who comes with hundreds pushes out his own. */
static void of_the_source_that_has_most(void)
{
	begin(1024);
	for (unsigned i = 0; i < 20; i++)
		come(i, v4(100 + i));
	for (unsigned i = 20; i < MANY; i++)
		come(i, v4(7));
	for (unsigned i = 0; i < 20; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == MANY - 256);
	for (unsigned i = 20; i < 20 + departures; i++)
		CHECK(visitors[i].left == i - 19);
	end(MANY);
}

/* The lower half of an IPv6 address is whatever its host likes. */
static void of_the_network_that_has_most(void)
{
	begin(1024);
	for (unsigned i = 0; i < 20; i++)
		come(i, v6(100 + i, 1));
	for (unsigned i = 20; i < 1000; i++)
		come(i, v6(7, i));
	for (unsigned i = 0; i < 20; i++)
		CHECK(visitors[i].stranger.link);
	end(1000);
}

static void who_has_spoken_counts_no_more(void)
{
	begin(256);
	for (unsigned i = 0; i < MANY; i++) {
		come(i, v4(1));
		rn_stranger_forget(&visitors[i].stranger);
	}
	CHECK(!departures);
	for (unsigned i = 0; i < 64; i++)
		come(i, v4(1));
	rn_stranger_forget(&visitors[0].stranger);
	rn_stranger_forget(&visitors[63].stranger);
	rn_stranger_forget(&visitors[30].stranger);
	CHECK(rn_stranger_make_room() && visitors[1].left == 1);
	for (unsigned i = 0; i < 60; i++)
		CHECK(rn_stranger_make_room());
	CHECK(visitors[62].left == 61 && !rn_stranger_make_room());
}

/* Nor do the 16 bits before it cost anything. */
static void of_the_site_that_has_most(void)
{
	begin(1024);
	for (unsigned i = 0; i < 20; i++)
		come(i, v6(htobe64(0x20010db800010000 + ((uint64_t)i << 16)), 1));
	for (unsigned i = 20; i < 1000; i++)
		come(i, v6(htobe64(0x20010db8ffff0000 + i), i));
	for (unsigned i = 0; i < 20; i++)
		CHECK(visitors[i].stranger.link);
	end(1000);
}

/* Anybody here has all of 127.0.0.0/8. */
static void this_host_is_one_source(void)
{
	begin(1024);
	for (unsigned i = 0; i < 20; i++)
		come(i, v4(htobe32(0x0a000001 + i)));
	for (unsigned i = 20; i < MANY; i++)
		come(i, v4(htobe32(0x7f000001 + i * 7919)));
	for (unsigned i = 0; i < 20; i++)
		CHECK(visitors[i].stranger.link);
	end(MANY);
}

/* Who has spoken is not driven out by silence; nor by others who have, for a while. */
static void silence_does_not_count_against_words(void)
{
	rn_settings.silence_ms = 3600 * 1000;
	begin(256);
	for (unsigned i = 0; i < 300; i++) {
		come(i, v4(1));
		get_on(i);
		get_on(i); /* again: that's no other */
	}
	for (unsigned i = 300; i < MANY; i++)
		come(i, v4(1));
	for (unsigned i = 0; i < 300; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == MANY - 300 - 64);
	for (unsigned i = 0; i < 64; i++)
		CHECK(rn_stranger_make_room());
	CHECK(!rn_stranger_make_room() && departures == MANY - 300);
	/* From here on they are slow. */
	rn_settings.silence_ms = 0;
	CHECK(rn_stranger_make_room() && visitors[0].left);
	come(0, v4(2));
	departures = MANY - 300; /* that one is there again */
	get_on(0);
	CHECK(departures == MANY - 300 + 300 - 64 && visitors[0].stranger.link);
	for (unsigned i = 1; i <= 300 - 64; i++)
		CHECK(visitors[i].left);
	end(MANY);
}

/* Of one source: who owes only a proof is not driven out by those who are silent... */
static void who_has_begun_to_speak_stays(void)
{
	begin(1024);
	for (unsigned i = 0; i < 100; i++) {
		come(i, v4(1));
		visitors[i].stranger.has_spoken = true;
	}
	for (unsigned i = 100; i < MANY; i++)
		come(i, v4(1));
	for (unsigned i = 0; i < 100; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == MANY - 256);
	for (unsigned i = 100; i < 100 + departures; i++)
		CHECK(visitors[i].left == i - 99);
	end(MANY);
}

/* ...and one that is silent yet not by those who owe a proof. */
static void who_has_just_come_stays(void)
{
	begin(1024);
	for (unsigned i = 0; i < 1000; i++) {
		come(i, v4(1));
		visitors[i].stranger.has_spoken = i != 500;
		CHECK(i < 500 || i >= 500 + 255 || !visitors[500].left);
	}
	CHECK(visitors[500].left == 501 && departures == 1000 - 256);
	end(1000);
}

/* The slow ones of the source that has most of them leave first, too. */
static void of_the_slow_of_the_source_that_has_most(void)
{
	rn_settings.silence_ms = 0;
	begin(256);
	for (unsigned i = 0; i < 1000; i++) {
		come(i, v4(i < 10 ? 100 + i : 7));
		get_on(i);
	}
	for (unsigned i = 0; i < 10; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == 1000 - 64);
	end(1000);
}

/* The source of a process that USER runs and that connects to us. */
static union ibv_gid source_of_child(uid_t user)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	socklen_t length = sizeof(name.sun_family); /* the kernel chooses the rest */
	int listener = socket(AF_UNIX, SOCK_STREAM, 0), fd;
	union ibv_gid source;
	pid_t child;

	CHECK(listener >= 0 && !bind(listener, (struct sockaddr *)&name, length) && !listen(listener, 1));
	length = sizeof(name);
	CHECK(!getsockname(listener, (struct sockaddr *)&name, &length));
	child = fork();
	if (!child) {
		fd = socket(AF_UNIX, SOCK_STREAM, 0);
		_exit(setuid(user) || connect(fd, (struct sockaddr *)&name, length) || read(fd, &source, 1));
	}
	fd = accept(listener, NULL, NULL);
	CHECK(child > 0 && fd >= 0);
	source = rn_stranger_user(fd);
	close(fd);
	close(listener);
	CHECK(waitpid(child, NULL, 0) == child);
	return source;
}

/* Other users' connections are theirs, not each other's, however many processes they have. */
static void users_are_sources(void)
{
	enum { OTHER = 65534 };
	union ibv_gid self = source_of_child(getuid()), other, again;

	CHECK(!memcmp(&(uid_t){getuid()}, &self.raw[4], sizeof(uid_t)));
	if (getuid()) {
		other = self;
		other.raw[4] ^= 1;
	} else {
		other = source_of_child(OTHER);
		again = source_of_child(OTHER);
		CHECK(!memcmp(&other, &again, sizeof(other)));
	}
	begin(256);
	come(0, other);
	for (unsigned i = 1; i < 200; i++)
		come(i, self);
	CHECK(visitors[0].stranger.link && departures == 200 - 64);
	end(200);
}

/* Of our own user's processes the one that floods us leaves first, and the others stay. */
static void processes_of_our_user_are_sources(void)
{
	union ibv_gid flooder = source_of_child(getuid()), honest = source_of_child(getuid());

	CHECK(memcmp(&flooder, &honest, sizeof(honest)));
	begin(256);
	come(0, honest);
	for (unsigned i = 1; i < 200; i++)
		come(i, flooder);
	CHECK(visitors[0].stranger.link && departures == 200 - 64);
	end(200);
}

/* The source of a TCP connection that USER makes to us. */
static union ibv_gid source_by_tcp(uid_t user)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htobe32(0x7f000001)}, far;
	socklen_t length = sizeof(at);
	int listener = socket(AF_INET, SOCK_STREAM, 0), fd, theirs;
	union ibv_gid source;

	CHECK(listener >= 0 && !bind(listener, (struct sockaddr *)&at, length) && !listen(listener, 1));
	CHECK(!getsockname(listener, (struct sockaddr *)&at, &length));
	CHECK(user == geteuid() || !seteuid(user));
	theirs = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(!connect(theirs, (struct sockaddr *)&at, sizeof(at)));
	CHECK(user == getuid() || !seteuid(getuid()));
	length = sizeof(far);
	fd = accept(listener, (struct sockaddr *)&far, &length);
	CHECK(fd >= 0);
	source = rn_stranger_by_tcp(fd, (struct sockaddr *)&far);
	close(theirs);
	close(fd);
	close(listener);
	return source;
}

/* By TCP, too: but for whom the kernel does not tell. */
static void users_are_sources_by_tcp(void)
{
	enum { OTHER = 61001 };
	union ibv_gid self = source_by_tcp(getuid()), other = self;
	uid_t user;

	CHECK(rn_stranger_way(&self, &user) == RN_STRANGER_BY_TCP && user == getuid());
	if (getuid())
		other.raw[4] ^= 1;
	else
		other = source_by_tcp(OTHER);
	CHECK(rn_stranger_way(&other, &user) == RN_STRANGER_BY_TCP && user != getuid());
	begin(256);
	for (unsigned i = 0; i < 10; i++)
		come(i, i & 1 ? v4(htobe32(0x7f000001)) : self);
	for (unsigned i = 10; i < 200; i++)
		come(i, other);
	for (unsigned i = 0; i < 10; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == 200 - 64);
	end(200);
}

/* From however many addresses a flood by TCP comes: who came to a Unix socket stays. */
static void who_comes_by_name_is_not_displaced_by_tcp(void)
{
	union ibv_gid named = source_of_child(getuid());
	uid_t user;

	CHECK(rn_stranger_way(&named, &user) == RN_STRANGER_BY_NAME && user == getuid());
	begin(1024);
	for (unsigned i = 0; i < 100; i++)
		come(i, named);
	for (unsigned i = 100; i < MANY; i++)
		come(i, v4(htobe32(0x0a000001 + i)));
	for (unsigned i = 0; i < 100; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == MANY - 256);
	end(MANY);
}

/* Nor the other way round. */
static void who_comes_by_tcp_is_not_displaced_by_name(void)
{
	union ibv_gid named = source_of_child(getuid());

	begin(1024);
	for (unsigned i = 0; i < 100; i++)
		come(i, v4(htobe32(0x0a000001)));
	for (unsigned i = 100; i < MANY; i++)
		come(i, named);
	for (unsigned i = 0; i < 100; i++)
		CHECK(visitors[i].stranger.link);
	CHECK(departures == MANY - 256);
	end(MANY);
}

int main(void)
{
	fclose(stderr); /* what is said of them */
	CHECK(!rn_stranger_make_room());
	RUN(as_many_as_there_may_be);
	RUN(of_the_source_that_has_most);
	RUN(of_the_network_that_has_most);
	RUN(who_has_spoken_counts_no_more);
	RUN(of_the_site_that_has_most);
	RUN(this_host_is_one_source);
	RUN(silence_does_not_count_against_words);
	RUN(who_has_begun_to_speak_stays);
	RUN(who_has_just_come_stays);
	RUN(of_the_slow_of_the_source_that_has_most);
	RUN(users_are_sources);
	RUN(processes_of_our_user_are_sources);
	RUN(users_are_sources_by_tcp);
	RUN(who_comes_by_name_is_not_displaced_by_tcp);
	RUN(who_comes_by_tcp_is_not_displaced_by_name);
	return 0;
}
