"""Sizes of the embedded device that errors name: Python has copies of what the device's headers say."""

import re
from pathlib import Path

import pytest

from rdmanet import _core

HEADERS = Path(__file__).parents[2] / "rdmanet/soft/shm"


@pytest.mark.parametrize(
    ("header", "name", "copy"),
    [
        ("arena.h", "RN_ARENA_SIZE", _core.EMBEDDED_ARENA_BYTES),
        ("limits.h", "RN_MAX_INLINE", _core.EMBEDDED_MAX_INLINE),
    ],
)
def test_a_copy_is_the_headers_number(header, name, copy):
    number, _, shift = re.search(rf"\b{name} = (\d+)( << (\d+))?,", (HEADERS / header).read_text()).groups()
    assert copy == int(number) << int(shift or 0)
