"""The number of the embedded device's protocol, for tests that speak it themselves (soft/base/version.h)."""

import re
from pathlib import Path

import rdmanet

WIRE = int(
    re.search(
        r"define RN_WIRE_VERSION (\d+)", (Path(rdmanet.__file__).parent / "soft/base/version.h").read_text()
    )[1]
)
