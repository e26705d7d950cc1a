/* SPDX-License-Identifier: Apache-2.0 */
/* The device's description of itself. */
#include <endian.h>

#include "base/gid.h"
#include "base/page.h"
#include "base/settings.h"
#include "device/query.h"
#include "objects/context.h"
#include "shm/limits.h"

RN_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	if (rn_is_foreign(context))
		return ENODEV;
	if (rn_context_is_dead(context))
		return EIO;
	*attr = (struct ibv_device_attr){
		.fw_ver = "1",
		.node_guid = RN_GUID,
		.sys_image_guid = RN_GUID,
		.max_mr_size = UINT64_MAX,
		.page_size_cap = rn_page(),
		.vendor_id = 0xffffff, /* no vendor, as with other software devices */
		.hw_ver = 1,
		.max_qp = RN_QPS_MAX,
		.max_qp_wr = RN_MAX_QP_WR,
		.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID |
				    IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_XRC |
				    (rn_settings.iwarp ? 0 : IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B),
		.max_sge = RN_MAX_SGE,
		.max_sge_rd = rn_settings.iwarp ? 1 : RN_MAX_SGE,
		.max_cq = RN_CQS_MAX,
		.max_cqe = RN_MAX_CQE,
		.max_mr = RN_MRS_MAX - 1,
		.max_mw = rn_settings.iwarp ? 0 : RN_MRS_MAX - 1, /* they can't be bound: faults/iwarp.c */
		.max_pd = 1 << 20,
		.max_qp_rd_atom = RN_MAX_RD_ATOMIC,
		.max_res_rd_atom = RN_MAX_RD_ATOMIC * 1024,
		.max_qp_init_rd_atom = RN_MAX_RD_ATOMIC,
		.atomic_cap = rn_settings.iwarp ? IBV_ATOMIC_NONE : IBV_ATOMIC_GLOB,
		.max_ah = 1 << 20,
		.max_mcast_grp = 1 << 12,
		.max_mcast_qp_attach = 1 << 12,
		.max_total_mcast_qp_attach = 1 << 16,
		.max_srq = RN_MAX_SRQS,
		.max_srq_wr = RN_MAX_QP_WR,
		.max_srq_sge = RN_MAX_SGE,
		.max_pkeys = 1,
		.local_ca_ack_delay = 0,
		.phys_port_cnt = 1,
	};
	return 0;
}

int rn_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex all = {0};
	int err;

	if (input && input->comp_mask)
		return EINVAL;
	if (size < sizeof(all.orig_attr))
		return EINVAL;
	err = ibv_query_device(context, &all.orig_attr);
	if (err)
		return err;
	all.cq_mod_caps.max_cq_count = UINT16_MAX;
	all.cq_mod_caps.max_cq_period = UINT16_MAX;
	all.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
	all.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
						      IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
						      IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV;
	all.odp_caps.per_transport_caps.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE;
	all.odp_caps.per_transport_caps.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
	all.xrc_odp_caps = all.odp_caps.per_transport_caps.rc_odp_caps;
	all.max_dm_size = RN_MAX_DM;
	all.completion_timestamp_mask = UINT64_MAX;
	all.hca_core_clock = 1000000; /* kHz: nanoseconds */
	all.device_cap_flags_ex = all.orig_attr.device_cap_flags;
	all.phys_port_cnt_ex = 1;
	memcpy(attr, &all, size < sizeof(all) ? size : sizeof(all));
	if (size > sizeof(all))
		memset((char *)attr + sizeof(all), 0, size - sizeof(all));
	return 0;
}

