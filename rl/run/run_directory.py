"""The directory of a run: its configuration, events, episodes, checkpoints, and the status that `holdfast top` reads.

    with RunDirectory(path).open() as directory:      # one driver at a time
        directory.append(event)

Lines are appended whole. A line that was cut off by a death is the last one, and is dropped by the next driver.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError
from holdfast.comms.system.files import write_all
from holdfast.comms.transport.liveness import read_proc_stat, this_host
from holdfast.rl.actors.service import ServiceStatus
from holdfast.rl.data.episode import Group
from holdfast.rl.run.run_events import Event
from holdfast.rl.telemetry import TrainerStatus

SLACK = 1.0
"""Seconds by which the wall clock may have been set between the start of a process and the status that names it."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at `time` (Unix seconds): its driver, the committed updates of all `steps`, trainers by name, services.

    `host` is that of all processes; "" for a run on several. `gone` are the processes that a reader has found ended.
    """

    time: float
    driver: int
    step: int
    steps: int
    trainers: Mapping[str, TrainerStatus]
    services: tuple[ServiceStatus, ...]
    ended: bool = False
    host: str = ""
    gone: tuple[int, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the run that the status names."""
        replicas = (replica for service in self.services for replica in service.replicas)
        return (
            self.driver,
            *(each.pid for each in self.trainers.values()),
            *(each.pid for each in replicas if each.pid),
        )

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
    except UNDECODABLE as error:
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


T = TypeVar("T", bound=msgspec.Struct)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
"""The errors of a disk that takes no more."""

_events = msgspec.json.Decoder(Event)
_groups = msgspec.json.Decoder(Group)


class RunInUse(HoldfastError):
    """Another driver works in the directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another driver works in {path}; end it, or choose another directory")


class RunDirectoryUnusable(HoldfastError):
    """The directory of a run cannot be made, or a file in it cannot be written."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"the directory of the run, {path}, cannot be written: {error.strerror or error}; free the disk or change "
            "the rights and start again, which goes on from what is committed there, or choose another directory"
        )


class RunDirectory:
    """The files of a run. Open it before writing; reading needs no lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.policy = path / "policy"
        self.status_file = path / "status.json"
        self.events_file = path / "events.jsonl"
        self.episodes_file = path / "episodes.jsonl"
        self.config_file = path / "config.toml"
        self.sessions = path / "sessions"

    @contextmanager
    def open(self) -> Iterator[RunDirectory]:
        """Hold the directory, which is made if it is not there.

        Raises `RunInUse` while another driver does, and as all that writes here `RunDirectoryUnusable`.
        """
        with self._writing():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunInUse(self.path) from None
            with self._writing():
                for file in (self.events_file, self.episodes_file):
                    _drop_cut_off_line(file)
            yield self
        except OSError as error:
            if error.errno in _FULL:
                raise RunDirectoryUnusable(self.path, error) from error
            raise
        finally:
            os.close(lock)

    def new_session_logs(self) -> Path:
        """A new folder for the event logs of the trainers' session: each driver has its own."""
        with self._writing():
            self.sessions.mkdir(mode=0o700, exist_ok=True)
            used = [int(each.name) for each in self.sessions.iterdir() if each.name.isdecimal()]
            folder = self.sessions / str(max(used, default=-1) + 1)
            folder.mkdir(mode=0o700)
        return folder

    def write_config(self, text: str) -> None:
        """Keep the configuration with which the run was begun."""
        self._replace(self.config_file, text.encode())

    def write_status(self, status: RunStatus) -> None:
        """Replace what `holdfast top` reads."""
        self._replace(self.status_file, msgspec.json.encode(status))

    def saved_steps(self) -> dict[int, Path]:
        """The whole checkpoints, by the number of updates before them."""
        found = {}
        for path in self.checkpoints.glob("step-*/.metadata"):
            if number := re.fullmatch(r"step-(\d+)", path.parent.name):
                found[int(number[1])] = path.parent
        return found

    # -- lines

    def append(self, *events: Event) -> None:
        """Append events, with one write."""
        self._append(self.events_file, b"\n".join(map(msgspec.json.encode, events)))

    def append_group(self, group: Group) -> None:
        """Append the episodes of a group that was trained on."""
        self._append(self.episodes_file, msgspec.json.encode(group))

    def events(self) -> Iterator[Event]:
        """All events. Raises `CorruptData` for a line that is none."""
        yield from _lines(self.events_file, _events)

    def groups(self) -> Iterator[Group]:
        """All groups that were trained on. Raises `CorruptData` for a line that is none."""
        yield from _lines(self.episodes_file, _groups)

    # -- writing

    def _append(self, file: Path, line: bytes) -> None:
        with self._writing():
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            before = os.fstat(fd).st_size
            try:
                write_all(fd, line + b"\n")
            except OSError:  # half a line would spoil the next one
                with suppress(OSError):
                    os.ftruncate(fd, before)
                raise
            finally:
                os.close(fd)

    def _replace(self, file: Path, data: bytes) -> None:
        """Write a file whole: a reader, and the next driver, see the old one or the new one."""
        draft = file.with_name(file.name + ".draft")
        with self._writing():
            draft.write_bytes(data)
            draft.replace(file)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryUnusable(self.path, error) from error


def _lines(file: Path, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except UNDECODABLE as error:
                raise CorruptData(f"{file}:{number}: {error}") from error


def _drop_cut_off_line(file: Path) -> None:
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)
