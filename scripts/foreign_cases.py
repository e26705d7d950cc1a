"""The cases of `make foreign`: each is a server and a client of another project's programs.

Reading order: `Case` describes a case; each function below makes the cases of one family of programs, and parses their
output; `all_cases` collects them. In a command `{port}` is a free port, the same on both sides, and `{address}` is the
server's address.
"""

import contextlib
import re
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Figure = Callable[[str], str | None]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    client: str  # its command; alone when there is no server
    server: str | None = None
    figure: Figure | None = (
        None  # reads the client's output; returns None if that is not what a good run prints
    )
    quick: bool = False  # in `make foreign-quick`
    address: str = "127.0.0.1"
    ready: str | None = None  # the server is ready when it has printed this; else when it has the port
    stays: bool = False  # the server goes on until it is stopped
    expected: str | None = None  # why this one does not run here, as the table says it
    timeout: float = (
        120  # long: on a busy machine two programs that poll their memory advance by time slices only
    )
    environment: tuple[tuple[str, str], ...] = ()  # settings of the device
    label: str | None = None  # a title, where the command says little

    @property
    def package(self) -> str:
        return PACKAGES.get(self.client.split()[0], "perftest")

    @property
    def title(self) -> str:
        """The client's command as a reader would type it."""
        if self.label is not None:
            return self.label
        command = re.sub(r" -(l?p|P) \{port\}", "", self.client).format(address="SERVER")
        return " ".join([*(f"{name}={value}" for name, value in self.environment), command])


PACKAGES = {
    **dict.fromkeys(["ibv_devices", "ibv_devinfo", "ibv_asyncwatch"], "ibverbs-utils"),
    **{f"ibv_{kind}_pingpong": "ibverbs-utils" for kind in ("rc", "uc", "ud", "srq", "xsrq")},
    **dict.fromkeys(
        ["rping", "ucmatose", "udaddy", "mckey", "rdma_client", "rdma_xclient", "cmtime"], "rdmacm-utils"
    ),
    "qperf": "qperf",
    **dict.fromkeys(["fi_info", "fi_pingpong"], "libfabric-bin"),
    **dict.fromkeys(["ucx_info", "ucx_perftest"], "ucx-utils"),
}


def finds(pattern: str, says: str = "{0}") -> Figure:
    """A figure that is the first match of a pattern, in these words."""

    def figure(output: str) -> str | None:
        found = re.search(pattern, output, re.MULTILINE)
        return says.format(*found.groups()) if found else None

    return figure


def counts(pattern: str, says: str) -> Figure:
    """A figure that is how often a pattern occurs."""

    def figure(output: str) -> str | None:
        count = len(re.findall(pattern, output, re.MULTILINE))
        return says.format(count) if count else None

    return figure


# --- ibverbs-utils ----------------------------------------------------------------------------------------


def tools() -> Iterator[Case]:
    yield Case("ibv_devices", figure=finds(r"^\s+(soft0)\s"), quick=True)
    yield Case("ibv_devinfo -v", figure=finds(r"GID\[\s*0\]:\s+(\S+, RoCE v2)"), quick=True)
    yield Case("ibv_asyncwatch", figure=finds(r"(async event FD \d+)"), stays=True)


PINGPONG = finds(r"= ([\d.]+) usec/iter", "{0} µs per round trip")


def pingpongs() -> Iterator[Case]:
    def case(kind: str, options: str = "", **more: object) -> Case:
        command = f"ibv_{kind}_pingpong -p {{port}} -g 0 {options}".strip()
        return Case(f"{command} {{address}}", command, figure=PINGPONG, **more)  # type: ignore[arg-type]

    yield case("rc", "-s 64 -n 20000", quick=True)
    for options in ("", "-s 65536", "-s 1048576", "-c", "-N", "-N -c", "-t", "-o", "-O", "-j"):
        yield case("rc", options)
    yield case("rc", "-e", quick=True)
    yield case("rc", "-e -t -N -c")
    for kind in ("uc", "ud", "srq"):
        yield case(kind, quick=True)
        yield case(kind, "-e")
        yield case(kind, "-c")
    one = finds(r"^(success)")
    yield Case(
        "ibv_xsrq_pingpong -p {port} -g 0 {address}",
        "ibv_xsrq_pingpong -p {port} -g 0",
        figure=one,
        quick=True,
    )
    yield Case(
        "ibv_xsrq_pingpong -p {port} -g 0 -e {address}", "ibv_xsrq_pingpong -p {port} -g 0 -e", figure=one
    )


