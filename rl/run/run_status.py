"""What is known of the processes of a run now, in a file that `holdfast top` reads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport.liveness import read_proc_stat, this_host
from holdfast.rl.actors.service import ServiceStatus

SLACK = 1.0
"""Seconds by which the wall clock may have been set between the start of a process and the status that names it."""


class TrainerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer: `rank` is None for a spare; `committed` are the updates that it knows to be committed."""

    name: str
    pid: int
    rank: int | None
    epoch: int | None
    committed: int
    newest_batch: int | None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at `time` (Unix seconds): its driver, the committed updates of all `steps`, trainers and services.

    `host` is that of all processes; "" for a run on several. `gone` are the processes that a reader has found ended.
    """

    time: float
    driver: int
    step: int
    steps: int
    trainers: tuple[TrainerRow, ...]
    services: tuple[ServiceStatus, ...]
    ended: bool = False
    host: str = ""
    gone: tuple[int, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the run that the status names."""
        replicas = (replica for service in self.services for replica in service.replicas)
        return (self.driver, *(row.pid for row in self.trainers), *(each.pid for each in replicas if each.pid))

    @property
    def age(self) -> float:
        """Seconds since the driver said this."""
        return max(0.0, time.time() - self.time)


def read_status(path: Path) -> RunStatus | None:
    """The status in a file, with a look at each of its processes; None if there is no file. Raises `CorruptData`."""
    try:
        status = msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CorruptData(f"{path} is no status of a run: {error}; delete it") from error
    if status.host != this_host():
        return status
    return msgspec.structs.replace(status, gone=tuple(pid for pid in status.pids if _is_gone(pid, status.time)))


def _is_gone(pid: int, seen: float) -> bool:
    """Whether the process that had this id at `seen` (Unix seconds) has ended; another may have its id now."""
    fields = read_proc_stat(pid)
    if not fields or fields[0] in (b"Z", b"X"):
        return True
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age > seen + SLACK
