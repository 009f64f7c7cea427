"""The errors with which the processes of a job of `LocalCluster.start` end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.ft.processes.packed_errors import unpack_error
from holdfast.harness.cluster.job import Job
from support.waiting import becomes_true


def errors_of(job: Job, processes: Sequence[Any], seconds: float = 30.0) -> list[BaseException | None]:
    """Wait until these processes have ended; the error of each, None for one without an error."""

    def ended() -> bool:
        job._collect(0.05)
        return all(map(job.ended, processes))

    becomes_true(ended, seconds)
    ends = [job._ended.get(process.pid) for process in processes]
    return [None if end is None or end.error is None else unpack_error(end.error) for end in ends]
