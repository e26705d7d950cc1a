"""Mooncake's own benchmark, as its wheel has it: a target, and an initiator that reads or writes for some seconds.

It compares no bytes. Its log says which device it has found, and how many batches it has transferred.

usage: mooncake_bench.py read|write
"""

import re
import subprocess
import sys
from pathlib import Path

import mooncake
import pair
from mooncake_pair import started
from pair import until

BENCH = Path(mooncake.__file__).parent / "transfer_engine_bench"
COMMON = (
    "--metadata_server=P2PHANDSHAKE",
    f"--local_server_name={pair.HOST}",
    "--protocol=rdma",
    "--device_name=soft0",
    "--threads=2",
    "--batch_size=16",
    f"--buffer_size={64 << 20}",
)


def address_of(target):
    for line in target.stderr:
        if found := re.search(r"listening on (\S+)", line):
            # It has no memory yet, does not say when it has, and an initiator that comes before ends at once. An engine
            # asks only once.
            until(lambda: started().get_first_buffer_address(found[1]), "the target's memory")
            return found[1]
    raise AssertionError("the target has ended")


def initiate(operation, address):
    options = ("--mode=initiator", f"--operation={operation}", f"--segment_id={address}", "--duration=3")
    done = subprocess.run([BENCH, *COMMON, *options], stderr=subprocess.PIPE, text=True)
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0
    assert "RDMA device: soft0" in done.stderr
    [batches] = re.findall(r"Test completed: .* batch count (\d+)", done.stderr)
    assert int(batches) > 0


if __name__ == "__main__":
    with subprocess.Popen([BENCH, *COMMON, "--mode=target"], stderr=subprocess.PIPE, text=True) as target:
        try:
            initiate(sys.argv[1], address_of(target))
        finally:
            target.kill()
    print("done")
