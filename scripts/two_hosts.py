"""Simulate two hosts on one machine: network namespaces joined by a pair of veth links, with IPv4 and IPv6 addresses.

usage: python scripts/two_hosts.py COMMAND [ARGUMENT ...]

COMMAND runs on the first host. Its environment describes both hosts:

    RDMANET_TEST_FAR      the prefix of a command that is to run on the second host
    RDMANET_TEST_FAR_NET  the network namespace of the second host, a file
    RDMANET_TEST_HERE     addresses of the first host, IPv4 and IPv6
    RDMANET_TEST_THERE    addresses of the second host

It needs root, or user namespaces that any user may create; if it cannot create the network, the exit status is 77.
The hosts are gone when COMMAND is: their namespaces live as long as the processes that hold them, which end with their
standard input.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HOLD = "echo ready; exec cat"  # until its standard input ends
ROUTE_S = 10.0


class NoNetwork(Exception):
    """This machine or this user cannot have such a network; the text says why."""

    STATUS = 77


@dataclass
class Host:
    """One of the two hosts: the process that holds it, and its addresses by family."""

    pid: int
    addresses: dict[int, str]

    @property
    def prefix(self) -> list[str]:
        """The arguments that make a command run on it."""
        mine = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{self.pid}/ns/user")
        others = [] if mine else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.pid}", "--net", *others]

    def command(self, *arguments: object) -> list[str]:
        return [*self.prefix, *map(str, arguments)]

    def ip(self, *arguments: str) -> None:
        done = subprocess.run(self.command("ip", *arguments), stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise NoNetwork(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def give_address(self, family: int) -> None:
        """Give the wire our address of this family."""
        length, options = (24, ()) if family == 4 else (64, ("nodad",))
        self.ip("address", "replace", f"{self.addresses[family]}/{length}", "dev", "wire", *options)

    def wait_for_route(self, address: str) -> None:
        """Until this address can be reached: a link has its routes a moment after both its ends are up."""
        deadline = time.monotonic() + ROUTE_S
        while (found := self._ask("route", "get", address)).returncode:
            if time.monotonic() > deadline:
                state = "".join(
                    self._ask(*what).stdout for what in (("address",), ("route",), ("-6", "route"))
                )
                raise RuntimeError(
                    f"no route to {address} after {ROUTE_S} s: {found.stderr.strip()}\n{state}"
                )
            time.sleep(0.02)

    def _ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command("ip", *arguments), capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both hosts, until the end of the block."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        raise NoNetwork(f"two hosts take {', '.join(missing)}: see util-linux and iproute2")
    holders: list[subprocess.Popen[str]] = []

    def hold(*enter: str) -> int:
        process = subprocess.Popen(
            [*enter, "sh", "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        holders.append(process)
        assert process.stdout and process.stderr
        if process.stdout.readline() != "ready\n":
            raise NoNetwork(f"cannot create a network namespace here: {process.stderr.read().strip()}")
        return process.pid

    try:
        as_root = os.geteuid() == 0
        first = Host(
            hold("unshare", *([] if as_root else ["--map-root-user"]), "--net"), {4: "10.8.0.1", 6: "fd08::1"}
        )
        second = Host(hold(*first.command("unshare", "--net")), {4: "10.8.0.2", 6: "fd08::2"})
        first.ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(second.pid))
        for host in (first, second):
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "wire", "up")
            for family in (4, 6):
                host.give_address(family)
        for host, other in ((first, second), (second, first)):
            for address in other.addresses.values():
                host.wait_for_route(address)
        yield first, second
    finally:
        for process in holders:
            process.communicate()


def main() -> int:
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with two_hosts() as (here, there):
            environment = os.environ | {
                "RDMANET_TEST_FAR": shlex.join(there.prefix),
                "RDMANET_TEST_FAR_NET": f"/proc/{there.pid}/ns/net",
                "RDMANET_TEST_HERE": " ".join(here.addresses.values()),
                "RDMANET_TEST_THERE": " ".join(there.addresses.values()),
            }
            return subprocess.run(here.command(*command), env=environment).returncode
    except NoNetwork as exc:
        print(f"two_hosts: {exc}", file=sys.stderr)
        return NoNetwork.STATUS


if __name__ == "__main__":
    sys.exit(main())
