"""Every kind of object at once, ended in random orders: nothing goes before what needs it; see object_graphs.py."""

import os
import subprocess
import sys

import pytest

from rdmanet.verbs import Device

from . import object_graphs


def seeds(device: Device) -> range:
    """Few, since the making of each takes its time; `make test-asan` has more."""
    return range(30) if device.library.embedded_device else range(6)


@pytest.mark.parametrize("end", object_graphs.ENDS)
def test_in_any_order(device: Device, address: str, end: str) -> None:
    for seed in seeds(device):
        try:
            object_graphs.run(device, address, end, seed)
        except BaseException as exc:
            exc.add_note(f"--end {end} --seed {seed}")
            raise


# With the second one, a record is shown when the interpreter cannot import any more.
@pytest.mark.parametrize("seed", ["0", "372244344"])
def test_alive_at_the_end_of_the_interpreter(device: Device, address: str, seed: str) -> None:
    """It ends, and quietly."""
    options = ["--end", "exit", "--count", "6", "--seed", seed, "--device", device.name, "--address", address]
    done = subprocess.run(
        [sys.executable, object_graphs.__file__, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
