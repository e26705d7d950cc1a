"""scripts/kernel-vm: what a command finds in the virtual machine, without one."""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch) -> Any:
    loader = SourceFileLoader("kernel_vm", str(ROOT / "scripts/kernel-vm"))
    module = ModuleType(loader.name)
    monkeypatch.setitem(sys.modules, loader.name, module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def test_the_command_has_our_variables(vm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """But for the one by which each process compiles again what has no byte code yet."""
    monkeypatch.setattr(sys, "argv", ["kernel-vm", "--", "python", "-c", "print('a b')"])
    monkeypatch.setenv("RDMANET_TEST_LIMIT", "it's long")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)
    vm.Machine(vm.parse("usage\n"), Path("image"), Path("initrd"), tmp_path)
    *variables, folder, command = (tmp_path / "control/command").read_text().splitlines()
    assert """export RDMANET_TEST_LIMIT='it'"'"'s long'""" in variables
    assert not [line for line in variables if "PYTHONDONTWRITEBYTECODE" in line]
    assert folder == f"cd {tmp_path}"
    assert command == """exec python -c 'print('"'"'a b'"'"')'"""
