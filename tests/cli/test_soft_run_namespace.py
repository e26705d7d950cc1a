"""soft-run --namespace: the device's files are there for programs that make system calls themselves."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.unfit import may_unshare

from .test_soft_run import STRANGER, environment, soft_run  # noqa: F401
from .test_soft_run_files import BECOME, home_of_another, interfaces_with_devices

# No library stands before these: the program is static, and calls the kernel by number.
CALLS = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		struct stat state;
		char text[64] = "";
		int fd = (int)syscall(SYS_openat, AT_FDCWD, argv[i], O_RDONLY);

		if (fd < 0) {
			printf("%s\n", strerror(errno));
			continue;
		}
		fstat(fd, &state);
		if (S_ISREG(state.st_mode) && syscall(SYS_read, fd, text, sizeof(text) - 1) >= 0)
			text[strcspn(text, "\n")] = 0;
		printf("%s\n", S_ISREG(state.st_mode) ? text : S_ISCHR(state.st_mode) ? "node" : "directory");
		close(fd);
	}
	return 0;
}
"""
PATHS = (
    "/sys/class/infiniband/soft0/ports/1/link_layer",
    "/sys/class/infiniband/soft0/device/numa_node",
    "/sys/class/infiniband_verbs/rdmanet_soft0/ibdev",
    "/dev/infiniband/rdmanet_soft0",
    "/dev/null",
    "/sys/class/net/lo/mtu",
    "/sys/devices/virtual/net/lo/mtu",
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    source = tmp_path_factory.mktemp("calls") / "calls.c"
    source.write_text(CALLS)
    program = source.with_suffix("")
    subprocess.run(["cc", source, "-o", program, "-static", "-Wall", "-Werror"], check=True)
    return program


@pytest.fixture
def seen():
    mtu = Path("/sys/class/net/lo/mtu").read_text().strip()
    return ["Ethernet", "-1", "soft0", "node", "node", mtu, mtu]


def may_mount():
    return may_unshare("--mount") if os.geteuid() == 0 else may_unshare("--user", "--mount")


@pytest.mark.skipif(not may_mount(), reason="this host lets this user make no mount namespace")
def test_files_for_programs_that_call_the_kernel(environment, calls, seen):  # noqa: F811
    status, out, err = soft_run(environment, "--namespace", "--", calls, *PATHS)
    assert (status, out.splitlines()) == (0, seen)
    assert "statically linked" in err
    missing = subprocess.run([calls, *PATHS], capture_output=True, text=True).stdout.splitlines()
    assert missing[0] == missing[3] == "No such file or directory"  # the host has still none
    assert missing[4:] == seen[4:]


@pytest.mark.skipif(not may_mount(), reason="this host lets this user make no mount namespace")
def test_the_rest_is_as_before(environment, tmp_path):  # noqa: F811
    """The device works, and the other entries of the covered directories are there. So is what /tmp has."""
    run = [environment, "--namespace", "--"]
    assert soft_run(*run, sys.executable, "-c", STRANGER) == (0, "1 soft0 True\n", "")
    for directory, added in (("/sys/class", {"infiniband", "infiniband_verbs"}), ("/dev", {"infiniband"})):
        listed = soft_run(*run, "env", "-u", "LD_PRELOAD", "ls", "-A", directory)[1].splitlines()
        assert set(listed) == set(os.listdir(directory)) | added
    assert tmp_path.name in soft_run(*run, "ls", tmp_path.parent)[1].splitlines()


@pytest.mark.skipif(not may_mount(), reason="this host lets this user make no mount namespace")
def test_the_adapter_of_an_interface(environment, calls):  # noqa: F811
    """The interface's device keeps all that it has, and leads to the adapter, too; the adapter leads back."""
    name = interfaces_with_devices(environment)[0]
    device = f"/sys/class/net/{name}/device"
    run = [environment, "--namespace", "--"]
    paths = [
        f"{device}/infiniband/soft0/ports/1/link_layer",
        f"/sys/class/infiniband/soft0/device/net/{name}/type",
    ]
    seen = ["Ethernet", Path(f"/sys/class/net/{name}/type").read_text().strip()]
    assert soft_run(*run, calls, *paths)[1].splitlines() == seen
    listed = soft_run(*run, "env", "-u", "LD_PRELOAD", "ls", "-A", f"{device}/")[1].splitlines()
    assert set(listed) == set(os.listdir(device)) | {"infiniband"}


@pytest.mark.skipif(os.geteuid() != 0 or not may_mount(), reason="only root can become another user")
def test_a_user_who_is_not_root(environment, calls, seen):  # noqa: F811
    """In a user namespace, where the host allows it; else the error says what to do."""
    with tempfile.TemporaryDirectory() as home:
        theirs = home_of_another(home, environment)
        program = shutil.copy(calls, Path(home) / "calls")
        done = subprocess.run(
            [sys.executable, "-c", BECOME, "--namespace", "--", program, *PATHS],
            env=theirs,
            capture_output=True,
            text=True,
            cwd="/",
        )
    if done.returncode:
        assert "unshare(CLONE_NEWNS | CLONE_NEWUSER)" in done.stderr
        assert "run it as root, or allow it (sysctl user.max_user_namespaces" in done.stderr
    else:
        assert done.stdout.splitlines() == seen


FORBIDDEN = """
import pathlib
pathlib.Path("/proc/sys/user/max_mnt_namespaces").write_text("0")
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not may_mount(), reason="only root can forbid it to a user namespace"
)
def test_says_what_to_do_where_it_is_not_allowed(environment):  # noqa: F811
    """The limit is that of a user namespace made for this test."""
    script = (
        f"{sys.executable} -c '{FORBIDDEN}' && exec {sys.executable} -m rdmanet soft-run --namespace -- true"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("soft-run: --namespace: unshare(CLONE_NEWNS): No space left on device")
    assert "CAP_SYS_ADMIN" in done.stderr


def test_needs_the_files(environment):  # noqa: F811
    status, _, err = soft_run(environment, "--namespace", "--no-files", "--", "true")
    assert (status, err) == (
        2,
        "soft-run: --namespace shows the device's files, and --no-files asks for none\n",
    )
