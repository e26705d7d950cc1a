# SPDX-License-Identifier: Apache-2.0
"""What tests/c's `make check` prints: a head for each test that ran, and make's own line for each target that failed.

A program that cannot be built has no head. It fails as the target that make names: build/plain/test_cm.
"""

import re

from suites.steps import Parts

HEAD = re.compile(r"^== (?P<test>test_\w+)(?P<how>.*)$", re.MULTILINE)
FAILED = re.compile(r"^make(?:\[\d+\])?: \*\*\* \[[^\]]*: (?P<target>\S+)\] ", re.MULTILINE)
KINDS = {"": "run", ", by stream": "stream", ", with a secret": "secret"}


def parts(output: str) -> Parts:
    """By make's targets: run-test_cm, stream-test_cm, secret-test_cm."""
    found = Parts()
    heads = {head.start(): f"{KINDS[head['how']]}-{head['test']}" for head in HEAD.finditer(output)}
    for failed in FAILED.finditer(output):
        before = [start for start in heads if start < failed.start()]
        found.failed[failed["target"]] = output[max(before, default=0) : failed.end()]
    found.passed = set(heads.values()) - found.failed.keys()
    return found
