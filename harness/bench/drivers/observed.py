"""The communicators that `holdfast bench overhead` compares: the same ranks, bare and with observers of each op."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.comms.system.paths import url_of
from holdfast.harness.bench.drivers.driver import TIMEOUT, LibraryDriver
from holdfast.harness.bench.drivers.holdfast import HoldfastDriver

if TYPE_CHECKING:
    from holdfast.comms import Communicator
    from holdfast.comms.journal import Recorder

VARIANTS = ("bare", "recorder", "recorder and metrics")


def another(comm: Communicator, folder: Path, name: str, recorder: Recorder | None) -> Communicator:
    """A communicator of the same ranks, with a recorder of its own."""
    import torch.distributed as dist

    from holdfast.comms.connect import KnownMembers, connect_members
    from holdfast.comms.execution.executor import OpSettings
    from holdfast.comms.transport.base import Peer
    from holdfast.comms.transport.liveness import this_process

    peers = [msgspec.convert(each, Peer) for each in comm.all_gather_object(msgspec.to_builtins(this_process()))]
    store = dist.PrefixStore(name, dist.FileStore(str(folder / f"overhead-{comm.epoch}-{name}"), comm.size))
    members = KnownMembers(rank=comm.rank, peers=peers, store=store, epoch=0, name=name)
    return connect_members(comm.backend, members, settings=OpSettings(TIMEOUT, recorder=recorder))


def observed_drivers(backend: str, folder: Path, rank: int, ranks: int) -> Mapping[str, LibraryDriver]:
    """The driver of each of the `VARIANTS`, in one process; ranks meet in `folder`."""
    from holdfast import comms
    from holdfast.ft.telemetry.flight import FlightRecorder
    from holdfast.ft.telemetry.metrics import OpTally

    def recorder(number: int) -> FlightRecorder:
        return FlightRecorder(folder / f"overhead-{rank}-{number}.flight", f"bench-{number}", "bench")

    meeting = url_of("file", folder / "meeting")
    with comms.connect(backend, rank=rank, size=ranks, rendezvous=meeting, timeout=TIMEOUT) as comm:
        recorders: tuple[Recorder | None, ...] = (None, recorder(1), OpTally(recorder(2)))
        return {
            name: HoldfastDriver(another(comm, folder, f"variant-{number}", each))
            for number, (name, each) in enumerate(zip(VARIANTS, recorders, strict=True))
        }
