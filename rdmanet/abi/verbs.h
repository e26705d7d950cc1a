/*
 * The public ABI of libibverbs, in our own declarations.
 *
 * Whoever speaks verbs, a program or a device, meets here: the core calls a
 * device only through these structs and functions, and the embedded device
 * is one more library that fills and exports them. Nothing of rdma-core is
 * needed to build; tests/unit/test_abi_layout.py compiles both sets of
 * headers, where the distribution's are installed, and compares the size of
 * every struct, the offset of every member and the value of every constant.
 *
 * How the ABI stays an ABI
 *
 *   - A struct, once published, keeps its size; the old ones (ibv_qp, ibv_cq,
 *     ibv_wc, ibv_send_wr, ...) have been the same since 2012.
 *   - "Extensible" structs grow at their end and carry a comp_mask or travel
 *     with their size: ibv_device_attr_ex, ibv_port_attr, ibv_qp_ex,
 *     ibv_qp_init_attr_ex, ibv_cq_init_attr_ex.
 *   - verbs_context grows at its *front*. A program holds an ibv_context,
 *     which is the last member, and looks backwards from it, so what counts is
 *     each member's distance from the end. `sz` says how much of it the
 *     device filled, abi_compat == UINTPTR_MAX that there is one at all.
 *
 * Two ways to call
 *
 *   - Exported functions, found by dlsym (declared at the end, to be defined
 *     by a device or to give the loader its types).
 *   - Pointers in the objects, for what is called often: ibv_context.ops,
 *     verbs_context, ibv_qp_ex, ibv_cq_ex. The inline functions go there.
 *
 * Values of type __beNN are in network byte order.
 *
 * Declarations describe rdma-core 65, the newest; a library that is older
 * lacks only what lies past its own sizes. What is deliberately absent: flow
 * steering, work queues with RSS, tag matching, raw packets, flags that nothing
 * here reads, and the ioctl plumbing of kernel providers.
 */
#ifndef RDMANET_ABI_VERBS_H
#define RDMANET_ABI_VERBS_H

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include <linux/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ibv_buf; struct ibv_counter_attach_attr; struct ibv_counters; struct ibv_counters_init_attr;
struct ibv_dmah; struct ibv_dmah_init_attr; struct ibv_flow; struct ibv_flow_action;
struct ibv_flow_action_esp_attr; struct ibv_flow_attr; struct ibv_mr_init_attr; struct ibv_ops_wr;
struct ibv_qp_rate_limit_attr; struct ibv_rwq_ind_table; struct ibv_rwq_ind_table_init_attr;
struct ibv_wc_tm_info; struct ibv_wq; struct ibv_wq_attr; struct ibv_wq_init_attr; struct verbs_ex_private;
struct _compat_ibv_port_attr; struct ibv_context; struct ibv_device; struct ibv_pd; struct ibv_mr;
struct ibv_mw; struct ibv_qp; struct ibv_cq; struct ibv_srq; struct ibv_ah;

/* ---- Devices, ports, addresses ------------------------------------------ */

union ibv_gid {
    uint8_t raw[16];
    struct {
        __be64 subnet_prefix, interface_id;
    } global;
};

enum ibv_gid_type { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };
enum ibv_node_type {
    IBV_NODE_UNKNOWN = -1, IBV_NODE_CA = 1, IBV_NODE_SWITCH, IBV_NODE_ROUTER, IBV_NODE_RNIC, IBV_NODE_USNIC,
    IBV_NODE_USNIC_UDP, IBV_NODE_UNSPECIFIED,
};
enum ibv_transport_type {
    IBV_TRANSPORT_UNKNOWN = -1, IBV_TRANSPORT_IB = 0, IBV_TRANSPORT_IWARP, IBV_TRANSPORT_USNIC,
    IBV_TRANSPORT_USNIC_UDP, IBV_TRANSPORT_UNSPECIFIED,
};
enum ibv_atomic_cap { IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB };
enum ibv_mtu { IBV_MTU_256 = 1, IBV_MTU_512 = 2, IBV_MTU_1024 = 3, IBV_MTU_2048 = 4, IBV_MTU_4096 = 5 };
enum ibv_port_state {
    IBV_PORT_NOP = 0, IBV_PORT_DOWN = 1, IBV_PORT_INIT = 2, IBV_PORT_ARMED = 3, IBV_PORT_ACTIVE = 4,
    IBV_PORT_ACTIVE_DEFER = 5,
};
enum { IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET };
enum ibv_fork_status { IBV_FORK_DISABLED, IBV_FORK_ENABLED, IBV_FORK_UNNEEDED };
enum ibv_device_cap_flags {
    IBV_DEVICE_CURR_QP_STATE_MOD = 1 << 7, IBV_DEVICE_SYS_IMAGE_GUID = 1 << 11, IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
    IBV_DEVICE_SRQ_RESIZE = 1 << 13, IBV_DEVICE_MEM_WINDOW = 1 << 17, IBV_DEVICE_XRC = 1 << 20,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
};

