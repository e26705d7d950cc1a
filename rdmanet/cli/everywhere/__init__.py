"""Switch every event loop of a process, however the program makes it: for `rdmanet run`.

A loop is an object of asyncio's class or of uvloop's, whoever makes it and by whatever name: asyncio.run(), a policy,
uvloop.run(). So the constructor of each class switches the new loop. A program that imports neither is to pay for
neither, so the constructors are changed when their modules are imported.

Children get the same: those by fork have the changed classes, and those that are started anew find
site/sitecustomize.py by the PYTHONPATH that `rdmanet run` has set.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SITE = Path(__file__).parent / "site"
"""The directory that PYTHONPATH has to begin with."""

_CLASSES = {"asyncio.unix_events": "_UnixSelectorEventLoop", "uvloop": "Loop"}


def switch_every_loop() -> None:
    """From now on every loop of asyncio's or uvloop's takes RDMA where it can. RDMANET_PEERS chooses the peers."""
    for name in _CLASSES:
        if name in sys.modules:
            _change(sys.modules[name])
    sys.meta_path.insert(0, _Watcher())


def _change(module: ModuleType) -> None:
    kind: Any = getattr(module, _CLASSES[module.__name__])
    construct = kind.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwds: Any) -> None:
        construct(self, *args, **kwds)
        from rdmanet.loop.mixin import switch_on
        from rdmanet.loop.settings import Settings

        switch_on(self, Settings())

    kind.__init__ = __init__


class _Watcher(importlib.abc.MetaPathFinder):
    """Notices that one of the modules is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CLASSES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader)
        return spec


class _Changing(importlib.abc.Loader):
    """A module's loader, which changes the module afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _change(module)
