"""A device is found by each thing that one may know of it, and where there is none the error has what there is."""

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

import pytest

from rdmanet._core import gid_advice
from rdmanet.verbs import (
    DeviceNotFoundError,
    GIDEntry,
    GIDType,
    Library,
    TransportType,
    best_gid,
    device_lookup,
    devices,
    features,
    find_device,
    open_device,
)


def interface(entry):
    try:
        return socket.if_indextoname(entry.ndev_ifindex)
    except OSError:
        return None


def test_by_name_and_guid(device):
    digits = f"{device.guid:016x}"
    spelled = ":".join(digits[i : i + 4] for i in range(0, 16, 4))
    for guid in (device.guid, digits, spelled, f"0x{digits}"):
        assert find_device(guid=guid).guid == device.guid
    assert find_device(device.name).name == device.name
    assert find_device(device.name, guid=device.guid).name == device.name


def test_without_a_wish_the_first():
    assert find_device().name == devices()[0].name


def test_by_each_address(device, context):
    for entry in context.gid_table():
        for gid in (entry.gid, str(entry), ipaddress.IPv6Address(entry.gid)):
            assert find_device(device.name, gid=gid).name == device.name
        if device.transport_type == TransportType.IWARP and not device.library.embedded_device:
            continue  # these are no IP addresses
        ways = {"ip": entry.address, "subnet": f"{entry.address}/{entry.address.max_prefixlen}"}
        if (name := interface(entry)) is not None:
            ways["netdev"] = name
        for key, value in ways.items():
            assert find_device(device.name, **{key: value}).name == device.name
            assert find_device(device.name, **{key: str(value)}).name == device.name
        assert find_device(device.name, **ways).name == device.name


