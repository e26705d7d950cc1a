"""One interpreter of a process has rdmanet. The others are told so, and do it no harm."""

import subprocess
import sys

IN_TWO = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import rdmanet

before = [device.name for device in rdmanet.devices()]
for _ in range(2):
    another = interpreters.create()
    run = getattr(interpreters, "exec", None) or interpreters.run_string
    run(another, f'''
import sys
sys.path[:] = {sys.path!r}
import rdmanet
try:
    rdmanet.devices
except ImportError as exc:
    print("refused:", exc)
''')
    interpreters.destroy(another)
assert [device.name for device in rdmanet.devices()] == before
"""


def test_another_interpreter_is_refused():
    done = subprocess.run([sys.executable, "-c", IN_TWO], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("refused: ") == 2 and "interpreter" in done.stdout
