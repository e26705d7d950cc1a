"""Nothing imports upward.

The rooms of the house, the ground first. A module may import from the rooms below its own, and from
its own room on its own side. A new module gets its place here first. scripts/draw-layers makes the drawing and
the list of modules in docs/architecture.md from this table, and tests/docs holds them to it; the list of
rdmanet/__init__.py is held to the tree here.

Files stay short enough to be read at a sitting, as those of the embedded device do (test_soft_layers.py).
"""

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rdmanet"

RPC_GROUND = {
    "rpc.arrays",
    "rpc.errors",
    "rpc.limits",
    "rpc.framing",
    "rpc.plain",
    "rpc.buffer",
    "rpc.describe",
    "rpc.messages",
    "rpc.schema",
    "rpc.calls",
    "rpc.coded",
}
RPC_GROUND |= {
    "rpc.annotations",
    "rpc.array_types",
    "rpc.item_types",
    "rpc.service_types",
    "rpc.hints",
    "rpc.packing",
    "rpc.parts",
    "rpc.copies",
    "rpc.beginning",
    "rpc.shares",
    "rpc.weights",
    "rpc.snapshot",
    "rpc.explaining",
    "rpc.method_options",
    "rpc.method",
    "rpc.retry",
    "rpc.call_metadata",
    "rpc.stats",
}

PUBLIC_NAMES = {"anyio_streams", "blocking", "trio_streams"}  # of modules of streams/

# Each room is a list of sides that do not import each other.
ROOMS = [
    [
        {"base", "wire", "stream"},  # which contain nothing themselves
        {"errors", "credit", "base.bodies", "wire.placement", "wire.slots", "wire.remote", "wire.qpinfo"},
        {"rpc.weighing"},
        {"base.log_rate"},
        {"base.environment"},
        {"base.scopes"},
        {"base.pause"},
        {"base.notifier", "base.closable"},
        {
            "base.accounts",
            "base.call_accounts",
            "base.watching",
            "base.fabric_of",
            "base.onlookers",
            "base.late_import",
            "base.cpus",
        },
    ],
    [{"_core", "_verbs"}],
    [
        {"protocol", "stream.machine", "wire.offers"},
        {"verbs", "cm", "verbs.device_lookup"},
        {"verbs.device_events"},
        {"verbs.device_log"},
        {"stream.options"},
        {"stream.tracing"},
        {"stream.waits", "stream.parting", "stream.tenants", "stream.leaving"},
        {"stream.transfers", "stream.blocks"},
        {"stream.tls", "stream.ssl_protocol", "stream.in_the_clear"},
    ],
    [
        {"stream.loop_context", "stream.readiness"},
        {"stream.addresses", "stream.client_ports", "stream.transport_socket"},
        {"verbs_async"},
        {"stream.peer_memory", "stream.bindings", "stream.registered", "stream.connection", "stream.uses"},
        {"stream.admission"},
        {"stream.metrics"},
        {"stream.teardown"},
    ],
    [{"stream.explaining"}],
    [
        {"stream.server"},
        {"stream.establish"},
        {"stream.regions"},
        {"stream.writing", "stream.callbacks"},
        {"stream.deadlines"},
        {"stream.facts"},
    ],
    [{"stream.parts"}],
    [{"stream.beginning"}, {"stream.ending"}],
    [{"stream.reports"}],
    [{"stream.lifecycle"}],
    [{"stream.rdma_transport"}, {"stream.whole"}],
    [{"stream.listening"}],
    [{"transport"}],
    [
        {"streams.buffering", "streams.accept_queue"},
        {"streams.trio_loop"},
        {"streams.private_loop", "streams.blocking_protocol"},
        {"streams.offered"},
        {"tensors"},
    ],
    [
        {"streams.reader_writer"},
        {"streams.files"},
        {"streams.byte_stream"},
        {"streams.trio_stream"},
        {"streams.blocking", "streams.blocking_listener"},
    ],
    [{"streams"}],
    [RPC_GROUND],
    [{"rpc.turns", "rpc.long_writes", "rpc.long_bodies", "rpc.paging", "rpc.gathering", "rpc.outgoing"}],
    [{"rpc.peers"}, {"rpc.messenger"}, {"rpc.in_memory"}],
    [{"rpc.context", "rpc.response", "rpc.threads"}, {"rpc.endpoints"}, {"rpc.link", "rpc.reads"}],
    [{"rpc.failures"}, {"rpc.totals"}],
    [
        {"rpc.streaming"},
        {"rpc.lending", "rpc.tails"},
        {"rpc.keepalive"},
        {"rpc.inner"},
        {"rpc.parting"},
        {"rpc.interceptors", "rpc.tracing"},
        {"rpc.builtin"},
    ],
    [
        {"rpc.channel", "rpc.pending", "rpc.unary", "rpc.stubs", "rpc.awaiting", "rpc.fetching"},
        {
            "rpc.callee",
            "rpc.executing",
            "rpc.first_steps",
            "rpc.host",
            "rpc.running",
            "rpc.taking",
            "rpc.answers",
        },
    ],
    [
        {"rpc.pool", "rpc.slot", "rpc.resolving", "rpc.dialing", "rpc.tried", "rpc.hedging"},
        {"rpc.client_interceptors"},
        {"rpc.dynamic_client", "rpc.dynamic_results"},
    ],
    [{"rpc.lending_objects"}],
    [{"rpc.client"}],
    [{"rpc.borrowed_objects"}],
    [{"rpc.server"}],
    [{"rpc.blocking"}, {"rpc.testing"}],
    [{"rpc"}],
    [{"loop"}],
    # the package itself, and modules of it: the public names
    [{""}, PUBLIC_NAMES],
    [{"cli", "__main__"}, {"testing"}, {"frameworks"}],
]
# Packages whose modules have places of their own; of the others the package has one.
DIVIDED = {"base", "wire", "verbs", "stream", "rpc", "streams"}
PURE = {
    "errors",
    "credit",
    "protocol",
    "stream.machine",
    "base.bodies",
    "wire.placement",
    "wire.slots",
    "wire.offers",
    "wire.remote",
    "wire.qpinfo",
}
PURE |= {"rpc.weighing"} | RPC_GROUND
# What would be I/O, a loop, a clock or a device.
WORLDLY = {"asyncio", "mmap", "select", "selectors", "signal", "socket", "subprocess"}
WORLDLY |= {"threading", "time", "uvloop"}

