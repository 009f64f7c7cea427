"""Failures that have their cause in this process: what it ran out of, told as that and not as the end of a peer."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from holdfast.comms.errors import BackendUnavailable, HoldfastError, PeerFailed, ResourceExhausted

MEMORY_HINT = (
    "allow it (CAP_SYS_PTRACE, `sysctl kernel.yama.ptrace_scope=0`, or a container profile that permits "
    "process_vm_readv), and run all processes of the job as one user, in one user namespace"
)
_MIB = 1 << 20
_SHARED = Path("/dev/shm")
_WORDS = {
    os.strerror(number): number
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM)
}
"""What libraries that raise without a number say: they end their messages with the C library's words."""


def local_cause(error: BaseException, doing: str) -> HoldfastError | None:
    """The error to raise instead of `error`, which happened while `doing`, if this process ran out of something; None
    if it did not, so that a peer may be to blame.
    """
    if isinstance(error, HoldfastError):
        return error if isinstance(error, ResourceExhausted) else None
    if isinstance(error, MemoryError):
        return exhausted(errno.ENOMEM, doing)
    if isinstance(error, OSError):
        return exhausted(error.errno, doing, error.filename)
    if isinstance(error, RuntimeError):
        text = str(error)
        if "can't start new thread" in text or "Resource temporarily unavailable" in text:
            return ResourceExhausted("threads", f"one more for {doing}", _limit_of(resource.RLIMIT_NPROC, "ulimit -u"))
        return next((exhausted(number, doing) for words, number in _WORDS.items() if words in text), None)
    return None


@contextlib.contextmanager
def reraise_local_cause(doing: str) -> Iterator[None]:
    """Raise the `local_cause` of an error instead of it, if it has one. Also a decorator."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        cause = local_cause(error, doing)
        if cause is None or cause is error:
            raise
        raise cause from error


def exhausted(number: int | None, doing: str, path: str | bytes | None = None) -> ResourceExhausted | None:
    """The error for an errno of a system call; None unless it says that this process or host ran out of something."""
    where = "the file system" if path is None else repr(os.fsdecode(path))
    match number:
        case errno.EMFILE:
            limit = f"and has all of its {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
            return ResourceExhausted("file descriptors", f"one more for {doing}", limit, "raise `ulimit -n`")
        case errno.ENFILE:
            return ResourceExhausted("file descriptors", f"one more for {doing}", "and the host has no more")
        case errno.ENOMEM:
            return ResourceExhausted("memory", f"more for {doing}", _limit_of(resource.RLIMIT_AS, "ulimit -v"))
        case errno.ENOSPC | errno.EDQUOT:
            return ResourceExhausted("space", f"more for {doing}", f"and {where} is full", "free some")
        case errno.EROFS:
            return ResourceExhausted("space", f"to write for {doing}", f"and {where} is read-only")
    return None


def out_of_descriptors(doing: str) -> ResourceExhausted | None:
    """The error for a library that failed without saying why, if this process can open nothing more."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return exhausted(error.errno, doing)
    return None


def unreadable(rank: int, number: int) -> HoldfastError:
    """What it means that the memory of `rank`, whose process lives, cannot be read: an errno of process_vm_readv."""
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        reason = f"this process may not read the memory of rank {rank}: {os.strerror(number)}"
        return BackendUnavailable("shm", reason, MEMORY_HINT)
    cause = exhausted(number, f"reading the memory of rank {rank}")
    return cause or PeerFailed((rank,), f"its memory cannot be read: {os.strerror(number)}")


def not_openable(rank: int, what: str, error: OSError) -> HoldfastError:
    """What it means that a file in /proc of the process of `rank` cannot be opened."""
    if error.errno in (errno.EPERM, errno.EACCES):
        reason = f"this process may not open {what} of rank {rank}: {error.strerror}"
        return BackendUnavailable("shm", reason, MEMORY_HINT)
    cause = exhausted(error.errno, f"opening {what} of rank {rank}")
    return cause or PeerFailed((rank,), f"its {what} cannot be opened: {error}")


def check_shared_memory(nbytes: int, doing: str, hint: str) -> None:
    """Raise `ResourceExhausted` unless /dev/shm has `nbytes` free: pages that it cannot give would be a SIGBUS."""
    resource_name, need = f"shared memory ({_SHARED})", f"{nbytes / _MIB:.1f} MiB for {doing}"
    try:
        found = os.statvfs(_SHARED)
    except OSError as error:
        limit = f"and it cannot be looked at: {error.strerror}"
        raise ResourceExhausted(resource_name, need, limit, hint) from error
    if found.f_flag & os.ST_RDONLY:
        raise ResourceExhausted(resource_name, need, "and it is read-only", hint)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if size and free < nbytes:
        limit = f"and {free / _MIB:.1f} of {size / _MIB:.1f} MiB are free"
        raise ResourceExhausted(resource_name, need, limit, hint)


def _limit_of(which: int, name: str) -> str:
    soft = resource.getrlimit(which)[0]
    return "and there is none left" if soft == resource.RLIM_INFINITY else f"and `{name}` allows {soft}"
