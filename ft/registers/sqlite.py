"""`sqlite:///absolute/path`: the embedded register of one host. One file, no server; survives SIGKILL of any process.

The file appears complete: its creator writes a template, already in WAL mode, under another name and links it into
place. So no process ever needs the exclusive lock that SQLite's own switch to WAL takes, and none sees half a file. A
compare-and-set is one UPDATE statement: about 10 us, readers never wait for it, and a writer that is killed inside it
leaves an unfinished WAL frame that the next reader ignores. `synchronous=OFF` is safe against the death of processes,
not of the host: with the host the job is gone as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import grp
import os
import pwd
import select
import sqlite3
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from holdfast.comms.errors import CorruptData
from holdfast.comms.system import files, forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.ft.registers import Cell, RegisterAway, RegisterBusy

_IN_MODIFY, _IN_ATTRIB, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x2, 0x4, 0x400, 0x800
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """Watches files from construction to `close`. Costs one inotify instance (Linux gives a user 128 or more).

    It reports that `written` was written to, and that a file of `kept` was removed, renamed or replaced. Keep it: the
    kernel may take tens of milliseconds to close one. Raises OSError if a file cannot be watched.
    """

    def __init__(self, written: Path, kept: Sequence[Path] = ()) -> None:
        self._wakeup = OwnedDescriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._lock, self._closed = threading.Lock(), False
        self._fd: OwnedDescriptor | None = None
        try:
            self._fd = OwnedDescriptor(_checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)))
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(written), _IN_MODIFY))
            for path in kept:
                gone = _IN_ATTRIB | _IN_DELETE_SELF | _IN_MOVE_SELF
                _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), gone))
        except OSError:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Sleep until something is to be reported, for at most `seconds`; return whether it is, since the last wait.

        A write may be reported a moment before it is complete.
        """
        if not self._poll.poll(1000 * seconds):
            return False
        assert self._fd is not None
        for fd in (self._fd, self._wakeup):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 4096)
        return True

    def wake(self) -> None:
        """End the wait of another thread, or the next one. Does nothing to a watch that is closed."""
        with self._lock:
            if not self._closed:
                self._wakeup.wake()

    def close(self) -> None:
        """Close the watch, once no thread waits. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for fd in (self._fd, self._wakeup):
                if fd is not None:
                    fd.close()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


APPLICATION_ID = 0x484F4C44  # "HOLD"
SCHEMA = 1
BUSY_SECONDS = 5.0
"""How long to retry while another process holds the write lock (normally microseconds) before `RegisterAway`."""

T = TypeVar("T")

_POLL = 0.002  # seconds between polls of a `wait` that has no watch
_QUIET_POLL = 0.5  # seconds after which `wait` polls although its watch has reported nothing
_SETTLING_FIRST, _SETTLING_LAST = 0.0001, 0.002
"""Pauses between polls for the commit of a write that has begun: each is twice the one before, and below the last."""
_REPLACE = "UPDATE cell SET version = version + 1, value = ? WHERE name = ? AND version = ?"
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_BROKEN = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_OWN_FOLDER = "a folder of your own, such as /run/user/UID, or one that `mktemp -d` makes"
_ELSEWHERE = f"for a job on one host name {_OWN_FOLDER}; for several hosts use etcd://host:2379/name"
_opening = threading.Lock()
_open_files: Counter[tuple[int, int]] = Counter()  # handles of this process by device and inode
_paths: dict[tuple[int, int], Path] = {}
_inherited: dict[tuple[int, int], list[int]] = {}
"""Files that a parent of this process had open when it forked, with the descriptors that hold this one's locks."""

_cells: forks.Living[SqliteCell] = forks.Living()
_held_for_fork: list[threading.Lock] = []
FORK_SECONDS = 10.0
"""How long a fork waits for the transactions of other threads: microseconds each, or seconds while the disk is busy."""

_child_began: tuple[int, int] | None = None
"""A pipe that the child of the present fork closes once it has this process's locks; only with open files."""
_unfinished = 0
"""Transactions of other threads that were under way at the last fork."""
_forked_amid = False
"""Whether this process, or a parent of it, began amid a transaction: SQLite's own locks stay taken here for ever."""

_SUFFIXES = ("", "-wal", "-shm")
"""The files of a register: the database, its log of writes, and the index of that log in memory."""

