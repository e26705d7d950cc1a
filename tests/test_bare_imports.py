"""A test that imports its neighbour by the bare name gets that neighbour, also where all folders are collected at once.

Several folders are on `sys.path` together, and the first module of a name stays the only one.
"""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
# A folder with a pytest.ini is a suite by itself.
FILES = [file for file in TESTS.glob("*/*.py") if not file.with_name("pytest.ini").exists()]


def imported(file):
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_a_bare_name_is_one_module():
    modules = Counter(file.stem for file in FILES)
    wrong = {
        f"{file.relative_to(TESTS)}: {name}" for file in FILES for name in imported(file) if modules[name] > 1
    }
    assert not wrong, "import it as tests.FOLDER.NAME"
