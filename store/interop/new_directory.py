"""Makes a directory that appears whole or not at all, whatever dies on the way."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone, this_process
from holdfast.store.errors import CopyFailed, NoRoomOnDisk

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_count = itertools.count()


@contextmanager
def new_directory(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Yield a hidden directory beside `path`; move it there once all that was written into it is on the disk.

    After an error nothing is left. What processes that died in the middle have left for `path` is removed first; with
    `alone` the caller knows that no living process writes this directory, and all of it is removed.

    Raises `CopyFailed` if `path` exists or cannot be made, `NoRoomOnDisk` if there is no room.
    """
    with disk_errors(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CopyFailed(path, "it exists already; name a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path, alone=alone)
        draft = path.with_name(f".{path.name}.{_owner(this_process())}-{next(_count)}.partial")
        try:
            draft.mkdir()
            yield draft
            for each in (*sorted(draft.rglob("*")), draft):
                sync(each)
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync(path.parent)


def remove_leftovers(path: Path, *, alone: bool) -> None:
    """Remove the unfinished directories that dead processes of this host, or `alone` any, have left for `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.([0-9a-f]+)-([0-9]+)-([0-9]+)-[0-9]+\.partial")
    mine = this_process()
    for each in path.parent.iterdir():
        if not (found := pattern.fullmatch(each.name)):
            continue
        host, pid, started = found[1], int(found[2]), int(found[3])
        if alone or (host == _host(mine) and is_gone(Peer(mine.host, pid, started))):
            shutil.rmtree(each, ignore_errors=True)


def need_room(path: Path, nbytes: int) -> None:
    """Raise `NoRoomOnDisk` unless the disk of the new directory `path` has room for `nbytes`, before any is written."""
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise NoRoomOnDisk(
            path, f"the version takes {nbytes} bytes, the disk has {free} left; free some, or name another"
        )


def sync(path: Path) -> None:
    """Return once a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `NoRoomOnDisk` and `CopyFailed` in place of errors of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoRoomOnDisk(path, str(error)) from error
        raise CopyFailed(path, str(error)) from error


def _owner(process: Peer) -> str:
    return f"{_host(process)}-{process.pid}-{process.started}"


def _host(process: Peer) -> str:
    return xxhash.xxh3_64_hexdigest(process.host.encode())