# --- rdmacm-utils -----------------------------------------------------------------------------------------


def address_for_groups(group: str) -> str | None:
    """An IPv6 address of this host from which the kernel brings a group's datagrams to this host.

    Loopback's has no route to groups on most machines, whatever runs on it; that of an interface has.
    """
    for elsewhere in ("::1", "2001:db8::1"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as near,
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as receiver,
            socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender,
        ):
            near.connect((elsewhere, 9))
            address = str(near.getsockname()[0])
            receiver.bind(("::", 0))
            for index, _ in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = socket.inet_pton(socket.AF_INET6, group) + struct.pack("@I", index)
                    receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
            receiver.settimeout(1)
            sender.bind((address, 0))
            sender.sendto(b"is anybody there?", (group, receiver.getsockname()[1]))
            receiver.recv(100)
            return address
    return None


def connection_managers() -> Iterator[Case]:
    pings = counts(r"^ping data: ", "{0} pings")
    for address, quick in (("127.0.0.1", True), ("::1", False)):
        end = f"-a {address} -p {{port}}"
        yield Case(
            f"rping -c -v -V -C 100 {end}", f"rping -s -V -C 100 {end}", pings, quick=quick, address=address
        )
        yield Case(
            f"rping -c -v -C 10 {end}", f"rping -s -P {end}", pings, quick=quick, address=address, stays=True
        )
    yield Case(
        "rping -c -q -v -V -C 100 -a {address} -p {port}",
        "rping -s -q -V -C 100 -a {address} -p {port}",
        pings,
    )
    done = finds(r"^(test complete)\n(?:.*\n)*return status 0")
    yield Case("ucmatose -p {port} -s {address}", "ucmatose -p {port}", done, quick=True)
    many = "-c 20 -C 50 -S 4096 -p {port}"
    yield Case(f"ucmatose {many} -s {{address}}", f"ucmatose {many}", done)
    yield Case(f"ucmatose {many} -m -a 20 -t 8 -s {{address}}", f"ucmatose {many} -m", done)
    yield Case("ucmatose -p {port} -s {address}", "ucmatose -p {port} -b {address}", done, address="::1")
    # These have the port of their examples built in.
    yield Case("udaddy -s {address}", "udaddy", done, quick=True)
    yield Case("udaddy -c 5 -C 20 -S 1024 -s {address}", "udaddy -c 5 -C 20 -S 1024", done)
    yield Case("udaddy -p 0x2 -s {address}", "udaddy -p 0x2", done)
    group = "mckey -m 239.195.1.1 -b {address}"
    yield Case(f"{group} -s", group, done, ready="initiating data transfers|joined dgid", quick=True)
    own = address_for_groups("ff15::4242")
    group = "mckey -m ff15::4242 -b {address}"
    yield Case(
        f"{group} -s",
        group,
        done,
        ready="joined dgid",
        address=own or "::1",
        expected=None if own else "this machine's kernel brings no IPv6 group's datagrams to itself",
    )
    end = "-s {address} -p {port}"
    ended = finds(r"rdma_x?client: (end) 0")
    yield Case(f"rdma_client {end}", "rdma_server -p {port}", ended, quick=True)
    yield Case(f"rdma_xclient {end} -c r", "rdma_xserver -p {port} -c r", ended)
    yield Case(f"rdma_xclient {end} -c x", "rdma_xserver -p {port} -c x", ended, quick=True)
    connect = finds(r"^connect\s*:\s*([\d.]+)", "{0} ms for 200 connections")
    yield Case(
        "cmtime -c 200 -p {port} -s {address}", "cmtime -c 200 -p {port}", connect, quick=True, stays=True
    )