enum ibv_odp_transport_cap_bits {
    IBV_ODP_SUPPORT_SEND = 1 << 0, IBV_ODP_SUPPORT_RECV = 1 << 1, IBV_ODP_SUPPORT_WRITE = 1 << 2,
    IBV_ODP_SUPPORT_READ = 1 << 3, IBV_ODP_SUPPORT_ATOMIC = 1 << 4, IBV_ODP_SUPPORT_SRQ_RECV = 1 << 5,
};
enum ibv_odp_general_caps { IBV_ODP_SUPPORT = 1 << 0, IBV_ODP_SUPPORT_IMPLICIT = 1 << 1 };
enum ibv_port_cap_flags { IBV_PORT_CM_SUP = 1 << 16, IBV_PORT_IP_BASED_GIDS = 1 << 26 };
enum ibv_rate {
    IBV_RATE_MAX = 0, IBV_RATE_2_5_GBPS = 2, IBV_RATE_5_GBPS = 5, IBV_RATE_10_GBPS = 3, IBV_RATE_20_GBPS = 6,
    IBV_RATE_30_GBPS = 4, IBV_RATE_40_GBPS = 7, IBV_RATE_60_GBPS = 8, IBV_RATE_80_GBPS = 9, IBV_RATE_120_GBPS = 10,
    IBV_RATE_14_GBPS = 11, IBV_RATE_56_GBPS = 12, IBV_RATE_112_GBPS = 13, IBV_RATE_168_GBPS = 14,
    IBV_RATE_25_GBPS = 15, IBV_RATE_100_GBPS = 16, IBV_RATE_200_GBPS = 17, IBV_RATE_300_GBPS = 18,
    IBV_RATE_28_GBPS = 19, IBV_RATE_50_GBPS = 20, IBV_RATE_400_GBPS = 21, IBV_RATE_600_GBPS = 22,
    IBV_RATE_800_GBPS = 23, IBV_RATE_1200_GBPS = 24,
};
enum ibv_values_mask { IBV_VALUES_MASK_RAW_CLOCK = 1 << 0, IBV_VALUES_MASK_RESERVED = 1 << 1 };

#define IBV_QPF_GRH_REQUIRED 1 /* ibv_port_attr.flags: every address needs a GRH */

struct _ibv_device_ops {
    struct ibv_context *(*_dummy1)(struct ibv_device *, int);
    void (*_dummy2)(struct ibv_context *);
};

