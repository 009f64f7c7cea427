"""The seam between `LocalCluster` and what ranks are: processes, or threads for the `inproc` backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.harness.cluster.results import RankResult


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What stays the same from call to call. Times in seconds."""

    size: int
    backend: str
    device: str | None
    timeout: float
    grace: float
    threads: int
    environ: Mapping[str, str]
    echo: bool
    launcher: str = ""
    """What must start the processes of this backend together; see `Capabilities.launcher`."""


class RankGroup(ABC):
    """Ranks that call functions together. Not safe to use from several threads."""

    @abstractmethod
    def start(self) -> None:
        """Bring up what is missing."""

    @abstractmethod
    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float,
        abort: bool,
    ) -> list[RankResult]:
        """Call `fn(comm, *args, **kwargs)` on every rank, with a fresh communicator; the outcomes in rank order.

        With `abort` the first failure ends what the others have pending, and the others if that does not help within
        the grace. Ranks that have not returned after `timeout` seconds are ended.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks. Idempotent."""
