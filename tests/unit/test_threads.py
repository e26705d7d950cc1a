"""Tests of what the others rely on: the list of threads with which each begins and ends."""

import os
import threading

from tests.support import threads

ENDED = "0"
"""The number of no thread."""


def test_one_that_has_ended_stands_for_no_other(monkeypatch):
    """The kernel cuts its list at a thread that ends, and then counts as many as were listed."""
    listdir, cut = os.listdir, []

    def cut_once(path):
        tasks = listdir(path)
        if not cut:
            tasks[tasks.index(str(newer.native_id))] = ENDED
            cut.append(path)
        return tasks

    over = threading.Event()
    newer = threading.Thread(target=over.wait)
    newer.start()
    try:
        with open(f"/proc/self/task/{newer.native_id}/comm", "w") as comm:
            comm.write("newer")
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", cut_once)
            assert "newer" in list(threads.names())
        assert cut == ["/proc/self/task"]
    finally:
        over.set()
        newer.join()
