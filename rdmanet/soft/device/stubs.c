/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What programs that were linked against rdma-core need to load, beside the verbs themselves.
 *
 * Distributions bind at start (BIND_NOW): every symbol that a program or one of its libraries imports must be
 * there, in the right version, called or not.  perftest, for one, is linked against the providers libmlx5 and
 * libefa, and these import what libibverbs keeps for providers, under IBVERBS_PRIVATE_34 (the private ABI of
 * rdma-core 34 to 55).  None of it is ever called: a provider is handed no device here.  So
 *
 *     verbs_register_driver_34    the provider's constructor: accepted, and forgotten
 *     the rest                    refuse, if they are called after all
 *
 * Besides, helpers that tools use: sysfs, the type of a GID, and the table of rates.
 */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/process.h"
#include "peer/peer.h"

/* --- for providers ------------------------------------------------------------------------------------------- */

/* Their real types are rdma-core's business: no caller of ours passes anything, or looks at more than this. */
#define REFUSED(name)             \
	RN_EXPORT int name(void); \
	RN_EXPORT int name(void)  \
	{                         \
		return EOPNOTSUPP; \
	}

#define REFUSED_POINTER(name)       \
	RN_EXPORT void *name(void); \
	RN_EXPORT void *name(void)  \
	{                           \
		errno = EOPNOTSUPP; \
		return NULL;        \
	}

#define IGNORED(name)              \
	RN_EXPORT void name(void); \
	RN_EXPORT void name(void)  \
	{                          \
	}

RN_EXPORT bool verbs_allow_disassociate_destroy;

IGNORED(__verbs_log) IGNORED(verbs_init_cq) IGNORED(verbs_register_driver_34) IGNORED(verbs_set_ops)
IGNORED(verbs_uninit_context)

REFUSED_POINTER(_verbs_init_and_alloc_context) REFUSED_POINTER(verbs_open_device)

REFUSED(__ioctl_final_num_attrs) REFUSED(execute_ioctl) REFUSED(ibv_cmd_advise_mr) REFUSED(ibv_cmd_alloc_dm)
REFUSED(ibv_cmd_alloc_mw) REFUSED(ibv_cmd_alloc_pd) REFUSED(ibv_cmd_attach_mcast) REFUSED(ibv_cmd_close_xrcd)
REFUSED(ibv_cmd_create_ah) REFUSED(ibv_cmd_create_counters) REFUSED(ibv_cmd_create_cq)
REFUSED(ibv_cmd_create_cq_ex) REFUSED(ibv_cmd_create_flow) REFUSED(ibv_cmd_create_flow_action_esp)
REFUSED(ibv_cmd_create_qp) REFUSED(ibv_cmd_create_qp_ex) REFUSED(ibv_cmd_create_qp_ex2)
REFUSED(ibv_cmd_create_rwq_ind_table) REFUSED(ibv_cmd_create_srq) REFUSED(ibv_cmd_create_srq_ex)
REFUSED(ibv_cmd_create_wq) REFUSED(ibv_cmd_dealloc_mw) REFUSED(ibv_cmd_dealloc_pd) REFUSED(ibv_cmd_dereg_mr)
REFUSED(ibv_cmd_destroy_ah) REFUSED(ibv_cmd_destroy_counters) REFUSED(ibv_cmd_destroy_cq)
REFUSED(ibv_cmd_destroy_flow) REFUSED(ibv_cmd_destroy_flow_action) REFUSED(ibv_cmd_destroy_qp)
REFUSED(ibv_cmd_destroy_rwq_ind_table) REFUSED(ibv_cmd_destroy_srq) REFUSED(ibv_cmd_destroy_wq)
REFUSED(ibv_cmd_detach_mcast) REFUSED(ibv_cmd_free_dm) REFUSED(ibv_cmd_get_context) REFUSED(ibv_cmd_modify_cq)
REFUSED(ibv_cmd_modify_flow_action_esp) REFUSED(ibv_cmd_modify_qp) REFUSED(ibv_cmd_modify_qp_ex)
REFUSED(ibv_cmd_modify_srq) REFUSED(ibv_cmd_modify_wq) REFUSED(ibv_cmd_open_qp) REFUSED(ibv_cmd_open_xrcd)
REFUSED(ibv_cmd_poll_cq) REFUSED(ibv_cmd_post_recv) REFUSED(ibv_cmd_post_send) REFUSED(ibv_cmd_post_srq_recv)
REFUSED(ibv_cmd_query_context) REFUSED(ibv_cmd_query_device_any) REFUSED(ibv_cmd_query_mr)
REFUSED(ibv_cmd_query_port) REFUSED(ibv_cmd_query_qp) REFUSED(ibv_cmd_query_srq) REFUSED(ibv_cmd_read_counters)
REFUSED(ibv_cmd_reg_dm_mr) REFUSED(ibv_cmd_reg_dmabuf_mr) REFUSED(ibv_cmd_reg_mr) REFUSED(ibv_cmd_req_notify_cq)
REFUSED(ibv_cmd_rereg_mr) REFUSED(ibv_cmd_resize_cq) REFUSED(ibv_read_ibdev_sysfs_file)
REFUSED(ibv_register_driver) REFUSED(ibv_resolve_eth_l2_from_gid)

