"""What the tests of commands share."""

import signal

import pytest


@pytest.fixture
def interruptible():
    """Children do not inherit that whoever started the tests ignores SIGINT, as a shell's background does."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
