/* SPDX-License-Identifier: Apache-2.0 */
/* Queries that programs reach through a context. */
#pragma once

#include <endian.h>

#include "verbs.h"

#define RN_GUID htobe64(0x025244fffe4d414eull) /* locally administered */

int rn_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
		       struct ibv_device_attr_ex *attr, size_t size);
int rn_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size);
int rn_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);
