"""Other processes that speak lines: a test tells them lines on their standard input, and hears what they print.

`Process` is for tests that block, `AwaitedProcess` for coroutines, on asyncio's loop or uvloop. A line is text (`say`,
`line`) or a JSON object (`tell`, `hear`). lines.py has the same words for the scripts at the other end.

A program that has closed its output, or ended, raises EOFError where a line is expected. close() ends it if it still
runs; finish() closes its standard input, at which the tests' own scripts end by themselves, and well.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from typing import Any, Self

from tests.support.nursery import Child
from tests.support.unfit import unfit
from tests.support.waiting import readable

SILENCE_S = 60.0  # longer than any program thinks, on a busy machine too


class _Speaker:
    """A started program, and its unread output."""

    def __init__(
        self, *command: object, keep_errors: bool = False, forked: bool = False, **options: Any
    ) -> None:
        """
        :param keep_errors: its standard error is for errors(), and not for ours. It goes to a file, so that the
            program never waits for it to be read.
        :param forked: the command is a Python script with arguments, to be forked from the nursery
        :param options: for Popen: `env`, `cwd`; a forked one has `env`
        """
        self._unheard = b""
        self._errors = ""
        self._error_file = tempfile.TemporaryFile() if keep_errors else None  # noqa: SIM115
        words = [str(word) for word in command]
        self.process: subprocess.Popen[bytes] | Child
        if forked:
            self.process = Child(words, stderr=self._error_file, **options)
        else:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=self._error_file, **options
            )
        assert self.process.stdin and self.process.stdout
        self._stdin, self._stdout = self.process.stdin, self.process.stdout

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self, *fields: object) -> None:
        self._stdin.write(" ".join(map(str, fields)).encode() + b"\n")
        self._stdin.flush()

    def tell(self, **facts: Any) -> None:
        self.say(json.dumps(facts))

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Send SIGSTOP, and return when none of its threads runs any more. SIGCONT makes it go on."""
        self.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def errors(self) -> str:
        """All that it has written to its standard error so far."""
        if self._error_file is not None:
            self._errors = os.pread(self._error_file.fileno(), 1 << 20, 0).decode(errors="replace")
        return self._errors

    def close(self) -> None:
        """Kill it, unless it has ended. What it had to say can no longer be heard, but for errors()."""
        if self.process.poll() is None:
            self.process.kill()  # stopped ones, too
        self.process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if self._error_file is not None:
            self.errors()
            self._error_file.close()
            self._error_file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- for the two kinds

    def _next(self) -> str | None:
        """The next line, if it has come."""
        line, newline, rest = self._unheard.partition(b"\n")
        if not newline:
            return None
        self._unheard = rest
        return line.decode()

    def _read(self) -> None:
        """To be called where there is something to read."""
        piece = os.read(self._stdout.fileno(), 65536)
        if not piece:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # a program closes its output a moment before it has ended
            raise EOFError(self._about(f"says no more; its status is {self.process.returncode}"))
        self._unheard += piece

    def _about(self, what: str) -> str:
        """For messages."""
        unfinished = f", after {self._unheard!r}" if self._unheard else ""
        return f"{self.process.args} {what}{unfinished}\n{self.errors()}".rstrip()

    def _silence(self) -> TimeoutError:
        return TimeoutError(self._about(f"has said nothing for {SILENCE_S:.0f} s"))

    def _ended_well(self, status: int) -> str:
        assert status == 0, self._about(f"has ended with status {status}")
        return self.errors()


class Process(_Speaker):
    """For tests that block."""

    def line(self) -> str:
        """The next line that it prints."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        while (line := self._next()) is None:
            if not poll.poll(SILENCE_S * 1000):
                raise self._silence()
            self._read()
        return line

    def hear(self) -> dict[str, Any]:
        """What it says next. That it is `unfit` ends the test."""
        said: dict[str, Any] = json.loads(self.line())
        if "unfit" in said:
            unfit(said["unfit"])
        return said

    def rest(self) -> str:
        """All that it prints until it ends."""
        return (self._unheard + self._stdout.read()).decode()

    def wait(self, timeout: float = SILENCE_S) -> int:
        """Its exit status."""
        return self.process.wait(timeout)

    def finish(self) -> str:
        """Let it end by itself, and well; its errors()."""
        self._stdin.close()
        return self._ended_well(self.wait())


class AwaitedProcess(_Speaker):
    """For coroutines.

    Its end is awaited through a pidfd: no thread of a child watcher, no signal handler, no polling.
    """

    async def line(self) -> str:
        """The next line that it prints."""
        while (line := self._next()) is None:
            await readable(self._stdout.fileno())
            self._read()
        return line

    async def hear(self, timeout: float | None = None) -> dict[str, Any]:
        async with asyncio.timeout(timeout):
            said: dict[str, Any] = json.loads(await self.line())
        return said

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        if self.process.poll() is None:
            fd = os.pidfd_open(self.pid)
            try:
                await readable(fd)
            finally:
                os.close(fd)
        return self.process.wait()

    async def finish(self) -> str:
        """Let it end by itself, and well; its errors()."""
        self._stdin.close()
        return self._ended_well(await self.ended())
