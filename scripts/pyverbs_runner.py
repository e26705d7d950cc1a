# mypy: ignore-errors
"""Run pyverbs' own tests, and write the result of each as a line of JSON.

pyverbs_suite.py starts it with the interpreter that pyverbs was built for, in a directory that contains rdma-core's
tests. These read a device's IP address from sysfs, which has kernel devices only; here it is read from the GID, which
is equivalent. Nothing else is changed.
"""

import importlib
import ipaddress
import json
import sys
import unittest


class Result(unittest.TextTestResult):
    """Outcomes by test id, as they come."""

    report = None

    def _note(self, test, outcome, why=""):
        print(json.dumps([test.id(), outcome, why]), file=Result.report, flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._note(test, "failed", str(err[1]).strip())

    def addError(self, test, err):
        super().addError(test, err)
        self._note(test, "failed", f"{err[0].__name__}: {err[1]}".strip())


def address_of(self, dev, port, idx):
    """The tests' _get_ip_mac, from the GID."""
    import pyverbs.device

    ip = None
    if idx is not None:
        with pyverbs.device.Context(name=dev) as context:
            gid = ipaddress.IPv6Address(context.query_gid(port, idx).gid)
            ip = str(gid.ipv4_mapped) if gid.ipv4_mapped else None
    self.args.append([dev, port, idx, ip, None])


def main():
    report, *arguments = sys.argv[1:]
    sys.path[:0] = [".", "tests"]
    sys.argv = ["tests/run_tests.py", *arguments]
    tests = importlib.import_module("tests")
    importlib.import_module("tests.base").RDMATestCase._get_ip_mac = address_of
    importlib.import_module("args_parser").parser.parse_args()
    with open(report, "w") as Result.report:
        unittest.main(module=tests, testRunner=unittest.TextTestRunner(resultclass=Result, verbosity=2))


if __name__ == "__main__":
    main()
