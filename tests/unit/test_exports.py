"""Programs that were linked against the distribution's libraries find every symbol in the embedded device's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rdmanet import _core

LIBRARIES = ["libibverbs.so.1", "librdmacm.so.1"]

# What nobody imports who isn't of rdma-core itself, or of 2006, or wants rsockets.
KERNEL_FORMATS = re.compile(r"ibv_copy_\w+_(from|to)_kern@")
RSOCKETS = re.compile(
    r"r(accept|bind|close|connect|fcntl|get\w+|io\w+|listen|read|readv|recv\w*|select|send\w*|setsockopt|shutdown"
    r"|socket|write|writev)@"
)


def symbols(path: Path) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].replace("@@", "@") for line in listed.splitlines() if "@" in line}


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_symbol_of_the_distribution_is_there(name: str) -> None:
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    [*found] = Path("/usr/lib").glob(f"*/{name}")
    if not found:
        pytest.skip(f"{name} is not installed")
    ours = symbols(Path(_core.Library.embedded().path))
    current = {symbol for symbol in ours if symbol.startswith(("ibv_", "rdma_"))}
    missing = {
        symbol
        for symbol in symbols(found[0]) - ours
        if not KERNEL_FORMATS.match(symbol)
        and not RSOCKETS.match(symbol)
        # Superseded by another version of the same name, in the time of libibverbs 1.0.
        and not (
            symbol.endswith("@IBVERBS_1.0") and symbol.replace("@IBVERBS_1.0", "@IBVERBS_1.1") in current
        )
    }
    assert not missing
