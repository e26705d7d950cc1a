/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The text of faults, read: see fault.h for its grammar.
 *
 * A field is known by its form, not by its place: a word is a kind, a call or a status, a time has a unit,
 * a chance a percent sign or a point.  So there is little to get wrong, and the message about a mistake says
 * what was read and what is expected.
 */
#include "faults/fault.h"
#include "faults/number.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct word {
	const char *name;
	int value;
};

static const struct word kinds[] = {
	{"any", RN_ANY},   {"send", RN_SEND},	  {"write", RN_WRITE},
	{"read", RN_READ}, {"atomic", RN_ATOMIC}, {"recv", RN_RECV},
	{NULL, 0},
};

static const struct word calls[] = {
	{"create", RN_CREATE}, {"alloc_pd", RN_ALLOC_PD}, {"reg_mr", RN_REG_MR},
	{"create_comp_channel", RN_CREATE_COMP_CHANNEL}, {"create_cq", RN_CREATE_CQ},
	{"create_qp", RN_CREATE_QP}, {"create_srq", RN_CREATE_SRQ}, {"create_ah", RN_CREATE_AH},
	{"alloc_mw", RN_ALLOC_MW}, {"alloc_dm", RN_ALLOC_DM}, {"open_xrcd", RN_OPEN_XRCD},
	{"alloc_td", RN_ALLOC_TD}, {"create_id", RN_CREATE_ID}, {"resolve_addr", RN_RESOLVE_ADDR},
	{"resolve_route", RN_RESOLVE_ROUTE}, {"connect", RN_CONNECT}, {"modify_qp", RN_MODIFY_QP},
	{"post_send", RN_POST_SEND}, {"post_recv", RN_POST_RECV}, {NULL, 0},
};

static const struct word statuses[] = {
	{"LOC_LEN_ERR", IBV_WC_LOC_LEN_ERR}, {"LOC_QP_OP_ERR", IBV_WC_LOC_QP_OP_ERR},
	{"LOC_PROT_ERR", IBV_WC_LOC_PROT_ERR}, {"WR_FLUSH_ERR", IBV_WC_WR_FLUSH_ERR},
	{"MW_BIND_ERR", IBV_WC_MW_BIND_ERR}, {"BAD_RESP_ERR", IBV_WC_BAD_RESP_ERR},
	{"LOC_ACCESS_ERR", IBV_WC_LOC_ACCESS_ERR}, {"REM_INV_REQ_ERR", IBV_WC_REM_INV_REQ_ERR},
	{"REM_ACCESS_ERR", IBV_WC_REM_ACCESS_ERR}, {"REM_OP_ERR", IBV_WC_REM_OP_ERR},
	{"RETRY_EXC_ERR", IBV_WC_RETRY_EXC_ERR}, {"RNR_RETRY_EXC_ERR", IBV_WC_RNR_RETRY_EXC_ERR},
	{"REM_ABORT_ERR", IBV_WC_REM_ABORT_ERR}, {"FATAL_ERR", IBV_WC_FATAL_ERR},
	{"RESP_TIMEOUT_ERR", IBV_WC_RESP_TIMEOUT_ERR}, {"GENERAL_ERR", IBV_WC_GENERAL_ERR}, {NULL, 0},
};

static const struct word errnos[] = {
	{"ENOMEM", ENOMEM}, {"EINVAL", EINVAL}, {"EPERM", EPERM},   {"EACCES", EACCES}, {"EAGAIN", EAGAIN},
	{"EBUSY", EBUSY},   {"EFAULT", EFAULT}, {"EIO", EIO},	    {"EMFILE", EMFILE}, {"ENODEV", ENODEV},
	{"ENOSPC", ENOSPC}, {"ENOSYS", ENOSYS}, {"EOPNOTSUPP", EOPNOTSUPP}, {"ETIMEDOUT", ETIMEDOUT},
	{"ECONNREFUSED", ECONNREFUSED},
	{"ENETUNREACH", ENETUNREACH}, {"EHOSTUNREACH", EHOSTUNREACH}, {NULL, 0},
};

static const struct word actions[] = {
	{"delay", RN_DELAY}, {"loss", RN_LOSS}, {"ackloss", RN_ACKLOSS}, {"dup", RN_DUP},
	{"rnr", RN_RNR},     {"fail", RN_FAIL}, {NULL, 0},
};