_IN_USE = (("", 0x40000002, 510), ("-shm", 128, 1))
"""SQLite's locks on a file in use: (suffix of the file, first byte, number of bytes).

SQLite takes them once in a process, and does not know that a child has none of its parent's. Without them the last
other process to close removes the WAL, and the child continues with one that no other process sees.
"""


NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0x18031977: "WekaFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
}
"""What `statfs` says of a file system (`f_type`), and its name. FUSE may be local or not, so it is not listed."""

_STATFS_BYTES = 512


def network_file_system(path: Path) -> str | None:
    """The name of the network file system that an existing `path` is on; None for a local one. Raises OSError."""
    return NETWORK_FILE_SYSTEMS.get(_type_of(path))


def _type_of(path: Path) -> int:
    """The kernel's number for the type of the file system: the first word of `struct statfs`."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), found) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF


def path_of(url: str) -> Path:
    """The file of a `sqlite:///absolute/path` URL."""
    return files.path_of(url, "sqlite", "sqlite:///absolute/path/job.sqlite")


def _template() -> bytes:
    """An empty register as the bytes of its file, marked as being in WAL mode."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    try:
        memory.execute(f"PRAGMA application_id={APPLICATION_ID}")
        memory.execute(f"PRAGMA user_version={SCHEMA}")
        memory.execute(
            "CREATE TABLE cell(name TEXT PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL)"
            " STRICT, WITHOUT ROWID"
        )
        image = bytearray(memory.serialize())
    finally:
        memory.close()
    image[18] = image[19] = 2  # file format versions for writing and reading: 2 is WAL
    return bytes(image)


def _create(path: Path) -> None:
    """Put an empty register at `path` unless a file is there already. Any number of processes may do so at once."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_template())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except FileNotFoundError:  # another creator was first and removed this draft
            if not path.exists():
                raise
    finally:
        draft.unlink(missing_ok=True)
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.new"):  # of creators that were killed, or are late
        other.unlink(missing_ok=True)


@contextlib.contextmanager
def _private_folder(path: Path, url: str) -> Iterator[int]:
    """A descriptor of the folder of a register. Refuses a folder in which another user could put files."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        writers = stat.S_IWOTH | (0 if _is_private_group(found.st_gid) else stat.S_IWGRP)
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & writers:
            raise RegisterAway(
                url,
                f"others can put files into its folder {path.parent} (owner {found.st_uid}, mode "
                f"{stat.S_IMODE(found.st_mode):04o}), and so forge it: name a file in {_OWN_FOLDER}",
            )
        yield folder
    finally:
        os.close(folder)


def _is_private_group(group: int) -> bool:
    """Whether a group is the one that has this user alone, as many systems make with the user."""
    try:
        name, named = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return named.gr_name == name and set(named.gr_mem) <= {name}


def _check_owner(folder: int, name: str, url: str) -> tuple[int, int] | None:
    """The identity of a file in `folder`; None if there is none. Refuses one that is not a file of this user alone.

    O_PATH: to close any other descriptor would release the locks of an open handle.
    """
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptData(f"register {url}: {name} is not a regular file; name another path")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RegisterAway(
            url,
            f"{name} has owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}: it must be yours alone (0600)",
        )
    return found.st_dev, found.st_ino


def _check_files(folder: int, name: str, url: str) -> tuple[int, int]:
    """The identity of the register's file, once it and SQLite's two files beside it are known to be this user's."""
    identity, *_ = [_check_owner(folder, name + suffix, url) for suffix in _SUFFIXES]
    if identity is None:
        raise RegisterAway(url, "the file was removed while it was opened")
    return identity


def _check_header(folder: int, name: str, identity: tuple[int, int], url: str) -> None:
    """Refuse a file that is not a register, without opening it as a database."""
    if _open_files[identity] or identity in _inherited:  # to open and close it would release an open handle's locks
        return
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        header = file.read(100)
    if not header.startswith(b"SQLite format 3\0") or len(header) < 100:
        raise CorruptData(f"register {url} is not an sqlite file; name another path, it was left as it is")
    schema, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application != APPLICATION_ID:
        raise CorruptData(f"{url} is an sqlite file but not a register; name another path, it was left as it is")
    if schema != SCHEMA:
        raise CorruptData(f"register {url} has schema {schema}, this version of holdfast knows {SCHEMA}")


