"""The enumerations and records of `_core` are made when they are first used; whoever uses them does not notice."""

import pickle
import subprocess
import sys

import pytest

import rdmanet._core
from rdmanet import verbs

PROGRAM = """
import sys
from rdmanet import _core
assert not {"WCStatus", "QPAttr", "AccessFlags", "DeviceAttr"} & {*vars(_core)}
assert "WCStatus" in dir(_core)
sys.meta_path.clear(); sys.path.clear()
from rdmanet._core import WCStatus
assert WCStatus is _core.WCStatus is vars(_core)["WCStatus"]
print(WCStatus(12).name)
"""


def test_nothing_is_made_before_and_no_file_is_read_then() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("RETRY_EXC_ERR\n", "")


def test_each_may_be_the_first() -> None:
    """A child process for each, which has made none before."""
    code = """
import os, sys
from rdmanet import _core
names = sorted({*dir(_core)} - {*vars(_core)})
assert len(names) > 40
failed = []
for name in names:
    if not (child := os.fork()):
        try:
            getattr(_core, name)
        except BaseException as exc:
            print(name, repr(exc), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(failed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["WCStatus", "AccessFlags", "QPCap", "AHAttr"])
def test_they_are_classes_of_the_module(name: str) -> None:
    kind = getattr(rdmanet._core, name)
    assert (kind.__module__, kind.__qualname__) == ("rdmanet._core", name)
    assert pickle.loads(pickle.dumps(kind)) is kind is getattr(verbs, name)


def test_what_they_make_can_be_pickled() -> None:
    for thing in (verbs.WCStatus.SUCCESS, verbs.AccessFlags(3), verbs.QPCap(3), verbs.AHAttr(dgid=bytes(16))):
        assert pickle.loads(pickle.dumps(thing)) == thing


def test_threads_get_the_same() -> None:
    """Whoever asks first while another one makes it."""
    code = """
import sys, threading
from rdmanet import _core
sys.setswitchinterval(1e-6)
barrier, got = threading.Barrier(8), []
def ask():
    barrier.wait()
    got.append(_core.QPAttrMask)
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len({*map(id, got)}), len(got))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 8\n"


HINTS = """
import typing
from rdmanet import _core
for name in ("AsyncEvent", "PortAttr", "QPAttr", "GIDEntry"):
    typing.get_type_hints(getattr(_core, name))
"""


def test_the_hints_of_a_record_can_be_read_though_nobody_has_used_what_they_name() -> None:
    subprocess.run([sys.executable, "-c", HINTS], check=True)


def test_those_of_servers_are_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import rdmanet.transport; print(*dir(rdmanet.transport))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"RdmaServer", "start_rdma_server", "create_rdma_connection"} <= {*done.stdout.split()}


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="'rdmanet._core' has no attribute 'WcStatus'"):
        rdmanet._core.WcStatus  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        from rdmanet.verbs import WcStatus  # type: ignore[attr-defined]  # noqa: F401