/* --- what is wrong ---------------------------------------------------------------------------- */

struct reader {
	struct rn_faults *to;
	const char *clause; /* the current one, without its blanks */
	char *error;
	size_t size;
};

static bool wrong(const struct reader *reader, const char *format, ...)
{
	va_list arguments;
	int length = snprintf(reader->error, reader->size, "%s: ", reader->clause);

	if (length < 0 || (size_t)length >= reader->size)
		return false;
	va_start(arguments, format);
	vsnprintf(reader->error + length, reader->size - length, format, arguments);
	va_end(arguments);
	return false;
}

/* "a, b, c" in a buffer that the next call reuses. */
static const char *names_of(const struct word *words)
{
	static _Thread_local char list[512];
	size_t length = 0;

	list[0] = 0;
	for (; words->name && length < sizeof(list); words++)
		length += snprintf(list + length, sizeof(list) - length, "%s%s", length ? ", " : "", words->name);
	return list;
}

static const struct word *find(const struct word *words, const char *name)
{
	for (; words->name; words++)
		if (!strcasecmp(words->name, name))
			return words;
	return NULL;
}

/* --- rules ---------------------------------------------------------------------------------------- */

static bool is_chance(const char *field)
{
	const char *point = strchr(field, '.');

	return isdigit((unsigned char)*field) && (strchr(field, '%') || (point && point[1] != '.'));
}

static bool read_chance(const struct reader *reader, const char *field, struct rn_rule *rule)
{
	uint64_t billionths;
	const char *at = rn_read_decimal(field, &billionths);

	if (at && *at == '%') {
		billionths /= 100;
		at++;
	}
	if (!at || *at || billionths > 1000000000)
		return wrong(reader, "\"%s\" is not a chance: write 5%% or 0.05, at most 100%%", field);
	rule->first = 0;
	rule->chance = (billionths << 32) / 1000000000;
	return true;
}

/* "3", "3+", "3..5", "*", or a chance. */
static bool read_range(const struct reader *reader, const char *field, struct rn_rule *rule)
{
	const char *at;

	if (!strcmp(field, "*")) {
		rule->first = 1;
		rule->last = UINT64_MAX;
		return true;
	}
	if (is_chance(field))
		return read_chance(reader, field, rule);
	at = rn_read_number(field, &rule->first);
	if (at)
		rule->last = rule->first;
	if (at && !strcmp(at, "+")) {
		rule->last = UINT64_MAX;
		at++;
	} else if (at && !strncmp(at, "..", 2)) {
		at = rn_read_number(at + 2, &rule->last);
	}
	if (!at || *at || !rule->first || rule->last < rule->first)
		return wrong(reader,
			     "\"%s\" does not say which ones: write 3 (the third), 3+, 3..5, 5%% (by chance) or *",
			     field);
	return true;
}

static const struct word *find_status(const char *name)
{
	return find(statuses, strncasecmp(name, "IBV_WC_", 7) ? name : name + 7);
}

static bool read_outcome(const struct reader *reader, const char *field, struct rn_rule *rule)
{
	bool is_call = rule->action == RN_CALL;
	const struct word *word = is_call ? find(errnos, field) : find_status(field);

	if (!word)
		return wrong(reader, "a %s can fail with one of %s; not with \"%s\"", is_call ? "call" : "request",
			     names_of(is_call ? errnos : statuses), field);
	rule->outcome = word->value;
	return true;
}

static bool read_kind(const struct reader *reader, const char *field, struct rn_rule *rule)
{
	const struct word *kind = find(kinds, field), *call = find(calls, field);

	if (!strcasecmp(field, "rtu")) {
		if (rule->action != RN_LOSS)
			return wrong(reader, "an RTU can only get lost: loss=rtu");
		rule->action = RN_CALL;
		rule->kind = RN_RTU;
		rule->outcome = ETIMEDOUT;
		return true;
	}
	if (kind && kind->value == RN_RECV && rule->action != RN_FAIL)
		return wrong(reader, "a receive can only fail; the other faults apply to requests");
	if (kind && rule->action == RN_RNR && (kind->value == RN_READ || kind->value == RN_ATOMIC))
		return wrong(reader, "only a send, or a write with immediate data, needs a receive");
	if (call && rule->action != RN_FAIL)
		return wrong(reader, "a call can only fail: fail=%s", field);
	if (call) {
		rule->action = RN_CALL;
		rule->kind = call->value;
		rule->outcome = rule->kind >= RN_RESOLVE_ADDR ? ETIMEDOUT : ENOMEM;
		return true;
	}
	if (!kind && rule->action == RN_FAIL)
		return wrong(reader,
			     "\"%s\" is neither a kind of request (any, send, write, read, atomic, recv) nor a call (%s)",
			     field, names_of(calls));
	if (!kind)
		return wrong(reader, "\"%s\" is not a kind of request: use one of %s%s", field, names_of(kinds),
			     rule->action == RN_LOSS ? "; or rtu, a message of the connection manager" : "");
	rule->kind = kind->value;
	return true;
}