# --- qperf ------------------------------------------------------------------------------------------------


def qperfs() -> Iterator[Case]:
    names = [
        *("rc_bi_bw", "rc_bw", "rc_lat", "uc_bi_bw", "uc_bw", "uc_lat", "ud_bi_bw", "ud_bw", "ud_lat"),
        *("rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw", "rc_rdma_write_lat"),
        *("rc_rdma_write_poll_lat", "uc_rdma_write_bw", "uc_rdma_write_lat", "uc_rdma_write_poll_lat"),
        *("rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add"),
    ]
    # With UC and UD the number of sends means little: without a receive they are dropped.
    value = finds(r"^\s+(?:recv_bw|bw|latency|msg_rate)\s+=\s+(.+?)$")

    def case(name: str, options: str, **more: object) -> Case:
        command = f"qperf {{address}} -lp {{port}} -t 1 {options} {name} quit".replace("  ", " ")
        return Case(command, "qperf -lp {port}", value, **more)  # type: ignore[arg-type]

    # Without rdma_cm qperf knows only LIDs, which need InfiniBand.
    for name in names:
        yield case(name, "", quick=name == "ud_lat", environment=(("RDMANET_SOFT_LINK", "infiniband"),))
    for name in names:
        if name.startswith("rc_"):
            yield case(name, "-cm1", quick=name == "rc_lat")
    yield case("rc_lat", "-cm1 -cp1")
    yield case("rc_bw", "-cm1 -cp1")


# --- perftest ---------------------------------------------------------------------------------------------


def bandwidth(output: str) -> str | None:
    """The last row's average and rate."""
    rows = re.findall(r"^ *(\d+) +\d+ +[\d.]+ +([\d.]+)\s+([\d.]+)\s*$", output, re.MULTILINE)
    if not rows:
        return None
    size, average, rate = rows[-1]
    unit = 1e9 / 8 if "BW average[Gb/sec]" in output else 2**20
    return f"{size} bytes: {float(average) * unit / 1e9:.2f} GB/s, {float(rate):.3f} M/s"


def latency(output: str) -> str | None:
    """The first row's typical figure, and where 99 of 100 are; or the average, where that is all it has."""
    rows = re.findall(r"^ *(\d+) +\d+ +([\d.]+) +([\d.]+) +([\d.]+)\s+([\d.]+)\s", output, re.MULTILINE)
    if rows:
        return f"{rows[0][0]} bytes: {float(rows[0][3]):.2f} µs typically"
    rows = re.findall(r"^ *(\d+) +\d+ +([\d.]+) +[\d.]+\s*$", output, re.MULTILINE)
    return f"{rows[0][0]} bytes: {float(rows[0][1]):.2f} µs on average" if rows else None


def perftests() -> Iterator[Case]:
    def case(program: str, options: str = "", **more: object) -> Case:
        command = f"{program} -F -p {{port}} {options}".strip()
        figure = bandwidth if program.endswith("_bw") else latency
        return Case(f"{command} {{address}}", command, figure, **more)  # type: ignore[arg-type]

    for verb in ("send", "write", "read", "atomic"):
        for kind in ("bw", "lat"):
            program = f"ib_{verb}_{kind}"
            yield case(program, quick=True)
            yield case(program, "-R")
            yield case(program, "-D 1")
            if verb != "write":
                yield case(program, "-e")
            if verb != "atomic":
                yield case(program, "-a -n 200", timeout=300)
                yield case(program, "-s 64")
            if kind == "bw":
                yield case(program, "-q 4")
                yield case(program, "-b")
                yield case(program, "-q 4 -b -R")
                yield case(program, "-l 10")
            if verb in ("send", "write"):
                yield case(program, "-c UC")
                yield case(program, "-c XRC")
            if verb == "send":
                yield case(program, "-c UD", quick=kind == "bw")
                yield case(program, "-c UD -R")
                yield case(program, "--use-srq", quick=kind == "bw")
                yield case(program, "--use_old_post_send")
    yield case("ib_send_bw", "-q 4 --use-srq -e -b")
    yield case("ib_send_bw", "-s 64 -n 100000")
    yield case("ib_write_bw", "--use_old_post_send")
    yield case("ib_atomic_bw", "-A CMP_AND_SWAP")
    # Further options that a user may try.
    for options in (
        "--ipv6",
        "-x 0 -d soft0 -i 1",
        "-m 1024",
        "-n 5000 -s 4096",
        "-s 1",
        "-t 16 -Q 4",
        "-r 32",
        "--inline_size 64 -s 64",
        "--recv_post_list 8",
        "--mr_per_qp -q 4",
        "--report_gbits",
        "-q 16",
        "-z",
        "-u 10 -S 1",
        "-T 32 -R",
        "-N",
        "--reversed",
    ):
        yield case("ib_send_bw", options)


