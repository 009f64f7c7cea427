"""The environment that a process needs to join a job on this machine, and the files behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.system.keys import create_key
from holdfast.comms.system.paths import url_of
from holdfast.ft.events import Event
from holdfast.ft.node.register import Register
from holdfast.ft.telemetry.event_reader import read_events

_SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which libraries choose an interface, without which they may choose another one than the session."""


@dataclass(frozen=True, slots=True)
class LocalContract:
    """A job's processes on this machine. Its register, its key and its event logs lie in `directory`, or elsewhere.

    `host` is the address where other hosts reach these processes; `interface` is the interface that has it.
    """

    name: str
    directory: Path
    backend: str
    size: int
    register_elsewhere: str | None = None
    min_size: int | None = None
    shards: int | None = None
    key_elsewhere: Path | None = None
    host: str | None = None
    interface: str | None = None

    @staticmethod
    def create(
        name: str,
        directory: Path,
        backend: str,
        size: int,
        register: str | None = None,
        *,
        min_size: int | None = None,
        shards: int | None = None,
        logs: Path | None = None,
        key_file: Path | None = None,
        host: str | None = None,
        interface: str | None = None,
    ) -> LocalContract:
        """Make the key and the folder of the event logs in the existing, empty, owner-only `directory`.

        `register` is the URL of the job's register (None: a file in `directory`); `logs` an existing folder for event
        logs and flight recordings that must outlive `directory`; `key_file` a key that is there already.
        """
        contract = LocalContract(
            name, directory.absolute(), backend, size, register, min_size, shards, key_file, host, interface
        )
        if key_file is None:
            create_key(contract.key_file)
        if logs is None:
            contract.events_directory.mkdir(mode=0o700)
        else:
            contract.events_directory.symlink_to(logs.absolute(), target_is_directory=True)
        return contract

    @property
    def key_file(self) -> Path:
        return self.directory / "key" if self.key_elsewhere is None else self.key_elsewhere.absolute()

    @property
    def register_url(self) -> str:
        return self.register_elsewhere or url_of("sqlite", self.directory / "register.sqlite")

    @property
    def events_directory(self) -> Path:
        return self.directory / "events"

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

    def register(self) -> Register:
        """Open the job's register; close it after use."""
        return Register.open(self.register_url)

    def events(self) -> list[Event]:
        """The events that all processes have logged so far, by time."""
        return read_events(self.events_directory)
