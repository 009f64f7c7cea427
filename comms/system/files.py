"""Files of this process: descriptors that it holds, whole reads and writes, mappings, paths, Unix sockets.

A program may close descriptors that are not its own, as a daemon does that closes all, and then open files of its own
under the same numbers. So what is held for longer than one function remembers its file, and closes or wakes no other
one; and a mapping needs no descriptor: Python's `mmap` keeps a duplicate, and closes its number whatever that names.

The kernel moves at most 0x7ffff000 bytes in one call, and fewer when a signal comes, or when a pipe or a disk is nearly
full. That is neither an error nor the end of the file. `at_once` limits the bytes of one call; tests lower it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit

_TELLS_APART = "eventfd-id:"
"""What the kernel says of descriptors that share one inode, and that stays so: the Pid of a pidfd does not."""


class OwnedDescriptor(int):
    """The number of a descriptor that was just opened. msgspec takes `int(it)`."""

    _file: tuple[object, ...]
    _open: bool

    def __new__(cls, number: int) -> OwnedDescriptor:
        owned = super().__new__(cls, number)
        owned._file, owned._open = _file_of(number), True
        return owned

    @property
    def ours(self) -> bool:
        """Whether the descriptor is open, and still names the file that it named first."""
        if not self._open:
            return False
        try:
            return _file_of(self) == self._file
        except OSError:
            return False

    def wake(self) -> None:
        """Let an eventfd be readable, if it is still ours."""
        if self.ours:
            os.eventfd_write(self, 1)

    def close(self) -> None:
        """Close the descriptor, unless the number names another file by now. Idempotent."""
        ours, self._open = self.ours, False
        if ours:
            os.close(self)


@functools.cache
def _shared_inode() -> tuple[int, int]:
    """The inode of eventfds and epolls, and of pidfds before Linux 6.9. Later kernels have one for each process.

    So a rank asks nothing of /proc about the pidfds of its peers: with 63 of them that took all processors.
    """
    number = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        status = os.fstat(number)
    finally:
        os.close(number)
    return status.st_dev, status.st_ino


def _file_of(number: int) -> tuple[object, ...]:
    """What tells the file of a descriptor from all others."""
    status = os.fstat(number)
    file = status.st_dev, status.st_ino
    if stat.S_IFMT(status.st_mode) or file != _shared_inode():
        return file
    details: list[str] = []  # an eventfd, an epoll or, before Linux 6.9, a pidfd: they share an inode
    with contextlib.suppress(OSError):
        details.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115  # no descriptor needed
        lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
        details += [line for line in lines if line.startswith(_TELLS_APART)]
    return (*file, *details)


AT_ONCE = 1 << 30


def read_all(fd: int, at_once: int = 1 << 16) -> bytes:
    """Read all bytes from a descriptor's current position to its end."""
    parts = []
    while part := os.read(fd, at_once):
        parts.append(part)
    return b"".join(parts)


