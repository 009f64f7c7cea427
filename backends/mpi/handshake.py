"""Make an MPI communicator for some ranks, in their order, whatever state other processes of the job are in.

While no process of the job is known to have failed, MPI_Comm_create_group on MPI_COMM_WORLD does it in well under a
millisecond. After a failure that call refuses, and MPI_Comm_create_from_group makes one of the living, through PMIx.
MPI_Comm_shrink does not help: it needs every living process, and a spare takes no part in a rebuild.
"""

from __future__ import annotations

import binascii
import os
import time
import uuid

import msgspec
from mpi4py import MPI

from holdfast.backends.mpi.world import bounded
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed
from holdfast.comms.rendezvous import fetch_as
from holdfast.comms.system.waiting import POLL
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness


class _MpiProcess(msgspec.Struct, frozen=True):
    """What a rank publishes: its MPI job, its rank in it, whether it knows of a failure there."""

    job: str
    process: int
    failures: bool
    token: str


def create_group(context: Context, liveness: Liveness) -> tuple[MPI.Intracomm, str, tuple[int, ...]]:
    """Make the communicator; collective. Returns it, its name, and the process of each rank in MPI_COMM_WORLD.

    Raises `Mismatch`, `OpTimeout`, `PeerFailed`.
    """
    world = MPI.COMM_WORLD
    failed = world.Get_failed()
    card = _MpiProcess(os.environ.get("PMIX_NAMESPACE", ""), world.rank, failed.size > 0, uuid.uuid4().hex)
    failed.Free()
    context.store.set(f"mpi/{context.rank}", msgspec.json.encode(card).decode())
    cards = [card if rank == context.rank else _fetch_process(context, rank, liveness) for rank in range(context.size)]
    strangers = [rank for rank, other in enumerate(cards) if other.job != card.job]
    if strangers:
        raise Mismatch(f"ranks {strangers} were started by another mpirun; all ranks must be of one MPI job")
    processes = tuple(other.process for other in cards)
    if len(set(processes)) < len(processes):
        raise Mismatch(f"two ranks are the same process of MPI_COMM_WORLD: {processes}; each needs its own")
    token = cards[0].token
    everybody = world.Get_group()
    group = everybody.Incl(processes)

    def create() -> MPI.Intracomm:
        if any(other.failures for other in cards):
            return MPI.Intracomm.Create_from_group(group, token, errhandler=MPI.ERRORS_RETURN)
        comm = world.Create_group(group, binascii.crc32(token.encode()) & 0x3FFFFFFF)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    try:
        return bounded(create, context.deadline, liveness), token, processes
    except MPI.Exception as error:
        raise _explain(error, liveness) from error
    finally:
        group.Free()
        everybody.Free()


def _fetch_process(context: Context, rank: int, liveness: Liveness) -> _MpiProcess:
    began = time.monotonic()
    try:
        return fetch_as(context.store, f"mpi/{rank}", _MpiProcess, context.deadline, liveness)
    except TimeoutError as error:
        raise OpTimeout("connect", 0, time.monotonic() - began, (rank,)) from error


def _explain(error: MPI.Exception, liveness: Liveness) -> HoldfastError:
    if POLL.reaches(lambda: bool(liveness.dead()), time.monotonic() + 0.2):
        return PeerFailed(liveness.dead(), "its process ended while the ranks connected")
    return PeerFailed((), f"a process of the MPI job failed while the ranks connected: {error.Get_error_string()}")