struct ibv_device {
    struct _ibv_device_ops _ops;
    enum ibv_node_type node_type;
    enum ibv_transport_type transport_type;
    char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

struct ibv_device_attr {
    char fw_ver[64];
    __be64 node_guid, sys_image_guid;
    uint64_t max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom;
    int max_qp_init_rd_atom, max_ee_init_rd_atom;
    enum ibv_atomic_cap atomic_cap;
    int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach;
    int max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct ibv_query_device_ex_input {
    uint32_t comp_mask;
};

struct ibv_odp_caps {
    uint64_t general_caps;
    struct {
        uint32_t rc_odp_caps, uc_odp_caps, ud_odp_caps;
    } per_transport_caps;
};

struct ibv_tso_caps {
    uint32_t max_tso, supported_qpts;
};

struct ibv_rss_caps {
    uint32_t supported_qpts, max_rwq_indirection_tables, max_rwq_indirection_table_size;
    uint64_t rx_hash_fields_mask;
    uint8_t rx_hash_function;
};

struct ibv_packet_pacing_caps {
    uint32_t qp_rate_limit_min, qp_rate_limit_max, supported_qpts;
};

struct ibv_tm_caps {
    uint32_t max_rndv_hdr_size, max_num_tags, flags, max_ops, max_sge;
};

struct ibv_cq_moderation_caps {
    uint16_t max_cq_count, max_cq_period;
};

struct ibv_pci_atomic_caps {
    uint16_t fetch_add, swap, compare_swap;
};

struct ibv_device_attr_ex {
    struct ibv_device_attr orig_attr;
    uint32_t comp_mask;
    struct ibv_odp_caps odp_caps;
    uint64_t completion_timestamp_mask, hca_core_clock, device_cap_flags_ex;
    struct ibv_tso_caps tso_caps;
    struct ibv_rss_caps rss_caps;
    uint32_t max_wq_type_rq;
    struct ibv_packet_pacing_caps packet_pacing_caps;
    uint32_t raw_packet_caps;
    struct ibv_tm_caps tm_caps;
    struct ibv_cq_moderation_caps cq_mod_caps;
    uint64_t max_dm_size;
    struct ibv_pci_atomic_caps pci_atomic_caps;
    uint32_t xrc_odp_caps, phys_port_cnt_ex;
};

struct ibv_port_attr {
    enum ibv_port_state state;
    enum ibv_mtu max_mtu, active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
    uint8_t link_layer, flags;
    uint16_t port_cap_flags2;
    uint32_t active_speed_ex;
};

struct ibv_values_ex {
    uint32_t comp_mask;
    struct timespec raw_clock;
};

/* ---- Protection domains and memory --------------------------------------- */

enum ibv_access_flags {
    IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 1 << 1, IBV_ACCESS_REMOTE_READ = 1 << 2,
    IBV_ACCESS_REMOTE_ATOMIC = 1 << 3, IBV_ACCESS_MW_BIND = 1 << 4, IBV_ACCESS_ZERO_BASED = 1 << 5,
    IBV_ACCESS_ON_DEMAND = 1 << 6, IBV_ACCESS_HUGETLB = 1 << 7, IBV_ACCESS_FLUSH_GLOBAL = 1 << 8,
    IBV_ACCESS_FLUSH_PERSISTENT = 1 << 9, IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
};
/* A device may ignore these bits where it does not know them. */
#define IBV_ACCESS_OPTIONAL_RANGE 0x3ff00000 /* bits 20 to 29 */

enum ibv_rereg_mr_flags {
    IBV_REREG_MR_CHANGE_TRANSLATION = 1 << 0, IBV_REREG_MR_CHANGE_PD = 1 << 1, IBV_REREG_MR_CHANGE_ACCESS = 1 << 2,
    IBV_REREG_MR_FLAGS_SUPPORTED = ((IBV_REREG_MR_CHANGE_ACCESS << 1) - 1),
};
enum ibv_rereg_mr_err_code {
    IBV_REREG_MR_ERR_INPUT = -1, IBV_REREG_MR_ERR_DO_FORK_OLD = -3, IBV_REREG_MR_ERR_CMD = -4,
    IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW = -5,
};
enum ibv_mw_type { IBV_MW_TYPE_1 = 1, IBV_MW_TYPE_2 = 2 };
enum ibv_xrcd_init_attr_mask { IBV_XRCD_INIT_ATTR_FD = 1 << 0, IBV_XRCD_INIT_ATTR_OFLAGS = 1 << 1 };
enum ibv_parent_domain_init_attr_mask {
    IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1 << 0, IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 1 << 1,
};
enum ib_uverbs_advise_mr_advice {
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH, IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
    IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
};
enum ib_uverbs_advise_mr_flag { IB_UVERBS_ADVISE_MR_FLAG_FLUSH = 1 << 0 };

enum ibv_placement_type { IBV_FLUSH_GLOBAL = 1 << 0, IBV_FLUSH_PERSISTENT = 1 << 1 };
enum ibv_selectivity_level { IBV_FLUSH_RANGE = 0, IBV_FLUSH_MR };

struct ibv_pd {
    struct ibv_context *context;
    uint32_t handle;
};

struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct ibv_mw {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t rkey, handle;
    enum ibv_mw_type type;
};

struct ibv_mw_bind_info {
    struct ibv_mr *mr;
    uint64_t addr, length;
    unsigned int mw_access_flags;
};

struct ibv_mw_bind {
    uint64_t wr_id;
    unsigned int send_flags;
    struct ibv_mw_bind_info bind_info;
};

struct ibv_dm {
    struct ibv_context *context;
    int (*memcpy_to_dm)(struct ibv_dm *, uint64_t, const void *, size_t);
    int (*memcpy_from_dm)(void *, struct ibv_dm *, uint64_t, size_t);
    uint32_t comp_mask, handle;
};

struct ibv_alloc_dm_attr {
    size_t length;
    uint32_t log_align_req, comp_mask;
};

struct ibv_td {
    struct ibv_context *context;
};

struct ibv_td_init_attr {
    uint32_t comp_mask;
};

struct ibv_parent_domain_init_attr {
    struct ibv_pd *pd;
    struct ibv_td *td;
    uint32_t comp_mask;
    void *(*alloc)(struct ibv_pd *, void *, size_t, size_t, uint64_t);
    void (*free)(struct ibv_pd *, void *, void *, uint64_t);
    void *pd_context;
};

struct ibv_xrcd {
    struct ibv_context *context;
};

struct ibv_xrcd_init_attr {
    uint32_t comp_mask;
    int fd, oflags;
};

/* ---- Completions ---------------------------------------------------------- */

enum ibv_wc_status {
    IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_EEC_OP_ERR, IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR, IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_LOC_RDD_VIOL_ERR, IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR, IBV_WC_INV_EECN_ERR,
    IBV_WC_INV_EEC_STATE_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR, IBV_WC_TM_ERR,
    IBV_WC_TM_RNDV_INCOMPLETE,
};
enum ibv_wc_opcode {
    IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_BIND_MW,
    IBV_WC_LOCAL_INV, IBV_WC_TSO, IBV_WC_FLUSH, IBV_WC_ATOMIC_WRITE = 9, IBV_WC_RECV = 1 << 7,
    IBV_WC_RECV_RDMA_WITH_IMM,
};
enum { IBV_WC_IP_CSUM_OK_SHIFT = 2 };
enum ibv_wc_flags {
    IBV_WC_GRH = 1 << 0, IBV_WC_WITH_IMM = 1 << 1, IBV_WC_IP_CSUM_OK = 1 << IBV_WC_IP_CSUM_OK_SHIFT,
    IBV_WC_WITH_INV = 1 << 3,
};
enum ibv_create_cq_wc_flags {
    IBV_WC_EX_WITH_BYTE_LEN = 1 << 0, IBV_WC_EX_WITH_IMM = 1 << 1, IBV_WC_EX_WITH_QP_NUM = 1 << 2,
    IBV_WC_EX_WITH_SRC_QP = 1 << 3, IBV_WC_EX_WITH_SLID = 1 << 4, IBV_WC_EX_WITH_SL = 1 << 5,
    IBV_WC_EX_WITH_DLID_PATH_BITS = 1 << 6, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
    IBV_WC_EX_WITH_CVLAN = 1 << 8, IBV_WC_EX_WITH_FLOW_TAG = 1 << 9, IBV_WC_EX_WITH_TM_INFO = 1 << 10,
    IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11,
};
enum {
    IBV_WC_STANDARD_FLAGS =
        IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |
        IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS,
};
enum ibv_cq_init_attr_mask { IBV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 0, IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1 };
enum ibv_create_cq_attr_flags {
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1 << 0, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1,
};
enum ibv_cq_attr_mask { IBV_CQ_ATTR_MODERATE = 1 << 0, IBV_CQ_ATTR_RESERVED = 1 << 1 };

struct ibv_wc {
    uint64_t wr_id;
    enum ibv_wc_status status;
    enum ibv_wc_opcode opcode;
    uint32_t vendor_err, byte_len;
    union {
        __be32 imm_data;
        uint32_t invalidated_rkey;
    };
    uint32_t qp_num, src_qp;
    unsigned int wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

struct ibv_grh {
    __be32 version_tclass_flow;
    __be16 paylen;
    uint8_t next_hdr, hop_limit;
    union ibv_gid sgid, dgid;
};

struct ibv_comp_channel {
    struct ibv_context *context;
    int fd, refcnt;
};

struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed, async_events_completed;
};

struct ibv_cq_init_attr_ex {
    uint32_t cqe;
    void *cq_context;
    struct ibv_comp_channel *channel;
    uint32_t comp_vector;
    uint64_t wc_flags;
    uint32_t comp_mask, flags;
    struct ibv_pd *parent_domain;
};

struct ibv_poll_cq_attr {
    uint32_t comp_mask;
};

struct ibv_moderate_cq {
    uint16_t cq_count, cq_period;
};

struct ibv_modify_cq_attr {
    uint32_t attr_mask;
    struct ibv_moderate_cq moderate;
};

struct ibv_cq_ex {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed, async_events_completed, comp_mask;
    enum ibv_wc_status status;
    uint64_t wr_id;
    int (*start_poll)(struct ibv_cq_ex *, struct ibv_poll_cq_attr *);
    int (*next_poll)(struct ibv_cq_ex *);
    void (*end_poll)(struct ibv_cq_ex *);
    enum ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex *);
    uint32_t (*read_vendor_err)(struct ibv_cq_ex *);
    uint32_t (*read_byte_len)(struct ibv_cq_ex *);
    __be32 (*read_imm_data)(struct ibv_cq_ex *);
    uint32_t (*read_qp_num)(struct ibv_cq_ex *);
    uint32_t (*read_src_qp)(struct ibv_cq_ex *);
    unsigned int (*read_wc_flags)(struct ibv_cq_ex *);
    uint32_t (*read_slid)(struct ibv_cq_ex *);
    uint8_t (*read_sl)(struct ibv_cq_ex *);
    uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex *);
    uint64_t (*read_completion_ts)(struct ibv_cq_ex *);
    uint16_t (*read_cvlan)(struct ibv_cq_ex *);
    uint32_t (*read_flow_tag)(struct ibv_cq_ex *);
    void (*read_tm_info)(struct ibv_cq_ex *, struct ibv_wc_tm_info *);
    uint64_t (*read_completion_wallclock_ns)(struct ibv_cq_ex *);
};

