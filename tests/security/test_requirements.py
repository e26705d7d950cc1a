"""What developers and CI install: files that requirements/ names by their hashes, and no others.

Between us and a package are its index, mirrors, caches and everybody who may publish a release. Here one of them
serves another file under the right name and version.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS: dict[str, list[str]] = PROJECT["dependency-groups"]
BUILD: list[str] = PROJECT["build-system"]["requires"]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
# The groups that are installed by the constraints; the others have a list of their own each.
OWN = ("pip", "lock", "libraries", "peers", "rpc-peers", "engines", "frameworks", "wheels")
FILE_OF = {group: group if group in OWN else "constraints" for group in GROUPS}


def locked(text: str) -> list[tuple[Requirement, list[str]]]:
    """Each requirement, with its hashes."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [
        (Requirement(line.split("--hash")[0].strip()), re.findall(r"--hash=(\S+)", line)) for line in lines
    ]


def releases(file: str) -> dict[str, list[tuple[Requirement, Version]]]:
    """By name: those it has, for one kind of interpreter each."""
    found: dict[str, list[tuple[Requirement, Version]]] = {}
    for requirement, _ in locked((ROOT / f"requirements/{file}.txt").read_text()):
        version = Version(next(iter(requirement.specifier)).version)
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, version))
    return found


# ---- What is written down ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_is_one_release_with_its_hashes(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^ *-(?!-hash)", text, re.MULTILINE), "an option: another index, say"
    for requirement, hashes in locked(text):
        assert [each.operator for each in requirement.specifier] == ["=="], requirement
        assert requirement.url is None, requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), requirement


@pytest.mark.parametrize(("group", "wanted"), [*GROUPS.items(), ("build-system", BUILD)])
def test_it_is_in_the_ranges_that_pyproject_gives(group: str, wanted: list[str]) -> None:
    found = releases(FILE_OF.get(group, "constraints"))
    for requirement in map(Requirement, wanted):
        chosen = found.get(canonicalize_name(requirement.name), [])
        assert chosen, f"{requirement} isn't there: make lock"
        ranges = [each for each in map(Requirement, wanted) if each.name == requirement.name]
        for _, version in chosen:  # some interpreters may have a range of their own
            assert any(version in each.specifier for each in ranges), (
                f"{version} isn't {requirement}: make lock"
            )
        # Of several that markers choose from, this interpreter has exactly one; of a range that is not for it, none.
        fits, own = (
            sum(each.marker is None or each.marker.evaluate() for each in some)
            for some in ([one for one, _ in chosen], ranges)
        )
        assert fits == bool(own), chosen


def test_all_ranges_have_an_end() -> None:
    for requirement in map(Requirement, [*BUILD, *(each for group in GROUPS.values() for each in group)]):
        if requirement.name not in ("furo",):  # its versions are dates
            assert {"<", "<=", "==", "~="} & {each.operator for each in requirement.specifier}, requirement


def test_this_environment_is_made_of_them() -> None:
    if ROOT not in Path(sys.prefix).parents:
        pytest.skip("this interpreter's environment is not make's")
    chosen = {**releases("constraints"), **releases("pip")}
    here = {
        canonicalize_name(each.name): Version(each.version)
        for each in distributions(path=[sysconfig.get_path("purelib")])
    }
    assert {"pip", "cython", "pytest"} <= here.keys() & chosen.keys()
    for name in here.keys() & chosen.keys():
        assert here[name] in [version for _, version in chosen[name]], name


# ---- What installs -------------------------------------------------------------------------------------

INSTALLS = re.compile(
    r"pip\S* +(?:install|wheel|download)|\bensurepip\b.*upgrade|\buv (?:pip|sync|run|tool)|\bpipx\b"
    r"|\bcurl\b|\bwget\b|urllib\.request|\brequests\b"
)


def scripts() -> list[Path]:
    folders = [path for folder in (".ci", "scripts") for path in (ROOT / folder).iterdir() if path.is_file()]
    return sorted([ROOT / "Makefile", *folders, *(ROOT / "tests").rglob("Makefile")])


def test_nothing_else_installs() -> None:
    """All that fetch code do it by hashes, from a list that is here, or from no index at all; apt checks signatures."""
    demands = re.compile(r"\$\(locked\)|--require-hashes|--no-index|--build-constraint")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in scripts()
        for line in path.read_text().splitlines()
        if INSTALLS.search(line) and not line.lstrip().startswith(("#", '"', "'"))
    ]
    assert len(found) >= 4, "the test finds what it is about"
    assert [line for line in found if not demands.search(line)] == []


# ---- The attack ------------------------------------------------------------------------------------------


def publish(index: Path, name: str, code: str) -> str:
    """A wheel of version 1; its hash."""
    info = f"{name}-1.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    index.mkdir(exist_ok=True)
    wheel = index / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in [*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")]:
            archive.writestr(path, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def give_our_pip(environment: Path) -> None:
    ours = Path(sysconfig.get_path("purelib"))
    for part in (ours / "pip", *ours.glob("pip-*.dist-info")):
        shutil.copytree(part, next(environment.glob("lib/python3*/site-packages")) / part.name)


@pytest.mark.parametrize("where", ["requirements", "constraints"])
@pytest.mark.parametrize(
    "swapped", [pytest.param(False, marks=pytest.mark.long, id="control"), pytest.param(True, id="guarded")]
)
def test_another_file_of_that_name_stops_make(tmp_path: Path, where: str, swapped: bool) -> None:
    """`make setup` up to its packages, as pip's list (for an old pip) and as a group, held by the constraints."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "scripts").mkdir()
    for script in ("prerequisites", "progress"):
        shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    if where == "constraints":  # make's first step would bring this pip, from the real index
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
        give_our_pip(tmp_path / "venv")
    index = tmp_path / "index"
    honest = publish(index, "victim", "")
    theirs = publish(index, "victim", "raise SystemExit('owned')")
    assert honest != theirs
    line = f"victim==1 --hash=sha256:{honest if swapped else theirs}\n"
    nothing = "# nothing\n"
    (tmp_path / "requirements/pip.txt").write_text(line if where == "requirements" else nothing)
    (tmp_path / "requirements/constraints.txt").write_text(line if where == "constraints" else nothing)
    group = ["victim>=1,<2"] if where == "constraints" else []
    (tmp_path / "pyproject.toml").write_text(f"[dependency-groups]\nrun = {group}\n")

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    made = subprocess.run(
        ["make", "venv/.run", "VENV=venv", f"PYTHON={sys.executable}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    said = made.stdout + made.stderr
    installed = list((tmp_path / "venv").glob("lib/python3*/site-packages/victim.py"))
    if swapped:
        assert made.returncode != 0, said
        assert "DO NOT MATCH THE HASHES" in said
        assert theirs in said
        assert installed == []
    else:
        assert len(installed) == 1, said
        assert "owned" in installed[0].read_text()
