"""Python imports this at its start, where `rdmanet run` has put its directory first on PYTHONPATH.

An environment may have a sitecustomize of its own, which comes first. A Python that cannot load rdmanet (of another
version, or another environment) runs its program as it would without all this.
"""

import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[4])


def _run_the_next() -> None:
    """Import the sitecustomize that this one hides."""
    ours = sys.modules.pop("sitecustomize", None)
    kept = sys.path[:]
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as exc:
        if exc.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        # What it has changed on the path stays.
        if sys.path == [entry for entry in kept if entry != _HERE]:
            sys.path[:] = kept


def _can_load() -> bool:
    if importlib.util.find_spec("msgspec") is None:
        return False
    if importlib.util.find_spec("rdmanet") is None:
        sys.path.append(_ROOT)
    return importlib.util.find_spec("rdmanet._core") is not None


try:
    _run_the_next()
finally:
    if _can_load():
        from rdmanet.cli.everywhere import switch_every_loop

        switch_every_loop()
