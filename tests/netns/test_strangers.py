"""Which hosts and processes may connect: what is open to other hosts, secrets, and other processes of this host."""

import os
import shutil
import socket

import pytest

pytestmark = pytest.mark.long

NOBODY = 65534


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def family(request):
    return request.param


def echo_server(host, address, *before, **environment):
    """An echo server and its port; `before` comes between the interpreter and the script."""
    process = host.python(*before, "server.py", address, **environment)
    return process, int(process.line())


def ways(said):
    """The paths by which a client's bytes went there and back."""
    return said.split()[3:]


# ---- What is open --------------------------------------------------------------------------------------


def is_loopback(address):
    """As /proc/net/tcp has it: words of four bytes, each the other way round."""
    return address[-8:] == "0100007F" and len(address) == 8 or address == "0" * 24 + "01000000"


def open_to_others(process):
    """The addresses of all TCP and UDP sockets of its network that others can send to."""
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        with open(f"/proc/{process.pid}/net/{table}") as lines:
            for words in map(str.split, list(lines)[1:]):
                address = words[1].partition(":")[0]
                if words[3] == state and not is_loopback(address):
                    found.add(address)
    return found


def as_listed(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    return "".join(packed[i : i + 4][::-1].hex().upper() for i in range(0, len(packed), 4))


def mapped(address):
    """An IPv4 address is also listed as one of IPv6 that stands for it."""
    return "0" * 16 + "FFFF0000" + as_listed(address)


def test_only_named_addresses_are_open(hosts, family, output):
    """A server that listens at one address opens ports at that address only, for connections and for their bytes."""
    here, there = hosts
    process, port = echo_server(there, there.addresses[family])
    named = {as_listed(there.addresses[family])} | ({mapped(there.addresses[4])} if family == 4 else set())
    assert open_to_others(process) <= named
    assert ways(output(here.python("client.py", "echo", there.addresses[family], port, 1))) == ["stream"]
    assert open_to_others(process) <= named


def test_a_server_of_loopback_opens_nothing(hosts, output):
    _, there = hosts
    process, port = echo_server(there, "127.0.0.1")
    assert ways(output(there.python("client.py", "echo", "127.0.0.1", port, 1))) == ["mapped"]
    assert not open_to_others(process)


def test_a_device_kept_on_loopback_opens_nothing(hosts, output):
    """A wildcard means loopback then, and a client on another host is refused."""
    here, there = hosts
    process, port = echo_server(there, "0.0.0.0", RDMANET_SOFT="local")
    client = there.python("client.py", "echo", "127.0.0.1", port, 1, RDMANET_SOFT="local")
    assert ways(output(client)) == ["mapped"]
    assert not open_to_others(process)
    assert output(here.python("client.py", "echo", there.addresses[4], port, 1)) == "refused\n"


# ---- Secrets -------------------------------------------------------------------------------------------


SECRET, ANOTHER = "5e" * 32, "5f" * 32


@pytest.mark.parametrize(
    ("ours", "its", "works"),
    [
        (SECRET, SECRET, True),
        (SECRET, ANOTHER, False),
        (SECRET, "", False),
        ("", SECRET, False),
    ],
    ids=["the same", "another", "only here", "only there"],
)
def test_secrets(hosts, output, ours, its, works):
    here, there = hosts
    address = there.addresses[4]
    _, port = echo_server(there, address, **({"RDMANET_SOFT_SECRET": its} if its else {}))
    client = here.python(
        "client.py", "echo", address, port, 1000, **({"RDMANET_SOFT_SECRET": ours} if ours else {})
    )
    if works:
        assert output(client).split()[1] == address
    else:
        said = client.rest()
        assert client.wait() != 0 or said == "refused\n"


# ---- Others of the same host ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_ourselves(hosts, output, size):
    """The same user in the same container: bytes go through memory that both map."""
    here, _ = hosts
    _, port = echo_server(here, here.addresses[4])
    assert ways(output(here.python("client.py", "echo", here.addresses[4], port, size))) == ["mapped"]


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to be somebody else")
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_another_user(hosts, output, size):
    """Another user's memory cannot be mapped: bytes go by TCP, without being told to."""
    here, _ = hosts
    _, port = echo_server(here, here.addresses[4], "as_user.py", NOBODY)
    client = ["client.py", "echo", here.addresses[4], port, size]
    for process in here.python(*client), here.python("as_user.py", NOBODY + 1, *client):
        assert ways(output(process)) == ["stream"]


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to have a container")
@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_another_container(hosts, output, size):
    """Processes that share the network, and don't see each other."""
    here, _ = hosts
    _, port = echo_server(here, here.addresses[4])
    script = here.script("client.py", "echo", here.addresses[4], port, size)
    contained = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *script]
    assert ways(output(here.start(*contained))) == ["stream"]
