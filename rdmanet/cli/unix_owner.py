"""Whose Unix socket is it? A name in the abstract namespace, or in /tmp, belongs to who takes it first.

The kernel says which user listens at the other end of a connection (SO_PEERCRED: whoever called listen()). Root may do
anything, and our own user could change us. Others are trusted with a path only if they alone decide what is there: the
owner of its directory, if no others may write to it, nor to another in which the kernel looks up a part of the path.
There they could put another in its place. A link is such a part, and leads to more of them: whoever may make one must
not be vouched for by its target. Whom the owner has given a directory's group is the owner's matter, as with
PostgreSQL's. The number that the kernel gives all users without one of their own stands for nobody.

The directories are looked at after connect(), which has gone through the same ones: only those who are trusted could
have changed them meanwhile. It takes a few system calls, and waits for a file system only where connect() does.
"""

import errno
import os
import pwd
import socket
import stat
import struct
from collections.abc import Collection

from rdmanet.loop import kernel

_CREDENTIALS = struct.Struct("iII")  # struct ucred
_LINKS_MOST = 40  # the kernel's own limit: path_resolution(7)


def user_of(text: str) -> int:
    """The number of a user, who is given by name or number.

    :raises ValueError: there is none of that name
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ValueError(f"there is no user {text!r}: give a name or a number") from None


def why_not_trusted(connected: socket.socket, path: str, users: Collection[int]) -> str:
    """Why whoever listens there is not to be trusted with what is sent; "" if it is.

    :param path: the socket's, or ``@`` and its name
    :param users: trusted beside those of this module's head
    """
    _, user, _ = _CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user in (0, os.geteuid()) or user in users:
        return ""
    if not path.startswith("@") and user == keeper(path):
        return ""
    may_be_anybodys = "such names may be anybody's" if path.startswith("@") else "the path may be anybody's"
    return f"user {user} listens there, and {may_be_anybodys}: if that is right, give --server-user {user}"


def keeper(path: str) -> int | None:
    """The one user, beside root, who decides what is at this path; None if others may, too, or it is not known.

    :param path: an absolute one
    """
    try:
        owners = _owners_on_the_way(path)
    except OSError:
        return None
    if not owners or not {0, owners[-1]}.issuperset(owners) or owners[-1] == kernel.overflow_user():
        return None
    return owners[-1]


def _owners_on_the_way(path: str) -> list[int]:
    """The owners of the directories in which the kernel looks up a part of this path; none if all may write to one.

    :raises OSError: there is no such path, or it cannot be read
    """
    owners: list[int] = []
    directory = "/"  # without links in it
    links = 0
    rest = _parts(path)
    while rest:
        found = os.stat(directory)
        if found.st_mode & stat.S_IWOTH:
            return []
        owners.append(found.st_uid)
        name = rest.pop()
        if name == "..":
            directory = os.path.dirname(directory)
            continue
        place = os.path.join(directory, name)
        try:
            target = os.readlink(place)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # it is no link
                raise
            directory = place
            continue
        links += 1
        if links > _LINKS_MOST:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if target.startswith("/"):
            directory = "/"
        rest += _parts(target)
    return owners


def _parts(path: str) -> list[str]:
    """The names in a path, the last first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]
