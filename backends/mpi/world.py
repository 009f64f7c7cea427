"""MPI in this process: loaded once, with a bound on every call that may wait for other processes, never finalised.

MPI_Finalize is collective, and would wait for dead processes. Under `--with-ft ulfm` Open MPI lets a process end
without it: the others continue, and mpirun removes the shared resources and reports success.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from holdfast.comms.errors import BackendUnavailable, OpTimeout, PeerFailed
from holdfast.comms.system.waiting import run_interruptible
from holdfast.comms.transport.liveness import Liveness

T = TypeVar("T")

_SETTINGS = {
    "MPI4PY_MPIABI": "openmpi",
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "3",
}
"""Rabenseifner's algorithm: as fast as the blocking all_reduce; the default is half as fast."""

_GRACE_SECONDS = 0.5
"""How long MPI may take to notice that a member of a communicator under construction is dead."""

_lock = threading.Lock()
_begun: Future[None] | None = None


def prepare() -> None:
    """Begin to initialise MPI in a thread, unless that has begun already. Returns at once.

    MPI_Init waits for all processes of the MPI job, spares too, whenever they call it.
    """
    global _begun
    with _lock:
        if _begun is None:
            _begun = Future()
            threading.Thread(target=_initialise, args=(_begun,), name="holdfast-mpi-start", daemon=True).start()


def start(deadline: float) -> None:
    """Wait until MPI is initialised. Raises `OpTimeout`, or `BackendUnavailable` with MPI's text."""
    began = time.monotonic()
    prepare()
    assert _begun is not None
    try:
        _begun.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise OpTimeout("connect", 0, time.monotonic() - began) from None


def _initialise(begun: Future[None]) -> None:
    try:
        _load()
    except BaseException as error:
        begun.set_exception(error)
    else:
        begun.set_result(None)


def _load() -> None:
    if "mpi4py.MPI" not in sys.modules:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        _load_library()
        rc: Any = importlib.import_module("mpi4py").rc
        rc.finalize = False
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable("mpi", f"MPI does not load: {error}", "pip install 'holdfast[mpi]'") from error
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise BackendUnavailable("mpi", "MPI was initialised for one thread only", "leave mpi4py.rc.threads true")


def _load_library() -> None:
    """Load libmpi from the folder that mpirun names.

    The loader read LD_LIBRARY_PATH when this process began; a process forked into an MPI job began before it got its
    own.
    """
    library = Path(os.environ.get("OPAL_PREFIX", "/nowhere")) / "lib" / "libmpi.so.40"
    if library.exists():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def bounded(task: Callable[[], T], deadline: float, liveness: Liveness) -> T:
    """Run `task()` in a thread; return or raise its result by `deadline`, or soon after `liveness` has seen a death.

    MPI has calls that cannot be interrupted. One that does not return keeps its thread.
    """
    began, seen = time.monotonic(), 0.0

    def look() -> None:
        nonlocal seen
        now = time.monotonic()
        if dead := liveness.dead():
            seen = seen or now
            if now > seen + _GRACE_SECONDS:
                raise PeerFailed(dead, "its process ended while the ranks connected")
        elif now >= deadline:
            raise OpTimeout("connect", 0, now - began)

    return run_interruptible(task, look, every=0.02, delays_exit=False)
