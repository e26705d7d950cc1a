"""soft-run: a program finds the kernel's files for the device, by every call that looks for files."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rdmanet import _core
from rdmanet.cli.soft_run import FILES
from rdmanet.cli.soft_tree import _mask
from tests.support.unfit import unfit

from .test_soft_run import STRANGER, environment, soft_run  # noqa: F401

PORT = "/sys/class/infiniband/soft0/ports/1"
PARENT = "/sys/devices/virtual/rdmanet/soft0"
NODE = "/dev/infiniband/rdmanet_soft0"

# What the device knows better than the tree, since it is open.
LIVE = (
    STRANGER
    + f"""
import sys
verbs.ibv_open_device.argtypes, verbs.ibv_open_device.restype = [ctypes.c_void_p], ctypes.c_void_p
context = verbs.ibv_open_device(devices[0])
for name in sys.argv[1:]:
    try:
        print(open("{PORT}/" + name).read(), end="")
    except OSError as exc:
        print(exc.strerror)
"""
)

# Each call that is given a path, on the first argument: its result, or errno's name. Those that write want a second.
CALLS = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#ifdef __x86_64__
#define VERSION 1
#else
#define VERSION 0
#endif

static void say(const char *call, long result, const char *text)
{
	if (result < 0)
		printf("%s %s\n", call, strerrorname_np(errno));
	else
		printf("%s %s\n", call, text);
}

static const char *kind(mode_t mode)
{
	return S_ISDIR(mode) ? "directory" : S_ISCHR(mode) ? "node" : S_ISLNK(mode) ? "link" : "file";
}

static void reads(const char *call, int fd)
{
	char text[64] = "";
	ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (length > 0)
		text[length - 1] = 0;
	say(call, length, text);
	if (fd >= 0)
		close(fd);
}

static void reads_stream(const char *call, FILE *file)
{
	char text[64] = "";

	if (file && fgets(text, sizeof(text), file))
		text[strcspn(text, "\n")] = 0;
	say(call, file && !ferror(file) ? 0 : -1, text);
	if (file)
		fclose(file);
}

int main(int argc, char **argv)
{
	const char *path = argv[1];
	volatile int flags = O_RDONLY; /* not known to the compiler: __open_2() */
	char text[PATH_MAX] = "";
	struct dirent **names;
	struct stat state = {0};
	struct stat64 state64 = {0};
	struct statx statex = {0};
	DIR *directory;
	ssize_t length;
	int (*old)(int version, const char *path, struct stat *state);
	int count, result;

	result = stat(path, &state);
	say("stat", result, kind(state.st_mode));
	result = stat64(path, &state64);
	say("stat64", result, kind(state64.st_mode));
	result = lstat(path, &state);
	say("lstat", result, kind(state.st_mode));
	result = fstatat(AT_FDCWD, path, &state, AT_SYMLINK_NOFOLLOW);
	say("fstatat", result, kind(state.st_mode));
	result = statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &statex);
	say("statx", result, kind(statex.stx_mode));
	*(void **)(void *)&old = dlsym(RTLD_DEFAULT, "__lxstat"); /* what stat() was in old C libraries */
	result = old ? old(VERSION, path, &state) : lstat(path, &state);
	say("__lxstat", result, kind(state.st_mode));
	say("access", access(path, R_OK), "yes");
	say("faccessat", faccessat(AT_FDCWD, path, R_OK, 0), "yes");
	say("getxattr", getxattr(path, "user.none", text, 1), "");
	length = readlink(path, text, flags ? 1 : sizeof(text) - 1);
	if (length >= 0)
		text[length] = 0;
	say("readlink", length, text);
	say("realpath", realpath(path, text) ? 0 : -1, text);
	reads("open", open(path, O_RDONLY));
	reads("open_2", open(path, flags));
	reads("openat", openat(AT_FDCWD, path, O_RDONLY));
	reads("openat64_2", openat64(AT_FDCWD, path, flags));
	reads_stream("fopen", fopen(path, "re"));
	reads_stream("fopen64", fopen64(path, "r"));
	if (argc > 2) {
		reads("write", open(path, O_WRONLY));
		reads_stream("append", fopen(path, "a"));
		reads("create", open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
	}
	directory = opendir(path);
	count = 0;
	while (directory && readdir(directory))
		count++;
	sprintf(text, "%d", count - 2);
	say("opendir", directory ? 0 : -1, text);
	count = scandir(path, &names, NULL, alphasort);
	say("scandir", count, count > 2 ? names[count - 1]->d_name : "");
	say("chdir", chdir(path), "yes");
	return 0;
}
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What a program built with _FORTIFY_SOURCE, as distributions do, learns of a path."""
    source = tmp_path_factory.mktemp("calls") / "calls.c"
    source.write_text(CALLS)
    program = source.with_suffix("")
    options = ["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-Wall", "-Werror"]
    subprocess.run(["cc", source, "-o", program, *options], check=True)
    return program


