"""What to do where a machine cannot show something."""

import os
import subprocess
from typing import NoReturn

import pytest


def unfit(why: str) -> NoReturn:
    """This machine can't show it: a skip for a developer, a failure for CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must show this, and can't: {why}", pytrace=False)
    pytest.skip(why)


def may_unshare(*namespaces: str) -> bool:
    """Whether this process may make such namespaces (options of unshare(1)), which a container may forbid."""
    return subprocess.run(["unshare", *namespaces, "true"], capture_output=True).returncode == 0
