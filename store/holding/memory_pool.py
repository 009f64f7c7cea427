"""The memory of the parts that a process keeps: bounded, reused, and touched before it is needed.

To touch fresh memory costs 5 to 40 times as much as to copy into memory that was touched before. So a thread of the
pool touches the memory of the next versions beside the program, as soon as it knows the size of one, and registers it
with CUDA if the process uses that.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store.catalog.client import check_cancelled
from holdfast.store.data.cuda_copies import register_ahead
from holdfast.store.errors import StoreFull

ROUNDING = 64 << 10
MOST_SPARE = 4
"""The number of dropped parts that leave their memory to the next ones."""
LOOK_SECONDS = 0.05
"""Seconds between two looks for memory that readers have let go: no event tells of it."""
AHEAD = 2
"""The number of versions that memory is touched for before they are published."""
LEAST_AHEAD = 1 << 20
"""Parts of fewer bytes are touched in less time than a thread needs to start."""
CLOSE_SECONDS = 5.0
_log = logging.getLogger("holdfast.store")


class MemoryPool:
    """Memory of `plane` for parts, at most `limit` bytes at a time (None: no limit). Thread-safe.

    Memory that a reader has mapped for good is not reused before the mapping ends; it counts until then. Before a part
    finds no room, `make_room` is called: whether it gave memory back.

    A thread touches memory for up to `AHEAD` more parts of the last size, until the pool has that of `parts` parts; not
    beyond the limit, nor with more than half of the memory that the machine has left.
    """

    def __init__(self, plane: MemoryPlane, limit: int | None, parts: int = 0) -> None:
        self._plane, self.limit, self._parts = plane, limit, parts
        self._changed = threading.Condition()
        self._used = 0
        self._toucher: threading.Thread | None = None
        self._fresh: deque[weakref.ref[torch.Tensor]] = deque()
        """Memory that the plane has not improved."""
        self._ahead = self._touching = 0
        """The size of the parts to come (0: not known), and of the memory that the thread touches now."""
        self._spare: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self.make_room: Callable[[], bool] = bool
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes in use, by mappings too, without spare memory."""
        with self._changed:
            return self._used - sum(each.nbytes for each in self._spare) - self._touching

    def allocate(self, nbytes: int, deadline: float, version: int, *, part: bool = True) -> torch.Tensor:
        """Memory of at least `nbytes` for a `part` of `version`, or beside one. Waits while the limit leaves no room.

        Raises `StoreFull` at the `deadline`, or at once if the part alone is larger than the limit. Memory that is
        touched at the deadline is waited for: it is room already, and the kernel gives it in bounded time.
        """
        size = _rounded(nbytes)
        if self.limit is not None and size > self.limit:
            raise StoreFull(version, nbytes, self.used, self.limit, 0.0)
        began = time.monotonic()
        with self._changed:
            while True:
                check_cancelled()
                self._take_back()
                self._ahead = size if part else self._ahead
                if (found := self._fitting(size)) is not None:
                    return found
                if not _fits(self._touching, size):
                    if self._drop_spare(size):
                        self._used += size
                        break
                    if part and self.make_room():
                        continue
                left = LOOK_SECONDS if self._touching else deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise StoreFull(version, nbytes, self.used, self.limit or 0, time.monotonic() - began)
                self._changed.wait(min(left, LOOK_SECONDS))
        try:
            return self._empty(size)
        except BaseException:
            with self._changed:
                self._used -= size
                self._changed.notify_all()
            raise

    @contextmanager
    def allocating(
        self, deadline: float, version: int, *, part: bool = True
    ) -> Iterator[Callable[[int], torch.Tensor]]:
        """Give a function that allocates; its memory is given back if the block raises an error.

        The block ends where something else has taken the memory over.
        """
        taken = []

        def allocate(nbytes: int) -> torch.Tensor:
            taken.append(self.allocate(nbytes, deadline, version, part=part))
            return taken[-1]

        try:
            yield allocate
        except BaseException:
            for memory in taken:
                self.give_back(memory)
            raise

    def touch_ahead(self, nbytes: int | None = None) -> None:
        """Touch memory for parts to come, of `nbytes` or of the last size, beside the program.

        Call it when a part is safe, not before: several touches at once slow each other down.
        """
        with self._changed:
            self._ahead = self._ahead if nbytes is None else _rounded(nbytes)
            if self._toucher is None and not self._closed and (self._fresh or self._is_lacking()):
                self._toucher = threading.Thread(target=self._run, name="holdfast-store-toucher", daemon=True)
                self._toucher.start()

    def give_back(self, memory: torch.Tensor) -> None:
        """Return memory of `allocate` for reuse. The caller has closed its region."""
        with self._changed:
            self._lent.append(memory)
            self._take_back()
            self._changed.notify_all()

    def close(self) -> None:
        """Let all spare memory go. Idempotent. The caller has closed the plane: that ends what touches memory of it."""
        with self._changed:
            self._closed = True
            toucher = self._toucher
        if toucher is not None and toucher is not threading.current_thread():
            toucher.join(CLOSE_SECONDS)
        with self._changed:
            self._spare.clear()
            self._lent.clear()
            self._changed.notify_all()

    # -- in the thread

    def _run(self) -> None:
        """Touch memory ahead, so that no part has to wait; then improve what is new."""
        while True:
            with self._changed:
                if size := self._ahead if self._is_lacking() else 0:
                    self._touching = size
                    self._used += size
                elif not self._fresh or self._closed:
                    self._toucher = None
                    return
            if size:
                self._touch(size)
            else:
                self._improve()

    def _touch(self, size: int) -> None:
        memory: list[torch.Tensor] = []
        try:
            memory = [self._empty(size)]
            register_ahead(memory[0])
        except Exception as error:  # the next publish touches its memory itself, and reports what is wrong
            _log.info("memory of %d bytes is not touched ahead: %s", size, error)
        with self._changed:
            self._touching = 0
            if memory and not self._closed:
                self._spare += memory
            else:
                self._used -= size
                self._ahead = 0
            self._changed.notify_all()

    def _improve(self) -> None:
        try:
            if (memory := self._fresh.popleft()()) is not None:
                self._plane.improve(memory)
        except Exception as error:
            _log.info("memory is used as it is: %s", error)

    def _empty(self, size: int) -> torch.Tensor:
        memory = self._plane.empty(size, mappable=True)
        if size >= LEAST_AHEAD and self._parts:
            self._fresh.append(weakref.ref(memory))
        return memory

    # -- under the lock

    def _is_lacking(self) -> bool:
        """Whether memory has to be touched for a part of the expected size, and may be."""
        size = self._ahead
        return (
            not self._closed
            and size >= LEAST_AHEAD
            and self._used + size // 2 < self._parts * size
            and sum(_fits(each.nbytes, size) for each in self._spare) < AHEAD
            and self._has_room(size)
            and 2 * size <= available_memory()
        )

    def _take_back(self) -> None:
        """Make memory spare that no reader maps any more."""
        free = [memory for memory in self._lent if not self._plane.is_lent(memory)]
        if free:
            self._lent = [memory for memory in self._lent if not any(memory is each for each in free)]
            self._spare = [*free, *self._spare]
            for memory in self._spare[MOST_SPARE:]:
                self._used -= memory.nbytes
            del self._spare[MOST_SPARE:]

    def _fitting(self, size: int) -> torch.Tensor | None:
        fits = [each for each in self._spare if _fits(each.nbytes, size)]
        if not fits:
            return None
        best = min(fits, key=lambda each: each.nbytes)
        self._spare = [each for each in self._spare if each is not best]
        return best

    def _drop_spare(self, size: int) -> bool:
        """Drop spare memory until `size` more bytes fit; whether they do."""
        while not self._has_room(size) and self._spare:
            self._used -= self._spare.pop().nbytes
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        return self.limit is None or self._used + size <= self.limit


def available_memory(processes: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes that the machine, and this process's cgroup, have left as far as the kernel tells."""
    text = (processes / "meminfo").read_text()
    found = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError, StopIteration):  # no cgroup of version 2, or "max"
        lines = (processes / "self" / "cgroup").read_text().splitlines()
        group = groups / next(line[4:] for line in lines if line.startswith("0::/"))
        limit, used = (int((group / f"memory.{kind}").read_text()) for kind in ("max", "current"))
        found = min(found, limit - used)
    return found


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ROUNDING) * ROUNDING


def _fits(there: int, size: int) -> bool:
    """Whether memory of `there` bytes serves a part of `size`, and does not waste more than half of itself."""
    return size <= there <= 2 * size + ROUNDING
