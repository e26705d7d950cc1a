/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The secret: which are taken, from where, and that a process which has one never opens its doors again without it.
 * Each case is a process of its own, since a secret is for life.
 */
#include "processes.h"

#include <grp.h>
#include <sys/stat.h>

#include "base/secret.h"
#include "base/settings.h"

#define ONE "00112233445566778899aabbccddeeff0123456789abcdefFEDCBA9876543210"
#define OTHER "10112233445566778899aabbccddeeff0123456789abcdefFEDCBA9876543210"

enum { NOBODY = 65534 };

static char directory[] = "/tmp/rdmanet-test-secret-XXXXXX";

/* --- what happens in each process --------------------------------------------------------------------------- */

static const char *path_of(const char *name)
{
	static char path[128];

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	return path;
}

static const char *put(const char *name, const char *text, mode_t mode)
{
	const char *path = path_of(name);
	int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);

	CHECK(fd >= 0);
	tell(fd, text, strlen(text));
	CHECK_EQ(fchmod(fd, mode), 0);
	close(fd);
	return path;
}

static bool has(const char *digits)
{
	const uint8_t *key = rn_secret_key();
	char text[2 * RN_SECRET + 1];

	if (!key || !rn_settings.has_secret)
		return false;
	for (int i = 0; i < RN_SECRET; i++)
		snprintf(text + 2 * i, 3, "%02x", key[i]);
	return !strcasecmp(text, digits);
}

/* Opens, and closes again. */
static void expect_open(const char *digits)
{
	CHECK_EQ(ibv_close_device(open_soft()), 0);
	CHECK(digits ? has(digits) : !rn_settings.has_secret && !rn_secret_key());
}

/* Doesn't, says why, and doesn't say the secret. (What standard error is told, test_settings has.) */
static void expect_refusal(const char *why)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int kept = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
	struct ibv_context *context;
	char error[512];
	int err;

	CHECK(dup2(nowhere, STDERR_FILENO) >= 0);
	context = ibv_open_device(list[0]);
	err = errno;
	CHECK(dup2(kept, STDERR_FILENO) >= 0);
	CHECK(!context && err == EINVAL);
	close(kept);
	close(nowhere);
	ibv_free_device_list(list);
	rdmanet_soft_settings_error(error, sizeof(error));
	if (!strstr(error, why))
		fprintf(stderr, "it said: %s\n", error);
	CHECK(strstr(error, why));
	CHECK(!strstr(error, "2233") && !strstr(error, "sesame"));
}

static void expect_refused_value(const char *value, const char *why)
{
	setenv("RDMANET_SOFT_SECRET", value, 1);
	expect_refusal(why);
	unsetenv("RDMANET_SOFT_SECRET");
}

static void expect_refused_file(const char *path, const char *why)
{
	setenv("RDMANET_SOFT_SECRET_FILE", path, 1);
	expect_refusal(why);
	unsetenv("RDMANET_SOFT_SECRET_FILE");
}

/* Nothing in a datagram could prove that its sender knows it. */
static void no_groups(int fd)
{
	union ibv_gid group = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [13] = 64, [15] = 1}};
	struct end end;

	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	end_open(&end, &(struct end_options){.type = IBV_QPT_UD});
	CHECK_EQ(ibv_attach_mcast(end.qp, &group, 0), EPERM);
	end_close(&end);
	meet(fd);
}

/* --- values --------------------------------------------------------------------------------------------------- */

static void digits_are_taken(int fd)
{
	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	expect_open(ONE);
	meet(fd);
}

