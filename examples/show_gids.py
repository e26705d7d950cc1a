"""Print the addresses of all RDMA ports, as the show_gids script does.

usage: python examples/show_gids.py [DEVICE]
"""

import ipaddress
import socket
import sys

import rdmanet.verbs as v


def spelled(gid: bytes) -> str:
    """A GID as the kernel spells it: eight groups, none left out."""
    return ipaddress.IPv6Address(gid).exploded


def interface(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:  # none, or one of another network namespace
        return ""


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    line = "{:<8} {:<5} {:<6} {:<40} {:<16} {:<8} {}"
    print(line.format("DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "DEV"))
    print(line.format("---", "----", "-----", "---", "----", "---", "---"))
    count = 0
    for device in v.devices():
        if wanted not in (None, device.name):
            continue
        with device.open() as context:
            for entry in context.gid_table():
                address = entry.address
                ipv4 = str(address) if address.version == 4 else ""
                kind = {v.GIDType.ROCE_V1: "v1", v.GIDType.ROCE_V2: "v2"}.get(entry.gid_type, "")
                port, index, netdev = entry.port_num, entry.gid_index, interface(entry.ndev_ifindex)
                print(line.format(device.name, port, index, spelled(entry.gid), ipv4, kind, netdev).rstrip())
                count += 1
    print(f"n_gids_found={count}")


if __name__ == "__main__":
    main()
