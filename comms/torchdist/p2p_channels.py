"""`P2PChannels`: torch's point-to-point ops, which run concurrently in any order of issue.

A communicator runs its ops one after the other: two ranks that both send first and receive second would deadlock. So
each ordered pair of ranks that exchange messages has its own channel, for all tags.

A channel is one direction between two ranks, with a communicator of the two, and a thread at each end (`ChannelEnd`). A
message is a header followed by its bytes. The communicator is connected once both ends have used the channel: they meet
in a store of the receiver's process, where the sender announces itself first. The receiving end reads only while a
receive is pending that the sender's message could complete; one from any rank is pending on all channels.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Revoked
from holdfast.comms.ops import Send
from holdfast.comms.rendezvous import tcp
from holdfast.comms.rendezvous.meeting_store import MeetingStore
from holdfast.comms.system import forks
from holdfast.comms.system.keys import Seal, job_key
from holdfast.comms.torchdist.message_matcher import HEADER_WORDS, Header, MessageMatcher, PendingMessage, PendingRecv
from holdfast.comms.transport.liveness import Liveness
from holdfast.comms.work import Work

Tensor = torch.Tensor

_HEADER, _PAYLOAD = 0, 1
"""Tags."""
_READY = ("ready/0", "ready/1")
"""The keys which the ends (0 sends, 1 receives) set in the channel's store when they first use the channel."""
_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
_CONNECT_SECONDS = 60.0
_DAY = 86_400.0


class _GivenUp(Exception):
    """The last op that waited for the connection has given up."""


class PairStores:
    """The stores where the two ranks of a channel meet: each in the receiver's process, and in no other.

    The ranks exchange their stores' addresses when the group begins. So a living pair can connect after other deaths:
    the group's own store, which often ends with rank 0, is not asked. It is collective over the group to make this;
    `timeout` (seconds) bounds each call of the stores.
    """

    def __init__(self, group: Communicator, timeout: float) -> None:
        self._rank, self._timeout, self._key = group.rank, timeout, job_key()
        self._own: dist.TCPStore | None = None
        self._places: list[tuple[str, int, str]] = []
        if group.size > 1:
            address = tcp.address_for(group.peers)
            self._own = tcp.serve(address, 0, timeout)
            # The scope is new for each group of a process: its keys are those of no group before.
            self._places = group.all_gather_object((address, self._own.port, secrets.token_hex(8)), timeout)

    def of_channel(self, name: str, dst: int, check_abort: Callable[[], None]) -> MeetingStore:
        """The store of a channel to `dst`; a sender connects to it. `check_abort`, which may raise, runs in each call.

        Raises `StoreSilent`, and `StoreLost` from its calls, which name the receiver.
        """
        host, port, scope = self._places[dst]
        store = self._own if dst == self._rank else tcp.dial(host, port, self._timeout, dst, check_abort)
        if store is None:
            raise HoldfastError("the group has ended")
        prefix = f"{scope}/{name}"
        return MeetingStore(
            store,
            prefix,
            where=f"{host}:{port}",
            timeout=self._timeout,
            seal=None if self._key is None else Seal(self._key, prefix.encode()),
            serving_rank=dst,
            check_abort=check_abort,
        )

    def close(self) -> None:
        """End this process's store, unless another group uses it."""
        self._own = None


