"""list the RDMA devices, their ports and addresses

The embedded device is listed beside the kernel's. A library that is not installed is a line of output, not an error.
"""

import argparse
import json
import sys
from typing import Any

from rdmanet.cli.text import chosen, gid_text, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("device", nargs="?", metavar="DEVICE", help="list this device only")
    parser.add_argument("--json", action="store_true", help="print JSON, with more details")


def run(args: argparse.Namespace) -> int:
    from rdmanet import _core

    there = chosen("devices", _core.devices(), args.device)
    if there is None:
        return 1
    devices = [_describe(device) for device in there]
    missing = {} if args.device else _core.Library.missing()
    if args.json:
        json.dump({"devices": devices, "missing": missing}, sys.stdout, indent=2)
        print()
    else:
        _print(devices, missing)
    return 0 if devices else 1


def _describe(device: Any) -> dict[str, Any]:
    """What is known of a device. One that cannot be opened is listed with the reason."""
    described: dict[str, Any] = {
        "name": device.name,
        "library": device.library.name,
        "transport": device.transport_type.name,
        "guid": f"{device.guid:016x}",
        "ports": [],
    }
    try:
        with device.open() as context:
            attributes = context.query_device()
            described |= {
                "firmware": attributes.fw_ver,
                "max_qp": attributes.max_qp,
                "max_mr": attributes.max_mr,
            }
            for number in range(1, attributes.phys_port_cnt + 1):
                port = context.query_port(number)
                described["ports"].append(
                    {
                        "port": number,
                        "state": port.state.name,
                        "link_layer": port.link_layer.name,
                        "mtu": port.active_mtu.bytes,
                        "lid": port.lid,
                        "gids": [
                            {
                                "index": entry.gid_index,
                                "gid": gid_text(entry.gid),
                                "address": str(entry.address),
                                "type": entry.gid_type.name,
                            }
                            for entry in context.gid_table(number)
                        ],
                    }
                )
    except OSError as exc:
        described["error"] = str(exc)
    return described


def _print(devices: list[dict[str, Any]], missing: dict[str, str]) -> None:
    rows: list[list[str]] = [["device", "library", "port", "state", "link", "MTU", "GID", "type", "address"]]
    for device in devices:
        # A name is printed once, in the first of its lines.
        owner = [device["name"], device["library"]]
        for port in device["ports"] or [None]:
            place = ["", "", "", ""]
            if port is not None:
                place = [str(port["port"]), port["state"], port["link_layer"], str(port["mtu"])]
            for gid in (port and port["gids"]) or [None]:
                address = ["", "", ""]
                if gid is not None:
                    address = [str(gid["index"]), gid["type"], gid["address"]]
                rows.append(owner + place + address)
                owner, place = ["", ""], ["", "", "", ""]
    if len(rows) > 1:
        print(table(rows, indent=""))
    for device in devices:
        if "error" in device:
            print(f"{device['name']} cannot be opened: {device['error']}")
    for library, reason in missing.items():
        print(f"{library} is not available: {reason}")
