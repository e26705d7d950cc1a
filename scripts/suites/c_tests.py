# SPDX-License-Identifier: Apache-2.0
"""What tests/c's `make check` prints: a head for each target, and a line with the status of each that failed."""

import re

from suites.steps import Parts

HEAD = re.compile(r"^== (?P<test>test_\w+)(?P<how>.*)$", re.MULTILINE)
STATUS = re.compile(r"^(?P<target>(?:run|stream|secret)-test_\w+): exit status \d+", re.MULTILINE)
KINDS = {"": "run", ", by stream": "stream", ", with a secret": "secret"}


def parts(output: str) -> Parts:
    """By make's targets: run-test_cm, stream-test_cm, secret-test_cm."""
    found = Parts()
    heads = [*HEAD.finditer(output)]
    ends = [*(head.start() for head in heads[1:]), len(output)]
    for head, end in zip(heads, ends, strict=True):
        text = output[head.start() : end]
        target = f"{KINDS[head['how']]}-{head['test']}"
        status = STATUS.search(text)
        if status and status["target"] == target:
            found.failed[target] = text
        else:
            found.passed.add(target)
    return found