def test_open(device):
    with open_device(device.name) as context:
        assert context.name == device.name


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"name": "nobody0"}, "name nobody0"),
        ({"guid": "dead:beef:dead:beef"}, "guid dead:beef:dead:beef"),
        ({"gid": bytes(15) + b"\x07"}, "gid " + "00" * 15 + "07"),
        ({"ip": "203.0.113.77"}, "ip 203.0.113.77"),
        ({"netdev": "nobody0"}, "netdev nobody0"),
        ({"subnet": "203.0.113.0/24"}, "subnet 203.0.113.0/24"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_there_is_none(device, context, wish, said):
    """The error names what was asked for, and the devices with their addresses."""
    for find in (find_device, open_device):
        with pytest.raises(DeviceNotFoundError, match=f"no device has {said}; there is ") as caught:
            find(**wish)
        assert caught.value.errno == errno.ENODEV
        assert f"{device.name} (guid {device.guid:016x}" in str(caught.value)
        for entry in context.gid_table():
            assert str(entry.address) in str(caught.value)


@pytest.mark.parametrize(
    "wish",
    [
        {"gid": b"short"},
        {"gid": "no address"},
        {"ip": "no address"},
        {"subnet": "10.0.0.1/24"},
        {"guid": "x"},
        {"guid": "1" * 17},
    ],
    ids=str,
)
def test_a_wish_that_makes_no_sense(wish):
    with pytest.raises(ValueError):
        find_device(**wish)


# ---- Of several ----


class StandIn:
    """A device and its context in one: what finding one asks of them."""

    def __init__(self, name, guid, table, opens=True):
        self.name, self.guid, self.table, self.opens = name, guid, table, opens

    def open(self):
        if not self.opens:
            raise PermissionError(errno.EACCES, "ibv_open_device: Permission denied")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def gid_table(self):
        return self.table


@dataclass
class Machine:
    first: StandIn
    second: StandIn
    shut: StandIn


def gid(address, index, ifindex=0, kind=GIDType.ROCE_V2):
    ip = ipaddress.ip_address(address)
    raw = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
    return GIDEntry(raw, index, 1, kind, ifindex)


@pytest.fixture
def machine(monkeypatch):
    lo = socket.if_nametoindex("lo")
    there = Machine(
        StandIn("first0", 1, [gid("10.0.0.1", 0), gid("10.1.0.1", 1, lo)]),
        StandIn("second0", 2, [gid("10.0.0.2", 0, lo), gid("2001:db8::2", 1)]),
        StandIn("shut0", 3, [], opens=False),
    )
    monkeypatch.setattr(device_lookup, "devices", lambda: [there.shut, there.first, there.second])
    return there


def test_all_of_it_has_to_hold_for_one_address(machine):
    assert find_device(ip="10.0.0.2") is machine.second
    assert find_device(subnet="10.0.0.0/24") is machine.first
    assert find_device(subnet="10.0.0.0/24", netdev="lo") is machine.second
    assert find_device(netdev="lo") is machine.first
    assert find_device("second0", netdev="lo") is machine.second
    assert find_device(ip="::ffff:10.0.0.2") is machine.second
    with pytest.raises(DeviceNotFoundError, match=r"no device has name first0 and ip 10\.0\.0\.2"):
        find_device("first0", ip="10.0.0.2")
    with pytest.raises(DeviceNotFoundError, match="ip 2001:db8::2 and netdev lo"):
        find_device(ip="2001:db8::2", netdev="lo")


def test_one_that_cannot_be_opened(machine):
    """It is found by what is known without opening it, and the error says why it could not be looked at."""
    assert find_device("shut0") is machine.shut
    assert find_device(guid=3) is machine.shut
    with pytest.raises(DeviceNotFoundError, match=r"shut0 \(guid 0{15}3, cannot be opened: .*denied"):
        find_device(ip="10.9.9.9")


def test_no_device_at_all(monkeypatch):
    monkeypatch.setattr(device_lookup, "devices", list)
    with pytest.raises(DeviceNotFoundError, match="there is no device"):
        find_device()


def test_the_best_address(machine):
    assert best_gid(machine.second.table) == machine.second.table[0]
    assert best_gid(machine.second.table[1:]) == machine.second.table[1]


V1, V2 = GIDType.ROCE_V1, GIDType.ROCE_V2
LOCAL, ROUTED, LOOP = "fe80::1", "10.0.0.1", "127.0.0.1"


@pytest.mark.parametrize(
    ("table", "ip", "said"),
    [
        (
            [(LOCAL, V2), (ROUTED, V2)],
            LOCAL,
            "link-local and .*; use GID index 1 \\(::ffff:[0-9a.:]+, ROCE_V2",
        ),
        ([(LOCAL, V2), (ROUTED, V2)], "fe80::1%lo", "index 0 .*link-local and .*; use GID index 1"),
        ([(ROUTED, V1), ("10.0.0.2", V2)], ROUTED, "index 0 .*RoCE v1 and .*; use GID index 1"),
        ([(ROUTED, V1), (ROUTED, V2)], ROUTED, "from GID index 1 \\(::ffff:[0-9a.:]+, ROCE_V2\\), port 1; `"),
        ([(ROUTED, V2), (LOOP, V2)], LOOP, "from GID index 1 .*, port 1; `rdmanet gids`"),
        ([(LOCAL, V2), (LOOP, V2)], LOCAL, "from GID index 0 .*, port 1; `"),
        ([(ROUTED, V2)], "10.0.0.9", "from 10.0.0.9, which is no GID of the port"),
    ],
)
def test_which_address_leads_further(table, ip, said):
    """What the error says of an attempt that found no way: the index that was used, and a better one."""
    entries = [gid(address, index, kind=kind) for index, (address, kind) in enumerate(table)]
    assert re.search(said, gid_advice(entries, ip))


# ---- What the libraries can do ----


def test_features():
    found = features()
    assert all(found["embedded"].values())
    assert {"dmabuf_mr", "qp_ex", "gid_table", "cm_multicast"} <= set(found["embedded"])
    assert ("rdma-core" in found) == (Library.system() is not None)


def test_the_calls_that_a_library_has(device):
    """Every call that a feature stands for is one of those that may be missing."""
    calls = device.library.optional_calls()
    assert set(device_lookup._FEATURES.values()) <= set(calls)
    assert all(isinstance(present, bool) for present in calls.values())
