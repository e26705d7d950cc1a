# ruff: noqa: F821
"""Registers memory and makes windows, and tells their keys in the order in which it got them."""

from rdmanet.verbs import MW, PD, MWType, open_device

count = int(argv[0])
pd = PD(open_device("soft0"))
memory = bytearray(4096)
regions, windows = [], []
for _ in range(count):
    regions.append(pd.reg_mr(memory))
    windows.append(MW(pd, MWType.TYPE_2))
say(regions=[mr.rkey for mr in regions], windows=[mw.rkey for mw in windows])

# The same index again and again: what was withdrawn last must not come back, with any variant.
repeated = 0
for each in windows:
    each.close()
latest: dict[int, int] = {}
for _ in range(200_000):
    mw = MW(pd, MWType.TYPE_2)
    index, tag = mw.rkey >> 16, mw.rkey >> 8 & 0xFF
    repeated += latest.get(index) == tag
    latest[index] = tag
    mw.close()
say(indexes=len(latest), repeated=repeated)
