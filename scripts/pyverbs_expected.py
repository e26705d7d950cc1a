"""The pyverbs tests that fail or skip on the embedded device, with the reasons; for pyverbs_suite.py."""

# Test to reason. Each one must fail.
FAILURES = {
    "tests.test_device.DMTest.test_multi_process_alloc_dm": (
        "forks and goes on with the parent's context. Objects from before a fork are refused in the child: their "
        "memory and threads are the parent's. A fresh open works"
    ),
}

# A part of the reason that a test gives for skipping, to the reason why that is correct.
SKIPS = {
    "non MLX5 device": "of the mlx5 provider",
    "This is not an MLX5 device": "of the mlx5 provider",
    "Converting timestamp to nanoseconds": "asks mlx5's clock, by a call of its provider",
    "non EFA device": "of the efa provider",
    "PCI device must be passed": "VFIO, of the mlx5 provider",
    "cuda-python": "needs a GPU",
    "/dev/dri/render": "needs a graphics card",
    "huge pages of size 2M": "the machine has none to give",
    "QP type 8 ": "raw packets: there is no wire here",
    "Raw Packet QP": "raw packets: there is no wire here",
    "Extended CQ is not supported": "only of tag matching, whose fields a CQ can't have (EOPNOTSUPP)",
    "Extended QP is not supported": "only of ATOMIC WRITE, which isn't there (EOPNOTSUPP)",
}
