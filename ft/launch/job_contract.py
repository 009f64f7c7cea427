"""The environment that a process needs to join a job or a group of torch, and the files behind it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from holdfast.comms.system.files import url_of
from holdfast.comms.system.keys import create_key
from holdfast.ft.event_lines import read_events
from holdfast.ft.events import Event
from holdfast.ft.node.register import Register

_SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which libraries choose an interface, without which they may choose another one than the session."""


@dataclass(frozen=True, slots=True)
class LocalContract:
    """A job's processes on this machine. Its register, its key and its event logs lie in `directory`, or elsewhere.

    `register` is the URL of the job's register, `key` a file that is there already; None: files in `directory`. `host`
    is the address where other hosts reach these processes; `interface` is the interface that has it.
    """

    name: str
    directory: Path
    backend: str
    size: int
    register: str | None = None
    min_size: int | None = None
    shards: int | None = None
    key: Path | None = None
    host: str | None = None
    interface: str | None = None

    def made(self, logs: Path | None = None) -> LocalContract:
        """Make the key, unless `key` names one, and the folder of the event logs in the existing `directory`.

        That is empty and owner-only. `logs` is an existing folder for event logs and flight recordings that must
        outlive it. Returns this contract.
        """
        if self.key is None:
            create_key(self.key_file)
        if logs is None:
            self.events_directory.mkdir(mode=0o700)
        else:
            self.events_directory.symlink_to(logs.absolute(), target_is_directory=True)
        return self

    @property
    def key_file(self) -> Path:
        return (self.directory / "key" if self.key is None else self.key).absolute()

    @property
    def register_url(self) -> str:
        return self.register or url_of("sqlite", self.directory.absolute() / "register.sqlite")

    @property
    def events_directory(self) -> Path:
        return self.directory.absolute() / "events"

    def environ(self) -> dict[str, str]:
        """The variables to add to the environment of each process of the job."""
        given: dict[str, object] = {
            "HOLDFAST_MIN_SIZE": self.min_size,
            "HOLDFAST_SHARDS": self.shards,
            **({} if self.host is None else {"HOLDFAST_INTERFACE": self.host, "HOLDFAST_HOST": ""}),
            **{name: os.environ.get(name, self.interface) for name in _SOCKETS},
        }
        return {
            "HOLDFAST_JOB": self.name,
            "HOLDFAST_REGISTER": self.register_url,
            "HOLDFAST_KEY_FILE": str(self.key_file),
            "HOLDFAST_BACKEND": self.backend,
            "HOLDFAST_SIZE": str(self.size),
            "HOLDFAST_LOG_DIR": str(self.events_directory.resolve()),
            **{variable: str(value) for variable, value in given.items() if value is not None},
        }

    def open_register(self) -> Register:
        """Open the job's register; close it after use."""
        return Register.open(self.register_url)

    def events(self) -> list[Event]:
        """The events that all processes have logged so far, by time."""
        return read_events(self.events_directory)


class ReservedPort:
    """A port of this host for rank 0 to listen at, for as long as this context lasts. Raises OSError.

    `number` 0 takes a free one.
    """

    def __init__(self, host: str, number: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 binds it beside this socket
            self._socket.bind((host, number))
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class TorchEnvironment:
    """Of `size` ranks this host has `count`, from `first` on; rank 0 listens at `host`, an address, and `port`."""

    size: int
    count: int
    first: int
    host: str
    port: int

    def of(self, number: int) -> dict[str, str]:
        """The variables of this host's process `number`; none for spares, which are in no torch group."""
        if number >= self.count:
            return {}
        return {
            "RANK": str(self.first + number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }
