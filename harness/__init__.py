"""The proof: clusters of real processes, the demo, benchmarks, reports, and the `holdfast` command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.harness.cluster import LocalCluster
    from holdfast.harness.failures import RankDied, RankFailed, RunTimeout
    from holdfast.harness.job import Job

_HOMES = {
    "Job": "holdfast.harness.job",
    "LocalCluster": "holdfast.harness.cluster",
    "RankDied": "holdfast.harness.failures",
    "RankFailed": "holdfast.harness.failures",
    "RunTimeout": "holdfast.harness.failures",
}

__all__ = ["Job", "LocalCluster", "RankDied", "RankFailed", "RunTimeout"]


def __getattr__(name: str) -> Any:
    """Import on demand: the `holdfast` command must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
