"""Point to point as torch has it: sends and receives that are issued run side by side, whatever their order.

A communicator runs its ops one after the other, so two ranks that both send first and receive second would wait for
each other. Here each (sender, receiver, tag) has a lane: a communicator of two, connected when both ends have first
used it, and a thread at each end. Messages of one lane arrive in the order sent.

A message is a token, one byte, and the payload. Who receives from whoever sends first looks out for a token on every
lane; whose has come is received from, and the tokens that are still to come serve the next receives, of any shape.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.ops import Recv, Send
from holdfast.comms.work import Work

Tensor = torch.Tensor

_TOKEN, _PAYLOAD = 0, 1
"""Tags."""
_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
_CONNECT_SECONDS = 60.0
_GRACE_SECONDS = 0.5
"""How long what is under way may take to end by itself when a group is closed."""
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


class Token:
    """A token that is looked out for: `posted` is done once the lane receives it, `arrival` once it is here."""

    __slots__ = ("arrival", "posted")

    def __init__(self) -> None:
        self.posted = Work("recv")
        self.arrival: Work | None = None


class Lane:
    """One end of a lane."""

    def __init__(self, line: Line, rank: int, group: Communicator, store: dist.Store) -> None:
        self._line = line
        self._end = 0 if rank == line.src else 1
        self._peer = line.dst if rank == line.src else line.src
        self._group = group
        self._store = store
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._communicator: Communicator | None = None
        self._over: HoldfastError | None = None
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._thread = threading.Thread(target=self._serve, name=f"holdfast-{line.name}", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._communicator is not None

    def send(self, tensor: Tensor, deadline: float) -> Work:
        """Send `tensor` behind what is queued."""
        return self._issue(Work("send"), partial(self._send, tensor, deadline))

    def recv(self, tensor: Tensor, deadline: float) -> Work:
        """Receive into `tensor` behind what is queued."""
        with self._lock:
            return self._recv_after(self._token, tensor, deadline)

    def recv_if_come(self, tensor: Tensor, deadline: float) -> Work | None:
        """As `recv`, if a message has begun to arrive; else None, and its token is looked out for."""
        with self._lock:
            token = self._token
            if token is None:
                token = self._token = Token()
                self._issue(token.posted, partial(self._post, token, deadline))
            if not token.posted.done():
                return None
            if (error := token.posted.exception()) is not None:
                self._token = None
                raise error
            if token.arrival is not None and not token.arrival.done():
                return None
            return self._recv_after(token, tensor, deadline)

    def _recv_after(self, token: Token | None, tensor: Tensor, deadline: float) -> Work:
        """Receive what `token` announces, now nobody else's; None: both. The lock is held."""
        self._token = None
        return self._issue(Work("recv"), partial(self._recv, token, tensor, deadline))

    def _issue(self, work: Work, body: Callable[[], None]) -> Work:
        self._queue.put((work, body))
        return work

    # -- the thread

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, body = item
            work.run(partial(self._explained, body))
        if self._communicator is not None:
            self._communicator.close()

    def _explained(self, body: Callable[[], None]) -> None:
        if self._over is not None:
            raise self._over.again()
        try:
            body()
        except PeerFailed as error:
            raise PeerFailed((self._peer,), error.evidence) from None
        except OpTimeout as error:
            raise OpTimeout("recv" if self._end else "send", error.seq, error.waited, (self._peer,)) from None

    def _send(self, tensor: Tensor, deadline: float) -> None:
        communicator = self._connected(deadline)
        message = [Send(self._byte(), 1, _TOKEN), Send(tensor, 1, _PAYLOAD)]
        communicator.batch_send_recv(message, timeout=_left(deadline))

    def _recv(self, token: Token | None, tensor: Tensor, deadline: float) -> None:
        communicator = self._connected(deadline)
        if token is None or token.arrival is None:
            message = [Recv(self._byte(), 0, _TOKEN), Recv(tensor, 0, _PAYLOAD)]
            communicator.batch_send_recv(message, timeout=_left(deadline))
            return
        with contextlib.suppress(TimeoutError):
            token.arrival.wait(_left(deadline))
        communicator.recv(tensor, 0, _PAYLOAD, timeout=_left(deadline))

    def _post(self, token: Token, deadline: float) -> None:
        token.arrival = self._connected(deadline).recv(self._byte(), 0, _TOKEN, async_op=True, timeout=_DAY)

    def _byte(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self._group.device)

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
                timeout=min(_CONNECT_SECONDS, _left(deadline)),
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

    def finish(self) -> None:
        """End the thread behind what is queued, and release the communicator."""
        self._queue.put(None)

    def ended(self, seconds: float) -> bool:
        """Whether the thread has ended, within `seconds` from now."""
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()


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
        return self._lane(Line(self._group.rank, dst, tag)).send(tensor, time.monotonic() + timeout)

    def recv(self, tensor: Tensor, src: int, tag: int, timeout: float) -> Work:
        return self._lane(Line(src, self._group.rank, tag)).recv(tensor, time.monotonic() + timeout)

    def recv_any(self, tensor: Tensor, tag: int, timeout: float) -> tuple[Work, list[int]]:
        """Receive from whoever sends first under `tag`; the list holds the sender when the work is done."""
        source: list[int] = []
        work = Work("recv")
        deadline = time.monotonic() + timeout

        def receive() -> None:
            src, taken = self._from_first(tensor, tag, timeout, deadline)
            taken.wait()
            source.append(src)

        thread = threading.Thread(target=work.run, args=(receive,), name="holdfast-recv-any", daemon=True)
        self._any = [each for each in self._any if each.is_alive()]
        self._any.append(thread)
        thread.start()
        return work, source

    def _from_first(self, tensor: Tensor, tag: int, timeout: float, deadline: float) -> tuple[int, Work]:
        """Who has sent, and the receive from there. Looks at every lane whose sender has come."""
        others = [rank for rank in range(self._group.size) if rank != self._group.rank]
        store = _own_client(self._store)
        pause = _FIRST_LOOK
        while True:
            for src in others:
                line = Line(src, self._group.rank, tag)
                lane = self._lanes.get(line)
                if (lane is None or not lane.connected) and not store.check([f"{line.name}/0"]):
                    continue
                if (taken := self._lane(line).recv_if_come(tensor, deadline)) is not None:
                    return src, taken
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
        for lane in self._end(error):
            lane.abort(error)

    def close(self) -> None:
        """End all threads and connections. What does not end by itself within a moment ends with `Revoked`."""
        closed = Revoked(self._group.epoch, "closed")
        lanes = self._end(closed)
        for lane in lanes:
            lane.finish()
        until = time.monotonic() + _GRACE_SECONDS
        pending = [lane for lane in lanes if not lane.ended(until - time.monotonic())]
        for lane in pending:
            lane.abort(closed)
        for lane in pending:
            lane.ended(_JOIN_SECONDS)
        for thread in self._any:
            thread.join(_JOIN_SECONDS)

    def _end(self, error: HoldfastError) -> list[Lane]:
        """Let nothing new begin; the lanes that there are."""
        with self._lock:
            self._over = self._over or error
            return list(self._lanes.values())


def _left(deadline: float) -> float:
    """Seconds that are left, for what takes no less than a moment."""
    return max(deadline - time.monotonic(), 0.001)


def _own_client(store: dist.Store) -> dist.Store:
    """Another client of the same store: who waits in a client of torch's TCPStore blocks all that share it."""
    clone: Callable[[], dist.Store] = store.clone  # type: ignore[attr-defined]  # missing in torch's stubs
    return clone()
