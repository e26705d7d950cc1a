"""Print the properties of each RDMA device, as ibv_devinfo does; with -v all of them.

usage: python examples/devinfo.py [-v] [-d DEVICE]
"""

import argparse
import dataclasses
import sys

import rdmanet.verbs as v

SHORT = ("fw_ver", "node_guid", "sys_image_guid", "vendor_id", "vendor_part_id", "hw_ver", "phys_port_cnt")
SHORT_PORT = ("state", "max_mtu", "active_mtu", "sm_lid", "lid", "lmc", "link_layer")
IN_HEX = ("vendor_id", "hw_ver", "device_cap_flags", "page_size_cap", "port_cap_flags", "max_mr_size")


def spelled(name: str, value: object) -> str:
    """A value as ibv_devinfo has it: GUIDs in groups of four digits, states by their names, sizes in bytes."""
    if name.endswith("guid"):
        digits = f"{value:016x}"
        return ":".join(digits[i : i + 4] for i in range(0, 16, 4))
    if isinstance(value, v.MTU):
        return f"{value.bytes} ({int(value)})"
    if isinstance(value, v.PortState):
        return f"PORT_{value.name} ({int(value)})"
    if isinstance(value, v.LinkLayer):
        return value.name.capitalize()
    if name in IN_HEX:
        return f"{value:#x}"
    return getattr(value, "name", None) or str(value)


def show(record: object, names: tuple[str, ...] | None, indent: str) -> None:
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        if names is None or field.name in names:
            print(f"{indent}{field.name + ':':<24}{spelled(field.name, getattr(record, field.name))}")


def main() -> int:
    parser = argparse.ArgumentParser(description="what each RDMA device can do")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-d", "--device", help="this one only")
    args = parser.parse_args()
    devices = [device for device in v.devices() if args.device in (None, device.name)]
    if not devices:
        print(f"no device named {args.device}" if args.device else "no device", file=sys.stderr)
        return 1
    for device in devices:
        print(f"hca_id: {device.name}")
        print(f"    {'transport:':<24}{device.transport_type.name} ({int(device.transport_type)})")
        with device.open() as context:
            attributes = context.query_device()
            show(attributes, None if args.verbose else SHORT, "    ")
            for number in range(1, attributes.phys_port_cnt + 1):
                print(f"        port: {number}")
                show(context.query_port(number), None if args.verbose else SHORT_PORT, "            ")
                for entry in context.gid_table(number) if args.verbose else []:
                    gid = f"GID[{entry.gid_index}]:"
                    print(f"            {gid:<24}{entry.address}, {entry.gid_type.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