class ChannelEnd:
    """One end of a channel with the group's rank `peer`. The subclass starts its thread."""

    _end: ClassVar[int]
    """0 sends, 1 receives."""

    def __init__(self, peer: int, group: Communicator, stores: PairStores) -> None:
        self.peer = peer
        self._src, self._dst = (peer, group.rank) if self._end else (group.rank, peer)
        self._name = f"p2p-{self._src}-{self._dst}"
        self._group = group
        self._stores = stores
        self._store: MeetingStore | None = None
        self._communicator: Communicator | None = None
        self._announced = False
        self._give_up: Callable[[], bool] = _never
        self._over: HoldfastError | None = None
        self._lock = threading.RLock()  # a signal's handler may abort
        self._liveness = Liveness([group.peers[group.rank], group.peers[self.peer]], 0)
        self._thread = threading.Thread(target=self._run, name=f"holdfast-{self._name}", daemon=True)

    def _serve(self) -> None:
        """The thread's main loop."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._liveness.close()
            self._store = None
            if self._communicator is not None:
                self._communicator.close()

    def _connected(self, give_up: Callable[[], bool]) -> Communicator | None:
        """Wait for the communicator until `give_up()`, and then return None. Raises if the channel fails."""
        pause = _FIRST_LOOK
        self._give_up = give_up
        try:
            while (communicator := self._try_to_connect()) is None:
                self._check_abort()
                time.sleep(pause)
                pause = min(2 * pause, _LAST_LOOK)
            return communicator
        except _GivenUp:
            return None
        finally:
            self._give_up = _never

    def _check_abort(self) -> None:
        """Raise if the channel, its group or its peer has ended, or the last waiting op has given up."""
        if self._over is not None:
            raise self._over.again()
        if (over := self._group.over) is not None:
            raise over.again()
        if self._liveness.dead():
            raise PeerFailed((self.peer,), "its process ended before it came to this channel")
        if self._give_up():
            raise _GivenUp

    def _try_to_connect(self) -> Communicator | None:
        """Connect if the peer has announced itself: only then is connecting quick. A dead peer ends the channel."""
        if self._communicator is not None:
            return self._communicator
        try:
            if self._store is None:
                self._store = self._stores.of_channel(self._name, self._dst, self._check_abort)
            if not self._announced and (self._end == 0 or self._store.check([_READY[0]])):
                self._store.set(_READY[self._end], "here")
                self._announced = True
            if not (self._announced and self._store.check([_READY[1 - self._end]])):
                return None
        except PeerFailed as error:
            self._over = self._over or PeerFailed((self.peer,), error.evidence)
            raise self._over.again() from error
        self._give_up = _never  # an attempt that is given up leaves its keys behind
        try:
            communicator = connect_members(
                self._group.backend,
                KnownMembers(
                    rank=self._end,
                    peers=[self._group.peers[self._src], self._group.peers[self._dst]],
                    store=self._store,
                    epoch=self._group.epoch,
                    name=f"{self._group.name}/{self._name}",
                ),
                device=self._group.device,
                timeout=_CONNECT_SECONDS,
                over=lambda: self._over,
            )
        except Exception as error:  # as does one that fails
            self._over = self._over or self._as_failure(error, "connecting to")
            raise self._over.again() from error
        with self._lock:
            self._communicator = communicator
            if self._over is not None:
                communicator.abort(self._over)
        return communicator

    def _as_failure(self, error: Exception, doing: str) -> HoldfastError:
        """What ends the channel, in ranks of the group."""
        translated = self._in_group_ranks(error)
        if isinstance(translated, HoldfastError):
            return translated
        return HoldfastError(f"{doing} rank {self.peer} failed: {error}")

    def _in_group_ranks(self, error: BaseException) -> BaseException:
        """Translate an error of the two-rank communicator to ranks of the group."""
        if isinstance(error, PeerFailed):
            return PeerFailed((self.peer,), error.evidence)
        if isinstance(error, OpTimeout):
            return OpTimeout("recv" if self._end else "send", error.seq, error.waited, (self.peer,))
        return error

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        """Fail pending and later messages with `error`. From any thread."""
        with self._lock:
            self._over = self._over or error
            if self._communicator is not None:
                self._communicator.abort(error)

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the thread, and return whether it has ended."""
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()


class SendChannel(ChannelEnd):
    """The sending end of a channel.

    A send ends by its deadline even while the thread connects: that may last, and later messages need what comes of it.
    """

    _end = 0

    def __init__(self, peer: int, group: Communicator, stores: PairStores) -> None:
        super().__init__(peer, group, stores)
        self._queue: queue.SimpleQueue[tuple[PendingMessage, Tensor, int] | None] = queue.SimpleQueue()
        self._thread.start()

    def send(self, tensor: Tensor, tag: int, timeout: float) -> Work:
        """Queue `tensor` for sending."""
        work = PendingMessage("send", timeout, lambda: self._expire(work))
        self._queue.put((work, tensor, tag))
        return work

    def finish(self) -> None:
        """Let the thread end after it has sent what is queued."""
        self._queue.put(None)

    def _serve(self) -> None:
        while True:
            waited_for = self._announced and self._communicator is None and self._over is None
            try:
                item = self._queue.get(timeout=_LAST_LOOK if waited_for else None)
            except queue.Empty:
                with contextlib.suppress(HoldfastError):  # the next message meets it again
                    self._try_to_connect()
                continue
            if item is None:
                return
            self._send(*item)
            del item  # its tensor

    def _send(self, work: PendingMessage, tensor: Tensor, tag: int) -> None:
        """Send the message, unless its deadline passes before that begins."""
        try:
            if self._over is not None:
                raise self._over.again()
            communicator = self._connected(work.done)
        except Exception as error:
            if self._claim(work):
                work.fail(self._in_group_ranks(error))
            return
        if communicator is not None and self._claim(work):
            work.run(partial(self._transmit, communicator, tensor, tag, work.deadline))

    def _transmit(self, communicator: Communicator, tensor: Tensor, tag: int, deadline: float) -> None:
        message = [Send(Header(tag, tensor.nbytes, tensor.dtype).words(self._group.device), 1, _HEADER)]
        if tensor.nbytes:
            message.append(Send(tensor, 1, _PAYLOAD))
        try:
            communicator.batch_send_recv(message, timeout=max(deadline - time.monotonic(), 0.001))
        except HoldfastError as error:
            raise self._in_group_ranks(error) from None

    def _claim(self, work: PendingMessage) -> bool:
        """Take a send off its deadline; False if that has ended it."""
        self._expire(work)
        with self._lock:
            mine, work.claimed = not work.claimed, True
        return mine

    def _expire(self, work: PendingMessage) -> None:
        with self._lock:
            if work.claimed or work.deadline > time.monotonic():
                return
            work.claimed = True
        work.fail(OpTimeout("send", 0, work.timeout, (self.peer,)))


