"""The tree as if it were installed, for the frameworks and the processes that they start; and what a test may leave."""

import gc
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tree's metadata says of entry points, where importlib.metadata finds it."""
    folder = tmp_path_factory.mktemp("metadata")
    metadata = folder / "rdmanet-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rdmanet\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
            for group, names in project["entry-points"].items()
            if group.startswith("distributed")
        )
    )
    sys.path += [str(folder)]
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{folder}"


def holdings() -> dict[str, Counter[str]]:
    """What this process has of the verbs, and its descriptors by kind: numbers in names are left out."""
    from rdmanet import _core

    gc.collect()
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
        except FileNotFoundError:  # the listing's own
            pass
    return {"objects": Counter(_core.live_objects()), "descriptors": kinds}


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test ends with the objects and descriptors that it began with. Clusters keep some of their own."""
    if request.node.get_closest_marker("cluster"):
        yield
        return
    before = holdings()
    yield
    after = holdings()
    assert not {kind: more for kind in before if (more := after[kind] - before[kind])}, "left behind"
