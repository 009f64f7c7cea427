"""Turns errors that this process caused by exhausting a resource into `ResourceExhausted`, so no peer is blamed."""

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
"""Errno by its C library message, for libraries that raise errors without an errno but end them with that text."""


def local_cause(error: BaseException, doing: str) -> HoldfastError | None:
    """The `ResourceExhausted` behind `error`, if this process ran out of a resource while `doing`.

    None if it did not: then a peer may have caused the error.
    """
    if isinstance(error, HoldfastError):
        return error if isinstance(error, ResourceExhausted) else None
    if isinstance(error, MemoryError):
        return resource_exhausted(errno.ENOMEM, doing)
    if isinstance(error, OSError):
        return resource_exhausted(error.errno, doing, error.filename)
    if isinstance(error, RuntimeError):
        text = str(error)
        if "can't start new thread" in text or "Resource temporarily unavailable" in text:
            return ResourceExhausted("threads", f"one more for {doing}", _limit_of(resource.RLIMIT_NPROC, "ulimit -u"))
        return next((resource_exhausted(number, doing) for words, number in _WORDS.items() if words in text), None)
    return None


@contextlib.contextmanager
def reraise_local_cause(doing: str) -> Iterator[None]:
    """Replace an error by its `local_cause`, if it has one. A context manager and a decorator."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        cause = local_cause(error, doing)
        if cause is None or cause is error:
            raise
        raise cause from error


def resource_exhausted(number: int | None, doing: str, path: str | bytes | None = None) -> ResourceExhausted | None:
    """The error for an errno by which this process or host lacks a resource; None for other errnos."""
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
    """`ResourceExhausted` if this process can open no more files, for a library that failed without a reason."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return resource_exhausted(error.errno, doing)
    return None


def unreadable_memory(backend: str, rank: int, number: int) -> HoldfastError:
    """The error for an errno of process_vm_readv on the memory of `rank`, which is still alive."""
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        reason = f"this process may not read the memory of rank {rank}: {os.strerror(number)}"
        return BackendUnavailable(backend, reason, MEMORY_HINT)
    cause = resource_exhausted(number, f"reading the memory of rank {rank}")
    return cause or PeerFailed((rank,), f"its memory cannot be read: {os.strerror(number)}")


def unopenable_file(backend: str, rank: int, what: str, error: OSError) -> HoldfastError:
    """The error for a failed open of `what`, a /proc file of the process of `rank`."""
    if error.errno in (errno.EPERM, errno.EACCES):
        reason = f"this process may not open {what} of rank {rank}: {error.strerror}"
        return BackendUnavailable(backend, reason, MEMORY_HINT)
    cause = resource_exhausted(error.errno, f"opening {what} of rank {rank}")
    return cause or PeerFailed((rank,), f"its {what} cannot be opened: {error}")


def check_shared_memory(nbytes: int, doing: str, hint: str) -> None:
    """Raise `ResourceExhausted` unless /dev/shm has `nbytes` free; to touch a missing page would be a SIGBUS."""
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
