"""The ends of a proxy: an address by which to listen or to connect, over RDMA, TCP, TLS or a Unix socket.

An endpoint is a value. `listen` and `connect` give it asyncio's two verbs, so whoever uses them need not know what kind
it is.

A Unix listener leaves a path behind when its process is killed. asyncio removes any socket that it finds at the path,
also one that somebody listens on. Here a path is removed only if nobody has that socket any more. Several programs may
find out at the same time; bind() lets one of them have the path, and the others must not remove the new socket for the
old one. So what is removed is first moved aside, in one step, and looked at there.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rdmanet.base.pause import pause
from rdmanet.cli.unix_owner import why_not_trusted

Factory = Callable[[], asyncio.BaseProtocol]

SCHEMES = {"rdma": False, "rdma+tls": True, "tcp": False, "tls": True}
"""The schemes of endpoints with a host and a port, and whether TLS encrypts them."""
_TRIES = 16  # how often others may be faster when they remove the same stale socket
_TRY_AGAIN_S = 0.02  # nobody tells when a Unix listener's backlog has room
FORMS = "rdma://HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT, rdma+tls://HOST:PORT, unix:/PATH or unix:@NAME"


class EndpointError(OSError):
    """An endpoint cannot be used; the text names it, and says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to listen or to connect.

    :ivar scheme: one of SCHEMES, or `unix`
    :ivar host: a name or an address; "" listens on all addresses
    :ivar path: of a Unix socket; `@name` is one without a file, in the abstract namespace
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def encrypted(self) -> bool:
        """Whether TLS encrypts what goes there."""
        return SCHEMES.get(self.scheme, False)

    @property
    def is_rdma(self) -> bool:
        """Whether it is reached by RDMA."""
        return self.scheme.startswith("rdma")

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"{self.scheme}://[{self.host}]:{self.port}" if ":" in self.host else (
            f"{self.scheme}://{self.host}:{self.port}"
        )  # fmt: skip


_PATH_BYTES = 107
"""How long a Unix socket's path may be, which ends with a zero: unix(7)."""


def parse(text: str) -> Endpoint:
    """Read an endpoint as a user writes it.

    :raises ValueError: it is none; the text says what one looks like
    """
    scheme, colon, rest = text.partition(":")
    try:
        if scheme == "unix" and rest:
            return Endpoint("unix", path=_path(rest))
        parts = urlsplit(text)
        if "://" in text and scheme not in SCHEMES:
            raise ValueError(f"the schemes are {', '.join(SCHEMES)} and unix")
        if not colon or scheme not in SCHEMES or not parts.netloc:
            raise ValueError(f"write {FORMS}")
        if parts.port is None:
            raise ValueError(f"the port is missing: write {scheme}://HOST:PORT")
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            raise ValueError("only a host and a port may follow the scheme")
    except ValueError as exc:
        raise ValueError(f"{text!r} is no endpoint: {exc}") from None
    return Endpoint(scheme, parts.hostname or "", parts.port)


def _path(text: str) -> str:
    path = re.sub("^//", "", text)
    if not path.startswith(("/", "@")):
        raise ValueError(
            "the path must be absolute: write unix:/PATH, or unix:@NAME for a name without a file"
        )
    if path == "@":
        raise ValueError("the name is missing: write unix:@NAME")
    if (length := len(os.fsencode(path))) > _PATH_BYTES:
        raise ValueError(f"a Unix socket's path has {_PATH_BYTES} bytes at most, and this one has {length}")
    return path


