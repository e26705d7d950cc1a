"""A plugin of pytest for suites of others: every loop is switched, and the end says how many connections were RDMA's.

RDMANET_TEST_PLAIN=1 leaves the loops as they are, to compare.
"""

import os

from rdmanet.everywhere import switch_every_loop
from tests.loop.suite import counted

made = counted()


def pytest_configure():
    if not os.environ.get("RDMANET_TEST_PLAIN"):
        switch_every_loop()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"connections by RDMA: {len(made)}")