def learn(environment, calls, path):  # noqa: F811
    status, out, err = soft_run(environment, "--", calls, path, "write")
    assert (status, err) == (0, "")
    return dict(line.split(" ", 1) for line in out.splitlines())


def expect(kind, reads, link="EINVAL", real="", count="ENOTDIR", last="ENOTDIR", **others):
    looks = dict.fromkeys(("stat", "stat64", "lstat", "fstatat", "statx", "__lxstat"), kind)
    opens = dict.fromkeys(("open", "open_2", "openat", "openat64_2", "fopen", "fopen64"), reads)
    yes = {"access": "yes", "faccessat": "yes", "readlink": link, "realpath": real}
    refused = {"write": "EACCES", "append": "EACCES", "create": "EACCES", "getxattr": "ENODATA"}
    lists = {"opendir": count, "scandir": last, "chdir": "ENOTDIR" if count == "ENOTDIR" else "yes"}
    return looks | opens | yes | refused | lists | others


def test_an_attribute(environment, calls):  # noqa: F811
    path = f"{PORT}/link_layer"
    assert learn(environment, calls, path) == expect("file", "Ethernet", real=path)
    untidy = "//sys/./class//infiniband/soft0/./ports/1/link_layer"
    assert learn(environment, calls, untidy) == expect("file", "Ethernet", real=path)


def test_a_node(environment, calls):  # noqa: F811
    """A character device, as UCX and Mooncake look for. It is not opened: the verbs do what is done with it."""
    refused = {"write": "ENXIO", "append": "ENXIO", "create": "ENXIO", "getxattr": "EOPNOTSUPP"}
    learnt = learn(environment, calls, NODE)
    if learnt["getxattr"] in ("ENODATA", "EPERM"):
        refused["getxattr"] = learnt["getxattr"]  # /dev may be of any file system
    assert learnt == expect("node", "ENXIO", real=NODE, **refused)


def test_a_directory(environment, calls):  # noqa: F811
    path = "/sys/class/infiniband"
    refused = dict.fromkeys(("write", "append", "create"), "EISDIR")
    expected = expect("directory", "EISDIR", real=path, count="1", last="soft0", **refused)
    assert learn(environment, calls, path) == expected | {"create": "EEXIST"}
    gids = learn(environment, calls, f"{PORT}/gids")
    assert (gids["opendir"], gids["scandir"]) == ("256", "99")


def test_a_link(environment, calls):  # noqa: F811
    """Followed and resolved, it stays in the program's world."""
    learnt = learn(environment, calls, "/sys/class/infiniband/soft0/device")
    assert (learnt["stat"], learnt["lstat"]) == ("directory", "link")
    assert learnt["readlink"] == "../../../devices/virtual/rdmanet/soft0"
    assert learnt["realpath"] == "/sys/devices/virtual/rdmanet/soft0"
    numa = learn(environment, calls, "/sys/class/infiniband/soft0/device/numa_node")
    assert (numa["open"], numa["realpath"]) == ("-1", "/sys/devices/virtual/rdmanet/soft0/numa_node")
    assert learn(environment, calls, "/sys/devices/virtual/rdmanet/soft0/vendor")["fopen"] == "0xffff"


def interfaces_with_devices(environment):  # noqa: F811
    """Those among the adapter's interfaces that have a device of their own: a container's have none."""
    _, out, _ = soft_run(environment, "--", "ls", f"{PARENT}/net")
    names = [name for name in out.split() if Path(f"/sys/class/net/{name}/device").exists()]
    return names or unfit("no interface of this machine that has an address has a device")


def test_the_interfaces_of_the_adapter(environment):  # noqa: F811
    """Those that have its addresses; the loopback interface only if there is no other."""
    path = "/sys/class/infiniband/soft0/device/net"
    local = environment | {"RDMANET_SOFT": "local"}
    assert soft_run(local, "--", "ls", path) == (0, "lo\n", "")
    assert soft_run(local, "--", "cat", f"{path}/lo/type") == (
        0,
        Path("/sys/class/net/lo/type").read_text(),
        "",
    )
    names = soft_run(environment, "--", "ls", path)[1].split()
    assert names and set(names) <= {name for _, name in socket.if_nameindex()}
    assert "lo" not in names or names == ["lo"]