@dataclass(frozen=True, slots=True)
class Tls:
    """How encrypted endpoints are encrypted.

    :ivar listening: shown to those who connect; None without a certificate
    :ivar connecting: checks those to whom we connect
    :ivar server_name: the name that their certificates must have, if it is not the endpoint's host
    :ivar shows_certificate: to those to whom we connect, if they ask
    """

    listening: ssl.SSLContext | None
    connecting: ssl.SSLContext
    server_name: str | None = None
    shows_certificate: bool = False

    def tell_of_failures(self, tell: Callable[[str], None]) -> None:
        """Say why the handshake of a client has failed: asyncio does not."""

        class Greeted(ssl.SSLObject):
            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as exc:
                    tell(reason(exc))
                    raise

        if self.listening is not None:
            self.listening.sslobject_class = Greeted

    def options(self, endpoint: Endpoint, listens: bool) -> dict[str, Any]:
        """Keywords of asyncio's calls."""
        if not endpoint.encrypted:
            return {}
        if listens:
            return {"ssl": self.listening}
        return {"ssl": self.connecting, "server_hostname": self.server_name or endpoint.host}


# ---------------------------------------------------------------------------
# Listening
# ---------------------------------------------------------------------------


class Listener:
    """A server, and what it leaves behind.

    :ivar endpoints: where it listens, with the ports that it has been given
    """

    def __init__(self, server: Any, endpoints: list[Endpoint], file: os.stat_result | None = None) -> None:
        self.server = server
        self.endpoints = endpoints
        self._file = file

    def close(self) -> None:
        """Stop listening. What was accepted lives on."""
        self.server.close()
        if self._file is not None:
            path = self.endpoints[0].path
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), self._file):
                    os.unlink(path)


async def listen(endpoint: Endpoint, factory: Factory, tls: Tls) -> Listener:
    """Accept connections there.

    :raises EndpointError: it cannot; the text says why
    """
    try:
        if endpoint.path:
            return await _listen_unix(endpoint, factory)
        host = endpoint.host or None
        options = tls.options(endpoint, listens=True)
        if endpoint.is_rdma:
            import rdmanet

            server: Any = await rdmanet.start_rdma_server(factory, host, endpoint.port, **options)
        else:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(factory, host, endpoint.port, **options)
    except (OSError, UnicodeError) as exc:
        raise EndpointError(f"cannot listen on {endpoint}: {reason(exc)}") from exc
    if endpoint.scheme == "tcp":
        for sock in server.sockets:
            close_resets(sock, True)  # what is accepted inherits it
    names = dict.fromkeys(sock.getsockname()[:2] for sock in server.sockets)  # several devices may have one
    return Listener(server, [replace(endpoint, host=name[0], port=name[1]) for name in names])


