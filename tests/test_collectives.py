"""The collectives of the conformance kit over our own backends, and what only direct transports promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.comms import Communicator, Mismatch, Revoked
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.collectives import *  # noqa: F403


@pytest.fixture(
    scope="module",
    params=["inproc-1", "inproc-3", "shm-1", "shm-2", "shm-3", "gloo-1", "gloo-3", "ucx-1", "ucx-3", "mpi-1", "mpi-3"],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend, size = request.param.split("-")
    with LocalCluster(int(size), backend, timeout=60.0) as cluster:
        cluster.warm_up()
        yield cluster


def test_without_checks_a_disagreement_is_still_no_hang_and_no_wrong_result() -> None:
    """Direct transports compare what ranks are about to do anyway: they would read each other's memory wrongly."""

    def body(comm: Communicator) -> str:
        try:
            comm.all_reduce(torch.ones(4 if comm.rank else 50_000), timeout=5.0)
        except (Mismatch, Revoked) as error:
            return type(error).__name__
        return "no error"

    with LocalCluster(2, "shm", environ={"HOLDFAST_CHECK": "0"}) as cluster:
        assert "no error" not in cluster.run(body)