/* ---- Address handles ------------------------------------------------------ */

struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
};

struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_ah {
    struct ibv_context *context;
    struct ibv_pd *pd;
    uint32_t handle;
};

/* ---- Queue pairs and shared receive queues -------------------------------- */

enum ibv_srq_attr_mask { IBV_SRQ_MAX_WR = 1 << 0, IBV_SRQ_LIMIT = 1 << 1 };
enum ibv_srq_type { IBV_SRQT_BASIC, IBV_SRQT_XRC, IBV_SRQT_TM };
enum ibv_srq_init_attr_mask {
    IBV_SRQ_INIT_ATTR_TYPE = 1 << 0, IBV_SRQ_INIT_ATTR_PD = 1 << 1, IBV_SRQ_INIT_ATTR_XRCD = 1 << 2,
    IBV_SRQ_INIT_ATTR_CQ = 1 << 3,
};
enum ibv_qp_type {
    IBV_QPT_RC = 2, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RAW_PACKET = 8, IBV_QPT_XRC_SEND = 9, IBV_QPT_XRC_RECV,
    IBV_QPT_DRIVER = 0xff,
};
enum ibv_qp_init_attr_mask {
    IBV_QP_INIT_ATTR_PD = 1 << 0, IBV_QP_INIT_ATTR_XRCD = 1 << 1, IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
};
enum ibv_qp_create_flags { IBV_QP_CREATE_BLOCK_SELF_MCAST_LB = 1 << 1 };
enum ibv_qp_create_send_ops_flags {
    IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1, IBV_QP_EX_WITH_SEND = 1 << 2,
    IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3, IBV_QP_EX_WITH_RDMA_READ = 1 << 4,
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6,
    IBV_QP_EX_WITH_LOCAL_INV = 1 << 7, IBV_QP_EX_WITH_BIND_MW = 1 << 8, IBV_QP_EX_WITH_SEND_WITH_INV = 1 << 9,
    IBV_QP_EX_WITH_TSO = 1 << 10, IBV_QP_EX_WITH_FLUSH = 1 << 11, IBV_QP_EX_WITH_ATOMIC_WRITE = 1 << 12,
};
enum ibv_qp_open_attr_mask {
    IBV_QP_OPEN_ATTR_NUM = 1 << 0, IBV_QP_OPEN_ATTR_XRCD = 1 << 1, IBV_QP_OPEN_ATTR_CONTEXT = 1 << 2,
    IBV_QP_OPEN_ATTR_TYPE = 1 << 3,
};
enum ibv_qp_attr_mask {
    IBV_QP_STATE = 1 << 0, IBV_QP_CUR_STATE = 1 << 1, IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
    IBV_QP_ACCESS_FLAGS = 1 << 3, IBV_QP_PKEY_INDEX = 1 << 4, IBV_QP_PORT = 1 << 5, IBV_QP_QKEY = 1 << 6,
    IBV_QP_AV = 1 << 7, IBV_QP_PATH_MTU = 1 << 8, IBV_QP_TIMEOUT = 1 << 9, IBV_QP_RETRY_CNT = 1 << 10,
    IBV_QP_RNR_RETRY = 1 << 11, IBV_QP_RQ_PSN = 1 << 12, IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    IBV_QP_ALT_PATH = 1 << 14, IBV_QP_MIN_RNR_TIMER = 1 << 15, IBV_QP_SQ_PSN = 1 << 16,
    IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17, IBV_QP_PATH_MIG_STATE = 1 << 18, IBV_QP_CAP = 1 << 19,
    IBV_QP_DEST_QPN = 1 << 20, IBV_QP_RATE_LIMIT = 1 << 25,
};
enum ibv_qp_state {
    IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR, IBV_QPS_UNKNOWN,
};
enum ibv_mig_state { IBV_MIG_MIGRATED, IBV_MIG_REARM, IBV_MIG_ARMED };
enum ibv_wr_opcode {
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_SEND_WITH_INV,
    IBV_WR_TSO, IBV_WR_FLUSH = 14, IBV_WR_ATOMIC_WRITE = 15,
};
enum ibv_send_flags {
    IBV_SEND_FENCE = 1 << 0, IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_SOLICITED = 1 << 2, IBV_SEND_INLINE = 1 << 3,
    IBV_SEND_IP_CSUM = 1 << 4,
};

