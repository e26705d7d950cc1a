"""A server that offers memory, and its clients: the stage of test_offers.py and test_opcodes.py."""

from typing import Any

import pytest

TRANSPORTS = pytest.mark.parametrize("way", ["mapped", "stream"])
# For what takes long, and is more of the owner's program than of the way.
MAPPED_FIRST = pytest.mark.parametrize("way", ["mapped", pytest.param("stream", marks=pytest.mark.long)])


class Play:
    """The owner, and what it said; the device of all of them, with or without guards."""

    def __init__(self, stage, way: str, without: str, *options: str) -> None:
        self.stage = stage
        self.device = {"without": without}
        if way == "stream":
            self.device["RDMANET_SOFT_TRANSPORT"] = "stream"
        self.owner = stage.start("offer_owner", *options, **self.device)
        self.port = self.expect("port")["port"]

    def start(self, script: str, *arguments: object):
        return self.stage.start(script, self.port, *arguments, **self.device)

    def expect(self, what: str) -> dict[str, Any]:
        while what not in (said := self.owner.hear()):
            pass
        return said

    def memory(self, client: int) -> bytes:
        self.owner.tell(client=client, do="tell")
        return bytes.fromhex(self.expect("memory")["memory"])
