"""Tools around holdfast: clusters of real processes, chaos, simulation, benchmarks, reports, the `holdfast` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ft import on_demand

if TYPE_CHECKING:
    from holdfast.harness.cluster.errors import RankDied, RankFailed, RunTimeout
    from holdfast.harness.cluster.job import Job
    from holdfast.harness.cluster.local_cluster import LocalCluster

_HOMES = {
    "Job": "holdfast.harness.cluster.job",
    "LocalCluster": "holdfast.harness.cluster.local_cluster",
    "RankDied": "holdfast.harness.cluster.errors",
    "RankFailed": "holdfast.harness.cluster.errors",
    "RunTimeout": "holdfast.harness.cluster.errors",
}

__all__ = ["Job", "LocalCluster", "RankDied", "RankFailed", "RunTimeout"]

__getattr__ = on_demand(_HOMES)
