"""Ranks on this machine: call a function on all of them, or run a job under `ft.Session` and break it.

with LocalCluster(4, "shm") as cluster:
    cluster.run(lambda comm: comm.all_reduce(torch.ones(8)))      # on every rank; the results by rank
    job = cluster.start(train)                                    # train(session) in size + spares processes
    job.kill(2)                                                   # SIGKILL
    job.results(timeout=60.0)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import BackendUnavailable, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.quantities import integer, integer_in, seconds
from holdfast.comms.system import forks
from holdfast.ft.console.units import counted
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.harness.cluster.cluster_ranks import ClusterRanks, ClusterSettings, RankResult, values
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.rank_processes import RankProcesses
from holdfast.harness.cluster.rank_threads import RankThreads
from holdfast.harness.cluster.rank_worker import Prepare

if TYPE_CHECKING:
    from holdfast.ft import Session
    from holdfast.harness.links.client import Links

P = ParamSpec("P")
T = TypeVar("T")


class LocalCluster:
    """`size` ranks on this machine over one backend: processes, or threads for a one-process backend (`inproc`).

    - `backend`: a name; unknown or unavailable ones raise `BackendUnavailable` at once.
    - `spares`: further processes that wait under `start` for a rank to die; `run` does not use them.
    - `timeout`: seconds for a whole `run`, and at most that for each op in it.
    - `grace`: seconds that the other ranks get to return after one has failed, before they are ended.
    - `threads`: torch threads of each process; by default the cores are divided among the ranks.
    - `environ`: added to the environment of the processes.
    - `session`: keyword arguments of the `ft.Session` of each process under `start` (`min_size`, `timeouts` ...).
    - `prepare`: called in each process under `start` before its session, when it has no other thread yet; it may return
      keyword arguments of this process's `ft.Session` alone. Or several such calls.
    - `links`: the links between the processes of jobs lead through a proxy, so that `Job.partition` can cut them.
    - `echo`: print the output of ranks, line by line with their names in front. `logs` has it either way.

    The processes are forked from one that has torch imported (see `holdfast.ft.processes.zygote`). They have this
    process's environment, directory and `sys.path`; they end with it, however it ends. A context manager; used from one
    thread.
    """

    def __init__(  # noqa: PLR0913  (public)
        self,
        size: int,
        backend: str = "shm",
        spares: int = 0,
        *,
        timeout: float = 60.0,
        grace: float = 5.0,
        device: str | None = None,
        threads: int | None = None,
        environ: Mapping[str, str] | None = None,
        echo: bool = True,
        session: Mapping[str, Any] | None = None,
        prepare: Prepare | Sequence[Prepare] | None = None,
        links: bool = False,
    ) -> None:
        size, spares = integer(size, "size"), integer(spares, "spares")
        if size < 1:
            raise ValueError(f"size={size}: a cluster has at least one rank")
        if spares < 0:
            raise ValueError(f"spares={spares} is negative")
        timeout, grace = seconds(timeout), seconds(grace, "grace")
        if not timeout or not grace:
            raise ValueError(f"timeout={timeout} and grace={grace} must be positive seconds")
        threads = None if threads is None else integer_in(threads, "threads", 1)
        forks.refuse_in_children(self, "the cluster")
        found = registry().backend(backend)
        if (missing := found.missing) is not None:
            raise BackendUnavailable(backend, missing.reason, missing.install_hint)
        self.size, self.backend, self.spares = size, backend, spares
        self._one_process = found.info.capabilities.one_process
        cores = len(os.sched_getaffinity(0))
        self._settings = ClusterSettings(
            size=size,
            backend=backend,
            device=None if device is None else str(device),
            timeout=timeout,
            grace=grace,
            threads=threads or max(1, cores // size),
            environ={"HOLDFAST_CHECK": os.environ.get("HOLDFAST_CHECK", "1"), **(environ or {})},
            echo=echo,
            launcher=found.info.capabilities.launcher,
        )
        self._session_options = dict(session or {})
        self._prepare, self._with_links = (prepare,) if callable(prepare) else tuple(prepare or ()), links
        self._links: Links | None = None
        self._directory: HeldDirectory | None = None
        self._ranks: ClusterRanks | None = None
        self._jobs: list[Job] = []

    def __repr__(self) -> str:
        return f"<LocalCluster of {self.size} over {self.backend}, {counted(self.spares, 'spare')}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def logs(self) -> Path:
        """The folder with the output of the processes; removed by `close`."""
        if self._directory is None:
            self._directory = HeldDirectory("holdfast-cluster-")
        return self._directory.path

    def run(self, fn: Callable[Concatenate[Communicator, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `fn(comm, *args, **kwargs)` on every rank; the results by rank.

        Each run has a fresh communicator. The processes live on from run to run (with what a function left in them);
        one that has died is replaced at the next run. Functions, arguments and results travel by cloudpickle, so
        lambdas and functions of scripts, notebooks and test modules will do.

        The first failure is raised, causes before consequences, and then the others are aborted: an exception of
        `fn` as a `RankFailed` that is also of its own type, with the remote traceback; the death of a process as
        `RankDied` (also a `PeerFailed`); no return within the cluster's timeout as `RunTimeout`, with the place
        where the ranks were.
        """
        result: list[T] = values(self._the_ranks().call(fn, args, kwargs, abort=True))
        return result

    def outcomes(
        self, fn: Callable[Concatenate[Communicator, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> list[RankResult]:
        """As `run`, but let every rank come to its own end, and return all outcomes instead of raising.

        For functions that break things: it shows how each survivor handles the death of another.
        """
        return self._the_ranks().call(fn, args, kwargs, abort=False)

    def start(self, fn: Callable[Concatenate[Session, P], Any], *args: P.args, **kwargs: P.kwargs) -> Job:
        """Call `fn(session, *args, **kwargs)` under an `ft.Session` in size + spares processes of their own.

        Returns at once, with the `Job` to watch and break it. Several jobs may run side by side.
        """
        if self._one_process:
            killable = "its ranks must be killable: use 'shm', 'gloo', 'ucx' or 'mpi'"
            raise Unsupported(f"a job of threads over {self.backend!r}", killable)
        self._jobs = [job for job in self._jobs if not job.closed]
        directory, links = Path(tempfile.mkdtemp(prefix="job-", dir=self.logs)), self._the_links()
        job = Job(
            self._settings,
            self.size + self.spares,
            directory,
            self._session_options,
            fn,
            args,
            kwargs,
            prepare=self._prepare if links is None else (*self._prepare, links.prepare()),
            links=links,
        )
        self._jobs.append(job)
        return job

    def warm_up(self) -> None:
        """Start the processes of `run` now instead of at the first run."""
        self._the_ranks().start()

    def close(self) -> None:
        """End all processes and jobs, and remove their files. Idempotent; a later use starts anew."""
        for job in self._jobs:
            job.close()
        self._jobs.clear()
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _the_links(self) -> Links | None:
        """The proxy between the processes, if `links` asks for one."""
        if self._with_links and self._links is None:
            from holdfast.harness.links.client import Links

            self._links = Links()
        return self._links

    def _the_ranks(self) -> ClusterRanks:
        if self._ranks is None:
            if self._one_process:
                self._ranks = RankThreads(self._settings)
            else:
                self._ranks = RankProcesses(self._settings, self.logs)
        return self._ranks
