"""Programs and libraries in C, of this folder, which a benchmark compiles when it first needs them."""

import os
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"


def compiled(name: str, source: str, *options: str) -> Path:
    """Compile a file of this folder, unless that was done since it was written.

    :param name: of what is made in build/
    :param options: the compiler's, which is that of the variable CC; it may have arguments, as in ``ccache gcc``
    """
    made, written = BUILD / name, HERE / source
    if not made.exists() or made.stat().st_mtime < written.stat().st_mtime:
        BUILD.mkdir(exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-O2", *options, "-o", made, written], check=True)
    return made
