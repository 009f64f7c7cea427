"""Point to point as torch has it: sends and receives that are issued run side by side, whatever their order.

A communicator runs its ops one after the other, so two ranks that both send first and receive second would wait for
each other. Here each (sender, receiver, tag) has a lane: a communicator of two, connected when both ends have first
used it, and a thread at each end. Messages of one lane arrive in the order sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.work import Work

Tensor = torch.Tensor

_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
_CONNECT_SECONDS = 60.0
_JOIN_SECONDS = 10.0
_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Line:
    """What names a lane: group ranks of sender and receiver, and the tag."""

    src: int
    dst: int
    tag: int

    @property
    def name(self) -> str:
        return f"lane-{self.src}-{self.dst}-{self.tag}"


class Lane:
    """One end of a lane."""

    def __init__(self, line: Line, rank: int, group: Communicator, store: dist.Store) -> None:
        self._line = line
        self._end = 0 if rank == line.src else 1
        self._peer = line.dst if rank == line.src else line.src
        self._group = group
        self._store = store
        self._queue: queue.SimpleQueue[tuple[Work, Tensor, float] | None] = queue.SimpleQueue()
        self._communicator: Communicator | None = None
        self._over: HoldfastError | None = None
        self._lock = threading.Lock()
        self._early: list[tuple[Work, Tensor]] = []
        self._thread = threading.Thread(target=self._serve, name=f"holdfast-{line.name}", daemon=True)
        self._thread.start()

    def issue(self, tensor: Tensor, timeout: float) -> Work:
        """Send or receive `tensor` behind what is queued, within `timeout` seconds of now."""
        work = Work("recv" if self._end else "send")
        self._queue.put((work, tensor, time.monotonic() + timeout))
        return work

    # -- receives that were posted for whoever sends first

    def post_early(self, tensor: Tensor) -> Work:
        """Receive into a buffer like `tensor`, unless that is under way already; kept for `take_early`."""
        if not self._early:
            buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._early.append((self.issue(buffer, _DAY), buffer))
        return self._early[0][0]

    def take_early(self, tensor: Tensor) -> Work | None:
        """What `post_early` began, copied into `tensor` when it is there; None if nothing was begun."""
        if not self._early:
            return None
        begun, buffer = self._early.pop()
        taken = Work("recv")

        def take() -> None:
            begun.wait()
            tensor.detach().copy_(buffer.view(tensor.shape))

        if begun.done():
            taken.run(take)
        else:
            threading.Thread(target=taken.run, args=(take,), name="holdfast-future", daemon=True).start()
        return taken

    # -- the thread

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, tensor, deadline = item
            work.run(lambda tensor=tensor, deadline=deadline: self._move(tensor, deadline))  # type: ignore[misc]
        if self._communicator is not None:
            self._communicator.close()

    def _move(self, tensor: Tensor, deadline: float) -> None:
        try:
            communicator = self._connected(deadline)
            left = max(deadline - time.monotonic(), 0.001)
            if self._end:
                communicator.recv(tensor, 0, timeout=left)
            else:
                communicator.send(tensor, 1, timeout=left)
        except PeerFailed as error:
            raise PeerFailed((self._peer,), error.evidence) from None
        except OpTimeout as error:
            raise OpTimeout("recv" if self._end else "send", error.seq, error.waited, (self._peer,)) from None

    def _connected(self, deadline: float) -> Communicator:
        if self._communicator is None:
            self._meet(deadline)
            communicator = connect(
                self._group.backend,
                rank=self._end,
                size=2,
                rendezvous=self._store,
                name=f"{self._group.name}/{self._line.name}",
                device=self._group.device,
                timeout=min(_CONNECT_SECONDS, max(deadline - time.monotonic(), 0.001)),
            )
            with self._lock:
                self._communicator = communicator
                if self._over is not None:
                    communicator.abort(self._over)
        return self._communicator

    def _meet(self, deadline: float) -> None:
        """Wait until the peer has come to its end, or this lane is over: only then is connecting sure to be quick."""
        began = time.monotonic()
        self._store.set(f"{self._line.name}/{self._end}", "here")
        pause = _FIRST_LOOK
        while not self._store.check([f"{self._line.name}/{1 - self._end}"]):
            if self._over is not None:
                raise self._over.again()
            if time.monotonic() > deadline:
                raise OpTimeout("connect", 0, time.monotonic() - began, (self._peer,))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        """End what is pending, and all that comes later, with `error`. From any thread."""
        with self._lock:
            self._over = self._over or error
            if self._communicator is not None:
                self._communicator.abort(error)

    def close(self) -> None:
        """End the thread, and release the communicator. What is still pending ends with `Revoked`."""
        if not self._queue.empty() or self._early:
            self.abort(Revoked(self._group.epoch, "closed"))
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS)


class Lanes:
    """All lanes of one rank of a group."""

    def __init__(self, group: Communicator, store: dist.Store) -> None:
        self._group = group
        self._store = store
        self._lanes: dict[Line, Lane] = {}
        self._lock = threading.Lock()
        self._any: list[threading.Thread] = []
        self._over: HoldfastError | None = None

    def send(self, tensor: Tensor, dst: int, tag: int, timeout: float) -> Work:
        return self._lane(Line(self._group.rank, dst, tag)).issue(tensor, timeout)

    def recv(self, tensor: Tensor, src: int, tag: int, timeout: float) -> Work:
        lane = self._lane(Line(src, self._group.rank, tag))
        return lane.take_early(tensor) or lane.issue(tensor, timeout)

    def recv_any(self, tensor: Tensor, tag: int, timeout: float) -> tuple[Work, list[int]]:
        """Receive from whoever sends first under `tag`; the list holds the sender when the work is done.

        A receive is posted on every lane whose sender has come; those that are not needed now serve the next receives,
        which must be of the same shape and dtype.
        """
        source: list[int] = []
        work = Work("recv")
        deadline = time.monotonic() + timeout

        def receive() -> None:
            src, lane = self._first_sender(tensor, tag, timeout, deadline)
            taken = lane.take_early(tensor)
            if taken is not None:
                taken.wait()
            source.append(src)

        thread = threading.Thread(target=work.run, args=(receive,), name="holdfast-recv-any", daemon=True)
        self._any.append(thread)
        thread.start()
        return work, source

    def _first_sender(self, tensor: Tensor, tag: int, timeout: float, deadline: float) -> tuple[int, Lane]:
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        store = _own_client(self._store)
        pause = _FIRST_LOOK
        while True:
            for src in others:
                line = Line(src, self._group.rank, tag)
                if line not in self._lanes and not store.check([f"{line.name}/0"]):
                    continue
                lane = self._lane(line)
                if lane.post_early(tensor).done():
                    return src, lane
            if self._over is not None:
                raise self._over.again()
            if time.monotonic() > deadline:
                raise OpTimeout("recv", 0, timeout, others)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    def _lane(self, line: Line) -> Lane:
        for what, rank in (("src", line.src), ("dst", line.dst)):
            if not 0 <= rank < self._group.size:
                raise ValueError(f"{what}={rank} is out of range: group ranks are 0 to {self._group.size - 1}")
        if line.src == line.dst:
            raise ValueError(f"rank {line.src} cannot send to or receive from itself")
        with self._lock:
            if self._over is not None:
                raise self._over.again()
            lane = self._lanes.get(line)
            if lane is None:
                lane = self._lanes[line] = Lane(line, self._group.rank, self._group, _own_client(self._store))
            return lane

    def abort(self, error: HoldfastError) -> None:
        """End all that is pending. From any thread."""
        self._each(lambda lane: lane.abort(error), error)

    def close(self) -> None:
        """End all threads and connections."""
        self._each(Lane.close, Revoked(self._group.epoch, "closed"))
        for thread in self._any:
            thread.join(_JOIN_SECONDS)

    def _each(self, do: Callable[[Lane], None], error: HoldfastError) -> None:
        with self._lock:
            self._over = self._over or error
            lanes = list(self._lanes.values())
        for lane in lanes:
            do(lane)


def _own_client(store: dist.Store) -> dist.Store:
    """Another client of the same store: who waits in a client of torch's TCPStore blocks all that share it."""
    clone: Callable[[], dist.Store] = store.clone  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone()
