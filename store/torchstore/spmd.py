"""Stores of SPMD jobs, such as torchrun's: every rank calls `initialize`, and the first one owns the store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, OpTimeout, Unsupported
from holdfast.store.torchstore import api
from holdfast.store.torchstore.client import in_thread
from holdfast.store.torchstore.strategy import HostStrategy, LocalRankStrategy, TorchStoreStrategy

RENDEZVOUS_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class SPMDEnv:
    """Where this process stands in its job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def group_rank(self) -> int:
        return self.rank // self.local_world_size

    @classmethod
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> SPMDEnv:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

        The arguments are used where the last two are not set. Raises RuntimeError, naming what is missing.
        """
        defaults = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port}
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = {name: os.environ.get(name, defaults.get(name)) for name in names}
        if missing := [name for name, value in found.items() if value is None]:
            raise HoldfastError(f"the environment lacks {', '.join(missing)}: start this with torchrun, or pass env=")
        rank, local_rank, size, local_size = (int(str(found[name])) for name in names[:4])
        if local_size < 1 or size % local_size:
            raise ValueError(f"world_size ({size}) must be divisible by local_world_size ({local_size})")
        return cls(rank, local_rank, size, local_size, str(found["MASTER_ADDR"]), int(str(found["MASTER_PORT"])))


async def initialize(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = api.DEFAULT_TORCHSTORE_NAME,
    *,
    env: SPMDEnv | None = None,
    rendezvous_timeout: timedelta = RENDEZVOUS_TIMEOUT,
    transport: str = "ipc",
    monarch_port: int = 26600,
) -> None:
    """Start a store for a job of ranks on one host. Every rank calls it, and later `shutdown`; rank 0 owns the store.

    Ranks meet in the store of their default group, or without one in a TCPStore at the job's master address.
    `transport` and `monarch_port` are accepted and not used. Raises RuntimeError without a `HostStrategy` or a
    `LocalRankStrategy`, `Unsupported` for a job of several hosts.
    """
    if not isinstance(strategy, HostStrategy | LocalRankStrategy):
        raise HoldfastError("an SPMD store needs a strategy: HostStrategy() or LocalRankStrategy()")
    env = env or SPMDEnv.from_env()
    if env.num_hosts > 1:
        raise Unsupported(
            f"torchstore's interface over {env.num_hosts} hosts", "publish versions with WeightStore over ucx"
        )
    os.environ.setdefault("HOSTNAME", HostStrategy.get_volume_id())
    await in_thread(_initialize, strategy, store_name, env, rendezvous_timeout)


def _initialize(strategy: TorchStoreStrategy, store_name: str, env: SPMDEnv, timeout: timedelta) -> None:
    meeting = _Meeting(store_name, env, timeout)
    volumes = env.num_hosts if isinstance(strategy, HostStrategy) else env.world_size
    reference = meeting.share("began", lambda: api.start(store_name, strategy, volumes))
    api.join(store_name, reference, lambda: meeting.share("ended", lambda: api.end(store_name)))
    meeting.gather()


_meetings: Counter[str] = Counter()
"""How often this rank initialised a store of a name: all ranks do so equally often, and count alike."""


class _Meeting:
    """Tells the other ranks what rank 0 did, through a store of torch's."""

    def __init__(self, store_name: str, env: SPMDEnv, timeout: timedelta) -> None:
        _meetings[store_name] += 1
        self._name, self._turn, self._env, self._timeout = store_name, _meetings[store_name], env, timeout
        self._store: Any = api.group_store()
        if self._store is None:
            master = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            self._store = dist.TCPStore(env.master_addr, env.master_port, env.world_size, master, timeout)

    def share(self, what: str, action: Callable[[], str | None]) -> str:
        """What `action` returns on rank 0; raises its error on all ranks, `OpTimeout` if rank 0 tells nothing."""
        if self._env.rank == 0:
            try:
                told = f"={action() or ''}"
            except Exception as error:
                self._store.set(self._key(what), f"!{error}")
                raise
            self._store.set(self._key(what), told)
        else:
            self._wait(what, f"waiting until rank 0 {what} store {self._name!r}", (0,))
            told = bytes(self._store.get(self._key(what))).decode()
        if told.startswith("!"):
            raise HoldfastError(f"rank 0 could not do it: {told[1:]}")
        return told[1:]

    def gather(self) -> None:
        """Say that this rank has joined; rank 0 waits until all have. Raises `OpTimeout`."""
        if self._store.add(self._key("joined"), 1) == self._env.world_size:
            self._store.set(self._key("complete"), "=")
        if self._env.rank == 0:
            self._wait("complete", f"waiting until {self._env.world_size} ranks have joined store {self._name!r}", ())

    def _wait(self, what: str, doing: str, missing: tuple[int, ...]) -> None:
        try:
            self._store.wait([self._key(what)], self._timeout)
        except (RuntimeError, TimeoutError) as error:  # dist.DistStoreError
            raise OpTimeout(doing, 0, self._timeout.total_seconds(), missing) from error

    def _key(self, what: str) -> str:
        return api.key_of(self._name, f"{what}/{self._turn}")
