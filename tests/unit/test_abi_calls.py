"""The layer that turns libibverbs' four error conventions into one, with made-up codes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler (cc)")


def test_every_convention_becomes_one(tmp_path: Path) -> None:
    program = tmp_path / "abi_calls"
    subprocess.run(
        ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/rdmanet/abi"]
        + [str(ROOT / "tests/unit/abi_calls.c"), "-o", str(program)],
        check=True,
    )
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_library_open_explains_itself(tmp_path: Path) -> None:
    """A file that is missing, and one that is no verbs library, each with its own words."""
    source = tmp_path / "open.c"
    source.write_text(
        '#include "loader.h"\n#include <stdio.h>\n'
        "int main(int c, char **v) { (void)c; struct rn_library *lib; char err[200];\n"
        'int rc = rn_library_open(v[1], v[1], &lib, err, sizeof err); printf("%d %d %s", rc, !lib, err); }\n'
    )
    program = tmp_path / "open"
    subprocess.run(
        ["cc", "-std=gnu11", f"-I{ROOT}/rdmanet/abi", str(source), str(ROOT / "rdmanet/abi/loader.c")]
        + ["-ldl", "-pthread", "-o", str(program)],
        check=True,
    )

    def answer(path: str) -> str:
        return subprocess.run([str(program), path], capture_output=True, text=True, check=True).stdout

    missing = answer("/nowhere/libibverbs.so.1")
    assert missing.startswith("-2 1 ") and "/nowhere/libibverbs.so.1" in missing
    assert answer("libm.so.6") == "-38 1 libm.so.6 has no ibv_get_device_list"
