"""Examples on the verbs with several programs, on the device under test: embedded, or --device and --address."""

import pytest

no_introductions = pytest.mark.not_on_siw("connects queue pairs by rdma_cm only")


@pytest.mark.parametrize("way", [pytest.param([], marks=no_introductions), ["--cm"]], ids=["exchange", "cm"])
def test_async_pingpong(programs, address, way):
    """One server, two clients after each other."""
    options = ["-n", 200, "-s", 4100, *way]
    server = programs.ours("async_pingpong.py", *options, "-p", 0)
    port = programs.port(server)
    for _ in range(2):
        client = programs.ours("async_pingpong.py", *options, "-p", port, address if way else "127.0.0.1")
        (output,) = programs.succeed(client)
        assert "200 iters in" in output
    assert server.process.poll() is None, server.output()


class Store:
    """The key-value store, served; commands for it."""

    def __init__(self, programs, address):
        self.programs = programs
        self.options = ["-a", address, "-p", 0]
        self.options[-1] = programs.port(self("serve"))

    def __call__(self, *command):
        """A client, under way."""
        return self.programs.ours("kv_store.py", *self.options, *command)

    def does(self, *command):
        """What a client prints."""
        (output,) = self.programs.succeed(self(*command))
        return output.split()


@pytest.fixture
def store(programs, address):
    return Store(programs, address)


no_atomics = pytest.mark.not_on_iwarp("there are no atomic operations")


@no_atomics
@pytest.mark.long
def test_kv_store(store):
    assert store.does("put", "colour", "red") == ["1"]
    assert store.does("put", "colour", "x" * 32) == ["2"]
    assert store.does("get", "colour") == ["x" * 32]
    assert store.does("put", "plumless", "one") == store.does("put", "buckeroo", "other") == ["1"]
    assert store.does("get", "plumless") + store.does("get", "buckeroo") == ["one", "other"], "of one hash"
    assert store.does("add", "visits", 40) + store.does("add", "visits", 2) == ["40", "42"]
    for command, complaint in (
        (["get", "nothing"], "KeyError: 'nothing'"),
        (["put", "colour", "x" * 33], "ValueError"),
        (["put", "k" * 25, "x"], "ValueError"),
    ):
        failing = store(*command)
        assert failing.wait(100) == 1 and complaint in failing.output()
    assert store.does("put", "colour", "blue") == ["3"], "nobody has left it locked"


@no_atomics
@pytest.mark.long
def test_kv_store_of_many(store, programs):
    """Three count, two write the same value, two read it: nothing is counted twice, lost, or read in parts."""
    times = ["-n", 200]
    store.does("put", "colour", "a" * 32)
    counting = [store("add", "visits", 1, *times) for _ in range(3)]
    writing = [store("put", "colour", letter * 32, *times) for letter in "bc"]
    reading = [store("get", "colour", *times) for _ in range(2)]
    programs.succeed(*counting, *writing)
    for output in programs.succeed(*reading):
        assert len(output.split()) == 200
        assert {*output.split()} <= {letter * 32 for letter in "abc"}
    assert store.does("add", "visits", 0) == ["600"]
    assert store.does("put", "colour", "d") == ["402"]
