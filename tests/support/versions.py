"""The number of the embedded device's protocol, for tests that speak it themselves (soft/base/version.h)."""

import re
from pathlib import Path

# In the tree: beside the package that scripts/asan runs are no sources.
HEADER = Path(__file__).parents[2] / "rdmanet/soft/base/version.h"

WIRE = int(re.search(r"define RN_WIRE_VERSION (\d+)", HEADER.read_text())[1])
