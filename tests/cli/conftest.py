"""What the tests of commands share."""

import signal

import pytest


@pytest.fixture
def interruptible():
    """Let children be interrupted, even if the tests run in a shell's background, where SIGINT is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
