/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The version of what the device says to other processes. One number for all of it, so that two processes learn from
 * the first message of a connection whether they will understand each other to its end:
 *
 *   - the connection manager's messages (cm/wire.h): the first of a connection that a program makes by rdma_cm,
 *   - frames by TCP (tcp/frames.h): the first of queue pairs that were connected by hand,
 *   - messages of links (peer/peers.h), and whatever lies in memory that linked processes share (shm/, objects/),
 *   - datagrams (datagram/wire.c).
 *
 * It moves by one with every release that changes any of these so that an older process would misunderstand it, if only
 * in a layout or in the meaning of a field. Versions are compared for equality: there are no others to be compatible
 * with.  The streams' own protocol has its own number (VERSION in credit.py), because it is spoken over adapters, too;
 * it moves by the same rule.
 *
 * A peer of another version is refused with the first message, and both sides log both versions. Hence some things never
 * change, whatever the version:
 *
 *   - struct rn_cm_header and struct rn_cm_rej: an unknown version is answered by REJ with RN_REJ_VERSION;
 *   - the first eight bytes of struct rn_tcp_hello, and all of struct rn_tcp_greeting: it is answered by
 *     RN_GREETING_VERSION with our version;
 *   - struct rn_link_message: it is answered by RN_LINK_REFUSED with RN_REFUSED_VERSION;
 *   - magic and version of a datagram, which is dropped: nobody answers one.
 */
#pragma once

#ifndef RN_WIRE_VERSION /* the tests build another one */
#define RN_WIRE_VERSION 8
#endif