static void anything_else_is_refused(int fd)
{
	expect_refused_value("", "it has 0 characters; a secret is 64 hexadecimal digits");
	expect_refused_value("open sesame", "it has 11 characters");
	expect_refused_value("open sesame", "make one with `rdmanet secret` or `openssl rand -hex 32`");
	expect_refused_value(ONE "0", "it has 65 characters");
	expect_refused_value(ONE "\n", "it has 65 characters");
	expect_refused_value("0x112233445566778899aabbccddeeff0123456789abcdefFEDCBA9876543210", "character 2 is not");
	expect_refused_value(" 0112233445566778899aabbccddeeff0123456789abcdefFEDCBA9876543210", "character 1 is not");
	expect_refused_value("00112233445566778899aabbccddeeff0123456789abcdefFEDCBA987654321g", "character 64 is not");
	expect_open(NULL);
	meet(fd);
}

static void one_of_the_two(int fd)
{
	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	setenv("RDMANET_SOFT_SECRET_FILE", put("both", ONE, 0600), 1);
	expect_refusal("are both set");
	unsetenv("RDMANET_SOFT_SECRET");
	expect_open(ONE);
	meet(fd);
}

/* --- for life --------------------------------------------------------------------------------------------------- */

static void kept_when_the_environment_loses_it(int fd)
{
	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	expect_open(ONE);
	unsetenv("RDMANET_SOFT_SECRET");
	expect_open(ONE);
	expect_refused_value("", "it has 0 characters");
	expect_refused_value(OTHER, "has already read another secret and keeps it");
	expect_open(ONE);
	meet(fd);
}

static void in_child(int fd)
{
	unsetenv("RDMANET_SOFT_SECRET");
	expect_open(ONE);
	expect_refused_value(OTHER, "already read another secret");
	meet(fd);
}

static void kept_in_a_forked_child(int fd)
{
	struct other child;

	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	expect_open(ONE);
	child = spawn(in_child);
	meet(child.fd);
	join(&child);
	meet(fd);
}

/* One that came along with another mistake counts: the next opening mustn't do without it. */
static void kept_when_the_device_did_not_open(int fd)
{
	expect_open(NULL);
	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	setenv("RDMANET_SOFT_SILENCE", "long", 1);
	expect_refusal("milliseconds");
	unsetenv("RDMANET_SOFT_SECRET");
	unsetenv("RDMANET_SOFT_SILENCE");
	expect_open(ONE);
	meet(fd);
}

/* Who only looks which devices there are takes nothing for good, and gives up nothing. */
static void a_glance_changes_nothing(int fd)
{
	setenv("RDMANET_SOFT_SECRET", "open sesame", 1);
	ibv_free_device_list(ibv_get_device_list(NULL));
	CHECK(!rn_secret_key());
	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	expect_open(ONE);
	unsetenv("RDMANET_SOFT_SECRET");
	setenv("RDMANET_SOFT_RULES", "iwrap", 1);
	ibv_free_device_list(ibv_get_device_list(NULL));
	CHECK(has(ONE));
	unsetenv("RDMANET_SOFT_RULES");
	meet(fd);
}