int rn_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	bool has_link = rn_gid_has_link();
	struct ibv_port_attr all = {
		.state = has_link ? IBV_PORT_ACTIVE : IBV_PORT_DOWN,
		.max_mtu = IBV_MTU_4096,
		.active_mtu = IBV_MTU_4096,
		.gid_tbl_len = RN_GIDS,
		.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
		.max_msg_sz = RN_MAX_MESSAGE,
		.pkey_tbl_len = 1,
		.max_vl_num = 1,
		.active_width = 2, /* 4x */
		.active_speed = 32, /* EDR: 100 Gb/s */
		.phys_state = has_link ? 5 : 3, /* link up, or disabled */
		.lid = rn_settings.infiniband ? RN_LID : 0,
		.sm_lid = rn_settings.infiniband ? RN_LID : 0,
		.link_layer = rn_settings.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET,
		.flags = rn_settings.infiniband || rn_settings.iwarp ? 0 : IBV_QPF_GRH_REQUIRED,
	};

	if (rn_is_foreign(context))
		return ENODEV;
	if (rn_context_is_dead(context))
		return EIO;
	if (port != 1)
		return EINVAL;
	if (rn_fault_link_is_down(&rn_context(context)->injector)) {
		all.state = IBV_PORT_DOWN;
		all.phys_state = 3; /* disabled */
	}
	memcpy(attr, &all, size < sizeof(all) ? size : sizeof(all));
	if (size > sizeof(all))
		memset((char *)attr + sizeof(all), 0, size - sizeof(all));
	return 0;
}

enum { COMPAT_PORT_ATTR_SIZE = 48 }; /* what callers of the exported function have room for */

RN_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	return rn_query_port(context, port, (struct ibv_port_attr *)attr, COMPAT_PORT_ATTR_SIZE);
}

static int fail(int err)
{
	errno = err;
	return -1;
}

RN_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	if (port != 1 || index < 0 || index >= RN_GIDS)
		return fail(EINVAL);
	if (!rn_gid_at((uint32_t)index, gid, NULL))
		memset(gid, 0, sizeof *gid);
	return 0;
}

static bool fill_gid(uint32_t index, void *entry, size_t size)
{
	enum ibv_gid_type type = rn_settings.infiniband ? IBV_GID_TYPE_IB : IBV_GID_TYPE_ROCE_V2;
	struct ibv_gid_entry one = {.gid_index = index, .port_num = 1, .gid_type = type};

	if (!rn_gid_at(index, &one.gid, &one.ndev_ifindex))
		return false;
	memset(entry, 0, size);
	memcpy(entry, &one, size < sizeof(one) ? size : sizeof(one));
	return true;
}

RN_EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
				uint32_t flags, size_t entry_size)
{
	if (rn_is_foreign(context))
		return ENODEV;
	if (flags)
		return EOPNOTSUPP;
	if (port != 1 || index >= RN_GIDS)
		return EINVAL;
	return fill_gid(index, entry, entry_size) ? 0 : ENODATA;
}

/* Those that are there: their indexes may have gaps. */
RN_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
				       uint32_t flags, size_t entry_size)
{
	size_t count = 0;

	if (rn_is_foreign(context))
		return -ENODEV;
	if (flags)
		return -EOPNOTSUPP;
	for (uint32_t i = 0; rn_gid_next(&i, NULL, NULL); i++) {
		if (count == max_entries)
			return -EINVAL;
		count += fill_gid(i, (char *)entries + count * entry_size, entry_size);
	}
	return (ssize_t)count;
}

RN_EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	if (port != 1 || index != 0)
		return fail(EINVAL);
	*pkey = htobe16(0xffff);
	return 0;
}

RN_EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	if (rn_is_foreign(context))
		return fail(ENODEV);
	return port == 1 && pkey == htobe16(0xffff) ? 0 : fail(EINVAL);
}

int rn_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	/* Ticks of the clock of completion time stamps, which programs take from tv_nsec alone. */
	if (values->comp_mask & IBV_VALUES_MASK_RAW_CLOCK)
		values->raw_clock = (struct timespec){.tv_nsec = rn_now_ns()};
	values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
	return 0;
}

/* --- what has one answer only ----------------------------------------------------------------------------------------------- */

RN_EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp, (void)op, (void)flags;
	return 0;
}

/* Enhanced connection establishment: nothing to enhance. */
RN_EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp, (void)ece;
	return EOPNOTSUPP;
}

RN_EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	*ece = (struct ibv_ece){0};
	return EOPNOTSUPP;
}
