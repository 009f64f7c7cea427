"""`P2PChannels`: torch's point-to-point ops, which run concurrently in any order of issue.

A communicator runs its ops one after the other: two ranks that both send first and receive second would deadlock. So
each ordered pair of ranks that exchange messages has its own channel, for all tags.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, PeerFailed, Revoked
from holdfast.comms.system import forks
from holdfast.comms.torchdist.p2p.channel import (
    ChannelEnd,
    ChannelRanks,
    PairStores,
    RecvChannel,
    SendChannel,
    ready_key,
)
from holdfast.comms.torchdist.p2p.message_matcher import MessageMatcher, PendingRecv
from holdfast.comms.transport.liveness import Liveness
from holdfast.comms.work import Work

Tensor = torch.Tensor

_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
_GRACE_SECONDS = 0.5
"""How long `close` waits for pending messages before it revokes them."""
_JOIN_SECONDS = 10.0

_open: weakref.WeakSet[P2PChannels] = weakref.WeakSet()


class P2PChannels:
    """All channels of one rank of a group, and its pending receives. Made by all ranks of the group at once."""

    def __init__(self, group: Communicator, timeout: float) -> None:
        self._group = group
        self._stores = PairStores(group, timeout)
        self._matcher = MessageMatcher(group.size)
        self._to: dict[int, SendChannel] = {}
        self._from: dict[int, RecvChannel] = {}
        self._lock = threading.Lock()
        self._scout: threading.Thread | None = None
        self._over: HoldfastError | None = None
        _open.add(self)

    def send(self, tensor: Tensor, dst: int, tag: int, timeout: float) -> Work:
        """Send to rank `dst`. Raises the errors of `Communicator.send` before any byte moves."""
        self._check(tensor, dst, "dst")
        with self._lock:
            channel = self._to.get(dst)
            if channel is None:
                self._check_open()
                ranks = ChannelRanks(self._group.rank, dst)
                channel = self._to[dst] = SendChannel(ranks, self._group, self._stores)
        return channel.send(tensor, tag, timeout)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout: float) -> PendingRecv:
        """Receive from rank `src`; for None, from the first rank that sends under `tag`."""
        self._check(tensor, src, "src")
        expected = self._matcher.expect(tensor, src, tag, timeout)
        if src is None:
            self._look_for_senders()
        else:
            self._receive_from(src)
        return expected

    def _check(self, tensor: Tensor, peer: int | None, what: str) -> None:
        self._group.check_movable(tensor)
        if peer is None:
            return
        if not 0 <= peer < self._group.size:
            raise ValueError(f"{what}={peer} is out of range: group ranks are 0 to {self._group.size - 1}")
        if peer == self._group.rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")

    def _receive_from(self, src: int) -> None:
        with self._lock:
            if src not in self._from:
                self._check_open()
                ranks = ChannelRanks(src, self._group.rank)
                self._from[src] = RecvChannel(ranks, self._group, self._stores, self._matcher)

    def _check_open(self) -> None:
        if self._over is not None:
            raise self._over.again()

    # -- receives from any rank

    def _look_for_senders(self) -> None:
        """Start the thread that finds ranks which have begun to send, while a receive from any rank is pending."""
        with self._lock:
            if self._scout is None or not self._scout.is_alive():
                self._scout = threading.Thread(target=self._look, name="holdfast-p2p-scout", daemon=True)
                self._scout.start()

    def _look(self) -> None:
        ranks = [ChannelRanks(src, self._group.rank) for src in range(self._group.size) if src != self._group.rank]
        liveness = Liveness(self._group.peers, self._group.rank)
        pause = _FIRST_LOOK
        try:
            stores = {each.src: self._stores.of_channel(each) for each in ranks}
            while self._over is None and self._must_look():
                for dead in liveness.dead():
                    self._matcher.fail(dead, PeerFailed((dead,), "its process ended"))
                for src, store in stores.items():
                    if src not in self._from and store.check([ready_key(0)]):
                        self._receive_from(src)
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK)
        except HoldfastError as error:
            for each in ranks:
                if each.src not in self._from:
                    self._matcher.fail(each.src, self._over or error)
        finally:
            liveness.close()

    def _must_look(self) -> bool:
        with self._lock:
            if self._matcher.wanted(None):
                return True
            self._scout = None
            return False

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        """Fail all pending messages with `error`. From any thread."""
        for channel in self._end(error):
            channel.abort(error)

    def close(self, grace: float = _GRACE_SECONDS, join: float = _JOIN_SECONDS) -> None:
        """End all threads and connections. A send that does not complete within `grace` seconds is revoked."""
        closed = Revoked(self._group.epoch, "closed")
        channels = self._end(closed)
        for sending in self._to.values():
            sending.finish()
        until = time.monotonic() + grace
        for receiving in self._from.values():
            receiving.abort(closed)
        pending = [channel for channel in channels if not channel.join(until - time.monotonic())]
        for channel in pending:
            channel.abort(closed)
        for channel in pending:
            channel.join(join)
        if (scout := self._scout) is not None:
            scout.join(join)
        self._stores.close()

    def _end(self, error: HoldfastError) -> list[ChannelEnd]:
        """Refuse new messages and fail all receives; return the existing channels."""
        with self._lock:
            self._over = self._over or error
            channels = [*self._to.values(), *self._from.values()]
        self._matcher.fail_all(error)
        return channels


@atexit.register
def _close_all() -> None:
    """Close all channels at exit: a thread inside a backend would end the process with SIGABRT."""
    for channels in list(_open):
        channels.close(0.0, 2.0)


forks.run_in_children(_open.clear)
