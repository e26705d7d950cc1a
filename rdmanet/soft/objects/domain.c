/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Protection domains, thread domains and parent domains.
 *
 * A protection domain is a number: keys, queue pairs and windows with the same number fit together.
 * A number is never reused, since quarantined objects are found by it.
 *
 * A thread domain is a promise of the program (one thread at a time) that we have no use for: our locks cost less than
 * checking whether they are needed.  A parent domain is a protection domain by another name, with such a promise or an
 * allocator; so it has the number of the domain that it is made from, and may be used in its place.  The allocator is
 * never called: what adapters would allocate with it (rings, doorbells) is in our arena, where peers can see it.
 */
#include <stdlib.h>

#include "objects/pd.h"

struct rn_td {
	struct ibv_td td;
	unsigned users;
	struct rn_list link;
};

static uint32_t last_pd; /* with rn_process_lock held */

static struct rn_td *rn_td(struct ibv_td *td)
{
	return container_of(td, struct rn_td, td);
}

RN_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *ibv_context)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_pd *pd;

	if (rn_is_foreign(ibv_context)) {
		errno = ENODEV;
		return NULL;
	}
	errno = rn_device_check(context, RN_ALLOC_PD);
	pd = errno ? NULL : calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->pd.context = ibv_context;
	pthread_mutex_lock(&context->mutex);
	pthread_mutex_lock(&rn_process_lock);
	pd->number = pd->pd.handle = ++last_pd; /* never reused: what is quarantined is found by it */
	pthread_mutex_unlock(&rn_process_lock);
	rn_list_add(&context->pds, &pd->link);
	pthread_mutex_unlock(&context->mutex);
	return &pd->pd;
}

struct ibv_pd *rn_alloc_parent_domain(struct ibv_context *ibv_context, struct ibv_parent_domain_init_attr *attr)
{
	enum { KNOWN = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
	struct rn_context *context = rn_context(ibv_context);
	struct rn_pd *pd;

	errno = rn_is_foreign(ibv_context)                              ? ENODEV
		: attr->comp_mask & ~(uint32_t)KNOWN                    ? EOPNOTSUPP
		: !attr->pd || attr->pd->context != ibv_context         ? EINVAL
		: attr->td && attr->td->context != ibv_context          ? EINVAL
		: attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS && (!attr->alloc || !attr->free) ? EINVAL
									: rn_device_check(context, RN_ALLOC_PD);
	if (errno)
		return NULL;
	pd = calloc(1, sizeof(*pd));
	if (!pd)
		return NULL;
	pd->pd = (struct ibv_pd){.context = ibv_context, .handle = attr->pd->handle};
	pd->number = rn_pd(attr->pd)->number;
	pd->parent = attr->pd;
	pd->td = attr->td;
	pthread_mutex_lock(&context->mutex);
	rn_pd(attr->pd)->users++;
	if (attr->td)
		rn_td(attr->td)->users++;
	rn_list_add(&context->pds, &pd->link);
	pthread_mutex_unlock(&context->mutex);
	return &pd->pd;
}

RN_EXPORT int ibv_dealloc_pd(struct ibv_pd *ibv_pd)
{
	struct rn_context *context = rn_context(ibv_pd->context);
	struct rn_pd *pd = rn_pd(ibv_pd);

	if (rn_is_foreign(ibv_pd->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	if (pd->users) {
		pthread_mutex_unlock(&context->mutex);
		return EBUSY;
	}
	if (pd->parent)
		rn_pd(pd->parent)->users--;
	if (pd->td)
		rn_td(pd->td)->users--;
	rn_list_del(&pd->link);
	pthread_mutex_unlock(&context->mutex);
	free(pd);
	return 0;
}

struct ibv_td *rn_alloc_td(struct ibv_context *ibv_context, struct ibv_td_init_attr *attr)
{
	struct rn_context *context = rn_context(ibv_context);
	struct rn_td *td;

	errno = rn_is_foreign(ibv_context) ? ENODEV : attr->comp_mask ? EINVAL : rn_device_check(context, RN_ALLOC_TD);
	td = errno ? NULL : calloc(1, sizeof(*td));
	if (!td)
		return NULL;
	td->td.context = ibv_context;
	pthread_mutex_lock(&context->mutex);
	rn_list_add(&context->tds, &td->link);
	pthread_mutex_unlock(&context->mutex);
	return &td->td;
}

int rn_dealloc_td(struct ibv_td *ibv_td)
{
	struct rn_context *context = rn_context(ibv_td->context);
	struct rn_td *td = rn_td(ibv_td);
	bool is_used;

	if (rn_is_foreign(ibv_td->context))
		return 0;
	pthread_mutex_lock(&context->mutex);
	is_used = td->users;
	if (!is_used)
		rn_list_del(&td->link);
	pthread_mutex_unlock(&context->mutex);
	if (is_used)
		return EBUSY;
	free(td);
	return 0;
}

/* Children first: parents are older, so they stand before them. */
void rn_domain_destroy_all(struct rn_context *context)
{
	while (!rn_list_empty(&context->pds))
		ibv_dealloc_pd(&container_of(context->pds.prev, struct rn_pd, link)->pd);
	while (!rn_list_empty(&context->tds))
		rn_dealloc_td(&container_of(context->tds.next, struct rn_td, link)->td);
}
