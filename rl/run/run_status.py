"""What is known of the processes of a run now, in a file that `holdfast top` reads."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.rl.services.status import ServiceStatus


class TrainerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer: `rank` is None for a spare; `committed` are the updates that it knows to be committed."""

    name: str
    pid: int
    rank: int | None
    epoch: int | None
    committed: int
    newest_batch: int | None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at `time` (Unix seconds): its driver, the committed updates of all `steps`, trainers and services."""

    time: float
    driver: int
    step: int
    steps: int
    trainers: tuple[TrainerRow, ...]
    services: tuple[ServiceStatus, ...]
    ended: bool = False

    @property
    def age(self) -> float:
        """Seconds since the driver said this."""
        return max(0.0, time.time() - self.time)


def read_status(path: Path) -> RunStatus | None:
    """The status in a file; None if there is no file. Raises `CorruptData`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CorruptData(f"{path} is no status of a run: {error}; delete it") from error
