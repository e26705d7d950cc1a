# The addresses (GIDs) of ports, and which of them to use.
#
# A port has a table of GIDs. On RoCE each IP address of its network device is one, once for each kind of packets; so a
# program that gives no index gets `best_gid`. An error of a connection says which entry was used, and which would have
# been better.


@_late
def GIDEntry():
    import ipaddress  # here and below: few programs look at addresses of ports

    @_record
    class GIDEntry(_FrozenRecord):
        """One address of a port."""
        gid: bytes
        gid_index: int
        port_num: int
        gid_type: GIDType
        ndev_ifindex: int

        @property
        def address(self):
            """The GID as an IP address; an IPv4-mapped one as an IPv4 address."""
            address = ipaddress.IPv6Address(self.gid)
            return address.ipv4_mapped or address

        def __str__(self):
            return str(ipaddress.IPv6Address(self.gid))
    return GIDEntry


def best_gid(table):
    """The address to use by default: routable before link-local, RoCE v2 before v1, IPv4 before IPv6.

    :param table: entries of a gid_table(); the result is None if there are none
    """
    return min(table, key=_rank, default=None)


def gid_advice(table, ip):
    """A sentence: which entry of a port's GID table a local IP address is, and which entry is better, if any."""
    import ipaddress
    wanted = ipaddress.ip_address(ip.partition("%")[0])
    own = best_gid([entry for entry in table if entry.address == wanted])
    if own is None:
        return f"from {ip}, which is no GID of the port; `rdmanet gids` lists them"
    text = f"from {_named(own)}, port {own.port_num}"
    best = best_gid([entry for entry in table if not entry.address.is_loopback])
    if best is not None and own.gid_type != core.GIDType.IB and _rank(best) < _rank(own):
        if own.address.is_link_local and not best.address.is_link_local:
            text += f", which is link-local and ends at the next router; use {_named(best)}"
        elif own.gid_type == core.GIDType.ROCE_V1 and best.gid_type != core.GIDType.ROCE_V1:
            text += f", which is RoCE v1 and ends at the next router; use {_named(best)}"
    return text + "; `rdmanet gids` lists all"


def _named(entry):
    return f"GID index {entry.gid_index} ({entry}, {getattr(entry.gid_type, 'name', entry.gid_type)})"


def _rank(entry):
    address = entry.address
    return (address.is_link_local, address.is_loopback, entry.gid_type == core.GIDType.ROCE_V1, address.version == 6,
            entry.gid_index)
