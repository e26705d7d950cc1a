"""Who talks without end, or asks and falls silent, takes neither the connection manager's time nor its room."""

TIMES, MIB = 10, 16  # more than sockets' buffers take


def test_one_connection_talks_without_end(stage, guarded):
    """The engine reads a little of it at a time, and ends it as soon as it repeats itself."""
    server = stage.start("echo_server", "127.0.0.1", 0, without="" if guarded else "cm-flood")
    port = server.hear()["port"]
    told = stage.start("cm_flooder", port, TIMES, "ready", MIB).hear()
    assert told == ({"through": 0, "ended": TIMES} if guarded else {"through": TIMES, "ended": 0})
    crowd = stage.start("crowd", port, 3, 0)
    crowd.hear()
    crowd.tell(connect="in turn")
    assert crowd.hear()["accepted"] == 3
    errors = server.finish()
    assert ("out of turn" in errors) == guarded


def test_who_was_refused_talks_on(stage):
    """It was told so, and the connection is closed: however much comes behind."""
    secret = {"RDMANET_SOFT_SECRET": "5eed" * 16}
    server = stage.start("echo_server", "127.0.0.1", 0, **secret)
    port = server.hear()["port"]
    assert stage.start("cm_flooder", port, TIMES, "refused", MIB).hear() == {"through": 0, "ended": TIMES}
    crowd = stage.start("crowd", port, 3, 0, **secret)
    crowd.hear()
    crowd.tell(connect="in turn")
    assert crowd.hear()["accepted"] == 3
    server.finish()
