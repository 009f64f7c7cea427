"""Locates a job's files, by the job's name or by their folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.paths import url_of
from holdfast.ft.membership.view import View
from holdfast.ft.node.register import Register
from holdfast.ft.telemetry.flight import find

REGISTER = "register.sqlite"
_PLACES = ("holdfast-*", "job-*")
"""Name patterns of running jobs' folders: in the folder for temporary files, and inside those (`LocalCluster`'s)."""


class NoSuchJob(HoldfastError):
    """There are no files of this job."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The folder with a job's event logs and flight recordings, and its register ("" if there is none)."""

    logs: Path
    register: str

    def view(self) -> View | None:
        """The newest view in the register; None if there is none or it is unreadable."""
        if not self.register:
            return None
        try:
            with Register.open(self.register) as register:
                return register.read()
        except (HoldfastError, ValueError):
            return None


def locate(job: str, register: str = "") -> JobFiles:
    """The files of the job in a folder, or of the newest job of that name on this machine. Raises `NoSuchJob`."""
    path = Path(job)
    if path.is_dir():
        return _in_folder(path.absolute(), register)
    names = []
    for folder in _candidates():
        try:
            files = _in_folder(folder, register)
        except (OSError, NoSuchJob):  # the job has ended meanwhile
            continue
        view = files.view()
        name = folder.name if view is None else view.job.name
        if job in (name, folder.name):
            return files
        names.append(name)
    raise NoSuchJob(
        f"there is no folder {job!r}, and no job of that name runs here (there are: {', '.join(names) or 'none'}); "
        "the files of a job that has ended are where `holdfast run --logs` put them"
    )


def _candidates() -> list[Path]:
    """The folders of this user's jobs on this machine, newest first."""
    own, inner = _PLACES
    found: list[tuple[float, Path]] = []
    for outer in Path(tempfile.gettempdir()).glob(own):
        with contextlib.suppress(OSError):  # jobs end, and their folders go, while we look
            jobs = [folder for folder in (outer, *outer.glob(inner)) if (folder / REGISTER).is_file()]
            looked = [(folder, folder.stat()) for folder in jobs]
            found += [(stat.st_mtime, folder) for folder, stat in looked if stat.st_uid == os.geteuid()]
    return [folder for _, folder in sorted(found, reverse=True)]


def _in_folder(folder: Path, register: str) -> JobFiles:
    logs = folder / "events" if (folder / "events").is_dir() else folder
    if not find(logs) and not list(logs.glob("*.jsonl")) and not (folder / REGISTER).is_file():
        raise NoSuchJob(f"{folder} holds neither flight recordings nor event logs (*.flight, *.jsonl)")
    if not register and (folder / REGISTER).is_file():
        register = url_of("sqlite", (folder / REGISTER).absolute())
    return JobFiles(logs, register)