def close_resets(sock: Any, resets: bool) -> None:
    """Have the close of this TCP socket, by whomever, reset the connection instead of ending its stream; or not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", resets, 0))


async def _listen_unix(endpoint: Endpoint, factory: Factory) -> Listener:
    sock = socket.socket(socket.AF_UNIX)
    try:
        _bind(sock, endpoint)
        server = await asyncio.get_running_loop().create_unix_server(factory, sock=sock)
    except BaseException:
        sock.close()
        raise
    return Listener(server, [endpoint], None if endpoint.path.startswith("@") else os.lstat(endpoint.path))


def _bind(sock: socket.socket, endpoint: Endpoint) -> None:
    """Bind to a Unix path. A socket that nobody has any more is no hindrance.

    :raises OSError: something else is there
    """
    for _ in range(_TRIES):
        try:
            sock.bind(_address(endpoint))
            return
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
        if endpoint.path.startswith("@"):
            break
        with contextlib.suppress(FileNotFoundError):  # its owner, or another program, has removed it
            found = os.lstat(endpoint.path)
            if not stat.S_ISSOCK(found.st_mode):
                raise OSError("the path exists, and is no socket")
            if not _is_stale(endpoint.path) or not _remove(endpoint.path, found):
                break
    raise OSError("another program listens there")


def _is_stale(path: str) -> bool:
    """Whether nobody has this socket any more.

    :raises OSError: that is not known
    """
    # Of another type than those that listen, who are not disturbed: it is refused only where there is no socket at all.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError as exc:
            if exc.errno != errno.EPROTOTYPE:
                raise
    return False


def _remove(path: str, found: os.stat_result) -> bool:
    """Remove this file, and no other that has taken its place. Whether it was removed."""
    aside = f"{path}.{secrets.token_hex(8)}"
    os.rename(path, aside)
    taken = os.lstat(aside)
    is_the_same = os.path.samestat(taken, found) and taken.st_mtime_ns == found.st_mtime_ns
    if not is_the_same:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    os.unlink(aside)
    return is_the_same


def _address(endpoint: Endpoint) -> str:
    return "\0" + endpoint.path[1:] if endpoint.path.startswith("@") else endpoint.path


# ---------------------------------------------------------------------------
# Connecting
# ---------------------------------------------------------------------------


async def connect(
    endpoint: Endpoint, factory: Factory, tls: Tls, timeout: float, users: Collection[int] = ()
) -> None:
    """Connect to it; the factory's protocol gets the transport.

    :param timeout: seconds for all of it: names, addresses, and the handshake of TLS
    :param users: whose a Unix socket may be, beside those whom unix_owner.py trusts
    :raises OSError, UnicodeError: it cannot be reached, or its certificate is wrong; `reason` says why in a line
    """
    try:
        async with asyncio.timeout(timeout):
            await _connect(endpoint, factory, tls, timeout, users)
    except TimeoutError as exc:
        if exc.errno is not None:  # the system's own
            raise
        raise TimeoutError(f"no connection within {timeout:g} s") from None


async def _connect(
    endpoint: Endpoint, factory: Factory, tls: Tls, timeout: float, users: Collection[int]
) -> None:
    loop = asyncio.get_running_loop()
    options = tls.options(endpoint, listens=False)
    if endpoint.path:
        await _connect_unix(endpoint, factory, users)
    elif endpoint.is_rdma:
        import rdmanet

        await rdmanet.create_rdma_connection(
            factory, endpoint.host, endpoint.port, connect_timeout=timeout, **options
        )
    else:
        await loop.create_connection(factory, endpoint.host, endpoint.port, **options)


async def _connect_unix(endpoint: Endpoint, factory: Factory, users: Collection[int]) -> None:
    # uvloop takes no abstract name as the path.
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(_address(endpoint))
                break
            except BlockingIOError:  # its backlog is full; sock_connect() would take this for a beginning
                await pause(loop, _TRY_AGAIN_S)
        if why := why_not_trusted(sock, endpoint.path, users):
            raise PermissionError(errno.EACCES, why)
        await loop.create_unix_connection(factory, sock=sock)
    except BaseException:
        sock.close()
        raise


async def check_target(endpoint: Endpoint) -> None:
    """Find at once what could never be connected to. Whoever does not listen there yet may do so later.

    :raises EndpointError: no host has that name, or it has none
    """
    if endpoint.path:
        return
    if not endpoint.host or not endpoint.port:
        raise EndpointError(f"cannot connect to {endpoint}: it needs a host and a port")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(endpoint.host.partition("%")[0])
        return  # the loop's resolver would start a thread
    try:
        await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        if exc.errno != socket.EAI_AGAIN:
            raise EndpointError(f"cannot connect to {endpoint}: {reason(exc)}") from exc
    except UnicodeError as exc:
        raise EndpointError(f"cannot connect to {endpoint}: {reason(exc)}") from exc


def reason(error: BaseException) -> str:
    """Why something failed, in one line, without the number of the error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return _tls_reason(error.reason)
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(told.split()) or type(error).__name__


def _tls_reason(name: str) -> str:
    """What an error of OpenSSL with this name says about the peer."""
    alert = name.partition("_ALERT_")[2]
    what = (alert or name).replace("_", " ").lower()
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it showed no certificate, and --client-ca demands one"
    if alert == "CERTIFICATE_REQUIRED":
        return "it demands a certificate: give --client-cert"
    if alert == "HANDSHAKE_FAILURE":  # all that TLS 1.2 says of a certificate that is missing
        return "its TLS refuses ours (handshake failure): if it demands a certificate, give --client-cert"
    if "CERTIFICATE" in alert or alert == "UNKNOWN_CA":
        return f"it does not accept the proxy's certificate: {what}"
    return f"its TLS refuses ours: {what}" if alert else f"TLS failed: {what}"
