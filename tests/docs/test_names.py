"""docs/reference/names.md lists what the reference names, for those who read the pages as Markdown."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed(page: str) -> set[str]:
    return set(re.findall(r"^\| `([\w.]+)", page, re.MULTILINE))


def test_the_page_has_all_names():
    loader = importlib.machinery.SourceFileLoader("list_names", str(ROOT / "scripts/list-names"))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("list_names", loader))
    loader.exec_module(script)
    names = listed((ROOT / "docs/reference/names.md").read_text())
    differing = names ^ listed(script.page())
    assert not differing, f"run PYTHONPATH=. .venv/bin/python scripts/list-names: {sorted(differing)}"
    assert {"open_rdma_connection", "RdmaTransport.offer", "rpc.connect", "verbs.QP"} <= names