enum { FIELDS_MAX = 4 };

static bool read_rule(struct reader *reader, enum rn_action action, char *fields[], int count)
{
	struct rn_rule rule = {.action = action, .first = 1, .last = UINT64_MAX, .tries = RN_TRIES_ALL};
	bool has_range = false;
	int i = 0;

	if (isalpha((unsigned char)fields[0][0]) && !(action == RN_FAIL && find_status(fields[0])) &&
	    !read_kind(reader, fields[i++], &rule))
		return false;
	for (; i < count; i++) {
		uint64_t tries;

		if (action == RN_DELAY && rn_read_times(fields[i], &rule.low, &rule.high))
			continue;
		if (action == RN_DELAY && (has_range || count == 1))
			return wrong(reader, "\"%s\" is not a time: write 50us, 2ms, 1.5s or 1ms..5ms", fields[i]);
		if (isalpha((unsigned char)fields[i][0]) && action == RN_FAIL) {
			if (!read_outcome(reader, fields[i], &rule))
				return false;
			continue;
		}
		if (!has_range) {
			if (!read_range(reader, fields[i], &rule))
				return false;
			has_range = true;
			continue;
		}
		if ((action != RN_LOSS && action != RN_ACKLOSS && action != RN_RNR) || rule.action == RN_CALL)
			return wrong(reader, "\"%s\" is one part too many", fields[i]);
		if (!rn_read_number(fields[i], &tries) || *rn_read_number(fields[i], &tries) || !tries || tries > 1000)
			return wrong(reader, "\"%s\" is not a number of tries from 1 to 1000", fields[i]);
		rule.tries = tries;
	}
	if (action == RN_DELAY && !rule.high)
		return wrong(reader, "the time is missing: for instance delay=50us or delay=send:3:1ms..5ms");
	if (rule.action == RN_FAIL && !rule.outcome)
		return wrong(reader, "the status is missing: for instance fail=send:3:REM_OP_ERR; use one of %s",
			     names_of(statuses));
	if (reader->to->count == RN_RULES_MAX)
		return wrong(reader, "there are more than %d rules", RN_RULES_MAX);
	rule.place = reader->to->places++;
	reader->to->rules[reader->to->count++] = rule;
	return true;
}

/* --- the other clauses ------------------------------------------------------------------------------ */

/* A fault of which a text has one. False: this is the second, which would replace the first without a word. */
static bool take_place(const struct reader *reader, bool is_there, unsigned *place)
{
	if (is_there)
		return wrong(reader, "there is another one before it, and a text has only one of these");
	*place = reader->to->places++;
	return true;
}

static bool read_link(struct reader *reader, char *fields[], int count)
{
	struct rn_faults *to = reader->to;
	uint64_t after, length = 0;

	if (!strcasecmp(fields[0], "up") && count == 1)
		return !to->link_down || wrong(reader, "the text takes the link down before");
	if (strcasecmp(fields[0], "down") || count > 3)
		return wrong(reader, "a link is up, down, down:AFTER or down:AFTER:FOR, for instance down:2s:500ms");
	if (!take_place(reader, to->link_down, &to->link_place))
		return false;
	to->link_down = true;
	for (int i = 1; i < count; i++) {
		uint64_t *ns = i == 1 ? &after : &length;
		const char *end = rn_read_time(fields[i], ns);

		if ((!end || *end) && strcmp(fields[i], "0"))
			return wrong(reader, "\"%s\" is not a time: write 50us, 2ms or 1.5s", fields[i]);
		if (!strcmp(fields[i], "0"))
			*ns = 0;
	}
	to->link_after_ns = count > 1 ? after : 0;
	to->link_for_ns = length;
	return true;
}

