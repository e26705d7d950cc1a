"""A client of rdmanet.rpc lends one buffer many times. It has the memory once, and the server would take it many times:
it takes as much as its limits say, and lets others have their turn while it does.

Or it lends memory, and stops when that is about to be read. The server then has a call, or only the memory for it, that
does not end while the connection lasts.
"""

import pytest

LENGTH, TIMES, TAKEN = 8 << 20, 16, 3
LONG_S = 3600


def lend(stage, taken, *kind):
    """A server that takes it so often, how much memory it may provide in one turn, and who lends."""
    server = stage.start("rpc_holder", taken * LENGTH, *kind)
    said = server.hear()
    return server, said["most"], stage.start("rpc_lender", said["port"], LENGTH, TIMES, LONG_S)


def test_memory_for_it_is_provided_between_turns(stage, guarded):
    """Others are held up for as long as the kernel takes to provide memory in one turn of the loop."""
    server, most, lender = lend(stage, TIMES, *(() if guarded else ("hasty",)))
    server.tell(held=TIMES)
    said = server.hear()
    assert said["held"] == TIMES
    if guarded:
        assert 0 < said["most"] <= most
    else:
        assert said["most"] >= LENGTH > most
    lender.finish()


def test_each_time_counts(stage, guarded):
    server, _, lender = lend(stage, TAKEN, *(() if guarded else ("careless",)))
    taken = TAKEN if guarded else TIMES
    server.tell(held=taken)
    assert server.hear()["held"] == taken
    lender.tell(refused=TIMES - taken)
    said = lender.hear()
    assert said["refused"] == TIMES - taken
    assert all("the limit lent_bytes is" in why for why in said["why"])
    lender.finish()


@pytest.mark.parametrize("seconds", [LONG_S, 1], ids=["the call lasts", "the call ends"])
def test_memory_that_does_not_come_ends_its_connection(stage, guarded, seconds):
    """Between two users, and two hosts, the client's process has to answer a READ."""
    server = stage.start("rpc_reader", 1.5, *(() if guarded else ("patient",)))
    port = server.hear()["port"]
    lender = stage.start("rpc_lender", port, LENGTH, 1, seconds, RDMANET_SOFT_TRANSPORT="stream")
    assert server.hear() == {"about": True}
    lender.stop()
    server.tell()
    assert server.hear() == {"connections": 0 if guarded else 1}
    server.finish()
