"""The collectives of the conformance kit over built-in backends, and guarantees of direct transports only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.comms import Communicator, Mismatch, Revoked
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.collectives import *  # noqa: F403
from holdfast.harness.conformance.reductions import *  # noqa: F403

SIZES = ["inproc-1", "inproc-3", "shm-1", "shm-2", "shm-3", "gloo-3", "ucx-3", "mpi-3"]
ALONE = [pytest.param(name, marks=pytest.mark.thorough) for name in ("gloo-1", "ucx-1", "mpi-1")]
"""A rank alone runs the same code over all transports that send messages."""


@pytest.fixture(scope="module", params=[*SIZES, *ALONE])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend, size = request.param.split("-")
    with LocalCluster(int(size), backend, timeout=60.0) as cluster:
        cluster.warm_up()
        yield cluster


def test_a_disagreement_without_checks_neither_hangs_nor_gives_wrong_results() -> None:
    """Direct transports compare ops in any case: else they would read each other's memory wrongly.

    Inputs of up to 40 bytes, ten floats, are on one line with the description of the op; larger ones are not.
    """

    def body(comm: Communicator, counts: tuple[int, int]) -> str:
        try:
            comm.all_reduce(torch.ones(counts[comm.rank]), timeout=5.0)
        except (Mismatch, Revoked) as error:
            return type(error).__name__
        return "no error"

    with LocalCluster(2, "shm", environ={"HOLDFAST_CHECK": "0"}) as cluster:
        for counts in ((50_000, 4), (11, 10), (10, 11), (4, 5), (1, 0)):
            assert "no error" not in cluster.run(body, counts), counts
