/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the secret comes from: the environment, or a file that it names.
 *
 * A file is trusted if no other user could have written or read it: it belongs to the effective user or to root, and
 * has no permissions for others (root's may be readable for its group, which is how containers get secrets).  The
 * opened file is checked, not the path; symbolic links are followed, since mounted secrets are links.
 *
 * It is read once.  A process that has dropped its privileges, or whose file or environment has changed since, opens
 * the device with the secret that it had first; with another one it doesn't open it at all.
 */
#include "base/guard.h"
#include "base/secret.h"
#include "base/sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define VARIABLE "RDMANET_SOFT_SECRET"
#define HOW_TO_MAKE_ONE "make one with `rdmanet secret` or `openssl rand -hex 32`"

enum { DIGITS = 2 * RN_SECRET };

static uint8_t *_Atomic kept;
static char *kept_file; /* the file that it came from; NULL: the environment itself */

struct complaint {
	char *why;
	size_t size;
};

static int complain(const struct complaint *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int complain(const struct complaint *to, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(to->why, to->size, format, arguments);
	va_end(arguments);
	return EINVAL;
}

static int digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	c |= 0x20;
	return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Make a key of any text, as was once allowed: for the tests that show why it is not. */
static void digest(const char *text, size_t length, uint8_t key[RN_SECRET])
{
	struct rn_sha256 sha;

	rn_sha256_begin(&sha);
	rn_sha256_add(&sha, text, length);
	rn_sha256_end(&sha, key);
}

/* whose: its name for the error message. */
static int parse(const char *text, size_t length, const char *whose, uint8_t key[RN_SECRET], const struct complaint *to)
{
	if (!rn_guarded(RN_GUARD_SECRET_KEY)) {
		digest(text, length, key);
		return 0;
	}
	if (length != DIGITS)
		return complain(to, "%s: it has %zu characters; a secret is %d hexadecimal digits: " HOW_TO_MAKE_ONE, whose,
				length, DIGITS);
	for (int i = 0; i < RN_SECRET; i++) {
		int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);

		if (high < 0 || low < 0)
			return complain(to, "%s: character %d is not a hexadecimal digit; a secret is %d of them: " HOW_TO_MAKE_ONE,
					whose, 2 * i + (high < 0 ? 1 : 2), DIGITS);
		key[i] = (uint8_t)(high << 4 | low);
	}
	return 0;
}

/* Could another user have written or read it? */
static int check_file(const struct stat *file, const char *whose, const struct complaint *to)
{
	mode_t others = file->st_uid || !geteuid() ? S_IRWXG | S_IRWXO : S_IWGRP | S_IXGRP | S_IRWXO;

	if (!S_ISREG(file->st_mode))
		return complain(to, "%s: not a regular file", whose);
	if (file->st_uid && file->st_uid != geteuid())
		return complain(to, "%s: owned by user %u; the owner must be this user (%u) or root", whose,
				file->st_uid, geteuid());
	if (file->st_mode & others)
		return complain(to, "%s: its mode is %o, which gives others access: chmod 600", whose,
				(unsigned)(file->st_mode & 07777));
	return 0;
}

static int read_file(const char *path, uint8_t key[RN_SECRET], const struct complaint *to)
{
	char text[DIGITS + 2], whose[256]; /* with a newline, and one character too many */
	struct stat file;
	ssize_t length = 0, got;
	int err, fd;

	snprintf(whose, sizeof(whose), VARIABLE "_FILE=%s", path);
	fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC); /* whatever it is: this doesn't block */
	if (fd < 0 || fstat(fd, &file)) {
		err = errno == EACCES
			      ? complain(to, "%s: user %u may not read it: chown it to this user, or let root's be read by its group",
					 whose, geteuid())
			      : complain(to, "%s: %s", whose, strerror(errno));
		goto out;
	}
	err = check_file(&file, whose, to);
	if (err)
		goto out;
	while (length < (ssize_t)sizeof(text) && (got = read(fd, text + length, sizeof(text) - (size_t)length)) > 0)
		length += got;
	if (length && length < (ssize_t)sizeof(text) && text[length - 1] == '\n')
		length--;
	if (length == (ssize_t)sizeof(text))
		err = complain(to,
			       "%s: it holds more than a secret, which is one line of %d hexadecimal digits: " HOW_TO_MAKE_ONE, whose,
			       DIGITS);
	else
		err = parse(text, (size_t)length, whose, key, to);
	explicit_bzero(text, sizeof(text));
out:
	if (fd >= 0)
		close(fd);
	return err;
}

/* Keep it for the life of the process. */
static int keep(const uint8_t key[RN_SECRET], const char *file, const struct complaint *to)
{
	long page = sysconf(_SC_PAGESIZE);
	char *name = file ? strdup(file) : NULL;
	uint8_t *place = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (place == MAP_FAILED || (file && !name)) {
		if (place != MAP_FAILED)
			munmap(place, (size_t)page);
		free(name);
		complain(to, VARIABLE ": out of memory");
		return ENOMEM;
	}
	madvise(place, (size_t)page, MADV_DONTDUMP);
	memcpy(place, key, RN_SECRET);
	mprotect(place, (size_t)page, PROT_READ);
	kept_file = name;
	atomic_store(&kept, place);
	return 0;
}

int rn_secret_read(char *why, size_t size)
{
	const char *text = getenv(VARIABLE), *file = getenv(VARIABLE "_FILE");
	const struct complaint to = {why, size};
	const uint8_t *had;
	uint8_t key[RN_SECRET];
	int err;

	if (!rn_guarded(RN_GUARD_SECRET_KEPT))
		atomic_store(&kept, NULL);
	had = rn_secret_key();
	if (text && file)
		return complain(&to, VARIABLE " and " VARIABLE "_FILE are both set: unset one of them");
	if ((!text && !file) || (file && kept_file && !strcmp(file, kept_file)))
		return 0;
	err = file ? read_file(file, key, &to) : parse(text, strlen(text), VARIABLE, key, &to);
	if (!err && had && memcmp(had, key, RN_SECRET))
		err = complain(&to,
			       VARIABLE "%s: this process has already read another secret and keeps it: start a new process",
			       file ? "_FILE" : "");
	if (!err && !had)
		err = keep(key, file, &to);
	explicit_bzero(key, sizeof(key));
	return err;
}

const uint8_t *rn_secret_key(void)
{
	return atomic_load(&kept);
}
