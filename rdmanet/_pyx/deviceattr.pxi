# The properties of devices and ports, as the libraries report them: named values, without behaviour.


@_late
def MTU():
    class MTU(enum.IntEnum):
        """The largest packet of a path. The value is the ABI's code; `bytes` is the size."""
        MTU_256 = verbs.IBV_MTU_256
        MTU_512 = verbs.IBV_MTU_512
        MTU_1024 = verbs.IBV_MTU_1024
        MTU_2048 = verbs.IBV_MTU_2048
        MTU_4096 = verbs.IBV_MTU_4096

        @property
        def bytes(self):
            """The size in bytes."""
            return 128 << int(self)
    return MTU


@_late
def DeviceAttr():
    @_record
    class DeviceAttr(_FrozenRecord):
        """The properties of a device; names as in struct ibv_device_attr."""
        fw_ver: str
        node_guid: int
        sys_image_guid: int
        max_mr_size: int
        page_size_cap: int
        vendor_id: int
        vendor_part_id: int
        hw_ver: int
        max_qp: int
        max_qp_wr: int
        device_cap_flags: int
        max_sge: int
        max_sge_rd: int
        max_cq: int
        max_cqe: int
        max_mr: int
        max_pd: int
        max_qp_rd_atom: int
        max_res_rd_atom: int
        max_qp_init_rd_atom: int
        atomic_cap: AtomicCap
        max_mw: int
        max_ah: int
        max_srq: int
        max_srq_wr: int
        max_srq_sge: int
        max_pkeys: int
        local_ca_ack_delay: int
        phys_port_cnt: int
        odp_general_caps: int
        odp_rc_caps: int
        max_mcast_grp: int = 0
        max_mcast_qp_attach: int = 0
        max_total_mcast_qp_attach: int = 0
        max_dm_size: int = 0
        max_cq_count: int = 0
        max_cq_period: int = 0
        completion_timestamp_mask: int = 0
        hca_core_clock: int = 0

        @property
        def implicit_odp(self):
            """Whether the whole address space can be registered and used as the source of sends."""
            cdef unsigned int wanted = verbs.IBV_ODP_SUPPORT | verbs.IBV_ODP_SUPPORT_IMPLICIT
            can_send = bool(self.odp_rc_caps & verbs.IBV_ODP_SUPPORT_SEND)
            return can_send and (self.odp_general_caps & wanted) == wanted
    return DeviceAttr


@_late
def PortAttr():
    @_record
    class PortAttr(_FrozenRecord):
        """A port; names as in struct ibv_port_attr."""
        state: PortState
        max_mtu: MTU
        active_mtu: MTU
        gid_tbl_len: int
        port_cap_flags: int
        max_msg_sz: int
        pkey_tbl_len: int
        lid: int
        sm_lid: int
        lmc: int
        active_width: int
        active_speed: int
        phys_state: int
        link_layer: LinkLayer
        flags: int
    return PortAttr
