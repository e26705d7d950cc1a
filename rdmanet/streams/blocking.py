"""Byte streams for programs without an event loop: ``open_rdma_stream`` and ``RdmaStream``.

Theory
------
A call that moves bytes waits in C, without an event loop (``BlockingEnd``, _pyx/blocking.pxi). Everything else that may
happen to a connection, such as its end, needs a loop: each stream, and each listener, has one of its own, which runs
only during calls, and only if there is something for it (private_loop.py). No thread is started. It follows that:

* Between calls the device works, and this module does not. Bytes from the peer arrive until the slots of the ring are
  full. The next call that reads takes them out of the slots and grants the peer new credits. A call also notices that
  the peer has closed or aborted. Writes leave nothing behind: they return when everything that they took has been given
  to the device. What an exception leaves of one (a time-out only of sendall(), a Ctrl-C of both) goes out later.
* One thread may read from a stream while another writes to it, no matter which. All other calls are alone. Streams are
  independent of each other.
* Ctrl-C works: the call raises KeyboardInterrupt, and the stream goes on working.
"""

from __future__ import annotations

import contextlib
import errno
import io
import socket
import warnings
from collections.abc import Callable, Coroutine
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from rdmanet.errors import shown
from rdmanet.stream.addresses import SockAddr
from rdmanet.stream.options import SLOT_BYTES
from rdmanet.stream.rdma_transport import RdmaTransport
from rdmanet.streams.blocking_protocol import BlockingProtocol
from rdmanet.streams.private_loop import PrivateLoop
from rdmanet.transport import create_rdma_connection

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_T = TypeVar("_T")

_CLOSED = "I/O operation on a closed stream"
_CHUNK_BYTES = 1 << 16  # of a file


def open_rdma_stream(
    host: str, port: int | str, *, timeout: float | None = None, **options: Any
) -> RdmaStream:
    """``socket.create_connection`` over RDMA: connect, and return a stream that blocks.

    ``timeout`` limits this call, and each later call of the stream (`RdmaStream.settimeout`), in seconds. ``options``
    are those of ``create_rdma_connection``: ``device``, ``connect_timeout``, ``local_addr``, ``slot_bytes``, …

    Raises what ``create_rdma_connection`` raises; TimeoutError; RuntimeError if an event loop runs in this thread.
    """
    # Nobody grows the ring between calls.
    options.setdefault("first_slot_bytes", options.get("slot_bytes", SLOT_BYTES))
    return stream_of(
        timeout,
        lambda private: create_rdma_connection(lambda: BlockingProtocol(private), host, port, **options),
    )


