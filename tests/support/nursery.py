"""Where scripts begin that tests run by the dozen: in a process that has imported what they import.

To start Python and import rdmanet takes seconds in the kernel's emulated machine, to fork milliseconds. The nursery has
no thread, has opened no device and runs no script itself, so a fork of it is as good as a fresh interpreter; but what
reads its environment before a script runs, such as a sanitizer, has read the nursery's.

A script has to be the child of the test, which waits for it and wants to see it stopped. So the nursery forks twice;
when the process between has ended, its orphan goes to the nearest ancestor that takes orphans in (prctl(2),
PR_SET_CHILD_SUBREAPER). The test's process is one for that moment.
"""

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
REQUEST_BYTES = 1 << 17  # at most: arguments and environment
IMPORTED = ("asyncio", "uvloop", "rdmanet.verbs", "tests.support.lines")
STDERR = 2
ROOT = Path(__file__).resolve().parents[2]


class Child:
    """What subprocess.Popen would be, for a script whose standard input and output are pipes."""

    def __init__(self, args: list[str], env: dict[str, str], stderr: IO[bytes] | None) -> None:
        """
        :param args: the script, and its arguments
        :param stderr: None for ours
        """
        self.args = args
        self.returncode: int | None = None
        its_input, tell = os.pipe()
        hear, its_output = os.pipe()
        self.stdin: IO[bytes] = open(tell, "wb")
        self.stdout: IO[bytes] = open(hear, "rb")
        try:
            self.pid = _born(
                args, env, [its_input, its_output, STDERR if stderr is None else stderr.fileno()]
            )
        finally:
            os.close(its_input)
            os.close(its_output)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and timeout is not None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(ended)
        status = self._reap(0)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _born(args: list[str], env: dict[str, str], fds: list[int]) -> int:
    """The pid of a new child, which runs the script args[0]."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        socket.send_fds(nursery(), [json.dumps([args, env, os.getcwd()]).encode()], fds)
        return int(nursery().recv(20))
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def nursery() -> socket.socket:
    """It begins with the first call, and ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        process = subprocess.Popen([sys.executable, "-m", __name__, str(fd)], pass_fds=[fd], cwd=ROOT)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ---- In the nursery ------------------------------------------------------------------------------------------


def serve(asked: socket.socket) -> list[str] | None:
    """Fork for each request. Returns in the forked process, with its arguments, and at the end, with none."""
    while True:
        request, fds, _, _ = socket.recv_fds(asked, REQUEST_BYTES, 3)
        if not request:
            return None
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(tell, b"%d" % pid)
                os._exit(0)
            asked.close()
            for fd in (told, tell):
                os.close(fd)
            return _become(*json.loads(request), fds)
        os.waitpid(between, 0)
        os.close(tell)  # else we would wait for a pid if there was no second fork
        asked.send(os.read(told, 20) or b"none")
        for fd in (told, *fds):
            os.close(fd)


def _become(args: list[str], env: dict[str, str], directory: str, fds: list[int]) -> list[str]:
    """What Python does when it starts."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    sys.argv = args
    sys.path[0] = os.path.dirname(args[0])
    sys.path[1:1] = env.get("PYTHONPATH", "").split(os.pathsep)
    return args


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    if given := serve(socket.socket(fileno=int(sys.argv[1]))):
        runpy.run_path(given[0], run_name="__main__")