# --- libfabric --------------------------------------------------------------------------------------------


def libfabrics() -> Iterator[Case]:
    """Its verbs provider: reliable endpoints, reliable datagrams made of them (rxm), and datagrams."""
    yield Case("fi_info -p verbs", figure=finds(r"domain: (soft0)$"), quick=True)
    line = finds(r"^64\s.*\s([\d.]+)\s+[\d.]+$", "{0} µs a transfer")
    for kind, provider in (("msg", "verbs"), ("rdm", "verbs;ofi_rxm"), ("dgram", "verbs")):
        command = f"fi_pingpong -p {provider} -e {kind} -I 1000 -S 64 -B {{port}}"
        yield Case(f"{command.replace('-B', '-P')} {{address}}", command, figure=line, quick=True)


# --- UCX --------------------------------------------------------------------------------------------------


def ucx() -> Iterator[Case]:
    """Its own transports over verbs, then what programs use (UCP), which chooses among them, or has to take one."""
    yield Case("ucx_info -d", figure=finds(r"Transport: (rc_verbs)\n.*Device: soft0:1"), quick=True)
    yield Case("ucx_info -d", figure=finds(r"Transport: (ud_verbs)\n.*Device: soft0:1"))
    figure = finds(r"^Final:\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)", "{0} µs a message")

    def case(options: str, **more: object) -> Case:
        command = f"ucx_perftest -p {{port}} {options}"
        return Case(f"{command} {{address}}", command, figure, **more)  # type: ignore[arg-type]

    for transport in ("rc_verbs", "ud_verbs"):
        for test in ("am_lat", "am_bw"):
            yield case(f"-x {transport} -d soft0:1 -t {test} -n 2000", quick=test == "am_lat")
    for test in ("put_lat", "get -D zcopy -s 4096"):
        yield case(f"-x rc_verbs -d soft0:1 -t {test} -n 2000")
    for transports in ("rc", "ud", "all"):
        more = {"environment": (("UCX_TLS", transports),)}
        yield case("-t tag_lat -n 2000", quick=transports == "ud", **more)
        yield case("-t tag_bw -s 1000000 -n 500", **more)
        yield case("-t ucp_put_lat -n 2000", **more)


# --- transfer engines -------------------------------------------------------------------------------------

ENGINES = "build/engines/bin/python"  # `make build/engines/.done` makes it


def engines() -> Iterator[Case]:
    """A READ and a WRITE by each of them. `make engines` tries much more."""
    for engine in ("NIXL", "Mooncake", "DLSlime", "PeerCache"):
        yield Case(
            f"{ENGINES} tests/engines/programs/{engine.lower()}_pair.py read_and_write",
            figure=finds(r"^done$", "every byte compared"),
            quick=True,
            environment=(("UCX_TLS", "ib"),),
            label=f"{engine}: READ and WRITE",
        )


def all_cases() -> list[Case]:
    """Debian's programs."""
    return [*tools(), *pingpongs(), *connection_managers(), *qperfs(), *perftests(), *libfabrics(), *ucx()]
