"""Announces a store to the processes of a job, in a memfd of the process that owns it.

A process looks at itself and its ancestors; in a Monarch job also at all processes that Monarch spawned there. A memfd
can be read by this user only, has no name in a file system, and is gone with its process. Ranks that share a
`torch.distributed` store, and no ancestor that owns the store, find the memfd through that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.system.file_io import read_at, write_all
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, read_proc_stat, this_process

_NAME = "holdfast-torchstore"
_MOST_BYTES = 1 << 16
_SPAWNED_BY_MONARCH = b"HYPERACTOR_MESH_BOOTSTRAP_MODE="


class Announcement(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A store: its name, the address and key of its server, and the process that owns it."""

    store_name: str
    address: str
    key: bytes
    owner: Peer

    @staticmethod
    def decode(data: bytes) -> Announcement:
        """The announcement in `data`. Raises `CorruptData` if it is none."""
        try:
            return msgspec.msgpack.decode(data, type=Announcement)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"not the announcement of a store: {error}") from error


class OpenAnnouncement:
    """An announcement that others can read until it is closed; `reference` names it. A context manager."""

    def __init__(self, store_name: str, address: str, key: bytes) -> None:
        self.announcement = Announcement(store_name, address, key, this_process())
        self._descriptor = OwnedDescriptor(os.memfd_create(_name_of(store_name), os.MFD_CLOEXEC))
        write_all(self._descriptor, msgspec.msgpack.encode(self.announcement))

    @property
    def reference(self) -> str:
        owner = self.announcement.owner
        return f"{owner.pid}:{owner.started}:{self._descriptor}"

    def __enter__(self) -> OpenAnnouncement:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor.ours:
            os.ftruncate(self._descriptor, 0)  # a forked child may have it open, too
        self._descriptor.close()


def find(store_name: str) -> Announcement | None:
    """The announcement of a store, from the nearest process that has one; None if there is none."""
    for pid in dict.fromkeys((os.getpid(), *_monarch_job(), *_ancestors(os.getpid()))):
        if (found := _announced_by(pid, store_name)) is not None:
            return found
    return None


def find_in_job(store_name: str) -> Announcement | None:
    """As `find`, but not in processes that started this job."""
    for pid in dict.fromkeys((os.getpid(), *_monarch_job())):
        if (found := _announced_by(pid, store_name)) is not None:
            return found
    return None


def resolve(store_name: str, reference: str) -> Announcement | None:
    """The announcement that `reference` names; None if it was taken back or its process has ended."""
    pid, _, rest = reference.partition(":")
    descriptor = rest.rpartition(":")[2]
    if not (pid.isdecimal() and descriptor.isdecimal()):
        raise CorruptData(f"{reference!r} does not name the announcement of a store")
    return _read(Path(f"/proc/{pid}/fd/{descriptor}"), store_name)


def _name_of(store_name: str) -> str:
    return f"{_NAME}-{hashlib.sha256(store_name.encode()).hexdigest()[:32]}"


def _announced_by(pid: int, store_name: str) -> Announcement | None:
    try:
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended, or belongs to another user
        return None
    for path in paths:
        with contextlib.suppress(OSError):
            if (found := _read(path, store_name)) is not None:
                return found
    return None


def _read(path: Path, store_name: str) -> Announcement | None:
    try:
        if not str(path.readlink()).startswith(f"/memfd:{_name_of(store_name)} "):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = read_at(descriptor, _MOST_BYTES, 0)
    finally:
        os.close(descriptor)
    if not content:
        return None
    found = Announcement.decode(content)
    return None if found.store_name != store_name or is_gone(found.owner) else found


def _ancestors(pid: int) -> Iterator[int]:
    while (pid := _parent(pid)) > 1:
        yield pid


def _parent(pid: int) -> int:
    fields = read_proc_stat(pid)
    return int(fields[1]) if fields else 0


def _monarch_job() -> Iterator[int]:
    """The processes of the Monarch job that this process is in: its root, and what Monarch spawned there."""
    root = os.getpid()
    if not _spawned_by_monarch(root) and "monarch" not in sys.modules:
        return
    while _spawned_by_monarch(root) and (parent := _parent(root)) > 1:
        root = parent
    yield root
    yield from (pid for pid in _descendants(root) if _spawned_by_monarch(pid))


def _spawned_by_monarch(pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(_SPAWNED_BY_MONARCH) for each in environment)


def _descendants(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        for path in _children_files(waiting.pop()):
            with contextlib.suppress(OSError):
                for child in map(int, path.read_text().split()):
                    yield child
                    waiting.append(child)


def _children_files(pid: int) -> list[Path]:
    try:
        return [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
