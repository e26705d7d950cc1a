"""Whose Unix socket is it? A name in the abstract namespace, or in /tmp, belongs to who takes it first.

The kernel says which user listens at the other end of a connection (SO_PEERCRED: whoever called listen()). Root may do
anything, and our own user could change us. Others are trusted with a path only if they alone decide what is there: the
owner of its directory, if no others may write to it, nor to one above it, where they could put another in its place.
Whom the owner has given the directory's group is the owner's matter, as with PostgreSQL's.
"""

import os
import pwd
import socket
import stat
import struct
from collections.abc import Collection

_CREDENTIALS = struct.Struct("iII")  # struct ucred


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
    """The one user, beside root, who decides what is at this path; None if others may, too, or it is not known."""
    try:
        directory = os.path.dirname(os.path.realpath(path))
        owner = os.stat(directory).st_uid
        while True:
            found = os.stat(directory)
            if found.st_mode & stat.S_IWOTH or found.st_uid not in (0, owner):
                return None
            if directory == "/":
                return owner
            directory = os.path.dirname(directory)
    except OSError:
        return None
