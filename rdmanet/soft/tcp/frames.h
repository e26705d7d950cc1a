/* SPDX-License-Identifier: Apache-2.0 */
/* What goes over the wire of a stream; tcp.h says how. */
#pragma once

#include "base/version.h"

#include <assert.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and so is every machine this was made for"
#endif

enum {
	RN_TCP_MAGIC = 0x53524e52, /* "RNRS" */
	RN_FRAME_BYTES = 256 * 1024, /* a longer message is split, so that it can be stopped */
	RN_PIGGYBACK_BYTES = 1024,       /* the longest message that can be piggybacked */
};

/* Before the first frame; see hello.c. */
enum { RN_TCP_HELLO_SECRET = 1 /* the sender has a secret, and requires the same of its peer */ };
struct rn_tcp_hello {
	uint32_t magic;
	uint16_t version; /* RN_WIRE_VERSION */
	uint16_t flags;
	uint32_t source_qpn, dest_qpn, psn, reserved2;
	uint8_t source_gid[16];
	uint8_t nonce[32];
};
static_assert(sizeof(struct rn_tcp_hello) == 72, "no padding on the wire");

enum rn_greeting {
	RN_GREETING_WELCOME = 1,
	RN_GREETING_CHALLENGE,
	RN_GREETING_REFUSED, /* that queue pair is not here, or not yet */
	RN_GREETING_SECRET,  /* the secrets differ, or only one side has one */
	RN_GREETING_VERSION, /* the HELLO is of another version */
};
struct rn_tcp_greeting {
	uint32_t magic;
	uint8_t kind;
	uint8_t reserved;
	uint16_t version;  /* of a VERSION: the responder's */
	uint8_t nonce[32]; /* of a CHALLENGE */
	uint8_t proof[32]; /* of the WELCOME after a CHALLENGE: the responder knows the secret too */
};
static_assert(sizeof(struct rn_tcp_greeting) == 72, "no padding on the wire");

/* From requester to responder: followed by length bytes of the message, from offset on. */
enum rn_frame_kind {
	RN_FRAME_SEND = 1,
	RN_FRAME_SEND_IMM,
	RN_FRAME_SEND_INV,
	RN_FRAME_WRITE,
	RN_FRAME_WRITE_IMM,
	RN_FRAME_READ,
	RN_FRAME_SWAP,
	RN_FRAME_ADD,
	RN_FRAME_NOTHING, /* lost by fault injection; sent so that the count stays right */
	RN_FRAME_HERE, /* the first frame: the requester has accepted the responder */
	RN_FRAME_BYE,
	RN_FRAME_REFUSED, /* by fault injection: answered with the status in imm, whatever the request */
	RN_FRAME_KINDS,
};
enum { RN_FRAME_SOLICITED = 1, RN_FRAME_BEHIND_PIGGYBACK = 2, RN_FRAME_FLAGS = 3 };
struct rn_tcp_frame {
	uint8_t kind;
	uint8_t flags;
	uint16_t reserved;
	uint32_t serial; /* of the request */
	uint32_t offset, length, total;
	uint32_t imm; /* as the program gave it, the key to invalidate, or the status of a REFUSED */
	uint32_t rkey;
	uint32_t ack; /* how many requests of the other direction were executed */
	uint64_t addr;
	uint64_t compare_add, swap;
	uint32_t srqn;
	uint32_t skipped; /* how many requests before this one have no frame, because they concern the requester only */
};
static_assert(sizeof(struct rn_tcp_frame) == 64, "no padding on the wire");
enum { RN_PIGGYBACK_MAX = sizeof(struct rn_tcp_frame) + RN_PIGGYBACK_BYTES };

/* From responder to requester: followed by length bytes of a READ, eight of an atomic, or a whole piggybacked frame. */
enum rn_answer_kind {
	RN_ANSWER_ACK = 1, /* serial: how many have been executed */
	RN_ANSWER_RNR,     /* code: the RNR timer's */
	RN_ANSWER_NAK,     /* code: the status for the requester's completion */
	RN_ANSWER_READ,
	RN_ANSWER_ATOMIC,
	RN_ANSWER_BYE,
	RN_ANSWER_PIGGYBACK, /* not an answer but a piggybacked request: see piggyback.c */
};
struct rn_tcp_answer {
	uint8_t kind;
	uint8_t code;
	uint16_t reserved;
	uint32_t serial;
	uint32_t length;
	uint32_t reserved2;
};
static_assert(sizeof(struct rn_tcp_answer) == 16, "no padding on the wire");
