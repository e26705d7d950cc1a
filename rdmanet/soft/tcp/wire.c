/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes in and out of a stream's socket, which never blocks.  tcp.h has the picture.
 */
#include <stdlib.h>
#include <sys/socket.h>

#include "tcp/tcp.h"

enum { INPUT_BEGIN = RN_PIGGYBACK_MAX };

/* --- in ------------------------------------------------------------------------------------------------- */

static bool prepare_input(struct rn_tcp *stream)
{
	uint32_t length = rn_tcp_available(stream);

	if (!stream->input)
		stream->input = malloc(INPUT_BEGIN + RN_TCP_INPUT);
	if (!stream->input)
		return false;
	if (!length) {
		stream->input_at = stream->input_end = INPUT_BEGIN;
	} else if (stream->input_at > INPUT_BEGIN) {
		memmove(stream->input + INPUT_BEGIN, stream->input + stream->input_at, length);
		stream->input_at = INPUT_BEGIN;
		stream->input_end = INPUT_BEGIN + length;
	}
	return true;
}

ssize_t rn_tcp_read(struct rn_tcp *stream, const struct iovec *direct, int count, size_t length, bool *fault)
{
	struct iovec to[RN_MAX_SGE + 1];
	struct msghdr message = {.msg_iov = to, .msg_iovlen = count + 1};
	size_t room;
	ssize_t got;

	if (!prepare_input(stream))
		return RN_TCP_ENDED; /* without memory it can't go on */
	room = INPUT_BEGIN + RN_TCP_INPUT - stream->input_end;
	for (int i = 0; i < count; i++)
		to[i] = direct[i];
	to[count] = (struct iovec){stream->input + stream->input_end, room};
	do
		got = count ? recvmsg(stream->source.fd, &message, MSG_DONTWAIT)
			    : recv(stream->source.fd, to[0].iov_base, room, MSG_DONTWAIT); /* cheaper */
	while (got < 0 && errno == EINTR);
	if (stream->qp)
		stream->qp->count.syscalls++;
	if (got < 0 && errno == EFAULT && fault) {
		*fault = true;
		return RN_TCP_NOTHING;
	}
	if (got < 0 && errno == EAGAIN) {
		stream->drained = true;
		return RN_TCP_NOTHING;
	}
	if (got <= 0) {
		stream->hung_up = !got || errno == ECONNRESET;
		return RN_TCP_ENDED;
	}
	stream->drained = (size_t)got < length + room;
	if ((size_t)got > length)
		stream->input_end += got - length;
	return got;
}

const char *rn_tcp_take(struct rn_tcp *stream, uint32_t length)
{
	const char *data = stream->input + stream->input_at;

	stream->input_at += length;
	return data;
}

bool rn_tcp_put_back(struct rn_tcp *stream, const char *request, uint32_t length)
{
	if (!prepare_input(stream))
		return false;
	stream->input_at -= length;
	memcpy(stream->input + stream->input_at, request, length);
	return true;
}

/* --- out ------------------------------------------------------------------------------------------------ */

bool rn_tcp_put(struct rn_tcp *stream, const void *data, uint32_t length)
{
	if (stream->output_at) {
		memmove(stream->output, stream->output + stream->output_at, stream->output_end - stream->output_at);
		stream->output_end -= stream->output_at;
		stream->output_at = 0;
	}
	if (length > rn_tcp_room(stream))
		return false;
	memcpy(stream->output + stream->output_end, data, length);
	stream->output_end += length;
	return true;
}

ssize_t rn_tcp_write(struct rn_tcp *stream, const struct iovec *more, int count, bool *fault)
{
	struct iovec from[64];
	struct msghdr message = {.msg_iov = from};
	size_t pending = stream->output_end - stream->output_at;
	ssize_t sent;

	if (pending)
		from[message.msg_iovlen++] = (struct iovec){stream->output + stream->output_at, pending};
	for (int i = 0; i < count && message.msg_iovlen < sizeof(from) / sizeof(from[0]); i++)
		from[message.msg_iovlen++] = more[i];
	do
		sent = message.msg_iovlen > 1 ? sendmsg(stream->source.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
					      : send(stream->source.fd, from[0].iov_base, from[0].iov_len,
						     MSG_DONTWAIT | MSG_NOSIGNAL); /* cheaper */
	while (sent < 0 && errno == EINTR);
	if (stream->qp)
		stream->qp->count.syscalls++;
	if (sent < 0 && errno == EFAULT && fault) {
		*fault = true;
		return RN_TCP_NOTHING;
	}
	if (sent < 0 && errno == EAGAIN) {
		stream->wants_out = true;
		return RN_TCP_NOTHING;
	}
	if (sent < 0) {
		stream->hung_up = errno == EPIPE || errno == ECONNRESET;
		return RN_TCP_ENDED;
	}
	stream->wants_out = false;
	if ((size_t)sent < pending) {
		stream->output_at += sent;
		stream->wants_out = true;
		return RN_TCP_NOTHING;
	}
	stream->output_at = stream->output_end = 0;
	return sent - pending;
}

bool rn_tcp_flush(struct rn_tcp *stream)
{
	if (stream->output_at != stream->output_end)
		rn_tcp_write(stream, NULL, 0, NULL);
	return stream->output_at == stream->output_end;
}
