"""What strangers do is logged, by the program's own logging, and they cannot fill the log."""

ATTEMPTS = 3000
SECONDS = 2.5  # so that the second line tells what the first second left out


def test_a_stranger_is_logged_and_cannot_fill_the_log(stage, guarded) -> None:
    """At most a line a second, with the number of those that were left out. Without the guard: a line for each."""
    without = "" if guarded else "log-rate"
    server = stage.start("logging_server", without=without, RDMANET_SOFT_TRANSPORT="stream")
    port = server.hear()["port"]
    stranger = stage.start("noise", port, ATTEMPTS, SECONDS).hear()
    attempts = stranger["attempts"]
    assert attempts == stranger["hung_up"] >= ATTEMPTS
    server.tell(gone=True)
    assert server.hear()["caught_up"]
    # One more, whose line tells how many before it were left out.
    assert stage.start("noise", port, 1, 0).hear()["hung_up"] == 1
    server.tell(over=True)
    said = server.hear()
    assert said["kinds"] == [
        "closed a connection from 127.0.0.1 to a port of our queue pairs: it speaks another protocol"
    ]
    if guarded:
        assert 2 <= said["lines"] <= said["seconds"] + 2
        assert 0 < said["left_out"] <= attempts + 1 - said["lines"]
    else:
        assert said["lines"] > said["seconds"] + 2
        assert said["lines"] + said["left_out"] == attempts + 1  # what the loop was too slow for is counted
    assert server.finish() == ""  # nothing went another way


def test_without_a_loop_it_goes_to_standard_error(stage) -> None:
    """One line, whatever the stranger has written."""
    server = stage.start("silent_server", RDMANET_SOFT_TRANSPORT="stream")
    stranger = stage.start("noise", server.hear()["port"], 1, 0)
    assert stranger.hear()["hung_up"] == 1
    assert server.finish() == (
        "rdmanet soft0: closed a connection from 127.0.0.1 to a port of our queue pairs: "
        "it speaks another protocol\n"
    )
