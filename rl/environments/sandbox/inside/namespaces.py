"""The walls: namespaces, a file system of their own, no capabilities. Two layers of them.

The template enters the outer ones once: a user namespace in which it may mount, an empty network, and a read-only root
that holds the interpreter's library and three devices. Each run gets inner ones: a user namespace without any right in
the outer one (and with a count of processes of its own), process numbers, message queues, and an empty /tmp.

Stops: reading or changing files of the host, signals to its processes, connections, mounts and devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.rl.environments.sandbox.inside.seccomp import call, libc, number

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_NEWPID, _NEWNET, _WITH_PIDFD = 0x20000000, 0x40000000, 0x1000
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_READ_ONLY = 1
"""Of mount_setattr(2); the three above are the same there."""
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SET_DUMPABLE, _DROP_BOUND, _SET_DEATH_SIGNAL = 4, 24, 1
_CAPABILITIES_VERSION = 0x20080522

NOBODY: Final = 65534
"""The host's user for runs of a job of root: the kernel counts no processes of root."""

INNER_USER: Final = 1000
DEVICES: Final = ("null", "zero", "urandom")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())
    call(f"mount {target}", libc.mount(*arguments))


def _restrict(target: str, attributes: int, recursive: bool = False) -> None:
    """Add attributes to a mount; it keeps those that a user namespace may not remove."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    which = number("mount_setattr")
    call(f"mount_setattr {target}", libc.syscall(which, _AT_FDCWD, target.encode(), flags, wanted, len(wanted)))


def _write(path: str, text: str, directory: int) -> None:
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _new_user(proc: int, inner: int, more: int) -> None:
    """Enter a new user namespace that knows one user, this one, and other new namespaces that belong to it."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", libc.unshare(_NEWUSER | more))
    _write("self/setgroups", "deny", proc)
    _write("self/uid_map", f"{inner} {user} 1", proc)
    _write("self/gid_map", f"{inner} {group} 1", proc)


def enter_outer(proc: int, library: Sequence[str]) -> None:
    """Put the template behind the outer walls; `library` are the folders of the interpreter. Raises OSError."""
    spaces = _NEWNS | _NEWNET | _NEWIPC | _NEWUTS
    if os.geteuid() != 0:
        _new_user(proc, os.geteuid(), spaces)
        _build_root(library)
        return
    call("unshare", libc.unshare(spaces))
    _build_root(library)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))  # else /proc/self stays root's, and the map cannot be written
    _new_user(proc, NOBODY, spaces)


def _build_root(library: Sequence[str]) -> None:
    sources = {folder: os.path.realpath(folder) for folder in library}
    call("sethostname", libc.sethostname(b"sandbox", 7))
    mount("none", "/", None, _REC | _PRIVATE)
    mount("holdfast", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=256k,mode=755")
    Path("/tmp/old").mkdir(mode=0o700)
    call("pivot_root", libc.syscall(number("pivot_root"), b"/tmp", b"/tmp/old"))
    os.chdir("/")
    for folder, source in sources.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        mount("/old" + source, folder, None, _BIND | _REC)
        _restrict(folder, _READ_ONLY | _NOSUID | _NODEV, recursive=True)
        for packages in ("site-packages", "dist-packages"):
            if (hidden := Path(folder, packages)).is_dir():
                mount("empty", str(hidden), "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=4k,mode=555")
                _restrict(str(hidden), _READ_ONLY)
    Path("/dev").mkdir()
    for name in DEVICES:
        device = Path("/dev", name)
        device.touch()
        mount(f"/old/dev/{name}", str(device), None, _BIND)
        _restrict(str(device), _READ_ONLY | _NOSUID | _NOEXEC)
    Path("/tmp").mkdir()
    call("umount /old", libc.umount2(b"/old", _DETACH))
    Path("/old").rmdir()
    _restrict("/", _READ_ONLY)


def fork_first_process() -> tuple[int, int]:
    """Fork the first process of a new space of process numbers.

    Returns its number and a pidfd here, and (0, -1) there. os.fork cannot do it: unshare(2) does so for all later
    children at once, and the way back needs rights in the namespace above.
    """
    pidfd = ctypes.c_int(-1)
    holding_the_gil = ctypes.PyDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_NEWPID | _WITH_PIDFD | signal.SIGCHLD)
    pid = call("clone", holding_the_gil.syscall(number("clone"), flags, None, ctypes.byref(pidfd), None, None))
    return pid, pidfd.value


def enter_inner(proc: int, disk_bytes: int) -> None:
    """Put a run behind the inner walls, with an empty /tmp of a bounded size. Raises OSError."""
    _new_user(proc, INNER_USER, _NEWNS | _NEWIPC)
    files = max(16, min(4096, disk_bytes // 4096))
    options = f"size={disk_bytes},nr_inodes={1 + files},mode=700"  # one for the folder itself
    mount("holdfast", "/tmp", "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)


def drop_capabilities() -> None:
    """Give up all capabilities of this user namespace, for good."""
    for capability in range(64):
        if libc.prctl(_DROP_BOUND, capability, 0, 0, 0) < 0:
            break
    header, none = struct.pack("II", _CAPABILITIES_VERSION, 0), bytes(24)
    call("capset", libc.syscall(number("capset"), header, none))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Changing the user undoes this."""
    call("prctl", libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def use_one_arena() -> None:
    """Let all threads allocate from one arena: each further one would cost 64 MiB of address space."""
    with contextlib.suppress(AttributeError):
        libc.mallopt(-8, 1)
