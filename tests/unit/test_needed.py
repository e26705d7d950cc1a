"""The compiled parts link with libc only: rdma-core is opened at run time, so that one build serves every machine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rdmanet
from rdmanet import _core, credit

pytestmark = pytest.mark.skipif(not shutil.which("readelf"), reason="no binutils (readelf)")

OBJECTS = [
    Path(_core.__file__),
    Path(credit.__file__),
    Path(rdmanet.__file__).parent / "soft" / "librdmanet_soft.so",
    Path(rdmanet.__file__).parent / "soft" / "librdmanet_files.so",
]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name.partition(".")[0])
def test_nothing_but_libc_is_needed(path: Path) -> None:
    listed = subprocess.run(
        ["readelf", "--dynamic", path], check=True, capture_output=True, text=True, env={"LC_ALL": "C"}
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed))
    # What glibc consists of, dependent on its age; and what a sanitizer's build adds.
    strange = {
        name
        for name in needed
        if not re.match(r"(libc|libpthread|libdl|librt|ld-linux.*|lib[atu]?san)\.so", name)
    }
    assert needed and not strange