def read_at(fd: int, nbytes: int, offset: int, at_once: int = AT_ONCE) -> bytes:
    """Read `nbytes` from an offset of a file; fewer only where the file ends."""
    parts: list[bytes] = []
    end = offset + nbytes
    while offset < end and (part := os.pread(fd, min(at_once, end - offset), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes | memoryview, at_once: int = AT_ONCE) -> None:
    """Write all of `data` at a descriptor's current position."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:at_once]) :]


SHAREABLE_MEMORY = "holdfast-memory"
"""The name of the memfds that processes of this host map from each other."""
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ (?P<access>\S{4}) \S+ \S+ \d+ *(?P<name>.*)")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class Mapping:
    """A mapping of shareable memory in this process. `before_unmap` is called before it goes.

    `registered` says whether devices were told of it; None before that was tried.
    """

    nbytes: int
    writable: bool
    before_unmap: Callable[[], object] = bool
    registered: bool | None = None


_mappings: dict[tuple[int, int], Mapping] = {}
"""By process and address: a forked child has the mappings of its parent, not what these were registered with."""


def mapping_at(address: int) -> Mapping | None:
    """The mapping of shareable memory that begins at an address; None if none does, or a fork made it."""
    return _mappings.get((os.getpid(), address))


def own_mapping(memory: object, address: int, mapping: Mapping) -> None:
    """Unmap what lies at an address once the object `memory` is gone."""
    key = os.getpid(), address
    _mappings[key] = mapping
    weakref.finalize(memory, _unmap, key, mapping.nbytes).atexit = False


def _unmap(key: tuple[int, int], nbytes: int) -> None:
    mapping = _mappings.pop(key, None)
    if mapping is not None and key[0] == os.getpid():
        mapping.before_unmap()
    unmap_pages(key[1], nbytes)


def map_pages(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    """Call mmap; returns the address. Raises OSError."""
    found: int | None = _libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    assert found is not None
    return found


unmap_pages = _libc.munmap


def map_file(descriptor: int, nbytes: int, *, writable: bool = True) -> memoryview:
    """Map the first bytes of a file, shared, until the returned memory and all views of it are gone."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = map_pages(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, unmap_pages, address, nbytes).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Call madvise; whether the kernel has done it."""
    return bool(_libc.madvise(address, nbytes, advice) == 0)


@dataclass(frozen=True, slots=True)
class TouchedPages:
    """The shareable memory of a process that has pages: its bytes, and how many of them are on huge pages."""

    nbytes: int
    huge: int


def touched_pages(pid: int) -> TouchedPages | None:
    """What the kernel says of the shareable memory of a process of this host; None if it does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    nbytes = huge = 0
    own = False
    for line in lines:
        if mapping := _MAPPING.match(line):
            own = mapping["access"] == "rw-s" and mapping["name"].startswith(f"/memfd:{SHAREABLE_MEMORY} ")
        elif own and line.startswith(("Rss:", "ShmemPmdMapped:", "FilePmdMapped:")):
            size = int(line.split()[1]) << 10
            nbytes, huge = (nbytes + size, huge) if line.startswith("Rss:") else (nbytes, huge + size)
    return TouchedPages(nbytes, huge)


_LONGEST_ADDRESS = 107
"""The longest Unix socket address that the kernel accepts, in bytes."""


def url_of(scheme: str, path: str | os.PathLike[str]) -> str:
    """The URL of an absolute path, such as `sqlite:///run/job.sqlite`. `path_of` reverses it."""
    if not Path(path).is_absolute():
        raise ValueError(f"{os.fspath(path)!r} is not an absolute path")
    return f"{scheme}:///{quote(os.fsencode(path).lstrip(b'/'))}"


def path_of(url: str, scheme: str, example: str) -> Path:
    """The absolute path that a URL of this scheme names. Raises ValueError, showing `example`, for other URLs.

    `#`, `?` and `%` in a path must be quoted (`%23`, `%3F`, `%25`): a URL with a fragment or a query is refused.
    """
    wrong = f"{url!r} does not name a file: write {example}"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if parts.scheme != scheme or parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
        raise ValueError(f"{wrong}, an absolute path")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError(f"{wrong}; quote '#' as %23 and '?' as %3F")
    if re.search("%(?![0-9A-Fa-f]{2})", parts.path):
        raise ValueError(f"{wrong}; quote '%' as %25")
    name = unquote_to_bytes(parts.path)
    if b"\0" in name:
        raise ValueError(f"{wrong}, without null characters")
    return Path(os.fsdecode(b"/" + name.lstrip(b"/")))


def bind_unix(sock: socket.socket, path: str | os.PathLike[str]) -> None:
    """Bind a Unix socket to a path of any length."""
    with _short(path) as address:
        sock.bind(address)


def connect_unix(sock: socket.socket, path: str | os.PathLike[str]) -> None:
    """Connect a Unix socket to a path of any length."""
    with _short(path) as address:
        sock.connect(address)


@contextlib.contextmanager
def _short(path: str | os.PathLike[str]) -> Iterator[str]:
    """An address for `path`: the path, or if that is too long, its name below its open folder in /proc/self/fd."""
    path = Path(path)
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
