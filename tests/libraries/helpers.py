"""What the libraries' tests have in common."""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MUCH = os.urandom(300_000)


def port_of(server: Any) -> int:
    return int(server.sockets[0].getsockname()[1])


def is_open(port: int) -> bool:
    from rdmanet.loop import doors

    found = doors.find("127.0.0.1", port)
    if isinstance(found, doors.Found):
        found.socket.close()
    return isinstance(found, doors.Found)


async def pipeline(client: Any) -> None:
    """A hundred values set and read again in one pipeline of a client of redis-py's kind."""
    commands = client.pipeline(transaction=False)
    for n in range(100):
        commands.set(f"key{n}", n)
        commands.get(f"key{n}")
    assert (await commands.execute())[1::2] == [b"%d" % n for n in range(100)]


def run_suite(
    folder: Path, arguments: list[str], left_out: Collection[str], *, path: list[str] | None = None
) -> tuple[int, int]:
    """Run tests of others with every loop switched: how many passed, and how many connections were by RDMA."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "tests/libraries/others.ini", "--rootdir", folder]
        + ["--confcutdir", folder, "-p", "tests.libraries.switched", *arguments]
        + (["-k", " and ".join(f"not ({name})" for name in left_out)] if left_out else []),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(path or [])])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    made = re.search(r"connections by RDMA: (\d+)", done.stdout)
    assert passed is not None and made is not None
    return int(passed[1]), int(made[1])