static void in_no_core_dump(int fd)
{
	char line[512];
	uintptr_t from, to;
	bool is_there = false, is_kept_out = false;
	FILE *maps;

	setenv("RDMANET_SOFT_SECRET", ONE, 1);
	expect_open(ONE);
	maps = fopen("/proc/self/smaps", "r");
	CHECK(maps);
	while (fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
			is_there = (uintptr_t)rn_secret_key() >= from && (uintptr_t)rn_secret_key() < to;
		if (is_there && !strncmp(line, "VmFlags:", 8))
			is_kept_out = strstr(line, " dd");
	}
	fclose(maps);
	CHECK(is_kept_out);
	meet(fd);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

static void a_file_is_taken(int fd)
{
	setenv("RDMANET_SOFT_SECRET_FILE", put("line", ONE "\n", 0600), 1);
	expect_open(ONE);
	/* Once: it may have changed, or be out of reach, when the device is opened again. */
	put("line", OTHER "\n", 0600);
	expect_open(ONE);
	CHECK_EQ(unlink(path_of("line")), 0);
	expect_open(ONE);
	setenv("RDMANET_SOFT_SECRET_FILE", put("another", OTHER, 0400), 1);
	expect_refusal("already read another secret");
	setenv("RDMANET_SOFT_SECRET_FILE", put("same", ONE, 0400), 1);
	expect_open(ONE);
	meet(fd);
}

static void a_link_is_followed(int fd)
{
	char target[128];

	strcpy(target, put("target", ONE, 0400));
	CHECK_EQ(symlink(target, path_of("link")), 0);
	setenv("RDMANET_SOFT_SECRET_FILE", path_of("link"), 1);
	expect_open(ONE);
	meet(fd);
}

static void other_files_are_refused(int fd)
{
	expect_refused_file("", "No such file or directory");
	expect_refused_file(path_of("nothing"), "No such file or directory");
	expect_refused_file(directory, "not a regular file");
	CHECK_EQ(mkfifo(path_of("fifo"), 0600), 0);
	expect_refused_file(path_of("fifo"), "not a regular file"); /* and nobody waits for who would write to it */
	expect_refused_file("/dev/zero", "not a regular file");
	expect_refused_file(put("empty", "", 0600), "it has 0 characters");
	expect_refused_file(put("text", "open sesame\n", 0600), "it has 11 characters");
	expect_refused_file(put("lines", ONE "\n\n", 0600), "it holds more than a secret");
	expect_refused_file(put("long", ONE OTHER, 0600), "it holds more than a secret");
	expect_refused_file(put("65", ONE "0", 0600), "it has 65 characters");
	for (mode_t bit = 1; bit < 0100; bit <<= 1)
		expect_refused_file(put("mode", ONE, 0600 | bit), "which gives others access: chmod 600");
	expect_open(NULL);
	meet(fd);
}

static void files_and_users(int fd)
{
	const char *path = put("owned", ONE, 0600);
	gid_t group = NOBODY;

	CHECK_EQ(chown(path, NOBODY, NOBODY), 0);
	expect_refused_file(path, "owned by user 65534; the owner must be this user (0) or root");
	/* Root's may be for the group that it gave to us. */
	put("closed", ONE, 0600);
	CHECK(!chown(put("group", ONE, 0640), 0, NOBODY) && !chmod(path_of("group"), 0640) && !chmod(directory, 0755));
	CHECK(!setgroups(1, &group) && !setgid(NOBODY) && !setuid(NOBODY));
	CHECK_EQ(chmod(path_of("owned"), 0640), 0);
	expect_refused_file(path_of("owned"), "its mode is 640");
	expect_refused_file(path_of("closed"), "user 65534 may not read it: chown it to this user");
	setenv("RDMANET_SOFT_SECRET_FILE", path_of("group"), 1);
	expect_open(ONE);
	meet(fd);
}

static void run(void (*what)(int fd))
{
	struct other other = spawn(what);

	meet(other.fd);
	join(&other);
}

#define RUN_ALONE(what)                   \
	do {                              \
		printf("  %s\n", #what); \
		run(what);                \
	} while (0)

int main(void)
{
	char command[64];

	unsetenv("RDMANET_SOFT_SECRET");
	unsetenv("RDMANET_SOFT_SECRET_FILE");
	CHECK(mkdtemp(directory));
	RUN_ALONE(digits_are_taken);
	RUN_ALONE(anything_else_is_refused);
	RUN_ALONE(one_of_the_two);
	RUN_ALONE(kept_when_the_environment_loses_it);
	RUN_ALONE(kept_in_a_forked_child);
	RUN_ALONE(kept_when_the_device_did_not_open);
	RUN_ALONE(a_glance_changes_nothing);
	RUN_ALONE(in_no_core_dump);
	RUN_ALONE(no_groups);
	RUN_ALONE(a_file_is_taken);
	RUN_ALONE(a_link_is_followed);
	RUN_ALONE(other_files_are_refused);
	if (geteuid())
		printf("  not root: files are nobody else's\n");
	else
		RUN_ALONE(files_and_users);
	snprintf(command, sizeof(command), "rm -r %s", directory);
	CHECK_EQ(system(command), 0);
	return 0;
}