def _finish_transactions() -> None:
    """Before a fork, wait until other threads have finished their transactions.

    A child cannot use SQLite if its copy of it is in the middle of a transaction.
    """
    global _child_began, _unfinished
    deadline = time.monotonic() + FORK_SECONDS

    def hold(lock: threading.Lock) -> bool:
        if held := lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            _held_for_fork.append(lock)
        return held

    held = [hold(_opening)]  # first: until it is held, another thread may open a cell, and write with it
    held += [hold(cell.lock) for cell in _cells]
    _unfinished = held.count(False)
    _child_began = os.pipe() if any(_open_files.values()) else None


def _go_on() -> None:
    """Release the locks in the parent, once the child has those that it needs.

    If the parent closed its last handle before, the files would go that the child's copy of SQLite has mapped.
    """
    global _child_began
    if _child_began is not None:
        (began, ours), _child_began = _child_began, None
        os.close(ours)
        ready = select.poll()
        ready.register(began)
        ready.poll(1000 * FORK_SECONDS)  # it is at its end: the child has begun, or ended
        os.close(began)
    while _held_for_fork:
        _held_for_fork.pop().release()


forks.run_around_fork(_finish_transactions, _go_on)


@forks.run_in_children
def _begin_child() -> None:
    """Reset the module in a forked child: it has no handle yet, and no thread that could release the locks."""
    global _child_began, _opening, _forked_amid
    _opening = threading.Lock()
    _forked_amid = _forked_amid or _unfinished > 0
    for file, count in _open_files.items():
        if count > 0:
            _inherited.setdefault(file, [])
    for file, held in _inherited.items():
        _hold(_paths[file], held)
    if _child_began is not None:
        for descriptor in _child_began:
            os.close(descriptor)
        _child_began = None
    _open_files.clear()
    _held_for_fork.clear()
    _cells.clear()


def _hold(path: Path, held: list[int]) -> None:
    """Take the locks of a file that this process's copy of SQLite believes to hold."""
    with contextlib.suppress(OSError):  # the file is gone: its next use reports that
        if not held:
            held += [os.open(f"{path}{suffix}", os.O_RDONLY | os.O_CLOEXEC) for suffix, _, _ in _IN_USE]
        for descriptor, (_, start, length) in zip(held, _IN_USE, strict=True):
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, length, start)