def test_the_adapter_of_an_interface(environment, calls):  # noqa: F811
    """Also for those who go there link by link, as realpath and std::filesystem do."""
    name = interfaces_with_devices(environment)[0]
    path = f"/sys/class/net/{name}/device/infiniband"
    for each in (path, f"{Path(path).parent.resolve()}/infiniband"):
        learnt = learn(environment, calls, each)
        assert {learnt[call] for call in ("stat", "lstat", "statx", "__lxstat")} == {"directory"}
        assert (learnt["opendir"], learnt["scandir"], learnt["chdir"]) == ("1", "soft0", "yes")
        assert (learnt["readlink"], learnt["realpath"]) == ("EINVAL", "/sys/class/infiniband")
    assert learn(environment, calls, f"{path}/soft0/ports/1/link_layer")["fopen"] == "Ethernet"
    resolved = f"{Path(path).parent.resolve()}/infiniband/soft0\n"
    assert soft_run(environment, "--", "realpath", f"{path}/soft0") == (0, resolved, "")
    for other in (f"{path}s", "/sys/class/net/lo/device/infiniband", f"/sys/class/net/{name}/infiniband"):
        assert learn(environment, calls, other)["stat"] == "ENOENT"


STREAMS = r"""
#include <filesystem>
#include <fstream>
#include <iostream>
int main()
{
	std::filesystem::path gids = "/sys/class/infiniband/soft0/ports/1/gid_attrs/types";
	std::ifstream file(gids / "0");
	std::string text;
	size_t count = 0;

	for (const auto &entry : std::filesystem::directory_iterator(gids))
		count += entry.path().parent_path() == gids && std::filesystem::is_regular_file(entry.path());
	std::getline(file, text);
	std::cout << text << " " << count << " ";
	std::cout << std::filesystem::is_character_file("/dev/infiniband/rdmanet_soft0") << " ";
	std::cout << std::filesystem::canonical("/sys/class/infiniband/soft0/device").string() << std::endl;
}
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_a_program_in_cpp(environment, tmp_path):  # noqa: F811
    """As dlslime and Mooncake are: streams, and std::filesystem."""
    (tmp_path / "streams.cc").write_text(STREAMS)
    program = tmp_path / "streams"
    subprocess.run(["c++", "-std=c++17", tmp_path / "streams.cc", "-o", program], check=True)
    out = "RoCE v2 256 1 /sys/devices/virtual/rdmanet/soft0\n"
    assert soft_run(environment, "--", program) == (0, out, "")


@pytest.mark.parametrize(
    "path", [f"{PORT}/gids/256", "/dev/infiniband/uverbs99", "/sys/class/infiniband/mlx5_0"]
)
def test_what_is_not_there(environment, calls, path):  # noqa: F811
    learnt = learn(environment, calls, path)
    assert {learnt.pop(call) for call in ("append", "create")} == {"EACCES"}
    assert set(learnt.values()) == {"ENOENT"}


def test_other_files_are_the_kernels(environment, calls, tmp_path):  # noqa: F811
    """Also those whose paths only begin alike."""
    for path in (
        "/dev/null",
        "/sys/class",
        "/sys/class/infiniband_madness",
        "/dev/infinibands",
        tmp_path,
        "/",
        "/etc/hosts",
    ):
        plain = subprocess.run([calls, path], capture_output=True, text=True).stdout
        assert soft_run(environment, "--", calls, path) == (0, plain, "")


def test_the_device_answers_once_it_is_open(environment):  # noqa: F811
    """What may have changed since the files were made; what cannot be read is not read."""
    names = [
        "gid_attrs/types/0",
        "gid_attrs/ndevs/0",
        "gids/0",
        "gids/255",
        "gid_attrs/types/255",
        "gids/256",
        "state",
    ]
    status, out, err = soft_run(environment, "--", sys.executable, "-c", LIVE, *names)
    assert (status, err) == (0, "")
    device, kind, interface, gid, empty, unreadable, none, state = out.splitlines()
    assert (device, kind) == ("1 soft0 True", "RoCE v2")
    assert interface in [name for _, name in socket.if_nameindex()]
    assert len(gid) == len(empty) == 39
    assert int(gid.replace(":", ""), 16) > int(empty.replace(":", ""), 16) == 0
    assert (unreadable, none) == (os.strerror(22), os.strerror(2))
    assert state in ("4: ACTIVE", "1: DOWN")
    environment |= {"RDMANET_SOFT_LINK": "infiniband"}
    status, out, err = soft_run(
        environment, "--", sys.executable, "-c", LIVE, "gid_attrs/types/0", "link_layer", "lid"
    )
    assert (out.splitlines()[1:], err) == (["IB/RoCE v1", "InfiniBand", "0x1"], "")


def test_the_tree_says_the_same_as_the_device(environment):  # noqa: F811
    """Programs read the GIDs before they open the device, too."""
    names = ["gid_attrs/types/0", "gid_attrs/ndevs/0", "gids/0", "gids/255", "state", "phys_state"]
    _, live, _ = soft_run(environment, "--", sys.executable, "-c", LIVE, *names)
    _, before, _ = soft_run(environment, "--", "cat", *(f"{PORT}/{name}" for name in names))
    assert before == live.partition("\n")[2]


COUNTING = """
import asyncio, pathlib
from rdmanet import _core

