"""The benchmarks run: what they measure is not judged here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.embedded_only("they are for one host, and choose the device themselves")


def run(module: str, *arguments: object) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module, "--quick", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT,
    ).stdout


def test_a_case_its_tables_and_its_drawing(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    case = ("--case", "round trip 64 B", "--api", "streams", "--variant", "uvloop", "--repetitions", 1)
    table = run("benchmarks", *case, "--output", results)
    assert results.with_suffix(".md").read_text().strip() == table.strip()
    drawn = ElementTree.parse(results.with_suffix(".svg"))
    said = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    at = said.index("round trip 64 B, streams: µs (less is better)")
    assert said[at + 1 : at + 6 : 2] == ["rdmanet", "unix", "tcp"]
    assert all(float(figure) > 0 for figure in said[at + 2 : at + 7 : 2])


@pytest.mark.long
def test_arrays() -> None:
    kinds = ["rdmanet", "rdmanet-alloc", "rdmanet-buffered-alloc", "unix-sockets"]
    text = run("benchmarks.arrays", "--size", "4", *kinds)
    tables = [table.splitlines() for table in text.strip().split("\n\n")]
    assert [[row.split()[0] for row in table[1:]] for table in tables] == [
        ["rdmanet", "rdmanet-alloc", "unix-sockets"],
        kinds,
        kinds,
    ]


@pytest.mark.long
def test_a_dictionary_of_arrays() -> None:
    _, *rows = run("benchmarks.state_dict", "--size", "8", "--arrays", "5").splitlines()
    assert [row[:20].strip() for row in rows] == [
        "argument, one",
        "argument, dict",
        "result, one",
        "result, dict",
    ]
    assert all(float(figure) >= 0 for row in rows for figure in row[20:].split())


def test_connecting() -> None:
    _, *rows = run("benchmarks.connecting").splitlines()
    assert [row.split()[0] for row in rows] == ["rdmanet", "tcp", "unix"]
    assert all(float(figure.replace(",", "")) > 0 for row in rows for figure in row.split()[1:])


def test_counted_connections() -> None:
    *_, row = run("benchmarks.count", "--case", "a connection", "--fabric", "rdmanet").splitlines()
    _, kind, _, _, sleeps, engines, _ = (cell.strip() for cell in row.split("|"))
    assert kind == "rdmanet"
    of_all, of_engine = ([float(side) for side in cell.split(" + ")] for cell in (sleeps, engines))
    # Linked processes hear of each other without the engine: it may not have slept at all.
    assert all(0 <= some <= every > 0 for some, every in zip(of_engine, of_all, strict=True))


@pytest.mark.skipif(shutil.which("redis-benchmark") is None, reason="there is no redis-benchmark")
def test_proxying() -> None:
    _, *rows = run("benchmarks.proxying").splitlines()
    assert [row.split()[0] for row in rows] == ["1"] * 4 + ["32"] * 4
    assert all(float(row.split()[-3].replace(",", "")) > 0 for row in rows)


def test_starting() -> None:
    _, nothing, *rows = run("benchmarks.starting").splitlines()
    assert nothing.split()[0] == "nothing"
    assert [row.split()[0] for row in rows] == ["tcp", "rdmanet", "run"]
    assert all(float(figure) > 0 for row in rows for figure in row.split()[1:])


def test_storm() -> None:
    """Clients connect at once, and again when their server was killed and another one has begun."""
    _, *rows, ratio = run("benchmarks.storm").splitlines()
    assert [row.split()[0] for row in rows] == ["rdma", "tcp"]
    for row in rows:
        ms, cpu_ms, _, again_ms, _ = map(float, row.split()[1:])
        assert ms > 0 and cpu_ms > 0 and again_ms > 0
    assert len(ratio.split()) == 4


def test_growing() -> None:
    _, growing, full = run("benchmarks.growing").splitlines()
    for line, name in ((growing, "growing"), (full, "full")):
        kind, echo, large, _ = line.split()
        assert kind == name
        assert float(echo.replace(",", "")) > 0 and float(large.replace(",", "")) > 0


def test_rpc() -> None:
    *rows, functions = run("benchmarks.rpc", "--cases", "64", "rpc", "streams").splitlines()
    assert len(rows) == 14
    for title, *table in (rows[:7], rows[7:]):  # of time, and of CPU time
        assert title.split()[-2:] == ["rpc", "streams"]
        assert all(float(figure) > 0 for row in table for figure in row.split()[-2:] if figure != "-")
    assert functions.endswith("functions of Python per call of 64 B, on both sides")


def test_falling_back() -> None:
    _, *rows = run("benchmarks.falling_back").splitlines()
    kinds = ["uvloop", "uvloop after 100 µs", "asyncio", "asyncio after 100 µs"]
    assert [row.rsplit(maxsplit=3)[0] for row in rows] == kinds
    assert all(float(figure) > 0 for row in rows for figure in row.split()[-3:])


@pytest.mark.long
def test_peers(tmp_path: Path) -> None:
    """Those that need nothing from PyPI."""
    names = ["rdmanet", "shared_memory", "multiprocessing"]
    results = tmp_path / "peers.json"
    choice = [argument for name in names for argument in ("--peer", name)]
    page = run("benchmarks.peers", *choice, "--output", results)
    assert results.with_suffix(".md").read_text() == page
    tables = [table.splitlines() for table in page.strip().split("\n\n")]
    assert len(tables) == 4
    for title, _, *rows in tables:
        assert title.count("|") == 7
        assert [row.split()[1] for row in rows] == names
        assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row.split("|")[2:-1])
    drawn = ElementTree.parse(results.with_suffix(".svg"))
    said = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    at = said.index("one-way, sleeping, 64 MiB: GB/s (more is better)")
    assert said[at + 1 : at + 7 : 2] == names
    assert all(float(figure) > 0 for figure in said[at + 2 : at + 7 : 2])