class SqliteCell(Cell):
    """One cell of the register file. Costs one connection (3 file descriptors); a forked child opens its own.

    `wait` sleeps in the kernel until the WAL is written to, the file is removed or replaced, or the cell is closed, and
    so learns of a change in well under a millisecond. It also polls every 0.5 s. A second thread that waits on the
    same cell, or any thread where the kernel has no watch left to give, polls every 2 ms instead, at some 3% of a core.
    """

    local = True

    def __init__(self, url: str, name: str, *, make: bool = True) -> None:
        """Raises `RegisterAway` if the file is missing, unless it shall be made."""
        self._url, self._name, self._path = url, name, Path(os.path.realpath(path_of(url)))
        self.lock = threading.Lock()
        self._closed = False
        self._watching = threading.Lock()
        self._kept_watch: FileWatch | None = None
        if _forked_amid:
            raise RegisterAway(
                url,
                f"this process was forked while another thread had been writing to a register for {FORK_SECONDS:g} s; "
                "fork it again, or start a new one",
            )
        try:
            if (kind := network_file_system(self._path.parent)) is not None:
                raise RegisterAway(url, f"its folder is on {kind}, where sqlite is not safe: {_ELSEWHERE}")
            with _opening:
                self._file = self._open(make)
                _cells.add(self)
            forks.refuse_in_children(self, f"register {url}")
        except OSError as error:
            raise RegisterAway(url, f"cannot open the file: {error}") from error

    def _open(self, make: bool) -> tuple[int, int]:
        """Open the database. Its files are checked before SQLite reads them, and once it has made those it needs."""
        with _private_folder(self._path, self._url) as folder:
            if not os.path.lexists(self._path):
                if not make:
                    raise RegisterAway(self._url, "there is no such file")
                _create(self._path)
            file = _check_files(folder, self._path.name, self._url)
            _check_header(folder, self._path.name, file, self._url)
            _paths[file] = self._path
            self._db = self._connect()
            _open_files[file] += 1
            try:
                if _check_files(folder, self._path.name, self._url) != file:
                    raise RegisterAway(self._url, "the file was replaced by another one while it was opened")
            except BaseException:
                self._db.close()
                _open_files[file] -= 1
                raise
        return file

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode=rw",
            uri=True,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._attempt(lambda: db.execute("PRAGMA synchronous=OFF"))
            self._attempt(lambda: db.execute("SELECT name, version, value FROM cell LIMIT 0").fetchall())
            self._attempt(lambda: db.execute(_REPLACE, (b"", self._name, -1)))  # prepares the statement
        except BaseException:
            db.close()
            raise
        return db

    def _attempt(self, action: Callable[[], T], wait: bool = True) -> T:
        """Do `action`. While another process holds the lock, repeat it for up to `BUSY_SECONDS` if `wait`."""
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.0001
        while True:
            try:
                return action()
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF
                if code in _BROKEN:
                    raise CorruptData(f"register {self._url} is damaged or is not one: {error}") from error
                if code not in _BUSY:
                    raise RegisterAway(self._url, str(error)) from error
                if not wait:
                    raise RegisterBusy(self._url, "another process holds its lock") from error
                if time.monotonic() >= deadline:
                    reason = f"another process has held its lock for {BUSY_SECONDS:g} s; is a member stopped?"
                    raise RegisterAway(self._url, reason) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.002)

    def _execute(
        self, sql: str, arguments: tuple[object, ...], wait: bool = True
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Execute one statement, which is one transaction; returns its rows, and how many rows it wrote."""

        def once() -> tuple[list[tuple[int, bytes]], int]:
            with self.lock:
                self._check_usable()
                cursor = self._db.execute(sql, arguments)
                return cursor.fetchall(), cursor.rowcount

        return self._attempt(once, wait)

    def _check_usable(self) -> None:
        """Refuse to continue if the file was removed or replaced: that would split the job in two registers."""
        if self._closed:
            raise RegisterAway(self._url, "this handle is closed")
        try:
            found = self._path.stat()
        except OSError as error:
            raise RegisterAway(self._url, f"the file is gone: {error}") from error
        if (found.st_dev, found.st_ino) != self._file:
            raise RegisterAway(self._url, "the file was replaced by another one while in use")

    def read(self, wait: bool = True) -> tuple[int, bytes]:
        rows, _ = self._execute("SELECT version, value FROM cell WHERE name = ?", (self._name,), wait)
        return rows[0] if rows else (0, b"")

    def try_read(self) -> tuple[int, bytes]:
        return self.read(wait=False)

    def try_compare_and_set(self, expected: int, value: bytes) -> bool:
        return self.compare_and_set(expected, value, wait=False)

    def compare_and_set(self, expected: int, value: bytes, wait: bool = True) -> bool:
        if expected == 0:
            sql = "INSERT INTO cell VALUES (?, 1, ?) ON CONFLICT DO NOTHING"
            arguments: tuple[object, ...] = (self._name, value)
        else:
            sql, arguments = _REPLACE, (value, self._name, expected)
        return self._execute(sql, arguments, wait)[1] == 1

    def wait(self, newer_than: int, timeout: float) -> tuple[int, bytes] | None:
        deadline = time.monotonic() + timeout
        pause = 2 * _SETTLING_LAST  # until the next poll for a commit that has begun; too long: there is none
        with self._watch() as watch:
            while True:
                version, value = self.read()
                now = time.monotonic()
                if version > newer_than:
                    return version, value
                if now >= deadline:
                    return None
                if watch is None:
                    time.sleep(min(_POLL, deadline - now))
                elif pause < _SETTLING_LAST:
                    time.sleep(pause)
                    pause *= 2
                elif watch.wait(min(_QUIET_POLL, deadline - now)):
                    pause = _SETTLING_FIRST

    @contextlib.contextmanager
    def _watch(self) -> Iterator[FileWatch | None]:
        """The cell's watch, for one thread at a time; None for the others, and where the kernel has none left.

        Every commit writes to the WAL, which stays the same file as long as any process has the register open.
        """
        if not self._watching.acquire(blocking=False):
            yield None
            return
        try:
            if self._kept_watch is None:
                with contextlib.suppress(OSError):
                    wal = self._path.with_name(self._path.name + "-wal")
                    self._kept_watch = FileWatch(wal, (self._path,))
            yield self._kept_watch
        finally:
            self._watching.release()
            if self._closed:
                self._close_watch()

    def _close_watch(self) -> None:
        if (waiting := self._kept_watch) is not None:
            waiting.wake()
        if self._watching.acquire(blocking=False):  # otherwise the thread that has the watch closes it
            watch, self._kept_watch = self._kept_watch, None
            self._watching.release()
            if watch is not None:
                watch.close()

    def close(self) -> None:
        with _opening, self.lock:
            if not self._closed:
                self._closed = True
                self._db.close()
                _open_files[self._file] -= 1
        self._close_watch()
