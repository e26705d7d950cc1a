"""rdmanet as pip installs it from its wheel, beside the engines, in a folder that has nothing to do with the tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pip(python: Path | str, *arguments: object) -> None:
    """As for somebody who has no tree: with it on its path, pip would take rdmanet for installed."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "pip", "--quiet", *arguments]
    subprocess.run(list(map(str, command)), check=True, env=outside, cwd="/")


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """The folder. It has an environment, venv, where rdmanet is installed and the engines are found, and their programs
    at the tree's place.
    """
    folder = tmp_path_factory.mktemp("installed")
    constraints = ROOT / "requirements/constraints.txt"
    locked = ("--require-hashes", "--only-binary", ":all:")
    pip(sys.executable, "wheel", "--no-deps", "--build-constraint", constraints, "--wheel-dir", folder, ROOT)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    pip(python, "install", *locked, "--requirement", ROOT / "requirements/pip.txt")
    pip(python, "install", *locked, "--constraint", constraints, "msgspec")
    pip(python, "install", "--no-index", *folder.glob("rdmanet-*.whl"))
    [packages] = (folder / "venv").glob("lib/python3*/site-packages")
    [engines] = (ROOT / os.environ["RDMANET_TEST_ENGINES"]).parents[1].glob("lib/python3*/site-packages")
    (packages / "engines.pth").write_text(f"{engines}\n")
    shutil.copytree(ROOT / "tests/engines/programs", folder / "tests/engines/programs")
    (folder / "rdmanet").symlink_to((packages / "rdmanet").relative_to(folder))
    folder.chmod(0o755)
    return folder
