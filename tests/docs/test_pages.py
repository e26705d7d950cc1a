"""What the manual says is so: its programs print what it claims, its links lead somewhere, no error lacks a page."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rdmanet import errors

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]

# What each program of a page prints, in the order of the page.
PRINTED = {
    "tutorial.md": ["b'hello\\n'\nover {device}\n", "1000000 bytes\n"],
    "howto/event-loop.md": ["b'hello world\\n' rdma\n"],
    "howto/migrate.md": [""],
    "howto/blocking.md": ["HELLO\n"],
    "howto/anyio.md": ["b'HELLO' by {device}\n"],
    "howto/trio.md": ["b'HELLO\\n' by {device}\n"],
    "howto/watch.md": ["client rdma open 6\nserver rdma open 6\n"],
    "howto/production.md": ["device {device} is lost: DEVICE_FATAL\nb'are you there?\\n'\n"],
    "howto/large-arrays.md": [
        "0.0 999999.0\nb'thanks'\n",
        "0.0 999999.0\n1.0 1000000.0\n2.0 1000001.0\n",
    ],
    "howto/tls.md": ["b'HELLO\\n' by TLSv1.3\n", "b'go ahead\\n'\nb'this is encrypted\\n'\n"],
    "howto/remote-memory.md": [
        "board 4096 b'board'\nleft there: b'hello'\n",
        "board 4096 b'board'\nleft there: b'hello'\n",
        "[0. 0.] 0.0\n[1. 0.] 1.0\n",
        "[0, 1, 2] 1\n",
    ],
    "howto/tensors.md": ["66.0 (3, 4) <f4\n", "True True\n", "66.0\n"],
    "howto/rpc.md": [
        "True\nTrue\nNOT_FOUND: there is no tensor v\n",
        "4 True\n",
        "-0.1 (10,)\n",
        "[3. 3. 3.]\n",
        "bbd05cf6\n",
        "[0.0, 0.5, 1.0, 1.5]\n249.75\n",
        "0\n50\n100\nbuilt\n",
        "4 5\n",
        "Adder.add for a has ended\n3\n",
        "{{'node': '7'}}\n[4] {{'rows-read': '120'}}\nINVALID_ARGUMENT: what do you look for? {{'rows-read': '120'}}\n",
        "3\nUNAUTHENTICATED: the token is missing, or wrong\n",
        "100 0 {{'OK': 100}} 800 100 0\nTrue {{'OK': 100}}\n",
    ],
    "howto/verbs.md": ["b'hello'\nb'hello'\n", "128 writes\n"],
    "async-verbs.md": ["0\nb'it is done' b'hello' 7\n"],
}


def programs(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def say(code: str) -> str:
    """What a program prints, which neither warns nor fails."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RDMANET_DEVICE": "soft0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("page", PRINTED)
def test_programs_print_what_they_should(page):
    codes = programs(ROOT / "docs" / page)
    assert len(codes) == len(PRINTED[page])
    for code, printed in zip(codes, PRINTED[page], strict=True):
        assert say(code) == printed.format(device="soft0")


def test_no_page_has_programs_that_nobody_runs():
    tried = {ROOT / "docs" / page for page in PRINTED}
    tried |= {ROOT / "docs/testing.md"}  # by tests/testing/test_plugin.py
    tried |= {ROOT / "docs/howto/engines.md"}  # by `make engines`
    tried |= {ROOT / "README.md"}  # a line's change, below, and two lines of no program
    tried |= {ROOT / "docs/index.md"}  # lines of that
    assert {page for page in PAGES if programs(page)} == tried


def test_the_changed_line():
    """The program of the README, with a server that it finds."""
    changed, _ = programs(ROOT / "README.md")
    assert changed.count("7471") == 2 and changed.endswith("\nasyncio.run(main())\n")
    code = changed.removesuffix("asyncio.run(main())\n").replace("7471", "PORT")
    code += """
async def echo(reader, writer):
    writer.write(await reader.readline())
    writer.close()

async def both():
    global PORT
    async with await rdmanet.start_rdma_stream_server(echo, "127.0.0.1", 0) as server:
        PORT = server.sockets[0].getsockname()[1]
        await main()

asyncio.run(both())
"""
    assert say(code) == "b'hello\\n'\n"


def test_the_front_page_shows_the_same_lines():
    (shown,) = programs(ROOT / "docs/index.md")
    changed, _ = programs(ROOT / "README.md")
    for line in shown.replace("host, port", '"127.0.0.1", 7471').splitlines():
        assert f"    {line}\n" in changed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}"
        if heading:
            anchors = {
                re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
                for line in there.read_text().splitlines()
                if line.startswith("#")
            }
            assert heading in anchors, f"{page.name} links to {target}"


def test_every_error_has_a_page():
    classes = {
        name
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, OSError)
    }
    assert {page.stem for page in (ROOT / "docs/errors").glob("*.md")} == classes | {"index"}


def test_every_completion_status_is_explained():
    page = (ROOT / "docs/errors/CompletionError.md").read_text()
    for number, (name, *_) in errors._STATUS.items():
        assert number == 0 or f"| {number}: {name} |" in page


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_has_a_size_and_holds_its_text(drawing):
    """A browser makes one without a size as wide as the page. Letters are half as wide as they are high, or more."""
    root = ElementTree.parse(drawing).getroot()
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    assert (root.attrib["width"], root.attrib["height"]) == (f"{width:g}", f"{height:g}")
    letter = 0.6 if root.attrib["font-family"] == "monospace" else 0.53
    around = {inner: outer for outer in root.iter() for inner in outer}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = len(text.text or "") * float(text.get("font-size", root.attrib["font-size"])) * letter
        anchor = text.get("text-anchor", around[text].get("text-anchor", "start"))
        left = float(text.attrib["x"]) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert left >= 0 and left + wide <= width, text.text


@pytest.mark.parametrize("script", ["draw-layers", "draw-states"])
def test_what_is_drawn_is_of_the_sources(script: str) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], check=True)
