"""A TCP listener that is bound to an interface (SO_BINDTODEVICE) keeps out who comes by another. So does RDMA there.

The embedded device has no interface: it would let in each process of this host, by the server's name.
"""

import sys
from pathlib import Path

from tests.security.conftest import unfit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import two_hosts  # noqa: E402

INTERFACE = "wire"


def test_who_comes_by_another_interface_does_not_get_in(stage, guarded):
    try:
        with two_hosts.two_hosts() as (here, there):
            assert_it_does_not_get_in(stage, guarded, here, there)
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


def assert_it_does_not_get_in(stage, guarded, here, there):
    """The server's users are on the other host. The attacker is on the server's, and goes by `lo`."""
    kinds = () if guarded else ("careless",)
    server = stage.start("bound_server", INTERFACE, *kinds, prefix=tuple(here.prefix))
    port = server.hear()["port"]
    user = stage.start("two_ways", here.addresses[4], port, prefix=tuple(there.prefix))
    assert user.hear() == {"tcp": "the server", "rdma": "ConnectionRefusedError"}
    attacker = stage.start("two_ways", "127.0.0.1", port, prefix=tuple(here.prefix))
    heard = attacker.hear()
    assert heard == {
        "tcp": "ConnectionRefusedError",
        "rdma": "ConnectionRefusedError" if guarded else "the server",
    }
    server.finish()