class RdmaStream(io.RawIOBase):
    """One connection, as a blocking raw file for reading and writing. `open_rdma_stream` and listeners create it.

    ``io.BufferedReader(stream)`` and ``io.BufferedRWPair(stream, stream)`` work with it, and so does
    ``io.TextIOWrapper`` around them. ``select`` does not, because the stream has no descriptor.

    Between calls, bytes from the peer arrive until the ring of the connection is full, and stay there. Only a call
    grants the peer new credits, or notices the end of the connection. When ``write`` returns, everything that it took
    has left.

    One thread may read while another writes. Any other call during a call raises RuntimeError, and so does a call in a
    thread where an event loop is running, and in a forked child.
    """

    _made = False  # Python closes a raw file even if its __init__ raised

    def __init__(self, private: PrivateLoop, protocol: BlockingProtocol, timeout: float | None) -> None:
        self._private = private
        self._protocol = protocol
        self._transport = protocol.transport
        self._timeout = timeout
        self._shut = False
        self._io_refs = 0  # open files of makefile()
        self._close_with_files = False
        self._made = True

    # -- reading ----------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Wait until there are bytes, and move them into ``buffer``; returns their number, 0 at the end of file.

        Raises TimeoutError; and the OSError with which the connection was lost (ConnectionResetError if the peer
        aborted it), after the bytes that had arrived. A call that raises these, or KeyboardInterrupt, loses no byte.
        """
        if self.closed:
            raise ValueError(_CLOSED)
        return self._protocol.readinto(buffer, self._timeout)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Wait until there are bytes, and return at most ``size`` of them; b"" at the end of file.

        Raises what ``readinto`` raises; ValueError if ``size`` is negative or the stream is closed; OSError
        (EOPNOTSUPP) for ``flags``.
        """
        if size < 0:
            raise ValueError(f"recv({shown(size)}): a size is not negative")
        if self.closed:
            raise ValueError(_CLOSED)
        if flags:
            raise _no_flags("recv", flags)
        return self._protocol.recv(size, self._timeout) if size else b""

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """``readinto``, but at most ``nbytes`` bytes; 0 means as many as fit.

        Raises what ``recv`` raises; ValueError if ``nbytes`` is more than fit.
        """
        if nbytes < 0:
            raise ValueError(f"recv_into(nbytes={shown(nbytes)}): a size is not negative")
        if flags:
            raise _no_flags("recv_into", flags)
        if not nbytes:
            return self.readinto(buffer)
        with memoryview(buffer) as view, view.cast("B") as octets:
            if nbytes > len(octets):
                raise ValueError(f"recv_into(nbytes={nbytes}): the buffer has only {len(octets)} bytes")
            with octets[:nbytes] as part:
                return self.readinto(part)

    # -- writing ----------------------------------------------------------------------------------------

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of ``data``; returns its length in bytes, when everything has been given to the device.

        If the time limit is over before, it returns how many bytes have been given to the device: write the others
        again, as an ``io.BufferedWriter`` does. It raises TimeoutError if there is none; then nothing was written.

        Each call sends at least one frame, and the peer's ring has room for a limited number of them. So collect small
        pieces in an ``io.BufferedWriter``.

        Raises BrokenPipeError after ``shutdown``; the OSError with which the connection was lost; TimeoutError. After a
        KeyboardInterrupt, later calls send the rest of ``data``: do not write it again.
        """
        return self._write(data, whole=False)

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        """``write``, as sockets call it. It raises OSError (EOPNOTSUPP) for ``flags``."""
        if flags:
            raise _no_flags("send", flags)
        return self._write(data, whole=False)

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        """Write all of ``data``, whatever the time limit.

        Raises what ``write`` raises; OSError (EOPNOTSUPP) for ``flags``. After a TimeoutError, too, later calls send
        the rest of ``data``: do not write it again.
        """
        if flags:
            raise _no_flags("sendall", flags)
        self._write(data, whole=True)

    def sendfile(self, file: IO[bytes], offset: int = 0, count: int | None = None) -> int:
        """Send a file, open in binary mode, from ``offset`` to its end, or ``count`` bytes; returns how many were sent.

        Its bytes pass through this process. When it returns or raises, the position in the file is behind what was
        sent. A file that cannot seek, a pipe say, is sent from where it is.

        Raises what ``write`` raises; ValueError for a text file, and for a ``count`` that is not positive.
        """
        if "b" not in getattr(file, "mode", "b"):
            raise ValueError(f"sendfile(): {shown(file)} is not open in binary mode")
        if count is not None and count <= 0:
            raise ValueError(f"sendfile(count={shown(count)}): a count is positive")
        seekable = file.seekable() if hasattr(file, "seekable") else hasattr(file, "seek")
        if offset or seekable:
            file.seek(offset)
        sent = 0
        try:
            while chunk := file.read(_CHUNK_BYTES if count is None else min(_CHUNK_BYTES, count - sent)):
                left = memoryview(chunk)
                while left:
                    written = self.send(left)
                    left = left[written:]
                    sent += written
            return sent
        finally:
            if sent and seekable:
                file.seek(offset + sent)

    def _write(self, data: ReadableBuffer, whole: bool) -> int:
        if self.closed:
            raise ValueError(_CLOSED)
        if self._shut:
            raise BrokenPipeError(errno.EPIPE, "write() after shutdown()")
        return self._protocol.write(data, self._timeout, whole)

    def shutdown(self, how: int = socket.SHUT_WR, /) -> None:
        """End a half of the connection, or both: ``socket.SHUT_WR``, ``SHUT_RD``, ``SHUT_RDWR``.

        SHUT_WR sends end of file, and returns when the peer's device has everything that was written. SHUT_RD tells the
        peer nothing: reads no longer wait, but return what has come, and then end of file.

        Raises TimeoutError; the OSError with which the connection was lost; OSError (EINVAL) for another ``how``.
        """
        if how not in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR):
            raise OSError(
                errno.EINVAL, f"shutdown({shown(how)}): use SHUT_RD, SHUT_WR or SHUT_RDWR of socket"
            )
        with self._entered():
            if how != socket.SHUT_WR:
                self._protocol.eof = True
            if how != socket.SHUT_RD:
                self._shut = True
                self._private.run(self._transport._end_writing, self._timeout)
                if self._protocol.error is not None:
                    raise self._protocol.error

    # -- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send end of file, wait until the peer's device has everything, and close. A second call does nothing.

        While files of ``makefile`` are open, this only notes that the stream is to be closed, as with a socket. The
        last of them closes it.

        Raises TimeoutError if nothing moved for ``close_timeout`` seconds (an option of the connection), and the
        OSError that ended the connection meanwhile, if bytes that were written may be lost. The stream is closed all
        the same.
        """
        if not self._ours:
            return super().close()
        if self._io_refs > 0:
            self._close_with_files = True
            return None
        known = self._protocol.error
        self._end(self._transport.close)
        error = self._protocol.error
        if error is not None and error is not known:
            raise error

    def abort(self) -> None:
        """Close at once: bytes that were not sent are dropped, and the peer gets ConnectionResetError."""
        if self._ours:
            self._end(self._transport.abort)

    @property
    def _ours(self) -> bool:
        """Whether there is something to end: the stream is open, and this is not a forked child."""
        return not self.closed and self._made and not self._private.foreign

    def _end(self, begin: Callable[[], None]) -> None:
        with self._entered():
            try:
                begin()
                self._private.run(self._protocol.until_lost, None)
            finally:
                self._drop()

    def _drop(self) -> None:
        super().close()
        self._transport.abort()
        self._private.close()

    def __del__(self) -> None:
        if self._ours:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._drop()

    # -- what sockets have ------------------------------------------------------------------------------

    def makefile(
        self,
        mode: str = "r",
        buffering: int | None = None,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file over the stream, like ``socket.makefile``: for reading ("r"), writing ("w"), or both, text or "b".

        Closing the file leaves the stream open. The connection is closed when ``close`` was called and all files are
        closed. After a TimeoutError a file can no longer be read: part of what was asked for may be lost.

        Raises ValueError for another ``mode``, or if the stream is closed.
        """
        if self.closed:
            raise ValueError(_CLOSED)
        # Python's own. Its files call recv_into() and send(), and are counted by _io_refs and _decref_socketios().
        file: IO[Any] = socket.socket.makefile(
            self,
            mode,
            buffering,
            encoding=encoding,
            errors=errors,
            newline=newline,  # type: ignore[call-overload]
        )
        return file

    def _decref_socketios(self) -> None:
        """What a file of makefile() calls when it is closed."""
        self._io_refs -= 1
        if self._close_with_files:
            self.close()

    def settimeout(self, timeout: float | None) -> None:
        """Set how long a call may wait, in seconds; None means forever. Raises ValueError unless it is positive."""
        self._timeout = seconds(timeout)

    def gettimeout(self) -> float | None:
        """The value that was set, in seconds, or None."""
        return self._timeout

    @property
    def timeout(self) -> float | None:
        """The value that was set, in seconds, or None."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """True stands for ``settimeout(None)``.

        :raises ValueError: flag is false: a stream waits
        """
        self.settimeout(None if flag else 0.0)

    def getblocking(self) -> bool:
        """True."""
        return True

    @property
    def family(self) -> socket.AddressFamily:
        """``socket.AF_INET`` or ``AF_INET6``."""
        return socket.AF_INET6 if len(self.getsockname()) == 4 else socket.AF_INET

    @property
    def type(self) -> socket.SocketKind:
        """``socket.SOCK_STREAM``."""
        return socket.SOCK_STREAM

    def getsockname(self) -> SockAddr:
        """The local address."""
        return cast(SockAddr, self.get_extra_info("sockname"))

    def getpeername(self) -> SockAddr:
        """The peer's address."""
        return cast(SockAddr, self.get_extra_info("peername"))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What `RdmaTransport.get_extra_info` returns."""
        return self._transport.get_extra_info(name, default)

    def _entered(self) -> contextlib.AbstractContextManager[None]:
        if self.closed:
            raise ValueError(_CLOSED)
        return self._private.entered("this stream")

    def __repr__(self) -> str:
        return f"<RdmaStream {self._transport!r}>"


def stream_of(
    timeout: float | None,
    begin: Callable[[PrivateLoop], Coroutine[Any, Any, tuple[RdmaTransport, BlockingProtocol]]],
    within: float | None = None,
) -> RdmaStream:
    """A stream with its own loop, of the connection that `begin` makes."""
    timeout = seconds(timeout)
    private = PrivateLoop()
    try:
        with private.entered("this stream"):
            _, protocol = private.run(lambda: begin(private), timeout if within is None else within)
        return RdmaStream(private, protocol, timeout)
    except BaseException:
        private.close()
        raise


def seconds(timeout: float | None) -> float | None:
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={shown(timeout)} is not positive: calls that do not wait are asyncio's")
    return timeout


def _no_flags(call: str, flags: int) -> OSError:
    return OSError(errno.EOPNOTSUPP, f"{call}(flags={flags:#x}): a stream knows none of the flags of sockets")
