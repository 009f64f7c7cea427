"""The kinds of workloads that a scenario can run, and their settings. Their code is in `workloads/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import config_of, placed

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Family = Literal["session", "store", "rl"]

FLIP_BIT, STOP = "flip-bit", "stop"
"""Orders to processes of the store workload: a holder spoils the newest version in its memory; the run is over."""


class _Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A workload. `family` selects the set of processes that runs it.

    A run of `sample_steps` steps is long enough to measure the speed.
    """

    family: ClassVar[Family] = "session"
    sample_steps: ClassVar[int] = 400

    def placed(self, folder: Path) -> Self:
        """This workload with paths relative to `folder`, that of its scenario. Raises ValueError for a missing file."""
        return self

    def with_steps(self, steps: int) -> Self:
        """This workload with another number of steps. Raises ValueError if its steps cannot be chosen."""
        return msgspec.structs.replace(self, steps=steps)


class AllReduce(_Kind, frozen=True, kw_only=True, tag="all_reduce"):
    """Every step sums vectors of `elements` floats, one a shard, into a state that all ranks hold.

    The sum has the same bits for every assignment of shards to ranks. Each step has `pause` seconds of other work.
    """

    steps: Count = 300
    elements: Count = 4096
    pause: Seconds = 0.002
    seed: int = 0


class Ddp(_Kind, frozen=True, kw_only=True, tag="ddp"):
    """torch's DistributedDataParallel trains a small network, one shard a rank; each epoch constructs it anew."""

    steps: Count = 200
    hidden: Count = 64
    pause: Seconds = 0.002
    seed: int = 0


class Python(_Kind, frozen=True, kw_only=True, tag="python"):
    """Your own training, called as `function(session, **arguments)` on every rank.

    `target` is `path/to/file.py:function` or `module:function`; a path counts from the folder of the scenario's file.
    `steps` is how many it takes: needed for faults at a random step. The results of the ranks are compared with each
    other and with those of a run without faults.
    """

    target: Annotated[str, Meta(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")]
    steps: Count | None = None
    arguments: dict[str, Any] = {}

    def placed(self, folder: Path) -> Self:
        where, _, name = self.target.rpartition(":")
        if not where.endswith(".py"):
            return self
        path = (folder / where).absolute()
        if not path.is_file():
            raise ValueError(f"target = {self.target!r}: there is no file {path}")
        return msgspec.structs.replace(self, target=f"{path}:{name}")

    def with_steps(self, steps: int) -> Self:
        raise ValueError("minutes cannot be given to a workload of kind 'python': the function takes its own steps")


class StoreWorkload(_Kind, frozen=True, kw_only=True, tag="store"):
    """A publisher puts `versions` versions of weights (`megabytes` each) into a store.

    `holders` keep them in `replicas` copies; `readers` repeatedly fetch the latest and check every byte.
    """

    family: ClassVar[Family] = "store"
    versions: Count = 40
    megabytes: Annotated[float, Meta(gt=0)] = 1.0
    holders: Count = 3
    readers: Count = 2
    replicas: Count = 2
    pause: Seconds = 0.05

    @property
    def steps(self) -> int:
        """The number of versions: each is a step of this workload."""
        return self.versions

    def with_steps(self, steps: int) -> Self:
        return msgspec.structs.replace(self, versions=steps)


class ReinforcementLearning(_Kind, frozen=True, kw_only=True, tag="rl"):
    """What `holdfast rl train` does, its driver in a process of its own that is resumed when it dies.

    `run` is the configuration, with the tables of docs/reference/rl-config.md; paths count from the folder of the
    scenario's file. `hosts`: so many network namespaces are its hosts, with a node of etcd on each (as root).
    """

    family: ClassVar[Family] = "rl"
    sample_steps: ClassVar[int] = 200
    run: dict[str, Any] = {}
    hosts: Annotated[int, Meta(ge=1, le=8)] = 1

    @property
    def config(self) -> RunConfig:
        """The whole configuration, with its defaults. Raises `BadConfig`."""
        return self.config_in(Path())

    @property
    def steps(self) -> int:
        """The number of updates of the weights."""
        return self.config.steps

    def with_steps(self, steps: int) -> Self:
        updates = self.config.algorithm.updates
        return msgspec.structs.replace(self, run={**self.run, "steps": -(-steps // updates) * updates})

    def config_in(self, folder: Path) -> RunConfig:
        """The configuration with paths relative to `folder`, and with names for its hosts. Raises `BadConfig`."""
        run = self.run
        if self.hosts > 1:
            names = [f"tcp://host-{number}:26600" for number in range(self.hosts)]
            run = {**run, "engine": {**run.get("engine", {}), "hosts": names, "register": "etcd://host-0:2379/run"}}
        return config_of(run, "workload.run", folder=folder)

    def placed(self, folder: Path) -> Self:
        config = placed(self.config_in(folder), folder)
        return msgspec.structs.replace(self, run=msgspec.to_builtins(config))


Workload = AllReduce | Ddp | Python | StoreWorkload | ReinforcementLearning
