/* SPDX-License-Identifier: Apache-2.0 */
/* What a process has one of.  That another process has died is noticed in peer/peer.c. */
#include "base/fence.h"
#include "base/process.h"

#ifdef RN_TSAN
_Atomic unsigned rn_fence_word;
#endif

unsigned rn_process;
pthread_mutex_t rn_process_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t rn_contexts_lock = PTHREAD_MUTEX_INITIALIZER;
struct rn_list rn_contexts = {&rn_contexts, &rn_contexts};

void rn_process_forked(void)
{
	rn_process++;
	pthread_mutex_init(&rn_process_lock, NULL);
	pthread_mutex_init(&rn_contexts_lock, NULL);
	rn_list_init(&rn_contexts);
}
