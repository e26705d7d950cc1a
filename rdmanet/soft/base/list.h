/* SPDX-License-Identifier: Apache-2.0 */
/* An intrusive, doubly linked, circular list: the head is an item, too. */
#pragma once

#include <stdbool.h>

struct rn_list {
	struct rn_list *next, *prev;
};

static inline void rn_list_init(struct rn_list *head)
{
	head->next = head->prev = head;
}
static inline void rn_list_add(struct rn_list *head, struct rn_list *item)
{
	item->prev = head->prev;
	item->next = head;
	head->prev->next = item;
	head->prev = item;
}
static inline void rn_list_del(struct rn_list *item)
{
	item->prev->next = item->next;
	item->next->prev = item->prev;
	item->next = item->prev = item;
}
static inline bool rn_list_empty(const struct rn_list *head)
{
	return head->next == head;
}
