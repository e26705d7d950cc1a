"""A mount namespace in which the embedded device's files are at the kernel's paths, for `soft-run --namespace`.

It is for programs that make system calls themselves, as Go's do: no preloaded library sees them. Neither /sys/class nor
/dev can be given new entries, so each is covered with a file system in memory that has all its entries, mounted from
where they were, and the device's besides. So is the directory of an interface's own device, which programs look through
for the adapter that the interface belongs to. The host, and other processes, see none of it.

Mounting needs a user namespace, unless the user is root. In it the user keeps its number; other users' files have the
overflow user's.
"""

import ctypes
import os
import stat
from pathlib import Path

from rdmanet.cli import soft_tree

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_MOVE, _MS_NOSUID = 0x1000, 0x4000, 0x40000, 0x2000, 0x2

_ADDED = {
    "/sys/class": ("infiniband", "infiniband_verbs"),
    "/sys/devices/virtual": ("rdmanet",),
    "/dev": ("infiniband",),
}
"""Which entries of the tree each directory gets, in place of its own if it has such ones."""


def enter(tree: Path) -> None:
    """Move this process, which has one thread, to a namespace of its own that shows the tree.

    :raises OSError: the kernel does not allow it; its message says which step failed, and what to do
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    apart = 0 if user == 0 else _CLONE_NEWUSER
    if libc.unshare(_CLONE_NEWNS | apart) != 0:
        raise OSError(
            ctypes.get_errno(),
            f"unshare(CLONE_NEWNS{' | CLONE_NEWUSER' if apart else ''}): {os.strerror(ctypes.get_errno())}: "
            + (
                "this host lets users make no namespaces; run it as root, or allow it "
                "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
                "kernel.apparmor_restrict_unprivileged_userns)"
                if apart
                else "this container may not mount; give it CAP_SYS_ADMIN"
            ),
        )
    if apart:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    mounts = _Mounts(libc)
    mounts.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    for directory, names in _ADDED.items():
        if os.path.isdir(directory):
            mounts.cover(directory, tree / directory.lstrip("/"), names)
    for device in soft_tree.devices_of_interfaces(tree):
        mounts.cover(device, tree / "sys/class", ("infiniband",))


class _Mounts:
    def __init__(self, libc: ctypes.CDLL) -> None:
        self._mount = libc.mount

    def mount(self, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        texts = (os.fsencode(source), os.fsencode(target), os.fsencode(kind))
        if self._mount(*texts, ctypes.c_ulong(flags), os.fsencode(data) or None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"mount({source}, {target}): {os.strerror(number)}")

    def cover(self, directory: str, source: Path, names: tuple[str, ...]) -> None:
        """Fill a file system in memory at /tmp, where only this process sees it, and move it over the directory. The
        names are from the source.
        """
        kept = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        added = os.open(source, os.O_PATH | os.O_DIRECTORY)
        stage = "/tmp"
        self.mount("rdmanet", stage, "tmpfs", _MS_NOSUID, "mode=755")
        try:
            for name in set(os.listdir(f"/proc/self/fd/{kept}")) - set(names):
                self._carry(f"/proc/self/fd/{kept}/{name}", f"{stage}/{name}")
            for name in names:
                self._carry(f"/proc/self/fd/{added}/{name}", f"{stage}/{name}", nodes=directory == "/dev")
        finally:
            self.mount(stage, directory, "", _MS_MOVE)
            os.close(kept)
            os.close(added)

    def _carry(self, source: str, target: str, nodes: bool = False) -> None:
        """Show at the target what is at the source. In a directory of nodes, links to devices become the devices."""
        state = os.lstat(source)
        if stat.S_ISLNK(state.st_mode) and not nodes:
            os.symlink(os.readlink(source), target)
            return
        if stat.S_ISDIR(state.st_mode):
            os.mkdir(target)
            if nodes:
                for name in os.listdir(source):
                    self._carry(f"{source}/{name}", f"{target}/{name}", nodes)
                return
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        self.mount(source, target, "", _MS_BIND | _MS_REC)
