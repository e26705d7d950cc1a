"""uvicorn's program and hypercorn's, as users run them: several workers, reloads, a browser beside clients by RDMA."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libraries import asking
from tests.libraries.program_cases import ROOT, program
from tests.support.ports import free_port
from tests.support.processes import Process
from tests.support.waiting import until_seen

APPLICATION = """
import os

async def application(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"WORD %d" % os.getpid()})
"""


@contextlib.contextmanager
def serving(directory: Path, *command: object) -> Iterator[int]:
    """A program that serves the application of this directory: its process."""
    (directory / "served.py").write_text(APPLICATION)
    with Process(
        sys.executable,
        "-m",
        *command,
        keep_errors=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
    ) as program:
        try:
            yield program.pid
        finally:  # it ends its workers, which would live on if it were killed
            program.process.terminate()
            program.wait()


@contextlib.contextmanager
def uvicorn(directory: Path, *options: str) -> Iterator[tuple[int, int]]:
    """The port and the process of `uvicorn`."""
    port = free_port()
    command = ["uvicorn", "served:application", "--loop", "rdmanet:loop_factory", "--port", port]
    with serving(directory, *command, "--app-dir", directory, "--no-access-log", *options) as process:
        yield port, process


@contextlib.contextmanager
def hypercorn(directory: Path, *options: str) -> Iterator[int]:
    """The port of `hypercorn`, which chooses its loops itself."""
    port = free_port()
    command = ["rdmanet", "run", "-m", "hypercorn", "served:application", "--bind", f"127.0.0.1:{port}"]
    with serving(directory, *command, *options):
        yield port


async def page(port: int) -> bytes:
    """The page by httpx; nothing until the server is there."""
    import httpx

    async with httpx.AsyncClient() as client:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(f"http://127.0.0.1:{port}/")).content
    return b""


async def by_curl(port: int) -> bytes:
    curl = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--max-time", "30", f"http://127.0.0.1:{port}/", stdout=subprocess.PIPE
    )
    return (await curl.communicate())[0]


async def page_by_rdma(port: int, connections, word: bytes) -> None:
    """Wait until a page with this word comes over RDMA; curl gets it at the same time, on the same port."""
    while True:
        before = len(connections)
        if (await page(port)).startswith(word) and len(connections) == before + 1:
            break
        await asyncio.sleep(0.05)
    pages = await asyncio.gather(by_curl(port), page(port), by_curl(port), page(port))
    assert all(each.startswith(word) for each in pages)
    assert len(connections) == before + 3


async def spread_evenly(port: int, connections, workers: int) -> None:
    """When all workers are there, RDMA's connections are spread over them in turn."""
    await page_by_rdma(port, connections, b"WORD")
    seen = set()
    while len(seen) < workers:
        before = len(connections)
        answer = await page(port)
        if len(connections) > before:
            seen.add(answer)
    before = len(connections)
    answers = Counter([await page(port) for _ in range(3 * workers)])
    assert answers == dict.fromkeys(seen, 3)
    assert len(connections) == before + 3 * workers


def test_uvicorn_with_workers(run, connections, tmp_path):
    with uvicorn(tmp_path, "--workers", "4") as (port, _):
        run(spread_evenly(port, connections, 4))


def test_hypercorn_with_workers(run, connections, tmp_path):
    with hypercorn(tmp_path, "--workers", "3") as port:
        run(spread_evenly(port, connections, 3))


def test_uvicorn_that_reloads(run, connections, tmp_path):
    async def main(port, process):
        await page_by_rdma(port, connections, b"WORD")
        # It begins to watch only a quarter of a second after it has started its server.
        await until_seen(lambda: watches_files(process))
        (tmp_path / "served.py").write_text(APPLICATION.replace("WORD", "CHANGED"))
        await page_by_rdma(port, connections, b"CHANGED")

    with uvicorn(tmp_path, "--reload") as (port, process):
        run(main(port, process))


@pytest.mark.parametrize("requests", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_reloads_drop_only_what_is_under_way(run, connections, tmp_path, requests):
    """uvicorn closes connections whose request it has not read yet, and so drops some over TCP, too.

    tests/loop/test_first_word.py says why these are not more over RDMA.

    So both fabrics ask at once. Those who ask by TCP are another process, which knows nothing of rdmanet.
    """
    at_once, reloads = 4, 5
    made: Counter[str] = Counter()
    dropped: Counter[str] = Counter()

    def count(fabric: str, counts: list[asking.Counts]) -> None:
        for each in counts:
            assert each.dropped <= 1  # the one that was under way
            made[fabric] += each.made
            dropped[fabric] += each.dropped

    async def main(port, process, tcp):
        await page_by_rdma(port, connections, b"WORD")
        await until_seen(lambda: watches_files(process))
        for number in range(reloads):
            word = f"NUMBER{number}"
            (tmp_path / "served.py").write_text(APPLICATION.replace("WORD", word))
            least = requests // reloads // at_once
            tcp.tell(word=word, least=least)
            before = len(connections)
            count("rdma", await asking.ask_at_once(port, word, least, at_once, takes_rdma))
            assert len(connections) > before
            heard = await asyncio.to_thread(tcp.hear)
            count("tcp", [asking.Counts(*each) for each in heard["counts"]])

    with uvicorn(tmp_path, "--reload") as (port, process):
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with Process(sys.executable, "-I", asking.__file__, port, at_once, env=plain) as tcp:
            run(main(port, process, tcp), limit_s=60 + requests / 10)
    for fabric in made:
        print(f"{fabric}: {dropped[fabric]} of {made[fabric]} requests were dropped in {reloads} reloads")


def takes_rdma(writer: asyncio.StreamWriter) -> bool:
    return writer.get_extra_info("fabric") == "rdma"


def test_a_browser(run, connections, tmp_path):
    """Headless Chromium loads the page while others load it over RDMA, on the same port."""
    chromium = program("chromium", "chromium")

    async def by_browser(port: int) -> bytes:
        browser = await asyncio.create_subprocess_exec(
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"http://127.0.0.1:{port}/",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return (await browser.communicate())[0]

    async def main(port):
        await page_by_rdma(port, connections, b"WORD")
        before = len(connections)
        shown, *pages = await asyncio.gather(by_browser(port), *(page(port) for _ in range(5)))
        assert b"WORD" in shown
        assert all(each.startswith(b"WORD") for each in pages)
        assert len(connections) == before + 5

    with uvicorn(tmp_path) as (port, _):
        run(main(port))


def watches_files(process: int) -> bool:
    """Whether it waits for changes of files, by inotify(7)."""
    for info in Path(f"/proc/{process}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a descriptor that was closed meanwhile
            if "inotify wd" in info.read_text():
                return True
    return False
