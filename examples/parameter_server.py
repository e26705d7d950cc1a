"""Train in several processes: the workers push gradients to a server and pull weights from it.

usage: python examples/parameter_server.py [--tcp] [--workers N] [--steps N]

A gradient has 4 MB. It stays where its worker has computed it, in memory that is registered once, and the server reads
it by RDMA. The weights go the other way, into the worker's own array. Nobody waits for the other workers. In the end
the server's weights are the sum of all gradients, and the example says whether they are.
"""

import argparse
import asyncio
import sys
import time

import numpy
import numpy.typing as npt

from rdmanet import rpc

Floats = npt.NDArray[numpy.float32]
SIZE = 1 << 20


class Parameters(rpc.Service):
    def __init__(self) -> None:
        self.weights = numpy.zeros(SIZE, numpy.float32)
        self.pushes = 0

    async def push(self, gradient: Floats) -> None:
        self.weights += gradient
        self.pushes += 1

    async def pull(self) -> Floats:
        return self.weights.copy()  # of this moment: the worker reads it while others push


async def work(rank: int, steps: int, host: str, port: int, transport: str) -> None:
    gradient = numpy.empty(SIZE, numpy.float32)
    weights = numpy.zeros(SIZE, numpy.float32)
    async with (
        rpc.Buffer(gradient) as kept,
        rpc.connect(Parameters, host, port, transport=transport) as parameters,
    ):
        pulling = rpc.options(parameters, into=weights)
        for _ in range(steps):
            gradient[:] = rank  # where others would compute it from the weights
            await parameters.push(kept.array)
            await pulling.pull()


async def train(workers: int, steps: int, transport: str) -> bool:
    parameters = Parameters()
    async with await rpc.serve(parameters, "127.0.0.1", 0, transport=transport) as server:
        where = map(str, server.sockets[0].getsockname()[:2])
        command = [sys.executable, __file__, "--transport", transport, "--steps", str(steps), "--at", *where]
        ranks = range(1, workers + 1)
        started = time.perf_counter()
        running = [await asyncio.create_subprocess_exec(*command, "--rank", str(rank)) for rank in ranks]
        ended = await asyncio.gather(*(process.wait() for process in running))
        took = time.perf_counter() - started
    print(f"{workers} workers pushed {parameters.pushes} gradients of {SIZE * 4 >> 20} MiB in {took:.1f} s")
    right = not any(ended) and bool((parameters.weights == steps * sum(ranks)).all())
    print(f"the weights are {'' if right else 'not '}the sum of the gradients, {steps * sum(ranks)}")
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tcp", dest="transport", action="store_const", const="tcp", default="rdma")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--at", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.at:
            asyncio.run(work(args.rank, args.steps, args.at[0], int(args.at[1]), args.transport))
        elif not asyncio.run(train(args.workers, args.steps, args.transport)):
            sys.exit(1)
    except (KeyboardInterrupt, OSError, rpc.Error) as exc:
        sys.exit(str(exc) or 130)


if __name__ == "__main__":
    main()
