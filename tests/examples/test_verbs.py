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