struct ibv_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct ibv_data_buf {
    void *addr;
    size_t length;
};

struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    enum ibv_wr_opcode opcode;
    unsigned int send_flags;
    union {
        __be32 imm_data;
        uint32_t invalidate_rkey;
    };
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t remote_addr, compare_add, swap;
            uint32_t rkey;
        } atomic;
        struct {
            struct ibv_ah *ah;
            uint32_t remote_qpn, remote_qkey;
        } ud;
    } wr;
    union {
        struct {
            uint32_t remote_srqn;
        } xrc;
    } qp_type;
    union {
        struct {
            struct ibv_mw *mw;
            uint32_t rkey;
            struct ibv_mw_bind_info bind_info;
        } bind_mw;
        struct {
            void *hdr;
            uint16_t hdr_sz, mss;
        } tso;
    };
};

struct ibv_recv_wr {
    uint64_t wr_id;
    struct ibv_recv_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
};

struct ibv_srq_attr {
    uint32_t max_wr, max_sge, srq_limit;
};

struct ibv_srq_init_attr {
    void *srq_context;
    struct ibv_srq_attr attr;
};

struct ibv_srq {
    struct ibv_context *context;
    void *srq_context;
    struct ibv_pd *pd;
    uint32_t handle;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct ibv_qp_cap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_rx_hash_conf {
    uint8_t rx_hash_function, rx_hash_key_len, *rx_hash_key;
    uint64_t rx_hash_fields_mask;
};

struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
};

struct ibv_qp_init_attr_ex {
    void *qp_context;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
    uint32_t comp_mask;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd;
    uint32_t create_flags;
    uint16_t max_tso_header;
    struct ibv_rwq_ind_table *rwq_ind_tbl;
    struct ibv_rx_hash_conf rx_hash_conf;
    uint32_t source_qpn;
    uint64_t send_ops_flags;
};

struct ibv_qp_open_attr {
    uint32_t comp_mask, qp_num;
    struct ibv_xrcd *xrcd;
    void *qp_context;
    enum ibv_qp_type qp_type;
};

struct ibv_qp_attr {
    enum ibv_qp_state qp_state, cur_qp_state;
    enum ibv_mtu path_mtu;
    enum ibv_mig_state path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned int qp_access_flags;
    struct ibv_qp_cap cap;
    struct ibv_ah_attr ah_attr, alt_ah_attr;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout;
    uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
};

struct ibv_ece {
    uint32_t vendor_id, options, comp_mask;
};

struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    uint32_t handle, qp_num;
    enum ibv_qp_state state;
    enum ibv_qp_type qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct ibv_qp_ex {
    struct ibv_qp qp_base;
    uint64_t comp_mask, wr_id;
    unsigned int wr_flags;
    void (*wr_atomic_cmp_swp)(struct ibv_qp_ex *, uint32_t, uint64_t, uint64_t, uint64_t);
    void (*wr_atomic_fetch_add)(struct ibv_qp_ex *, uint32_t, uint64_t, uint64_t);
    void (*wr_bind_mw)(struct ibv_qp_ex *, struct ibv_mw *, uint32_t,
            const struct ibv_mw_bind_info *);
    void (*wr_local_inv)(struct ibv_qp_ex *, uint32_t);
    void (*wr_rdma_read)(struct ibv_qp_ex *, uint32_t, uint64_t);
    void (*wr_rdma_write)(struct ibv_qp_ex *, uint32_t, uint64_t);
    void (*wr_rdma_write_imm)(struct ibv_qp_ex *, uint32_t, uint64_t, __be32);
    void (*wr_send)(struct ibv_qp_ex *);
    void (*wr_send_imm)(struct ibv_qp_ex *, __be32);
    void (*wr_send_inv)(struct ibv_qp_ex *, uint32_t);
    void (*wr_send_tso)(struct ibv_qp_ex *, void *, uint16_t, uint16_t);
    void (*wr_set_ud_addr)(struct ibv_qp_ex *, struct ibv_ah *, uint32_t, uint32_t);
    void (*wr_set_xrc_srqn)(struct ibv_qp_ex *, uint32_t);
    void (*wr_set_inline_data)(struct ibv_qp_ex *, void *, size_t);
    void (*wr_set_inline_data_list)(struct ibv_qp_ex *, size_t, const struct ibv_data_buf *);
    void (*wr_set_sge)(struct ibv_qp_ex *, uint32_t, uint64_t, uint32_t);
    void (*wr_set_sge_list)(struct ibv_qp_ex *, size_t, const struct ibv_sge *);
    void (*wr_start)(struct ibv_qp_ex *);
    int (*wr_complete)(struct ibv_qp_ex *);
    void (*wr_abort)(struct ibv_qp_ex *);
    void (*wr_atomic_write)(struct ibv_qp_ex *, uint32_t, uint64_t, const void *);
    void (*wr_flush)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
};

struct ibv_tm_cap {
    uint32_t max_num_tags, max_ops;
};

struct ibv_srq_init_attr_ex {
    void *srq_context;
    struct ibv_srq_attr attr;
    uint32_t comp_mask;
    enum ibv_srq_type srq_type;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd;
    struct ibv_cq *cq;
    struct ibv_tm_cap tm_cap;
};

/* ---- Asynchronous events --------------------------------------------------- */

enum ibv_event_type {
    IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST,
    IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE,
    IBV_EVENT_PORT_ERR, IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_SRQ_ERR,
    IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_GID_CHANGE,
    IBV_EVENT_WQ_FATAL, IBV_EVENT_DEVICE_SPEED_CHANGE,
};

struct ibv_async_event {
    union {
        struct ibv_cq *cq;
        struct ibv_qp *qp;
        struct ibv_srq *srq;
        struct ibv_wq *wq;
        int port_num;
    } element;
    enum ibv_event_type event_type;
};

/* ---- The context: what a device is called through -------------------------- */

struct ibv_context_ops {
    int (*_compat_query_device)(struct ibv_context *, struct ibv_device_attr *);
    int (*_compat_query_port)(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *);
    void *(*_compat_alloc_pd)(void);
    void *(*_compat_dealloc_pd)(void);
    void *(*_compat_reg_mr)(void);
    void *(*_compat_rereg_mr)(void);
    void *(*_compat_dereg_mr)(void);
    struct ibv_mw *(*alloc_mw)(struct ibv_pd *, enum ibv_mw_type);
    int (*bind_mw)(struct ibv_qp *, struct ibv_mw *, struct ibv_mw_bind *);
    int (*dealloc_mw)(struct ibv_mw *);
    void *(*_compat_create_cq)(void);
    int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
    int (*req_notify_cq)(struct ibv_cq *, int);
    void *(*_compat_cq_event)(void);
    void *(*_compat_resize_cq)(void);
    void *(*_compat_destroy_cq)(void);
    void *(*_compat_create_srq)(void);
    void *(*_compat_modify_srq)(void);
    void *(*_compat_query_srq)(void);
    void *(*_compat_destroy_srq)(void);
    int (*post_srq_recv)(struct ibv_srq *, struct ibv_recv_wr *, struct ibv_recv_wr **);
    void *(*_compat_create_qp)(void);
    void *(*_compat_query_qp)(void);
    void *(*_compat_modify_qp)(void);
    void *(*_compat_destroy_qp)(void);
    int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
    int (*post_recv)(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
    void *(*_compat_create_ah)(void);
    void *(*_compat_destroy_ah)(void);
    void *(*_compat_attach_mcast)(void);
    void *(*_compat_detach_mcast)(void);
    void *(*_compat_async_event)(void);
};

struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};

