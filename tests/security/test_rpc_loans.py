"""A client of rdmanet.rpc lends one buffer many times. It has the memory once, and the server would take it many times:
it takes as much as its limits say, and lets others have their turn while it does.
"""

LENGTH, TIMES, TAKEN = 8 << 20, 16, 3


def lend(stage, taken, *kind):
    """A server that takes it so often, how much memory it may provide in one turn, and who lends."""
    server = stage.start("rpc_holder", taken * LENGTH, *kind)
    said = server.hear()
    return server, said["most"], stage.start("rpc_lender", said["port"], LENGTH, TIMES)


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
