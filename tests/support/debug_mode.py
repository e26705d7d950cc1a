"""Whether asyncio's own loop checks how it is used."""

import os


def wanted() -> bool:
    """True, except on kernels' devices and under a sanitizer: debug mode finds nothing new there, and is slow."""
    return "RDMANET_DEVICE" not in os.environ and "ASAN_OPTIONS" not in os.environ
