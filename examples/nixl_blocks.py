"""Reads a peer's memory by NIXL, block by block. If a READ fails it connects again, or starts a new peer if the peer is
gone. The embedded device makes things fail:

    rdmanet soft-run --faults "fail=read:3:RETRY_EXC_ERR" -- python examples/nixl_blocks.py
    rdmanet soft-run --faults "loss=read:3:2" -- python examples/nixl_blocks.py
    rdmanet soft-run --faults "link=down:8s:500ms" -- python examples/nixl_blocks.py --seconds 12
    rdmanet soft-run -- python examples/nixl_blocks.py --kill 5

It takes NIXL (nixl-cu12) and numpy. Set UCX_TLS=ib, or UCX copies a part of each block without the device.
"""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import nixlRemoteDisconnectError

BLOCK = 1 << 20
BLOCKS = 16
ATTEMPTS = 3


def content() -> np.ndarray:
    """The same in each peer."""
    return np.random.default_rng(7).integers(0, 256, BLOCK * BLOCKS, np.uint8)


def agent_with(name: str, memory: np.ndarray, **config: bool) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], **config))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def peer(pipe: Connection) -> None:
    """A process whose memory is read; it runs until the pipe is closed."""
    memory = content()
    agent = agent_with("peer", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.poll(None)


class Reader:
    """Reads blocks from a peer that it starts."""

    def __init__(self) -> None:
        self.memory = np.zeros(BLOCK, np.uint8)
        self.agent = agent_with("reader", self.memory, enable_prog_thread=False)
        self.process: BaseProcess | None = None

    def start_peer(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=peer, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.metadata, self.address = self.pipe.recv()
        self.connect()

    def connect(self) -> None:
        self.name = self.agent.add_remote_agent(self.metadata)

    def read(self, block: int) -> bytes:
        here = self.agent.get_xfer_descs([(self.memory.ctypes.data, BLOCK, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(self.address + block * BLOCK, BLOCK, 0)], "DRAM")
        transfer = self.agent.initialize_xfer("READ", here, there, self.name)
        try:
            state = self.agent.transfer(transfer)
            while state == "PROC":
                state = self.agent.check_xfer_state(transfer)
        finally:
            self.agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise OSError(f"the transfer ended in {state}")
        return self.memory.tobytes()

    def recover(self) -> None:
        """What the engine has of the peer is of no use any more."""
        self.agent.remove_remote_agent(self.name)
        if self.process is not None and self.process.is_alive():
            self.connect()
        else:
            self.start_peer()


def main() -> None:
    parser = argparse.ArgumentParser(description="read a peer's memory by NIXL, whatever fails")
    parser.add_argument("--seconds", type=float, default=0, help="read all blocks again until then")
    parser.add_argument("--kill", type=int, metavar="N", help="kill the peer after N blocks")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    expected = content().reshape(BLOCKS, BLOCK)
    reader = Reader()
    reader.start_peer()
    count = failures = attempts = 0
    slowest_s = 0.0
    while count < BLOCKS or time.monotonic() < end:
        if count == args.kill and reader.process is not None and not failures:
            reader.process.kill()
            reader.process.join()
        block, began = count % BLOCKS, time.monotonic()
        try:
            data = reader.read(block)
        except nixlRemoteDisconnectError as exc:
            print(f"block {count}: {exc}", flush=True)
            failures, attempts = failures + 1, attempts + 1
            if attempts == ATTEMPTS:
                raise
            reader.recover()
            continue
        if data != expected[block].tobytes():
            raise SystemExit(f"block {count} is wrong")
        count, attempts = count + 1, 0
        slowest_s = max(slowest_s, time.monotonic() - began)
    print(f"{count} blocks are right, the slowest took {slowest_s:.1f} s, {failures} READs failed")


if __name__ == "__main__":
    main()
