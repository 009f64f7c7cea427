"""Tools around holdfast: clusters of real processes, chaos, simulation, benchmarks, reports, the `holdfast` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ft import on_demand

if TYPE_CHECKING:
    from holdfast.harness.cluster.cluster_ranks import RankDied, RankFailed, RunTimeout
    from holdfast.harness.cluster.job import Job
    from holdfast.harness.cluster.local_cluster import LocalCluster

_HOMES = {
    "Job": "holdfast.harness.cluster.job",
    "LocalCluster": "holdfast.harness.cluster.local_cluster",
    "RankDied": "holdfast.harness.cluster.cluster_ranks",
    "RankFailed": "holdfast.harness.cluster.cluster_ranks",
    "RunTimeout": "holdfast.harness.cluster.cluster_ranks",
}

__all__ = ["Job", "LocalCluster", "RankDied", "RankFailed", "RunTimeout"]

__getattr__ = on_demand(_HOMES)
