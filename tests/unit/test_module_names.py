"""The public names of the streams can be imported from each module that has them, and are the same objects there."""

import ast
import importlib
import pickle
from pathlib import Path

import pytest

import rdmanet
from rdmanet.streams import byte_stream

MODULES = {
    "rdmanet.streams": ["RdmaStreamWriter", "open_rdma_connection", "start_rdma_stream_server"],
    "rdmanet.blocking": ["RdmaStream", "RdmaStreamListener", "listen_rdma_stream", "open_rdma_stream"],
    "rdmanet.transport": ["RdmaServer", "RdmaTransport", "create_rdma_connection", "start_rdma_server"],
}
NAMES = [(module, name) for module, names in MODULES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_package_has_it_too(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(rdmanet, name)


@pytest.mark.parametrize("name", byte_stream.__all__)
def test_the_public_name_of_anyios_streams(name: str) -> None:
    public = importlib.import_module("rdmanet.anyio_streams")
    assert getattr(public, name) is getattr(byte_stream, name)
    assert public.__all__ == byte_stream.__all__


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_reference_can_be_pickled(module: str, name: str) -> None:
    """And one that was pickled when the module itself had it can still be loaded."""
    thing = getattr(rdmanet, name)
    assert pickle.loads(pickle.dumps(thing)) is thing
    assert pickle.loads(f"c{module}\n{name}\n.".encode()) is thing


def test_type_checkers_know_every_name_and_no_other():
    """They take a module's __getattr__ to have any name, so that a misspelt one would pass."""
    tree = ast.parse(Path(rdmanet.__file__).read_text())
    shown = {
        alias.asname
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert shown - {None} == {*rdmanet._LAZY}
    assert not any(isinstance(line, ast.FunctionDef) and line.name == "__getattr__" for line in tree.body)