static bool read_clause(struct reader *reader, const char *name, char *fields[], int count)
{
	const struct word *action = find(actions, name);
	struct rn_faults *to = reader->to;
	const char *end;

	if (action)
		return read_rule(reader, action->value, fields, count);
	if (!strcasecmp(name, "link"))
		return read_link(reader, fields, count);
	if (!strcasecmp(name, "seed") || !strcasecmp(name, "overrun")) {
		uint64_t number, is_seed = !strcasecmp(name, "seed");

		end = count == 1 ? rn_read_number(fields[0], &number) : NULL;
		if (!end || *end || (!is_seed && !number))
			return wrong(reader, is_seed ? "a seed is a whole number"
						     : "must be the number of a completion: overrun=10");
		if (!is_seed && !take_place(reader, to->overrun != 0, &to->overrun_place))
			return false;
		*(is_seed ? &to->seed : &to->overrun) = number;
		return true;
	}
	if (!strcasecmp(name, "fatal")) {
		end = count != 1 ? NULL : strcasecmp(fields[0], "now") ? rn_read_time(fields[0], &to->fatal_after_ns) : "";
		if (!end || *end)
			return wrong(reader, "the device fails at once or after a time: fatal=now or fatal=50ms");
		if (!take_place(reader, to->is_fatal, &to->fatal_place))
			return false;
		to->is_fatal = true;
		return true;
	}
	if (!strcasecmp(name, "memlock")) {
		uint64_t bytes;

		if (count != 1 || !rn_read_size(fields[0], &bytes) || !bytes)
			return wrong(reader, "not a size of memory: write 65536, 64K, 16M or 1G");
		if (!take_place(reader, to->memlock != 0, &to->memlock_place))
			return false;
		to->memlock = bytes;
		return true;
	}
	return wrong(reader,
		     "unknown fault \"%s\"; use delay, loss, ackloss, dup, rnr, fail, overrun, "
		     "memlock, link, fatal or seed",
		     name);
}

/* Cut at each separator; the pieces, or -1 when there are too many. */
static int split(char *text, char separator, char *pieces[], int most)
{
	int count = 0;

	while (text) {
		char *next = strchr(text, separator);

		if (count == most)
			return -1;
		pieces[count++] = text;
		if (next)
			*next++ = 0;
		text = next;
	}
	return count;
}

enum { CLAUSE_MAX = 128 };

/* clause: without blanks; cut to pieces here. */
static bool read_text_of_clause(struct reader *reader, char *clause)
{
	char *value = strchr(clause, '='), *fields[FIELDS_MAX];
	int count;

	if (!value)
		return wrong(reader, "a fault is written name=value: loss=5%%");
	*value++ = 0;
	count = split(value, ':', fields, FIELDS_MAX);
	if (count < 0)
		return wrong(reader, "too many parts");
	for (int i = 0; i < count; i++)
		if (!*fields[i])
			return wrong(reader, "one of its parts is empty");
	return read_clause(reader, clause, fields, count);
}

/* Where it is in the text, without the blanks around it. */
static struct rn_span span_of(const char *text, const char *from, const char *to)
{
	while (isspace((unsigned char)*from))
		from++;
	while (isspace((unsigned char)to[-1]))
		to--;
	return (struct rn_span){.at = from - text, .length = to - from};
}

bool rn_faults_read(const char *text, struct rn_faults *faults, char *error, size_t size)
{
	char original[CLAUSE_MAX], clause[CLAUSE_MAX];
	struct reader reader = {faults, original, error, size};
	const char *start = text;

	*faults = (struct rn_faults){.seed = 1};
	while (*text) {
		const char *clause_at = text;
		size_t length = 0;

		for (; *text && *text != ','; text++) {
			if (isspace((unsigned char)*text))
				continue;
			if (length == CLAUSE_MAX - 1) {
				snprintf(error, size, "a fault has at most %d characters", CLAUSE_MAX - 1);
				return false;
			}
			original[length++] = *text;
		}
		original[length] = 0;
		if (length) {
			unsigned places = faults->places;

			memcpy(clause, original, length + 1);
			if (!read_text_of_clause(&reader, clause))
				return false;
			if (faults->places > places)
				faults->spans[places] = span_of(start, clause_at, text);
			faults->is_set = true;
		}
		if (*text)
			text++;
	}
	return true;
}