FILE_LINES = 500
LONGER = {
    "credit.py": "the whole of what VERSION stands for; nearly a quarter of it is text",
}
"""Files that are longer: why each can't be cut without harm. The file says it, too."""

PLACE = {
    name: (floor, side)
    for floor, room in enumerate(ROOMS)
    for side, names in enumerate(room)
    for name in names
}


def modules() -> Iterator[tuple[str, Path]]:
    """(the module's name below rdmanet, its file); the parts of a module that is in parts are the module."""
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.px[di]")]):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] == "_pyx":
            yield "_core", path
        elif inside.parts[0] != "soft":
            yield _place(".".join(inside.with_suffix("").parts).removesuffix("__init__").rstrip(".")), path


def _place(module: str) -> str:
    """The name that a module below rdmanet has in ROOMS."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in DIVIDED else 1])


def imported(path: Path) -> Iterator[str]:
    """The names of rdmanet's modules that a file imports, and of foreign packages, as 'x:name'."""
    depth = len(path.relative_to(PACKAGE).parts)  # 1 for a file in the package itself
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _name(alias.name, [], depth, 0)
            elif isinstance(node, ast.ImportFrom):
                yield from _name(node.module or "", [alias.name for alias in node.names], depth, node.level)
    else:
        text = re.sub(r"\\\n|\((?:[^()]*)\)", lambda found: found[0].replace("\n", " "), path.read_text())
        for found in re.finditer(r"^\s*from\s+(\.*)([\w.]*)\s+c?import\s+([^#\n]+)", text, re.MULTILINE):
            names = [name.split()[0] for name in found[3].strip("() ,").split(",") if name.strip()]
            yield from _name(found[2], names, depth, len(found[1]))
        for found in re.finditer(r"^\s*c?import\s+([\w., ]+)", text, re.MULTILINE):
            for name in found[1].split(","):
                yield from _name(name.split()[0], [], depth, 0)


def _name(module: str, names: list[str], depth: int, level: int) -> Iterator[str]:
    if level == 0:
        head, _, rest = module.partition(".")
        if head != "rdmanet":
            yield f"x:{head}"
            return
    elif level < depth:
        return  # inside a package of its own
    else:
        rest = module
    if rest in DIVIDED:
        yield from {f"{rest}.{name}" if f"{rest}.{name}" in PLACE else rest for name in names or [""]}
    elif rest:
        yield _place(rest)
    else:
        yield from (name if name in PLACE else "" for name in names or [""])


