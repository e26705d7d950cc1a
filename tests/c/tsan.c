/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For builds with ThreadSanitizer, which knows threads by their pthread_t and never forgets those of a process that
 * was forked.  In the child glibc gives the first new thread the stack, and with it the name, of a thread that the
 * parent had: "dup thread with used id", and the child is dead.  So here each thread has a stack that nobody had
 * before and nobody gets after it.  (The linker sends the calls of pthread_create here: --wrap.)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>

enum { STACK = 8 << 20 }; /* a reservation: what is not touched costs nothing */

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *argument)
{
	void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
	pthread_attr_t with_stack;
	int detached = PTHREAD_CREATE_JOINABLE, err;

	if (stack == MAP_FAILED)
		return 12;
	if (attr)
		pthread_attr_getdetachstate(attr, &detached);
	pthread_attr_init(&with_stack);
	pthread_attr_setdetachstate(&with_stack, detached);
	pthread_attr_setstack(&with_stack, stack, STACK);
	err = __real_pthread_create(thread, &with_stack, start, argument);
	pthread_attr_destroy(&with_stack);
	return err;
}