struct verbs_context {
    void (*free_buf)(struct ibv_buf *);
    void *(*alloc_buf)(struct ibv_pd *, size_t, struct ibv_buf **);
    int (*dm_export_dmabuf_fd)(struct ibv_dm *);
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct ibv_mr_init_attr *);
    int (*dealloc_dmah)(struct ibv_dmah *);
    struct ibv_dmah *(*alloc_dmah)(struct ibv_context *, struct ibv_dmah_init_attr *);
    int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t);
    int (*advise_mr)(struct ibv_pd *, enum ib_uverbs_advise_mr_advice, uint32_t,
            struct ibv_sge *, uint32_t);
    struct ibv_mr *(*alloc_null_mr)(struct ibv_pd *);
    int (*read_counters)(struct ibv_counters *, uint64_t *, uint32_t, uint32_t);
    int (*attach_counters_point_flow)(struct ibv_counters *, struct ibv_counter_attach_attr *,
            struct ibv_flow *);
    struct ibv_counters *(*create_counters)(struct ibv_context *, struct ibv_counters_init_attr *);
    int (*destroy_counters)(struct ibv_counters *);
    struct ibv_mr *(*reg_dm_mr)(struct ibv_pd *, struct ibv_dm *, uint64_t, size_t, unsigned int);
    struct ibv_dm *(*alloc_dm)(struct ibv_context *, struct ibv_alloc_dm_attr *);
    int (*free_dm)(struct ibv_dm *);
    int (*modify_flow_action_esp)(struct ibv_flow_action *, struct ibv_flow_action_esp_attr *);
    int (*destroy_flow_action)(struct ibv_flow_action *);
    struct ibv_flow_action *(*create_flow_action_esp)(struct ibv_context *,
            struct ibv_flow_action_esp_attr *);
    int (*modify_qp_rate_limit)(struct ibv_qp *, struct ibv_qp_rate_limit_attr *);
    struct ibv_pd *(*alloc_parent_domain)(struct ibv_context *,
            struct ibv_parent_domain_init_attr *);
    int (*dealloc_td)(struct ibv_td *);
    struct ibv_td *(*alloc_td)(struct ibv_context *, struct ibv_td_init_attr *);
    int (*modify_cq)(struct ibv_cq *, struct ibv_modify_cq_attr *);
    int (*post_srq_ops)(struct ibv_srq *, struct ibv_ops_wr *, struct ibv_ops_wr **);
    int (*destroy_rwq_ind_table)(struct ibv_rwq_ind_table *);
    struct ibv_rwq_ind_table *(*create_rwq_ind_table)(struct ibv_context *,
            struct ibv_rwq_ind_table_init_attr *);
    int (*destroy_wq)(struct ibv_wq *);
    int (*modify_wq)(struct ibv_wq *, struct ibv_wq_attr *);
    struct ibv_wq *(*create_wq)(struct ibv_context *, struct ibv_wq_init_attr *);
    int (*query_rt_values)(struct ibv_context *, struct ibv_values_ex *);
    struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *, struct ibv_cq_init_attr_ex *);
    struct verbs_ex_private *priv;
    int (*query_device_ex)(struct ibv_context *, const struct ibv_query_device_ex_input *,
            struct ibv_device_attr_ex *, size_t);
    int (*ibv_destroy_flow)(struct ibv_flow *);
    void (*ABI_placeholder2)(void);
    struct ibv_flow *(*ibv_create_flow)(struct ibv_qp *, struct ibv_flow_attr *);
    void (*ABI_placeholder1)(void);
    struct ibv_qp *(*open_qp)(struct ibv_context *, struct ibv_qp_open_attr *);
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *, struct ibv_qp_init_attr_ex *);
    int (*get_srq_num)(struct ibv_srq *, uint32_t *);
    struct ibv_srq *(*create_srq_ex)(struct ibv_context *, struct ibv_srq_init_attr_ex *);
    struct ibv_xrcd *(*open_xrcd)(struct ibv_context *, struct ibv_xrcd_init_attr *);
    int (*close_xrcd)(struct ibv_xrcd *);
    uint64_t _ABI_placeholder3;
    size_t sz;
    struct ibv_context context;
};

/* The verbs_context around a context, or NULL where the library has none. */
static inline struct verbs_context *verbs_get_ctx(struct ibv_context *ctx)
{
    if (ctx->abi_compat != (void *)UINTPTR_MAX)
        return NULL;
    return (struct verbs_context *)((char *)ctx - offsetof(struct verbs_context, context));
}

/* The same, provided the device reaches as far back as `op` and fills it in. */
#define verbs_get_ctx_op(ctx, op)                                                                  \
    (__extension__({                                                                               \
        struct verbs_context *vctx_ = verbs_get_ctx(ctx);                                          \
        !vctx_ || vctx_->sz < sizeof(*vctx_) - offsetof(struct verbs_context, op) || !vctx_->op    \
            ? NULL                                                                                 \
            : vctx_;                                                                               \
    }))

/* ---- Calls through the context ---------------------------------------------- */

static inline int ibv_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
    return cq->context->ops.poll_cq(cq, num_entries, wc);
}

static inline int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    return cq->context->ops.req_notify_cq(cq, solicited_only);
}

static inline int ibv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
    return qp->context->ops.post_send(qp, wr, bad_wr);
}

static inline int ibv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    return qp->context->ops.post_recv(qp, wr, bad_wr);
}

static inline int ibv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    return srq->context->ops.post_srq_recv(srq, wr, bad_wr);
}

static inline struct ibv_mw *ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    if (!pd->context->ops.alloc_mw) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return pd->context->ops.alloc_mw(pd, type);
}

static inline int ibv_dealloc_mw(struct ibv_mw *mw)
{
    return mw->context->ops.dealloc_mw(mw);
}

static inline int ibv_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *mw_bind)
{
    if (mw->type != IBV_MW_TYPE_1)
        return EINVAL;
    return mw->context->ops.bind_mw(qp, mw, mw_bind);
}

