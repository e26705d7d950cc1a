/* SPDX-License-Identifier: Apache-2.0 */
/* Names of hosts and services: rdma_getaddrinfo(), by getaddrinfo(). */
#include <netdb.h>
#include <stdlib.h>

#include "cm/cm.h"

/* One block: the answer and, behind it, its addresses. */
struct answer {
	struct rdma_addrinfo info;
	struct sockaddr_storage src, dst;
};

/* Copy what the hints contain beside addresses. */
static struct answer *answer_by(const struct rdma_addrinfo *hints, int family)
{
	struct answer *answer = calloc(1, sizeof *answer);
	struct rdma_addrinfo *info = &answer->info;

	if (!answer)
		return NULL;
	info->ai_flags = hints ? hints->ai_flags : 0;
	info->ai_family = family;
	info->ai_port_space = hints ? hints->ai_port_space : 0;
	info->ai_qp_type = hints ? hints->ai_qp_type : 0;
	if (!info->ai_port_space) /* one follows from the other */
		info->ai_port_space = info->ai_qp_type == IBV_QPT_UD ? RDMA_PS_UDP : RDMA_PS_TCP;
	if (!info->ai_qp_type)
		info->ai_qp_type = info->ai_port_space == RDMA_PS_UDP || info->ai_port_space == RDMA_PS_IPOIB ? IBV_QPT_UD
													      : IBV_QPT_RC;
	return answer;
}

static void set_src(struct answer *answer, const struct sockaddr *address, socklen_t length)
{
	memcpy(&answer->src, address, length);
	answer->info.ai_src_addr = (struct sockaddr *)&answer->src;
	answer->info.ai_src_len = length;
}

static void set_dst(struct answer *answer, const struct sockaddr *address, socklen_t length)
{
	memcpy(&answer->dst, address, length);
	answer->info.ai_dst_addr = (struct sockaddr *)&answer->dst;
	answer->info.ai_dst_len = length;
}

/* A found address is the one to listen on, or the destination; the source is the hint's, if it has one. */
static struct rdma_addrinfo *answer_of(const struct addrinfo *found, const struct rdma_addrinfo *hints)
{
	struct answer *answer = answer_by(hints, found->ai_family);

	if (!answer)
		return NULL;
	if (answer->info.ai_flags & RAI_PASSIVE)
		set_src(answer, found->ai_addr, found->ai_addrlen);
	else
		set_dst(answer, found->ai_addr, found->ai_addrlen);
	if (!answer->info.ai_src_len && hints && hints->ai_src_len)
		set_src(answer, hints->ai_src_addr, hints->ai_src_len);
	return &answer->info;
}

/* Nothing to look up: take the addresses that the hints contain. */
static struct rdma_addrinfo *answer_of_hints(const struct rdma_addrinfo *hints)
{
	struct answer *answer = answer_by(hints, hints->ai_family);

	if (!answer)
		return NULL;
	if (hints->ai_src_len)
		set_src(answer, hints->ai_src_addr, hints->ai_src_len);
	if (hints->ai_dst_len)
		set_dst(answer, hints->ai_dst_addr, hints->ai_dst_len);
	return &answer->info;
}

/* If a name must be resolved, this call waits, as the real one does. */
RN_EXPORT int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
		     struct rdma_addrinfo **result)
{
	struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found, *each;
	struct rdma_addrinfo *first = NULL, **end = &first;
	int rc;

	if (hints && (hints->ai_src_len > sizeof(struct sockaddr_storage) ||
		      hints->ai_dst_len > sizeof(struct sockaddr_storage)))
		return rn_cm_error(EINVAL);
	if (!node && !service) {
		if (!hints)
			return rn_cm_error(EINVAL);
		*result = answer_of_hints(hints);
		return *result ? 0 : rn_cm_error(ENOMEM);
	}
	if (hints) {
		want.ai_flags = (hints->ai_flags & RAI_PASSIVE ? AI_PASSIVE : 0) |
				(hints->ai_flags & RAI_NUMERICHOST ? AI_NUMERICHOST : 0);
		want.ai_family = hints->ai_flags & RAI_FAMILY || hints->ai_family ? hints->ai_family : AF_UNSPEC;
	}
	rc = getaddrinfo(node, service, &want, &found);
	if (rc)
		return rn_cm_error(rc == EAI_SYSTEM ? errno : rc == EAI_MEMORY ? ENOMEM : EADDRNOTAVAIL);
	for (each = found; each; each = each->ai_next) {
		if (!rn_cm_address_length(each->ai_addr))
			continue;
		*end = answer_of(each, hints);
		if (!*end)
			break;
		end = &(*end)->ai_next;
	}
	freeaddrinfo(found);
	if (each || !first) {
		rdma_freeaddrinfo(first);
		return rn_cm_error(each ? ENOMEM : EADDRNOTAVAIL);
	}
	*result = first;
	return 0;
}

RN_EXPORT void rdma_freeaddrinfo(struct rdma_addrinfo *info)
{
	while (info) {
		struct rdma_addrinfo *next = info->ai_next;

		free(RN_OWNER(info, struct answer, info));
		info = next;
	}
}
