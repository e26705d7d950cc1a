/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queue pairs' state machine as a table: which transition needs which attributes, and allows which.
 *
 * The table is the kernel's (it is the same for every adapter under Linux), row by row: a
 * transition without a row does not exist, and an attribute that the row does not name makes the
 * call fail.  So RESET -> ERR is refused, and CUR_STATE is allowed only where a row has it.
 *
 *     RESET --> INIT --> RTR --> RTS <--> SQD          any --> RESET
 *                                 ^                    any but RESET --> ERR
 *                                 |
 *                                SQE   (UC and UD, after a send that failed)
 */
#include "peer/peer.h"

enum kind { RC, UC, UD, XRC_SEND, XRC_RECV, KINDS };

static const struct transition {
	enum ibv_qp_state from, to;
	struct {
		int required, optional;
	} of[KINDS];
} transitions[] = {
	{IBV_QPS_RESET, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_INIT, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_RTR, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_RTS, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_SQD, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_SQE, IBV_QPS_RESET, {{0, 0}}},
	{IBV_QPS_ERR, IBV_QPS_RESET, {{0, 0}}},

	{IBV_QPS_INIT, IBV_QPS_ERR, {{0, 0}}},
	{IBV_QPS_RTR, IBV_QPS_ERR, {{0, 0}}},
	{IBV_QPS_RTS, IBV_QPS_ERR, {{0, 0}}},
	{IBV_QPS_SQD, IBV_QPS_ERR, {{0, 0}}},
	{IBV_QPS_SQE, IBV_QPS_ERR, {{0, 0}}},
	{IBV_QPS_ERR, IBV_QPS_ERR, {{0, 0}}},

#define CONNECTED_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define DATAGRAM_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)
	{IBV_QPS_RESET,
	 IBV_QPS_INIT,
	 {[RC] = {CONNECTED_INIT, 0},
	  [UC] = {CONNECTED_INIT, 0},
	  [UD] = {DATAGRAM_INIT, 0},
	  [XRC_SEND] = {CONNECTED_INIT, 0},
	  [XRC_RECV] = {CONNECTED_INIT, 0}}},
	{IBV_QPS_INIT,
	 IBV_QPS_INIT,
	 {[RC] = {0, CONNECTED_INIT},
	  [UC] = {0, CONNECTED_INIT},
	  [UD] = {0, DATAGRAM_INIT},
	  [XRC_SEND] = {0, CONNECTED_INIT},
	  [XRC_RECV] = {0, CONNECTED_INIT}}},

#define PATH (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define RESPONDER (IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define RTR_OPTIONAL (IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX)
	{IBV_QPS_INIT,
	 IBV_QPS_RTR,
	 {[RC] = {PATH | RESPONDER, RTR_OPTIONAL},
	  [UC] = {PATH, RTR_OPTIONAL},
	  [UD] = {0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
	  [XRC_SEND] = {PATH, RTR_OPTIONAL},
	  [XRC_RECV] = {PATH | RESPONDER, RTR_OPTIONAL}}},

#define REQUESTER (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
#define UC_OPTIONAL (IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE)
#define RC_OPTIONAL (UC_OPTIONAL | IBV_QP_MIN_RNR_TIMER)
#define UD_OPTIONAL (IBV_QP_CUR_STATE | IBV_QP_QKEY)
	{IBV_QPS_RTR,
	 IBV_QPS_RTS,
	 {[RC] = {IBV_QP_SQ_PSN | REQUESTER, RC_OPTIONAL},
	  [UC] = {IBV_QP_SQ_PSN, UC_OPTIONAL},
	  [UD] = {IBV_QP_SQ_PSN, UD_OPTIONAL},
	  [XRC_SEND] = {IBV_QP_SQ_PSN | REQUESTER, UC_OPTIONAL},
	  [XRC_RECV] = {IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, RC_OPTIONAL}}},
#define RUNNING                                                                                                     \
	{[RC] = {0, RC_OPTIONAL},                                                                                   \
	 [UC] = {0, UC_OPTIONAL},                                                                                   \
	 [UD] = {0, UD_OPTIONAL},                                                                                   \
	 [XRC_SEND] = {0, UC_OPTIONAL},                                                                             \
	 [XRC_RECV] = {0, RC_OPTIONAL}}
	{IBV_QPS_RTS, IBV_QPS_RTS, RUNNING},
	{IBV_QPS_SQD, IBV_QPS_RTS, RUNNING},
	{IBV_QPS_RTS,
	 IBV_QPS_SQD,
	 {[RC] = {0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
	  [UC] = {0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
	  [UD] = {0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
	  [XRC_SEND] = {0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
	  [XRC_RECV] = {0, IBV_QP_EN_SQD_ASYNC_NOTIFY}}},

#define SQD_OPTIONAL                                                                                                \
	(IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PATH_MIG_STATE)
	{IBV_QPS_SQD,
	 IBV_QPS_SQD,
	 {[RC] = {0, SQD_OPTIONAL | IBV_QP_PORT | REQUESTER | RESPONDER},
	  [UC] = {0, SQD_OPTIONAL},
	  [UD] = {0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
	  [XRC_SEND] = {0, SQD_OPTIONAL | IBV_QP_PORT | REQUESTER},
	  [XRC_RECV] = {0, SQD_OPTIONAL | IBV_QP_PORT | IBV_QP_TIMEOUT | RESPONDER}}},
	{IBV_QPS_SQE,
	 IBV_QPS_RTS,
	 {[UC] = {0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS}, [UD] = {0, IBV_QP_CUR_STATE | IBV_QP_QKEY}}},
};

static enum kind kind_of(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UC:
		return UC;
	case IBV_QPT_UD:
		return UD;
	case IBV_QPT_XRC_SEND:
		return XRC_SEND;
	case IBV_QPT_XRC_RECV:
		return XRC_RECV;
	default:
		return RC;
	}
}

bool rn_qp_may_move(enum ibv_qp_type type, enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
	for (size_t i = 0; i < sizeof(transitions) / sizeof(transitions[0]); i++) {
		int required, optional;

		if (transitions[i].from != from || transitions[i].to != to)
			continue;
		required = transitions[i].of[kind_of(type)].required;
		optional = transitions[i].of[kind_of(type)].optional;
		return (mask & required) == required && !(mask & ~(required | optional | IBV_QP_STATE));
	}
	return false;
}