FILES = list(modules())


@pytest.mark.parametrize(("name", "path"), FILES, ids=[str(path.relative_to(PACKAGE)) for _, path in FILES])
def test_nothing_imports_upward(name: str, path: Path) -> None:
    assert name in PLACE, f"{name} has no room yet"
    floor, side = PLACE[name]
    for other in imported(path):
        if other.startswith("x:"):
            assert not (name in PURE and other[2:] in WORLDLY), f"{name} is pure and imports {other[2:]}"
        elif other != name:
            assert other in PLACE, f"{name} imports rdmanet.{other}, which has no room yet"
            assert PLACE[other][0] < floor or PLACE[other] == (floor, side), (
                f"{name} imports {other or 'the package'}"
            )


def arrows(node: Callable[[str], str]) -> dict[str, set[str]]:
    """What imports what; ``node`` says of a module which node of the graph it is in."""
    graph: dict[str, set[str]] = {}
    for name, path in FILES:
        others = {node(other) for other in imported(path) if not other.startswith("x:")}
        graph.setdefault(node(name), set()).update(others - {node(name)})
    return graph


def test_no_circles() -> None:
    TopologicalSorter(arrows(str)).prepare()


def test_no_circle_crosses_a_folder() -> None:
    """Seen from afar, too, where each folder is one node."""
    TopologicalSorter(arrows(lambda name: name.partition(".")[0])).prepare()


def on_the_top_floor() -> set[str]:
    """The modules and folders that are in the package itself. _verbs.pxd is declarations, and no module."""
    files = {
        path.relative_to(PACKAGE).parts[0].partition(".")[0] for _, path in FILES if path.suffix != ".pxd"
    }
    return files | {path.parent.name for path in PACKAGE.glob("*/*.[ch]")} | {"_pyx", "soft"}


def test_the_top_floor_is_small() -> None:
    """Whoever opens the package sees at a glance what is in it. What is new belongs into a folder."""
    assert len(on_the_top_floor()) <= 26


def test_the_package_lists_its_top_floor() -> None:
    layout = (PACKAGE / "__init__.py").read_text().partition("General layout")[2].partition("Import names")[0]
    listed = {
        word.strip().rstrip("/")
        for line in layout.splitlines()
        if line.startswith("    ")
        for word in re.split(r"  +", line.strip())[0].split(",")
    }
    unlisted = {"__init__", "__main__", "_pyx"} | {*PUBLIC_NAMES}
    assert listed == on_the_top_floor() - unlisted


def too_long(files: dict[str, str]) -> dict[str, int]:
    return {name: lines for name, text in files.items() if (lines := text.count("\n")) > FILE_LINES}


def test_files_are_short() -> None:
    paths = [path for _, path in FILES if path.suffix in (".py", ".pyx", ".pxi")]
    assert len(paths) > 150  # it sees them
    found = too_long({str(path.relative_to(PACKAGE)): path.read_text() for path in paths})
    assert not {name: lines for name, lines in found.items() if name not in LONGER}
    assert LONGER.keys() <= found.keys(), "an exception is none any more"
    for name in LONGER:
        assert "ore than 500 lines" in (PACKAGE / name).read_text(), f"{name} does not say why it is longer"


def test_the_check_sees() -> None:
    """The words that it looks for are found in the forms that people write."""
    assert list(_name("rdmanet.credit", ["Ledger"], 1, 0)) == ["credit"]
    assert list(_name("rdmanet.streams.buffering", ["x"], 2, 0)) == ["streams.buffering"]
    assert sorted(_name("rdmanet.streams", ["buffering", "x"], 1, 0)) == ["streams", "streams.buffering"]
    assert list(_name("rdmanet.cli.text", ["x"], 2, 0)) == ["cli"]
    assert list(_name("rdmanet", ["credit", "connect"], 1, 0)) == ["credit", ""]
    assert list(_name("", ["credit"], 1, 1)) == ["credit"]
    assert list(_name("credit", ["Ledger"], 1, 1)) == ["credit"]
    assert list(_name("table", ["x"], 2, 1)) == []
    assert list(_name("transport", ["x"], 2, 2)) == ["transport"]
    assert list(_name("asyncio.events", [], 1, 0)) == ["x:asyncio"]
    assert too_long({"a.py": "\n" * FILE_LINES, "b.pxi": "\n" * (FILE_LINES + 1)}) == {
        "b.pxi": FILE_LINES + 1
    }