def count(name):
    return int(pathlib.Path("/sys/class/infiniband/soft0/ports/1", name).read_text())

async def main():
    import rdmanet
    received = asyncio.get_running_loop().create_future()
    async def serve(reader, writer):
        received.set_result(await reader.readexactly(1 << 20))
        writer.close()
    server = await rdmanet.start_rdma_stream_server(serve, "127.0.0.1", 0)
    reader, writer = await rdmanet.open_rdma_connection(*server.sockets[0].getsockname()[:2])
    before = count("counters/port_xmit_data"), count("hw_counters/send_wrs")
    writer.write(bytes(1 << 20))
    await received
    after = count("counters/port_xmit_data"), count("hw_counters/send_wrs")
    print(after[0] - before[0] >= (1 << 20) // 4, after[1] > before[1], count("counters/symbol_error"))
    writer.close()
    server.close()

asyncio.run(main())
"""


def test_counters_count(environment):  # noqa: F811
    environment |= {"RDMANET_DEVICE": "soft0"}
    assert soft_run(environment, "--", sys.executable, "-c", COUNTING) == (0, "True True 0\n", "")


def test_the_tree_is_made_once_and_brought_up_to_date(environment):  # noqa: F811
    def look():
        return soft_run(environment, "--", "cat", "/sys/class/infiniband/soft0/fw_ver")[1]

    assert look() == "1\n"
    directory = Path(soft_run(environment, "--show-path")[1].strip())
    made = directory / "files-ethernet" / "sys/class/infiniband/soft0/fw_ver"
    first = made.stat().st_ino
    assert look() == "1\n"
    assert made.stat().st_ino == first
    made.unlink()
    made.write_text("old\n")
    gone = directory / "files-ethernet" / PARENT.lstrip("/") / "net/gone0"
    gone.symlink_to("/sys/class/net/gone0")
    (directory / "files-ethernet" / "rendered").unlink()
    assert look() == "1\n"
    assert not gone.is_symlink()


def test_without_files_there_are_none(environment, calls):  # noqa: F811
    plain = subprocess.run([calls, NODE], capture_output=True, text=True).stdout
    assert soft_run(environment, "--no-files", "--", calls, NODE) == (0, plain, "")


def test_processors_as_the_kernel_writes_them():
    assert _mask("0\n") == "00000001\n"
    assert _mask("0-3,8\n") == "0000010f\n"
    assert _mask("0-32\n") == "00000001,ffffffff\n"


# Python itself may be out of another user's reach, so it is loaded before.
BECOME = """
import argparse, ctypes, dataclasses, ipaddress, locale, os, sys  # some are imported late, out of this user's reach
import rdmanet._core
from rdmanet.cli import soft_run
os.setgroups([])
os.setgid(61001)
os.setuid(61001)
PR_SET_DUMPABLE = 4  # as after execve(): the files in /proc/self are this user's
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
parser = argparse.ArgumentParser()
soft_run.add_arguments(parser)
sys.exit(soft_run.run(parser.parse_args()))
"""


def home_of_another(home, environment):  # noqa: F811
    """An environment in which a user finds all in this folder: the tree may be closed to others than root."""
    os.chown(home, 61001, 61001)
    device = Path(_core.Library.embedded().path)
    for each in (device, device.with_name(FILES)):
        shutil.copy(each, home)
    ours = {"XDG_CACHE_HOME": home, "HOME": home, "RDMANET_SOFT_LIBRARY": f"{home}/{device.name}"}
    return environment | ours


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_is_not_root(environment, calls):  # noqa: F811
    """The tree is the user's own, in a cache of its own."""
    with tempfile.TemporaryDirectory() as home:
        theirs = home_of_another(home, environment)
        program = shutil.copy(calls, Path(home) / "calls")
        for path, kind in ((NODE, "node"), (f"{PORT}/link_layer", "file")):
            done = subprocess.run(
                [sys.executable, "-c", BECOME, "--", program, path, "write"],
                env=theirs,
                capture_output=True,
                text=True,
                cwd="/",
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert f"stat {kind}\n" in done.stdout
            assert ("write EACCES\n" in done.stdout) == (kind == "file")
