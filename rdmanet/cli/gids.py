"""list the addresses (GIDs) of all ports: index, type, IP address and network interface

The table is that of show_gids. The last column marks the address to choose when a program asks for an index.
"""

import argparse
import json
import sys

from rdmanet.cli.text import chosen, gid_text, interface_name, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("device", nargs="?", metavar="DEVICE", help="list the addresses of this device only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from rdmanet import _core

    devices = chosen("gids", _core.devices(), args.device)
    if devices is None:
        return 1
    entries = []
    for device in devices:
        try:
            with device.open() as context:
                gids = context.gid_table()
        except OSError as exc:
            print(f"{device.name} cannot be opened: {exc}", file=sys.stderr)
            continue
        best = _core.best_gid(gids)
        for entry in gids:
            entries.append(
                {
                    "device": device.name,
                    "port": entry.port_num,
                    "index": entry.gid_index,
                    "gid": gid_text(entry.gid),
                    "address": str(entry.address),
                    "type": entry.gid_type.name,
                    "interface": interface_name(entry.ndev_ifindex),
                    "preferred": entry is best,
                }
            )
    if args.json:
        json.dump({"gids": entries}, sys.stdout, indent=2)
        print()
    elif entries:
        header = ["device", "port", "index", "GID", "address", "type", "interface", "choose"]
        rows = [
            [str(value) for value in list(entry.values())[:-1]] + ["*" if entry["preferred"] else ""]
            for entry in entries
        ]
        print(table([header, *rows], indent=""))
    else:
        print("gids: no device has an address" if devices else "gids: there is no device", file=sys.stderr)
    return 0 if entries else 1
