"""Clusters of Dask over RDMA: the answers are right, in threads and in processes, and when a worker dies."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dask.array
import dask.dataframe
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, Security, wait

from tests.support import certificates

pytestmark = pytest.mark.cluster

SECURITY = {
    "tls_ca_file": "authority",
    "tls_scheduler_cert": "server",
    "tls_worker_cert": "server",
    "tls_client_cert": "client",
}


@pytest.fixture(params=["threads", "processes", "processes with TLS"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    security = None
    if "TLS" in request.param:
        files = {name: str(certificates.CERTIFICATES / f"{file}.pem") for name, file in SECURITY.items()}
        security = Security(require_encryption=True, **files)
    with (
        LocalCluster(
            protocol="rdma",
            n_workers=2,
            threads_per_worker=2,
            processes=request.param != "threads",
            dashboard_address=None,
            worker_dashboard_address=None,
            security=security,
        ) as cluster,
        Client(cluster, security=security) as client,
    ):
        yield client


def test_answers(client: Client) -> None:
    workers = client.scheduler_info()["workers"]
    assert len(workers) == 2
    assert all(name.startswith("rdma://") for name in (client.scheduler.address, *workers))

    arrays = [np.random.default_rng(seed).random(MILLION) for seed in range(4)]
    for direct in (False, True):
        futures = client.scatter(arrays, direct=direct, hash=False)
        back = client.gather(futures, direct=direct)
        assert all(map(np.array_equal, arrays, back))

    x = dask.array.random.default_rng(1).random((2000, 2000), chunks=(500, 500)).persist()
    total = (x + x.T).sum().compute()
    assert np.isclose(total, 2 * x.compute().sum())

    left = pd.DataFrame({"key": np.arange(200_000) % 5_003, "a": np.arange(200_000)})
    right = pd.DataFrame({"key": np.arange(5_003), "b": np.arange(5_003) * 2})
    expected = left.merge(right, on="key").sort_values("a", ignore_index=True)
    merged = dask.dataframe.from_pandas(left, npartitions=6).merge(
        dask.dataframe.from_pandas(right, npartitions=3), on="key", shuffle_method="p2p"
    )
    came = merged.compute().sort_values("a", ignore_index=True)[expected.columns]
    pd.testing.assert_frame_equal(came, expected)

    shuffled = dask.dataframe.from_pandas(left, npartitions=6).shuffle("key", shuffle_method="p2p")
    parts = client.compute(shuffled.to_delayed(), sync=True)
    assert sum(len(part) for part in parts) == len(left)
    keys = [set(part["key"]) for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys)) == 5_003  # each key is in one partition


MILLION = 1_000_000


def test_what_a_dead_worker_had_is_computed_again(tmp_path: Path) -> None:
    """By the commands, as on a cluster of hosts."""
    file = tmp_path / "scheduler.json"
    plain = ("--no-dashboard", "--scheduler-file", str(file))
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            running("dask_scheduler", "--protocol", "rdma", "--host", "127.0.0.1", "--port", "0", *plain)
        )
        while not file.exists() or not file.read_text():
            assert scheduler.poll() is None
        assert json.loads(file.read_text())["address"].startswith("rdma://127.0.0.1:")
        worker = ("dask_worker", "--no-nanny", "--nthreads", "1", *plain)
        workers = {name: stack.enter_context(running(*worker, "--name", name)) for name in ("one", "two")}
        client = stack.enter_context(Client(scheduler_file=str(file)))
        client.wait_for_workers(2, timeout=60)
        x = dask.array.arange(4 * MILLION, chunks=MILLION // 4).persist()
        wait(x)
        workers["one"].kill()
        workers["one"].wait()
        assert x.sum().compute() == sum(range(4 * MILLION))
        assert {each["name"] for each in client.scheduler_info()["workers"].values()} == {"two"}


@contextmanager
def running(module: str, *arguments: str) -> Iterator[subprocess.Popen[Any]]:
    """One of distributed's commands, until the end of the block."""
    with subprocess.Popen([sys.executable, "-m", f"distributed.cli.{module}", *arguments]) as process:
        try:
            yield process
        finally:
            process.terminate()