class RecvChannel(ChannelEnd):
    """The receiving end of a channel. A failure fails the receives that this sender's messages could complete."""

    _end = 1

    def __init__(self, peer: int, group: Communicator, stores: PairStores, matcher: MessageMatcher) -> None:
        super().__init__(peer, group, stores)
        self._matcher = matcher
        self._thread.start()

    def _serve(self) -> None:
        while self._matcher.wait_wanted(self.peer):
            try:
                communicator = self._connected(lambda: not self._matcher.wanted(self.peer))
                if communicator is not None:
                    self._receive(communicator)
            except Exception as error:
                self._matcher.fail(self.peer, self._as_failure(error, "receiving from"))

    def _receive(self, communicator: Communicator) -> None:
        """Receive one message: into the tensor of its receive, if that is posted, else to be kept."""
        words = torch.empty(HEADER_WORDS, dtype=torch.int64, device=self._group.device)
        communicator.recv(words, 0, _HEADER, timeout=_DAY)
        header = Header.read(words)
        expected = self._matcher.claim(self.peer, header)
        if expected is None:
            self._matcher.keep(self.peer, header, self._payload(communicator, header))
            return
        if (mismatch := header.mismatch(expected.tensor, self.peer)) is not None:
            self._payload(communicator, header)
            expected.fail(mismatch)
            return

        def receive() -> None:
            try:
                if header.nbytes:
                    left = max(expected.deadline - time.monotonic(), 0.001)
                    communicator.recv(expected.tensor, 0, _PAYLOAD, timeout=left)
            except BaseException as error:
                raise self._in_group_ranks(error) from None
            expected.source[:] = [self.peer]

        expected.run(receive)
        if (error := expected.exception()) is not None:
            raise error

    def _payload(self, communicator: Communicator, header: Header) -> Tensor:
        """Receive the bytes of a message without a fitting receive into a new tensor."""
        count = header.nbytes // header.dtype.itemsize
        payload = torch.empty(count, dtype=header.dtype, device=self._group.device)
        if header.nbytes:
            communicator.recv(payload, 0, _PAYLOAD, timeout=_DAY)
        return payload.view(torch.uint8)


def _never() -> bool:
    return False


_GRACE_SECONDS = 0.5
"""How long `close` waits for pending messages before it revokes them."""
_JOIN_SECONDS = 10.0

_open: forks.Living[P2PChannels] = forks.Living()


class P2PChannels:
    """All channels of one rank of a group, and its pending receives. Made by all ranks of the group at once."""

    def __init__(self, group: Communicator, timeout: float) -> None:
        self._group = group
        self._stores = PairStores(group, timeout)
        self._matcher = MessageMatcher(group.size)
        self._to: dict[int, SendChannel] = {}
        self._from: dict[int, RecvChannel] = {}
        self._lock = threading.Lock()
        self._over: HoldfastError | None = None
        _open.add(self)

    def send(self, tensor: Tensor, dst: int, tag: int, timeout: float) -> Work:
        """Send to rank `dst`. Raises the errors of `Communicator.send` before any byte moves."""
        tensor = self._checked(tensor, dst, "dst")
        with self._lock:
            channel = self._to.get(dst)
            if channel is None:
                self._check_open()
                channel = self._to[dst] = SendChannel(dst, self._group, self._stores)
        return channel.send(tensor, tag, timeout)

    def recv(self, tensor: Tensor, src: int | None, tag: int, timeout: float) -> PendingRecv:
        """Receive from rank `src`; for None, from the first rank that sends under `tag`.

        Raises the errors of `Communicator.recv` before it is posted: a message that it took would be lost.
        """
        tensor = self._checked(tensor, src, "src")
        expected = self._matcher.expect(tensor, src, tag, timeout)
        for sender in range(self._group.size) if src is None else (src,):
            if sender != self._group.rank:
                self._receive_from(sender)
        return expected

    def _checked(self, tensor: Tensor, peer: int | None, what: str) -> Tensor:
        """The tensor of a message as a plain one."""
        tensor = self._group.check_message(tensor, received=what == "src")
        if peer is None:
            return tensor
        if not 0 <= peer < self._group.size:
            raise ValueError(f"{what}={peer} is out of range: group ranks are 0 to {self._group.size - 1}")
        if peer == self._group.rank:
            raise ValueError(f"rank {peer} cannot send to or receive from itself")
        return tensor

    def _receive_from(self, src: int) -> None:
        with self._lock:
            if src not in self._from:
                self._check_open()
                self._from[src] = RecvChannel(src, self._group, self._stores, self._matcher)

    def _check_open(self) -> None:
        if self._over is not None:
            raise self._over.again()

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
    for channels in _open:
        channels.close(0.0, 2.0)


forks.run_in_children(_open.clear)