/* --- for tools ------------------------------------------------------------------------------------------------- */

/* Memory is never pinned here, so a fork can't take it away. */
RN_EXPORT int ibv_dontfork_range(void *base, size_t size);
RN_EXPORT int ibv_dontfork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

RN_EXPORT int ibv_dofork_range(void *base, size_t size);
RN_EXPORT int ibv_dofork_range(void *base, size_t size)
{
	(void)base, (void)size;
	return 0;
}

RN_EXPORT const char *ibv_get_sysfs_path(void);
RN_EXPORT const char *ibv_get_sysfs_path(void)
{
	return "/sys";
}

/* The file's text without its last newline; its length, or -1. Of our device there are no files. */
RN_EXPORT int ibv_read_sysfs_file(const char *dir, const char *file, char *text, size_t size);
RN_EXPORT int ibv_read_sysfs_file(const char *dir, const char *file, char *text, size_t size)
{
	char path[4096];
	ssize_t length;
	int fd;

	if (!size || (size_t)snprintf(path, sizeof(path), "%s/%s", dir, file) >= sizeof(path))
		return -1;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	length = read(fd, text, size);
	close(fd);
	if (length <= 0)
		return -1;
	if (text[length - 1] == '\n')
		text[--length] = '\0';
	else if ((size_t)length < size)
		text[length] = '\0';
	else
		return -1;
	return length;
}

/* As sysfs has it, where InfiniBand and RoCE v1 are one. */
enum sysfs_gid_type { SYSFS_GID_IB_ROCE_V1, SYSFS_GID_ROCE_V2 };

RN_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, enum sysfs_gid_type *type);
RN_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, enum sysfs_gid_type *type)
{
	struct ibv_gid_entry entry;
	int err = _ibv_query_gid_ex(context, port, index, &entry, 0, sizeof(entry));

	if (err) {
		errno = err;
		return -1;
	}
	*type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? SYSFS_GID_ROCE_V2 : SYSFS_GID_IB_ROCE_V1;
	return 0;
}

/* Static rates: in multiples of 2.5 Gb/s (0: it isn't one), and in Mb/s as the links really run. */
static const struct {
	enum ibv_rate rate;
	int mult, mbps;
} rates[] = {
	{IBV_RATE_2_5_GBPS, 1, 2500},   {IBV_RATE_5_GBPS, 2, 5000},      {IBV_RATE_10_GBPS, 4, 10000},
	{IBV_RATE_20_GBPS, 8, 20000},   {IBV_RATE_30_GBPS, 12, 30000},   {IBV_RATE_40_GBPS, 16, 40000},
	{IBV_RATE_60_GBPS, 24, 60000},  {IBV_RATE_80_GBPS, 32, 80000},   {IBV_RATE_120_GBPS, 48, 120000},
	{IBV_RATE_14_GBPS, 0, 14062},   {IBV_RATE_56_GBPS, 0, 56250},    {IBV_RATE_112_GBPS, 0, 112500},
	{IBV_RATE_168_GBPS, 0, 168750}, {IBV_RATE_25_GBPS, 0, 25781},    {IBV_RATE_100_GBPS, 0, 103125},
	{IBV_RATE_200_GBPS, 0, 206250}, {IBV_RATE_300_GBPS, 0, 309375},  {IBV_RATE_28_GBPS, 11, 28125},
	{IBV_RATE_50_GBPS, 20, 53125},  {IBV_RATE_400_GBPS, 160, 425000}, {IBV_RATE_600_GBPS, 240, 637500},
	{IBV_RATE_800_GBPS, 320, 850000}, {IBV_RATE_1200_GBPS, 480, 1275000},
};
enum { RATES = sizeof(rates) / sizeof(rates[0]) };

RN_EXPORT int ibv_rate_to_mult(enum ibv_rate rate);
RN_EXPORT int ibv_rate_to_mult(enum ibv_rate rate)
{
	for (unsigned i = 0; i < RATES; i++)
		if (rates[i].rate == rate && rates[i].mult)
			return rates[i].mult;
	return -1;
}

RN_EXPORT enum ibv_rate mult_to_ibv_rate(int mult);
RN_EXPORT enum ibv_rate mult_to_ibv_rate(int mult)
{
	for (unsigned i = 0; i < RATES; i++)
		if (rates[i].mult == mult && mult)
			return rates[i].rate;
	return IBV_RATE_MAX;
}

RN_EXPORT int ibv_rate_to_mbps(enum ibv_rate rate);
RN_EXPORT int ibv_rate_to_mbps(enum ibv_rate rate)
{
	for (unsigned i = 0; i < RATES; i++)
		if (rates[i].rate == rate)
			return rates[i].mbps;
	return -1;
}

RN_EXPORT enum ibv_rate mbps_to_ibv_rate(int mbps);
RN_EXPORT enum ibv_rate mbps_to_ibv_rate(int mbps)
{
	for (unsigned i = 0; i < RATES; i++)
		if (rates[i].mbps == mbps)
			return rates[i].rate;
	return IBV_RATE_MAX;
}
