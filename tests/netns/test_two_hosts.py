"""Between hosts: what works within one works between two, by TCP, in both families of addresses."""

import select
import shutil
import signal
import sys

import pytest

pytestmark = pytest.mark.long


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def family(request):
    return request.param


@pytest.fixture
def server(hosts, family):
    """An echo server on the other host: its address, its port, and its process."""
    _, there = hosts
    process = there.python("server.py", there.addresses[family])
    return there.addresses[family], int(process.line()), process


@pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
def test_bytes_there_and_back(hosts, server, family, output, size):
    here, there = hosts
    address, port, _ = server
    said = output(here.python("client.py", "echo", address, port, size)).split()
    assert said == [here.addresses[family], there.addresses[family], "soft0", "stream"]


def test_several_at_once(hosts, server, output):
    address, port, _ = server
    assert output(hosts[0].python("client.py", "several", address, port, 20)) == "done\n"


def test_nobody_there(hosts, family, output):
    here, there = hosts
    assert output(here.python("client.py", "echo", there.addresses[family], 9, 1)) == "refused\n"


@pytest.mark.parametrize("manner", ["hangs up", "resets", "answers"])
def test_a_tcp_program(hosts, family, manner, output):
    """On this host the kernel tells who has a port. On another only the program itself does."""
    here, there = hosts
    process = there.python("tcp_program.py", there.addresses[family], manner)
    said = output(here.python("client.py", "refused", there.addresses[family], process.line().strip()))
    if manner == "answers":
        assert "answers, but not as rdmanet: a TCP program has that port" in said
    else:
        assert "has ended the connection without an answer: a TCP program has that port" in said


def test_the_other_is_killed(hosts, server, output):
    address, port, process = server
    client = hosts[0].python("client.py", "wait", address, port)
    assert client.line() == "connected"
    process.close()
    assert client.line() in ("end", "reset")
    client.finish()


def test_a_server_of_loopback_is_out_of_reach(hosts, output):
    here, there = hosts
    process = there.python("server.py", "127.0.0.1")
    port = int(process.line())
    assert output(here.python("client.py", "echo", there.addresses[4], port, 1)) == "refused\n"
    assert output(there.python("client.py", "echo", "127.0.0.1", port, 1)).split()[0] == "127.0.0.1"


def test_a_device_kept_on_loopback(hosts, server, output):
    """RDMANET_SOFT=local goes nowhere else."""
    address, port, _ = server
    client = hosts[0].python("client.py", "echo", address, port, 1, RDMANET_SOFT="local")
    assert client.wait() != 0
    assert "No route to host" in client.errors()


# ---- Datagrams ---------------------------------------------------------------------------------------


def answering(host, family, *group):
    """Start a process that answers datagrams; its address and queue pair number, as the asker will see them."""
    process = host.python("datagrams.py", "answer", host.addresses[family], *group)
    return f"{host.addresses[family]} {process.line()}"


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_datagrams(hosts, family, output, size):
    """There and back, each in several packets if need be."""
    here, there = hosts
    who = answering(there, family)
    asked = here.python("datagrams.py", "ask", here.addresses[family], *who.split(), size, 1)
    assert output(asked).splitlines() == [who]


def test_datagrams_to_many(hosts, family, output):
    """All members of a group on both hosts get what is sent to it, and no others."""
    here, there = hosts
    group = {4: "239.8.0.1", 6: "ff15::8:1"}[family]
    members = {answering(host, family, group) for host in (here, there, there)}
    answering(there, family)
    answering(there, family, {4: "239.8.0.2", 6: "ff15::8:2"}[family])
    asked = here.python("datagrams.py", "ask", here.addresses[family], group, 0xFFFFFF, 4096, len(members))
    assert set(output(asked).splitlines()) == members


# ---- Programs of others ------------------------------------------------------------------------------


@pytest.fixture
def foreign(hosts):
    """Start a program of rdma-core on a host."""

    def start(host, *command):
        if not shutil.which(command[0]):
            pytest.skip(f"{command[0]} is not installed")
        return host.start(sys.executable, "-m", "rdmanet", "soft-run", "--", *command)

    return start


@pytest.mark.parametrize(
    ("serve", "ask"),
    [
        ("ibv_rc_pingpong -g 0", "ibv_rc_pingpong -g 0 {there}"),
        ("rdma_server", "rdma_client -s {there}"),
        ("rping -s -C 3 -a {there}", "rping -c -C 3 -V -a {there}"),
        ("ucmatose -C 4", "ucmatose -C 4 -s {there}"),
        ("udaddy", "udaddy -s {there}"),
    ],
    ids=lambda text: text.split()[0],
)
def test_programs(hosts, foreign, output, eventually, serve, ask):
    """Their exit statuses say whether all went well. The client is started when the server listens."""
    here, there = hosts
    server = foreign(there, *serve.format(there=there.addresses[4]).split())
    listening = ["ss", "-Htln"]

    def is_up():
        assert server.process.poll() is None, server.errors()
        return output(there.start(*listening)).strip()

    if not shutil.which("ss"):
        pytest.skip("ss is not installed")
    eventually(is_up)
    output(foreign(here, *ask.format(there=there.addresses[4]).split()))
    output(server)


# ---- Silence -----------------------------------------------------------------------------------------


@pytest.fixture
def pair(hosts):
    """Two queue pairs that know each other, one on each host."""
    here, there = hosts
    ends = [
        here.python("pair.py", here.addresses[4], there.addresses[4]),
        there.python("pair.py", there.addresses[4], here.addresses[4]),
    ]
    numbers = [end.line() for end in ends]
    for end, number in zip(ends, reversed(numbers), strict=True):
        end.say(number)
    return ends


def test_a_host_that_vanishes(hosts, pair):
    """Without a word, as when its cable is pulled: the queue pair's timeout and retries say when it is over."""
    here, there = hosts
    first, _ = pair
    first.say("send")
    assert first.line() == "SUCCESS"
    there.ip("route", "add", "blackhole", f"{here.addresses[4]}/32")
    try:
        first.say("send")
        assert first.line() == "RETRY_EXC_ERR"
    finally:
        there.ip("route", "del", "blackhole", f"{here.addresses[4]}/32")


def test_a_host_that_vanishes_while_its_process_is_stopped(hosts, pair):
    """Its kernel's TCP acknowledges the request, its process never does, so the request is tried again."""
    here, there = hosts
    first, second = pair
    first.say("send")
    assert first.line() == "SUCCESS"
    second.stop()
    first.say("send")
    # No status comes while the host answers; what is waited for here must not happen.
    assert not select.select([first.process.stdout], [], [], 2)[0]
    there.ip("route", "add", "blackhole", f"{here.addresses[4]}/32")
    try:
        assert first.line() == "RETRY_EXC_ERR"
    finally:
        there.ip("route", "del", "blackhole", f"{here.addresses[4]}/32")
        second.send_signal(signal.SIGCONT)
