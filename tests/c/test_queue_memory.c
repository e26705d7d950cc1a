/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of send queues: some is kept for the next queue pair of the same size, and none when the device is closed. */
#include "harness.h"
#include "objects/qp.h"

#include <sys/mman.h>

enum { MANY = 40, MARK = 1000 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static struct ibv_qp *make(uint32_t sends)
{
	struct ibv_qp_init_attr attr = {.cap = {.max_send_wr = sends, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
					.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq};
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	CHECK(qp);
	return qp;
}

static bool is_there(void *page)
{
	unsigned char resident;

	return !mincore((void *)((uintptr_t)page & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1)), 1, &resident);
}

static void open_all(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(devices && (context = ibv_open_device(devices[0])));
	ibv_free_device_list(devices);
	CHECK((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 4, NULL, NULL, 0)));
}

static void close_all(void)
{
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
}

static void the_next_one_gets_it(void)
{
	struct ibv_qp *qp = make(64);
	char *memory = rn_qp(qp)->sq;

	memory[MARK] = 1;
	CHECK(!ibv_destroy_qp(qp));
	qp = make(64);
	CHECK(rn_qp(qp)->sq == memory && memory[MARK]);
	CHECK(!ibv_destroy_qp(qp));
	qp = make(128); /* of another size: it begins with zeros, in as much memory as it needs */
	memory = rn_qp(qp)->sq;
	CHECK(!memory[MARK] && !memory[(size_t)rn_qp(qp)->sq_stride * 128 - 1]);
	CHECK(!ibv_destroy_qp(qp));
}

static void few_are_kept(void)
{
	struct ibv_qp *qps[MANY];
	char *memory[MANY];
	unsigned kept = 0;

	for (int i = 0; i < MANY; i++)
		memory[i] = rn_qp(qps[i] = make(64))->sq;
	for (int i = 0; i < MANY; i++)
		CHECK(!ibv_destroy_qp(qps[i]));
	for (int i = 0; i < MANY; i++)
		kept += is_there(memory[i]);
	CHECK(kept && kept < MANY);
}

static void large_ones_are_not(void)
{
	struct ibv_qp *qp = make(1024);
	char *memory = rn_qp(qp)->sq;

	CHECK(is_there(memory));
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!is_there(memory));
}

static void none_is_left_at_the_end(void)
{
	struct ibv_qp *qp = make(64);
	char *memory = rn_qp(qp)->sq;

	CHECK(!ibv_destroy_qp(qp));
	CHECK(is_there(memory));
	close_all();
	CHECK(!is_there(memory));
	open_all();
}

int main(void)
{
	open_all();
	RUN(the_next_one_gets_it);
	RUN(few_are_kept);
	RUN(large_ones_are_not);
	RUN(none_is_left_at_the_end);
	close_all();
	return 0;
}
