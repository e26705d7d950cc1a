/* SPDX-License-Identifier: Apache-2.0 */
/* The switches: what is said when they make no sense, and when they are read. */
#include "harness.h"

#include "base/settings.h"

/* Open and close the device; what was written to standard error meanwhile. 0, or errno. */
static int open_hearing(char *said, size_t size)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int ends[2], kept = dup(STDERR_FILENO), err;
	struct ibv_context *context;
	ssize_t length;

	CHECK(kept >= 0 && !pipe2(ends, O_NONBLOCK | O_CLOEXEC) && dup2(ends[1], STDERR_FILENO) >= 0);
	errno = 0;
	context = ibv_open_device(list[0]);
	err = context ? 0 : errno;
	CHECK(dup2(kept, STDERR_FILENO) >= 0);
	if (context)
		CHECK_EQ(ibv_close_device(context), 0);
	length = read(ends[0], said, size - 1);
	said[length > 0 ? length : 0] = 0;
	close(ends[0]);
	close(ends[1]);
	close(kept);
	ibv_free_device_list(list);
	return err;
}

static void expect_refusal(const char *name, const char *value, const char *why)
{
	char said[512];

	setenv(name, value, 1);
	CHECK_EQ(open_hearing(said, sizeof(said)), EINVAL);
	unsetenv(name);
	if (!strstr(said, name) || !strstr(said, why))
		fprintf(stderr, "it said: %s", said);
	CHECK(strstr(said, name) && strstr(said, value) && strstr(said, why));
}

/* A protection that was asked for by a wrong name isn't there, so nothing is; and the value may be a secret. */
static void strangers_are_refused(void)
{
	char said[512];

	setenv("RDMANET_SOFT_SECRTE", "open sesame", 1);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(open_hearing(said, sizeof(said)), EINVAL);
		CHECK(strstr(said, "unknown variable RDMANET_SOFT_SECRTE; did you mean RDMANET_SOFT_SECRET?"));
		CHECK(!strstr(said, "sesame"));
	}
	unsetenv("RDMANET_SOFT_SECRTE");
	expect_refusal("RDMANET_SOFT_DEFFER", "", "did you mean RDMANET_SOFT_DEFER?");
	expect_refusal("RDMANET_SOFT_TIME_WAIT", "", "did you mean RDMANET_SOFT_TIMEWAIT?");
	expect_refusal("RDMANET_SOFT_SECRET_FILES", "", "did you mean RDMANET_SOFT_SECRET_FILE?");
	expect_refusal("RDMANET_SOFT_", "", "did you mean RDMANET_SOFT_");
	expect_refusal("RDMANET_SOFT_THIS_IS_A_NAME_WITHOUT_AN_END_OR_NEARLY_SO_AND_IT_GOES_ON", "", "unknown variable");
	CHECK_EQ(open_hearing(said, sizeof(said)), 0);
}

/* What standard error is told can be asked for afterwards: all of it, and of the last time only. */
static void the_reason_is_kept(void)
{
	char said[512], error[512], start[8];

	setenv("RDMANET_SOFT_DEFER", "soon", 1);
	setenv("RDMANET_SOFT_CMA", "no", 1);
	CHECK_EQ(open_hearing(said, sizeof(said)), EINVAL);
	rdmanet_soft_settings_error(error, sizeof(error));
	CHECK(!strcmp(error, "RDMANET_SOFT_DEFER=soon: must be a whole number of microseconds; "
			     "RDMANET_SOFT_CMA=no: must be 1 or 0"));
	rdmanet_soft_settings_error(start, sizeof(start));
	CHECK(!strcmp(start, "RDMANET"));
	unsetenv("RDMANET_SOFT_DEFER");
	unsetenv("RDMANET_SOFT_CMA");
	CHECK_EQ(open_hearing(said, sizeof(said)), 0);
	rdmanet_soft_settings_error(error, sizeof(error));
	CHECK(!error[0]);
}

static void nonsense_is_refused(void)
{
	expect_refusal("RDMANET_SOFT_DEFER", "soon", "microseconds");
	expect_refusal("RDMANET_SOFT_DEFER", "-1", "microseconds");
	expect_refusal("RDMANET_SOFT_SILENCE", "5s", "milliseconds");
	expect_refusal("RDMANET_SOFT_CMA", "no", "1 or 0");
	expect_refusal("RDMANET_SOFT_LOG", "loud", "must be 0 or 1");
	expect_refusal("RDMANET_SOFT_RULES", "iwrap", "roce or iwarp");
	expect_refusal("RDMANET_SOFT_LINK", "ib", "ethernet or infiniband");
	setenv("RDMANET_SOFT_RULES", "iwarp", 1);
	expect_refusal("RDMANET_SOFT_LINK", "infiniband", "RULES=iwarp requires Ethernet");
	unsetenv("RDMANET_SOFT_RULES");
}

static void read_when_the_first_context_opens(void)
{
	struct ibv_context *context;

	setenv("RDMANET_SOFT_DEFER", "7", 1);
	setenv("RDMANET_SOFT_PADDED", "0", 1);
	context = open_soft();
	CHECK_EQ(rn_settings.defer_ns, 7000);
	CHECK(!rn_settings.padded);
	unsetenv("RDMANET_SOFT_DEFER");
	unsetenv("RDMANET_SOFT_PADDED");
	CHECK_EQ(ibv_close_device(open_soft()), 0);
	CHECK_EQ(rn_settings.defer_ns, 7000);
	CHECK_EQ(ibv_close_device(context), 0);
	CHECK_EQ(ibv_close_device(open_soft()), 0);
	CHECK_EQ(rn_settings.defer_ns, 0);
	CHECK(rn_settings.padded);
	CHECK_EQ(rn_settings.silence_ms, 5000);
}

int main(void)
{
	RUN(strangers_are_refused);
	RUN(the_reason_is_kept);
	RUN(nonsense_is_refused);
	RUN(read_when_the_first_context_opens);
	expect_live_nothing();
	return 0;
}