/* ---- Calls through verbs_context: EOPNOTSUPP where the device has none -------- */

static inline struct ibv_cq_ex *ibv_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, create_cq_ex);

    if (!vctx) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return vctx->create_cq_ex(context, attr);
}

static inline struct ibv_srq *ibv_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, create_srq_ex);

    if (!vctx) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return vctx->create_srq_ex(context, attr);
}

static inline struct ibv_qp *ibv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, create_qp_ex);

    if (!vctx) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return vctx->create_qp_ex(context, attr);
}

static inline int ibv_query_rt_values_ex(struct ibv_context *context, struct ibv_values_ex *values)
{
    struct verbs_context *vctx = verbs_get_ctx_op(context, query_rt_values);

    return vctx ? vctx->query_rt_values(context, values) : EOPNOTSUPP;
}

static inline int ibv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
    struct verbs_context *vctx = verbs_get_ctx_op(cq->context, modify_cq);

    return vctx ? vctx->modify_cq(cq, attr) : EOPNOTSUPP;
}

static inline int ibv_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
                                struct ibv_sge *sg_list, uint32_t num_sge)
{
    struct verbs_context *vctx = verbs_get_ctx_op(pd->context, advise_mr);

    return vctx ? vctx->advise_mr(pd, advice, flags, sg_list, num_sge) : EOPNOTSUPP;
}

static inline int ibv_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num)
{
    struct verbs_context *vctx = verbs_get_ctx_op(srq->context, get_srq_num);

    return vctx ? vctx->get_srq_num(srq, srq_num) : EOPNOTSUPP;
}

/* ---- Calls through an extended completion queue -------------------------------- */

static inline struct ibv_cq *ibv_cq_ex_to_cq(struct ibv_cq_ex *cq)
{
    return (struct ibv_cq *)cq;
}

static inline int ibv_start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
    return cq->start_poll(cq, attr);
}

static inline int ibv_next_poll(struct ibv_cq_ex *cq)
{
    return cq->next_poll(cq);
}

static inline void ibv_end_poll(struct ibv_cq_ex *cq)
{
    cq->end_poll(cq);
}

#define RN_WC_READER(type, field)                                                                  \
    static inline type ibv_wc_read_##field(struct ibv_cq_ex *cq)                                   \
    {                                                                                              \
        return cq->read_##field(cq);                                                               \
    }

RN_WC_READER(enum ibv_wc_opcode, opcode)
RN_WC_READER(uint32_t, vendor_err)
RN_WC_READER(uint32_t, byte_len)
RN_WC_READER(__be32, imm_data)
RN_WC_READER(uint32_t, qp_num)
RN_WC_READER(uint32_t, src_qp)
RN_WC_READER(unsigned int, wc_flags)
RN_WC_READER(uint32_t, slid)
RN_WC_READER(uint8_t, sl)
RN_WC_READER(uint8_t, dlid_path_bits)
RN_WC_READER(uint64_t, completion_ts)
RN_WC_READER(uint64_t, completion_wallclock_ns)
#undef RN_WC_READER

/* ---- Exports: found by dlsym, defined by a device -------------------------------- */

struct ibv_device **ibv_get_device_list(int *num_devices);
void ibv_free_device_list(struct ibv_device **list);
const char *ibv_get_device_name(struct ibv_device *device);
__be64 ibv_get_device_guid(struct ibv_device *device);
int ibv_get_device_index(struct ibv_device *device);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_fork_init(void);
enum ibv_fork_status ibv_is_fork_initialized(void);

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
/* Writes the 48 bytes of the port's oldest layout; the whole comes from verbs_context.query_port. */
int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct _compat_ibv_port_attr *attr);
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, __be16 *pkey);
int ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, __be16 pkey);
int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port_num, uint32_t gid_index,
                      struct ibv_gid_entry *entry, uint32_t flags, size_t entry_size);
ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size);
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void ibv_ack_async_event(struct ibv_async_event *event);

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access);
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access);
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                 int access);
int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                             struct ibv_comp_channel *channel, int comp_vector);
int ibv_resize_cq(struct ibv_cq *cq, int cqe);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr);
int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int attr_mask);
int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr);
int ibv_destroy_srq(struct ibv_srq *srq);

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
                 struct ibv_qp_init_attr *init_attr);
int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags);
int ibv_destroy_qp(struct ibv_qp *qp);
struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp);
int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece);
int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece);

struct ibv_context *ibv_import_device(int cmd_fd);
struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t pd_handle);
void ibv_unimport_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t mr_handle);
void ibv_unimport_mr(struct ibv_mr *mr);
struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t dm_handle);
void ibv_unimport_dm(struct ibv_dm *dm);

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
                                     uint8_t port_num);
int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc, struct ibv_grh *grh,
                        struct ibv_ah_attr *ah_attr);
int ibv_destroy_ah(struct ibv_ah *ah);

const char *ibv_wc_status_str(enum ibv_wc_status status);
const char *ibv_event_type_str(enum ibv_event_type event);
const char *ibv_port_state_str(enum ibv_port_state state);
const char *ibv_node_type_str(enum ibv_node_type node_type);

#ifdef __cplusplus
}
#endif

#endif
