"""`rdmanet doctor HOST:PORT` sends no byte to a TCP program of another host, whose names it does not see.

The embedded device connects by a request to the port that the program has. So doctor first asks by TCP whether it is
`rdmanet doctor --serve` that listens there.
"""

import sys
from pathlib import Path

from tests.security.conftest import unfit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import two_hosts  # noqa: E402

REQUEST = 88  # bytes


def test_a_tcp_program_of_another_host_gets_no_byte(stage, guarded):
    try:
        with two_hosts.two_hosts() as (here, there):
            assert_it_gets_no_byte(stage, guarded, here, there)
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


def assert_it_gets_no_byte(stage, guarded, here, there):
    address = there.addresses[4]
    program = stage.start("tcp_program", address, prefix=tuple(there.prefix))
    port = program.hear()["port"]
    doctor = stage.start(
        "doctor_asks",
        address,
        port,
        *(() if guarded else ("careless",)),
        prefix=tuple(here.prefix),
        RDMANET_SOFT_CM_TIMEOUT="2000",
    )
    heard = doctor.hear()
    found = heard["ping"]
    doctor.finish()
    program.tell(came=0 if guarded else REQUEST)
    came = program.hear()
    if guarded:
        assert "was not tried" in found
        assert "take TCP" in heard["fabric"]
        assert came == {"came": 0, "connections": 2}
    else:
        assert came["came"] >= REQUEST, found
