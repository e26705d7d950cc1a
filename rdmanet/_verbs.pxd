"""The verbs ABI as Cython sees it: abi/verbs.h, abi/rdma_cma.h, the calls of abi/calls.h, and abi/bus_error.h.

Only what the core reads or writes is named. Every rn_* call answers >= 0, or -errno; "calls.h" says
how it comes to that. Those that may sleep are called `with nogil`.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from posix.time cimport timespec
from posix.types cimport pid_t


cdef extern from "bus_error.h" nogil:
    void rn_bus_watch()
    bint rn_bus_copy(void *to, const void *data, size_t length, const void **lost)


cdef extern from "calls.h" nogil:
    ctypedef uint16_t be16 "__be16"
    ctypedef uint32_t be32 "__be32"
    ctypedef uint64_t be64 "__be64"

    enum: IBV_TRANSPORT_IWARP, IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096, IBV_ODP_SUPPORT
    enum: IBV_ODP_SUPPORT_IMPLICIT, IBV_ODP_SUPPORT_SEND

    enum: IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC
    enum: IBV_ACCESS_MW_BIND, IBV_ACCESS_ZERO_BASED, IBV_ACCESS_ON_DEMAND, IBV_REREG_MR_CHANGE_TRANSLATION
    enum: IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_ACCESS, IBV_FLUSH_GLOBAL, IBV_FLUSH_RANGE
    enum ibv_mw_type: IBV_MW_TYPE_1
    enum ibv_srq_type: pass
    enum: IBV_SRQ_MAX_WR, IBV_SRQ_LIMIT, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_XRCD
    enum: IBV_SRQ_INIT_ATTR_CQ, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_XRCD, IBV_QP_INIT_ATTR_CREATE_FLAGS
    enum: IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM, IBV_WC_EX_WITH_QP_NUM
    enum: IBV_WC_EX_WITH_SRC_QP, IBV_WC_EX_WITH_SLID, IBV_WC_EX_WITH_SL, IBV_WC_EX_WITH_DLID_PATH_BITS
    enum: IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK
    enum: IBV_CQ_INIT_ATTR_MASK_FLAGS

    enum ibv_wc_status: IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IBV_WC_RETRY_EXC_ERR
    enum ibv_wc_opcode: IBV_WC_RECV
    enum: IBV_WC_WITH_IMM, IBV_WC_WITH_INV

    enum ibv_qp_type: IBV_QPT_RC, IBV_QPT_UD, IBV_QPT_XRC_SEND, IBV_QPT_XRC_RECV
    enum ibv_qp_state: IBV_QPS_RESET, IBV_QPS_RTS
    enum ibv_mig_state: pass
    enum ibv_mtu: pass
    enum: IBV_QP_STATE, IBV_QP_CUR_STATE, IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_ACCESS_FLAGS, IBV_QP_PKEY_INDEX
    enum: IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_AV, IBV_QP_PATH_MTU, IBV_QP_TIMEOUT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY
    enum: IBV_QP_RQ_PSN, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_ALT_PATH, IBV_QP_MIN_RNR_TIMER, IBV_QP_SQ_PSN
    enum: IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_PATH_MIG_STATE, IBV_QP_CAP, IBV_QP_DEST_QPN, IBV_QP_RATE_LIMIT

    enum ibv_wr_opcode:
        IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP
        IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_SEND_WITH_INV, IBV_WR_ATOMIC_WRITE
    enum: IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_SEND_INLINE

    enum ibv_event_type:
        IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST
        IBV_EVENT_SQ_DRAINED, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR
        IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_SRQ_ERR
        IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_GID_CHANGE
        IBV_EVENT_DEVICE_SPEED_CHANGE

    union ibv_gid:
        uint8_t raw[16]
    struct ibv_device:
        int node_type, transport_type
    struct ibv_context:
        ibv_device *device
        int async_fd, num_comp_vectors
    struct ibv_device_attr:
        char fw_ver[64]
        be64 node_guid, sys_image_guid
        uint64_t max_mr_size, page_size_cap
        uint32_t vendor_id, vendor_part_id, hw_ver
        int max_qp, max_qp_wr
        unsigned int device_cap_flags
        int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_res_rd_atom, max_qp_init_rd_atom
        int atomic_cap, max_mw, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_srq
        int max_srq_wr, max_srq_sge
        uint16_t max_pkeys
        uint8_t local_ca_ack_delay, phys_port_cnt
    struct ibv_odp_transport_caps:
        uint32_t rc_odp_caps
    struct ibv_odp_caps:
        uint64_t general_caps
        ibv_odp_transport_caps per_transport_caps
    struct ibv_cq_moderation_caps:
        uint16_t max_cq_count, max_cq_period
    struct ibv_device_attr_ex:
        ibv_device_attr orig_attr
        ibv_odp_caps odp_caps
        uint64_t completion_timestamp_mask, hca_core_clock
        ibv_cq_moderation_caps cq_mod_caps
        uint64_t max_dm_size
    struct ibv_port_attr:
        int state, max_mtu, active_mtu, gid_tbl_len
        uint32_t port_cap_flags, max_msg_sz
        uint16_t pkey_tbl_len, lid, sm_lid
        uint8_t lmc, active_width, active_speed, phys_state, link_layer, flags
        uint32_t active_speed_ex
    struct ibv_gid_entry:
        ibv_gid gid
        uint32_t gid_index, port_num, gid_type, ndev_ifindex

    struct ibv_pd:
        ibv_context *context
        uint32_t handle
    struct ibv_mr:
        void *addr
        size_t length
        uint32_t lkey, rkey
    struct ibv_mw:
        uint32_t rkey
        ibv_mw_type type
    struct ibv_mw_bind_info:
        ibv_mr *mr
        uint64_t addr, length
        unsigned int mw_access_flags
    struct ibv_mw_bind:
        uint64_t wr_id
        unsigned int send_flags
        ibv_mw_bind_info bind_info
    struct ibv_dm:
        uint32_t handle
    struct ibv_alloc_dm_attr:
        size_t length
        uint32_t log_align_req, comp_mask
    struct ibv_xrcd:
        ibv_context *context
    struct ibv_values_ex:
        uint32_t comp_mask
        timespec raw_clock

    struct ibv_comp_channel:
        int fd
    struct ibv_cq:
        ibv_context *context
        ibv_comp_channel *channel
        void *cq_context
        int cqe
    struct ibv_wc:
        uint64_t wr_id
        ibv_wc_status status
        ibv_wc_opcode opcode
        uint32_t vendor_err, byte_len
        be32 imm_data
        uint32_t invalidated_rkey, qp_num, src_qp
        unsigned int wc_flags
        uint16_t pkey_index, slid
        uint8_t sl, dlid_path_bits
    struct ibv_grh: pass
    struct ibv_cq_init_attr_ex:
        uint32_t cqe
        void *cq_context
        ibv_comp_channel *channel
        uint32_t comp_vector
        uint64_t wc_flags
        uint32_t comp_mask, flags
    struct ibv_cq_ex:
        ibv_wc_status status
        uint64_t wr_id
    ibv_cq *ibv_cq_ex_to_cq(ibv_cq_ex *cq)
    void ibv_end_poll(ibv_cq_ex *cq)
    ibv_wc_opcode ibv_wc_read_opcode(ibv_cq_ex *cq)
    uint32_t ibv_wc_read_vendor_err(ibv_cq_ex *cq)
    uint32_t ibv_wc_read_byte_len(ibv_cq_ex *cq)
    be32 ibv_wc_read_imm_data(ibv_cq_ex *cq)
    uint32_t ibv_wc_read_qp_num(ibv_cq_ex *cq)
    uint32_t ibv_wc_read_src_qp(ibv_cq_ex *cq)
    unsigned int ibv_wc_read_wc_flags(ibv_cq_ex *cq)
    uint32_t ibv_wc_read_slid(ibv_cq_ex *cq)
    uint8_t ibv_wc_read_sl(ibv_cq_ex *cq)
    uint8_t ibv_wc_read_dlid_path_bits(ibv_cq_ex *cq)
    uint64_t ibv_wc_read_completion_ts(ibv_cq_ex *cq)
    uint64_t ibv_wc_read_completion_wallclock_ns(ibv_cq_ex *cq)

    struct ibv_sge:
        uint64_t addr
        uint32_t length, lkey
    struct ibv_send_wr_rdma:
        uint64_t remote_addr
        uint32_t rkey
    struct ibv_send_wr_atomic:
        uint64_t remote_addr, compare_add, swap
        uint32_t rkey
    struct ibv_send_wr_ud:
        ibv_ah *ah
        uint32_t remote_qpn, remote_qkey
    union ibv_send_wr_wr:
        ibv_send_wr_rdma rdma
        ibv_send_wr_atomic atomic
        ibv_send_wr_ud ud
    struct ibv_send_wr_xrc:
        uint32_t remote_srqn
    union ibv_send_wr_qp_type:
        ibv_send_wr_xrc xrc
    struct ibv_send_wr_bind_mw:
        ibv_mw *mw
        uint32_t rkey
        ibv_mw_bind_info bind_info
    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        ibv_wr_opcode opcode
        unsigned int send_flags
        be32 imm_data
        uint32_t invalidate_rkey
        ibv_send_wr_wr wr
        ibv_send_wr_qp_type qp_type
        ibv_send_wr_bind_mw bind_mw
    struct ibv_data_buf:
        void *addr
        size_t length
    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge

    struct ibv_srq_attr:
        uint32_t max_wr, max_sge, srq_limit
    struct ibv_srq_init_attr:
        ibv_srq_attr attr
    struct ibv_srq_init_attr_ex:
        ibv_srq_attr attr
        uint32_t comp_mask
        ibv_srq_type srq_type
        ibv_pd *pd
        ibv_xrcd *xrcd
        ibv_cq *cq
    struct ibv_srq:
        ibv_context *context
        uint32_t handle
    struct ibv_ah:
        uint32_t handle
    struct ibv_qp_cap:
        uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
    struct ibv_qp_init_attr:
        void *qp_context
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        ibv_qp_cap cap
        ibv_qp_type qp_type
        int sq_sig_all
    struct ibv_qp_init_attr_ex:
        ibv_cq *send_cq
        ibv_cq *recv_cq
        ibv_srq *srq
        ibv_qp_cap cap
        ibv_qp_type qp_type
        int sq_sig_all
        uint32_t comp_mask
        ibv_pd *pd
        ibv_xrcd *xrcd
        uint32_t create_flags
        uint64_t send_ops_flags
    struct ibv_qp_ex:
        void (*wr_start)(ibv_qp_ex *) noexcept
    struct rn_wr_more:
        uint8_t atomic_write[8]
        uint64_t flush_length
        uint8_t flush_type, flush_level
    struct ibv_global_route:
        ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index, hop_limit, traffic_class
    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl, src_path_bits, static_rate, is_global, port_num
    struct ibv_qp_attr:
        ibv_qp_state qp_state, cur_qp_state
        ibv_mtu path_mtu
        ibv_mig_state path_mig_state
        uint32_t qkey, rq_psn, sq_psn, dest_qp_num
        unsigned int qp_access_flags
        ibv_qp_cap cap
        ibv_ah_attr ah_attr, alt_ah_attr
        uint16_t pkey_index, alt_pkey_index
        uint8_t en_sqd_async_notify, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout
        uint8_t retry_cnt, rnr_retry, alt_port_num, alt_timeout
        uint32_t rate_limit
    struct ibv_qp:
        ibv_context *context
        void *qp_context
        ibv_pd *pd
        ibv_cq *send_cq
        ibv_cq *recv_cq
        uint32_t qp_num
        ibv_qp_state state
        ibv_qp_type qp_type

    union ibv_async_event_element:
        ibv_cq *cq
        ibv_qp *qp
        ibv_srq *srq
        int port_num
    struct ibv_async_event:
        ibv_async_event_element element
        ibv_event_type event_type

    # ---- The connection manager ----

    enum rdma_cm_event_type: RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED
    enum rdma_port_space: RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP
    enum: RDMA_OPTION_ID, RDMA_MC_JOIN_FLAG_FULLMEMBER, RDMA_OPTION_ID_TOS, RDMA_OPTION_ID_REUSEADDR
    enum: RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_ACK_TIMEOUT

    struct sockaddr: pass
    struct sockaddr_storage: pass
    struct rdma_event_channel:
        int fd
    struct rdma_cm_event
    struct rdma_cm_id:
        ibv_context *verbs
        rdma_event_channel *channel
        void *context
        ibv_qp *qp
        rdma_port_space ps
        uint8_t port_num
    struct rdma_conn_param:
        const void *private_data
        uint8_t private_data_len, responder_resources, initiator_depth, retry_count, rnr_retry_count, srq
        uint32_t qp_num
    struct rdma_ud_param:
        const void *private_data
        uint8_t private_data_len
        ibv_ah_attr ah_attr
        uint32_t qp_num, qkey
    union rdma_cm_event_param:
        rdma_conn_param conn
        rdma_ud_param ud
    struct rdma_cm_event:
        rdma_cm_id *id
        rdma_cm_id *listen_id
        rdma_cm_event_type event
        int status
        rdma_cm_event_param param
    sockaddr *rdma_get_local_addr(rdma_cm_id *id)
    sockaddr *rdma_get_peer_addr(rdma_cm_id *id)

    # ---- The library and its calls ----

    pid_t rn_pid
    struct rn_library:
        const char *(*ibv_get_device_name)(ibv_device *) noexcept
        be64 (*ibv_get_device_guid)(ibv_device *) noexcept

    int rn_library_open(const char *verbs_path, const char *cm_path, rn_library **lib, char *err,
                        size_t errlen)
    const char *rn_library_optional(const rn_library *lib, size_t index, bint *present)
    void *rn_library_symbol(const rn_library *lib, const char *name)

    int rn_get_device_list(const rn_library *lib, int *count, ibv_device ***out)
    void rn_free_device_list(const rn_library *lib, ibv_device **list)
    int rn_open_device(const rn_library *lib, ibv_device *device, ibv_context **out)
    int rn_close_device(const rn_library *lib, ibv_context *context)
    int rn_query_device_ex(const rn_library *lib, ibv_context *context, ibv_device_attr_ex *attr)
    int rn_query_port(const rn_library *lib, ibv_context *context, uint8_t port_num, ibv_port_attr *attr)
    int rn_query_gid(const rn_library *lib, ibv_context *context, uint8_t port_num, int index, ibv_gid *gid)
    int rn_query_gid_ex(const rn_library *lib, ibv_context *context, uint32_t port_num, uint32_t index,
                        ibv_gid_entry *entry)
    int rn_query_pkey(const rn_library *lib, ibv_context *context, uint8_t port_num, int index, be16 *pkey)
    int rn_get_async_event(const rn_library *lib, ibv_context *context, ibv_async_event *event)
    void rn_ack_async_event(const rn_library *lib, ibv_async_event *event)

    int rn_alloc_pd(const rn_library *lib, ibv_context *context, ibv_pd **out)
    int rn_dealloc_pd(const rn_library *lib, ibv_pd *pd)
    int rn_reg_mr(const rn_library *lib, ibv_pd *pd, void *addr, size_t length, int access, ibv_mr **out)
    int rn_reg_dmabuf_mr(const rn_library *lib, ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                         int fd, int access, ibv_mr **out)
    int rn_rereg_mr(const rn_library *lib, ibv_mr *mr, int flags, ibv_pd *pd, void *addr, size_t length,
                    int access, bint *lost)
    int rn_alloc_null_mr(ibv_pd *pd, ibv_mr **out)
    int rn_advise_mr(ibv_pd *pd, int advice, uint32_t flags, ibv_sge *sges, uint32_t count)
    int rn_alloc_mw(ibv_pd *pd, ibv_mw_type type, ibv_mw **out)
    int rn_dealloc_mw(ibv_mw *mw)
    int rn_bind_mw(ibv_qp *qp, ibv_mw *mw, ibv_mw_bind *bind)
    int rn_alloc_dm(ibv_context *context, ibv_alloc_dm_attr *attr, ibv_dm **out)
    int rn_free_dm(ibv_dm *dm)
    int rn_reg_dm_mr(ibv_pd *pd, ibv_dm *dm, uint64_t offset, size_t length, unsigned int access, ibv_mr **out)
    int rn_memcpy_to_dm(ibv_dm *dm, uint64_t offset, const void *data, size_t length)
    int rn_memcpy_from_dm(void *data, ibv_dm *dm, uint64_t offset, size_t length)
    int rn_dereg_mr(const rn_library *lib, ibv_mr *mr)

    int rn_create_comp_channel(const rn_library *lib, ibv_context *context, ibv_comp_channel **out)
    int rn_destroy_comp_channel(const rn_library *lib, ibv_comp_channel *channel)
    int rn_create_cq(const rn_library *lib, ibv_context *context, int cqe, void *cq_context,
                     ibv_comp_channel *channel, int comp_vector, ibv_cq **out)
    int rn_resize_cq(const rn_library *lib, ibv_cq *cq, int cqe)
    int rn_destroy_cq(const rn_library *lib, ibv_cq *cq)
    int rn_get_cq_event(const rn_library *lib, ibv_comp_channel *channel, ibv_cq **cq, void **cq_context)
    void rn_ack_cq_events(const rn_library *lib, ibv_cq *cq, unsigned int nevents)
    int rn_poll_cq(ibv_cq *cq, int num_entries, ibv_wc *wc)
    int rn_req_notify_cq(ibv_cq *cq, int solicited_only)

    int rn_create_cq_ex(ibv_context *context, ibv_cq_init_attr_ex *attr, ibv_cq_ex **out)
    int rn_start_poll(ibv_cq_ex *cq)
    int rn_modify_cq(ibv_cq *cq, uint16_t count, uint16_t period)
    int rn_query_rt_values(ibv_context *context, ibv_values_ex *values)

    int rn_create_srq(const rn_library *lib, ibv_pd *pd, ibv_srq_init_attr *attr, ibv_srq **out)
    int rn_create_srq_ex(ibv_context *context, ibv_srq_init_attr_ex *attr, ibv_srq **out)
    int rn_modify_srq(const rn_library *lib, ibv_srq *srq, ibv_srq_attr *attr, int mask)
    int rn_query_srq(const rn_library *lib, ibv_srq *srq, ibv_srq_attr *attr)
    int rn_destroy_srq(const rn_library *lib, ibv_srq *srq)
    int rn_post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad_wr)
    int rn_get_srq_num(ibv_srq *srq, uint32_t *number)
    int rn_open_xrcd(ibv_context *context, int fd, int oflags, ibv_xrcd **out)
    int rn_close_xrcd(ibv_xrcd *xrcd)
    int rn_open_qp(ibv_context *context, ibv_xrcd *xrcd, uint32_t qp_num, ibv_qp **out)
    int rn_create_ah(const rn_library *lib, ibv_pd *pd, ibv_ah_attr *attr, ibv_ah **out)
    int rn_destroy_ah(const rn_library *lib, ibv_ah *ah)
    int rn_init_ah_from_wc(const rn_library *lib, ibv_context *context, uint8_t port_num, ibv_wc *wc,
                           ibv_grh *grh, ibv_ah_attr *attr)

    int rn_create_qp(const rn_library *lib, ibv_pd *pd, ibv_qp_init_attr *attr, ibv_qp **out)
    int rn_create_qp_ex(ibv_context *context, ibv_qp_init_attr_ex *attr, ibv_qp **out)
    int rn_qp_to_qp_ex(const rn_library *lib, ibv_qp *qp, ibv_qp_ex **out)
    int rn_attach_mcast(const rn_library *lib, ibv_qp *qp, const ibv_gid *gid, uint16_t lid)
    int rn_detach_mcast(const rn_library *lib, ibv_qp *qp, const ibv_gid *gid, uint16_t lid)
    uint64_t rn_send_op(ibv_wr_opcode opcode)
    void rn_wr_build(ibv_qp_ex *qp, const ibv_send_wr *wr, const rn_wr_more *more, ibv_data_buf *inline_bufs)
    int rn_wr_complete(ibv_qp_ex *qp)
    int rn_modify_qp(const rn_library *lib, ibv_qp *qp, ibv_qp_attr *attr, int attr_mask)
    int rn_query_qp(const rn_library *lib, ibv_qp *qp, ibv_qp_attr *attr, int attr_mask,
                    ibv_qp_init_attr *init_attr)
    int rn_destroy_qp(const rn_library *lib, ibv_qp *qp)
    int rn_post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad_wr)
    int rn_post_recv(ibv_qp *qp, ibv_recv_wr *wr, ibv_recv_wr **bad_wr)

    int rn_create_event_channel(const rn_library *lib, rdma_event_channel **out)
    void rn_destroy_event_channel(const rn_library *lib, rdma_event_channel *channel)
    int rn_get_cm_event(const rn_library *lib, rdma_event_channel *channel, rdma_cm_event **event)
    int rn_ack_cm_event(const rn_library *lib, rdma_cm_event *event)
    int rn_create_id(const rn_library *lib, rdma_event_channel *channel, void *context, rdma_port_space ps,
                     rdma_cm_id **out)
    int rn_destroy_id(const rn_library *lib, rdma_cm_id *id)
    int rn_migrate_id(const rn_library *lib, rdma_cm_id *id, rdma_event_channel *channel)
    int rn_set_option(const rn_library *lib, rdma_cm_id *id, int level, int optname, void *optval,
                      size_t optlen)
    int rn_bind_addr(const rn_library *lib, rdma_cm_id *id, sockaddr *addr)
    int rn_resolve_addr(const rn_library *lib, rdma_cm_id *id, sockaddr *src, sockaddr *dst, int timeout_ms)
    int rn_resolve_route(const rn_library *lib, rdma_cm_id *id, int timeout_ms)
    int rn_listen(const rn_library *lib, rdma_cm_id *id, int backlog)
    int rn_connect(const rn_library *lib, rdma_cm_id *id, rdma_conn_param *param)
    int rn_accept(const rn_library *lib, rdma_cm_id *id, rdma_conn_param *param)
    int rn_establish(const rn_library *lib, rdma_cm_id *id)
    int rn_notify(const rn_library *lib, rdma_cm_id *id, ibv_event_type event)
    int rn_reject(const rn_library *lib, rdma_cm_id *id, const void *private_data, uint8_t length)
    int rn_disconnect(const rn_library *lib, rdma_cm_id *id)
    int rn_cm_create_qp(const rn_library *lib, rdma_cm_id *id, ibv_pd *pd, ibv_qp_init_attr *attr)
    int rn_cm_create_qp_ex(const rn_library *lib, rdma_cm_id *id, ibv_qp_init_attr_ex *attr)
    int rn_join_multicast(const rn_library *lib, rdma_cm_id *id, sockaddr *addr, uint32_t flags)
    int rn_leave_multicast(const rn_library *lib, rdma_cm_id *id, sockaddr *addr)
    void rn_cm_destroy_qp(const rn_library *lib, rdma_cm_id *id)
    int rn_cm_init_qp_attr(const rn_library *lib, rdma_cm_id *id, ibv_qp_attr *attr, int *attr_mask)
