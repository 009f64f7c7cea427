"""How ranks become a communicator: meet, say what each can run, take the first backend that all can, connect.

Nothing falls back silently: the choice and the reasons are logged once, by rank 0; a preference that no backend
satisfies on every rank is an error on every rank.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast.comms import rendezvous as places
from holdfast.comms.communicator import Communicator, discard_unconnected
from holdfast.comms.errors import BackendUnavailable, HoldfastError, Mismatch, OpTimeout, Unsupported, again
from holdfast.comms.journal import Recorder
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.rendezvous.gathering import Gathering, MeetingCount, connected
from holdfast.comms.rendezvous.offers import Offer, shorten
from holdfast.comms.system import forks
from holdfast.comms.system.environment import flag
from holdfast.comms.system.keys import job_key
from holdfast.comms.system.local_causes import reraise_local_cause
from holdfast.comms.transport.base import Context, Peer, Transport
from holdfast.comms.transport.liveness import this_process

log = logging.getLogger("holdfast.comms")

_counts: dict[tuple[str, str, int], MeetingCount] = {}
_open: set[tuple[str, str, int]] = set()
_lock = threading.Lock()


@forks.in_child
def _begin_child() -> None:
    """None of its parent's ranks are connected in a forked child."""
    global _lock
    _lock = threading.Lock()
    _open.clear()
    connected.clear()


def checks_are_on() -> bool:
    """Whether HOLDFAST_CHECK, or torch's debug level DETAIL, asks for agreement checks.

    Raises ValueError for a value of HOLDFAST_CHECK that says neither yes nor no.
    """
    return flag("HOLDFAST_CHECK") or dist.get_debug_level() == dist.DebugLevel.DETAIL


@reraise_local_cause("connecting")
def connect(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | dist.Store = "env://",
    name: str = "default",
    device: str | torch.device | None = None,
    timeout: float = 30.0,
) -> Communicator:
    """Connect this process, as one rank, with the others; collective.

    `backend` is a name, a preference list ("ucx,gloo"), or "auto". `rank` and `size` default to RANK and
    WORLD_SIZE. `name` tells apart communicators that meet at the same place. `timeout` (seconds) bounds this call,
    and is the default for every op.

    Whoever can write to the rendezvous can come as a rank, or keep a rank out: any user of the network that the port
    is on, of the machine for loopback, of the folder for a file. If HOLDFAST_KEY_FILE names a job's key
    (`holdfast run` makes one), what the ranks tell each other there is authenticated with it, and strangers can no
    longer come as ranks. It guards the meeting, not the tensors: no backend encrypts or authenticates those.

    Raises `BackendUnavailable` (on every rank, if one lacks the backend), `Mismatch` (ranks disagree, or this rank is
    taken), `OpTimeout` (naming the ranks that did not come), `PeerFailed`, `CorruptData` (what is at the rendezvous was
    not written by the ranks), `KeyRefused`, ValueError.
    """
    timeout = seconds(timeout)
    deadline = time.monotonic() + timeout
    rank = None if rank is None else integer(rank, "rank")
    size = None if size is None else integer(size, "size")
    where = torch.device("cpu" if device is None else device)
    preference, unavailable = _asked(backend, where)
    key = job_key()

    def find() -> places.MeetingPlace:
        return places.meet(rendezvous, rank, size, max(0.0, deadline - time.monotonic()))

    try:
        place = find()
    except ValueError:
        if len(unavailable) == len(preference):
            raise _none_available(backend, unavailable) from None
        raise
    identity = (place.key, name, place.rank)
    with _lock:
        if identity in _open:
            raise Mismatch(
                f"rank {place.rank} of {name!r} is connected in this process already; close it first, or pass "
                "another name"
            )
        _open.add(identity)
        count = _counts.setdefault(identity, MeetingCount())
    gathering = Gathering(
        place,
        name,
        count,
        deadline=deadline,
        timeout=timeout,
        key=key,
        renew=find if place.by_rank_0 and not place.served else None,
    )
    offer = _offer(place.size, preference, unavailable)
    connected.add(offer.nonce)
    del place
    try:
        decide = functools.partial(_choose, rank=gathering.place.rank, name=name)
        with gathering.meeting(offer, decide) as meeting:
            return _build(
                meeting.decision,
                functools.partial(
                    Context,
                    rank=gathering.place.rank,
                    size=gathering.place.size,
                    name=name,
                    epoch=0,
                    device=where,
                    store=meeting.store,
                    peers=tuple(each.peer for each in meeting.offers),
                    deadline=deadline,
                ),
                timeout,
                check=any(each.check for each in meeting.offers),
                on_close=functools.partial(_forget, identity, gathering.place, offer.nonce),
            )
    except BaseException:
        _forget(identity, gathering.place, offer.nonce)
        raise


@reraise_local_cause("connecting")
def connect_part(
    whole: Communicator,
    members: tuple[int, ...],
    count: MeetingCount,
    context: Context,
    *,
    timeout: float,
    op_timeout: float,
    recorder: Recorder | None,
) -> Communicator:
    """Connect `members` of a communicator as one of their own; collective over these. See `connect_members`.

    `count` numbers the communicators of just these ranks; `context` is the one that the whole was connected with.
    """
    deadline = time.monotonic() + timeout
    rank = members.index(whole.rank)
    within = f"{whole.name}/{'-'.join(map(str, members))}"
    place = places.MeetingPlace(rank, len(members), context.store, within, f"the rendezvous of {whole.name!r}")

    def check_abort() -> None:
        if (error := whole.over) is not None:
            raise again(error)

    gathering = Gathering(place, within, count, deadline=deadline, timeout=timeout, check_abort=check_abort)
    with gathering.meeting(_offer(len(members), [whole.backend], {}), lambda offers: None) as meeting:
        return connect_members(
            whole.backend,
            rank=rank,
            size=len(members),
            store=meeting.store,
            peers=[context.peers[member] for member in members],
            epoch=whole.epoch,
            name=f"{within}.{meeting.number}",
            device=whole.device,
            timeout=max(0.0, deadline - time.monotonic()),
            op_timeout=op_timeout,
            over=lambda: whole.over,
            recorder=recorder,
        )


@reraise_local_cause("connecting")
def connect_members(
    backend: str,
    *,
    rank: int,
    size: int,
    store: dist.Store,
    peers: Sequence[Peer],
    epoch: int,
    name: str = "default",
    device: str | torch.device | None = None,
    timeout: float = 30.0,
    op_timeout: float | None = None,
    over: Callable[[], HoldfastError | None] = lambda: None,
    recorder: Recorder | None = None,
    previous: Communicator | None = None,
    connect_payload: Sequence[int] = (),
) -> Communicator:
    """Connect ranks that know each other already: no negotiation, for the rebuild of an epoch.

    `backend` is one name, known to run on all members; `store` is private to this epoch; `peers` are in rank order.
    `timeout` bounds the call; `op_timeout` (default: the same) is the default for every op. The call ends with what
    `over()` gives once that is not None. `recorder` is told of every op, and of those of communicators split off.
    `previous` is the communicator of the epoch before, aborted and not closed; the backend may keep what is good of it.
    `connect_payload` may come along with the connection (`Communicator.connect_payloads`).
    """
    info = registry().backend(backend).info
    connecting = True
    told = functools.partial(
        Context,
        rank=rank,
        size=size,
        name=name,
        epoch=epoch,
        device=torch.device("cpu" if device is None else device),
        store=store,
        peers=tuple(peers),
        deadline=time.monotonic() + timeout,
        over=lambda: over() if connecting else None,
        journal=None if recorder is None else recorder.journal(name, epoch, rank, size, backend),
        previous=None if previous is None or previous.backend != backend else previous.transport,
        connect_payload=tuple(connect_payload),
    )
    communicator = _build(
        info, told, timeout if op_timeout is None else op_timeout, check=checks_are_on(), recorder=recorder
    )
    connecting = False
    return communicator


def choose_backend(preference: str, peers: Sequence[Peer], device: str | torch.device | None = None) -> str:
    """The first backend of a preference that this process can run, given where its peers are."""
    where = torch.device("cpu" if device is None else device)
    names = _preference(preference, where)
    unavailable = _unavailable(names) | _unfit(names, peers)
    for name in names:
        if name not in unavailable:
            return name
    raise _none_available(preference, unavailable)


def runnable_backends(backend: str, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The names of a preference that this process can run, in order; and why it cannot run the others.

    Those that it can run prepare themselves for being chosen.

    Raises `BackendUnavailable` for an unknown name, ValueError for an empty preference.
    """
    names = _preference(backend, device)
    unavailable = _unavailable(names)
    runnable = [name for name in names if name not in unavailable]
    for name in runnable:
        if (prepare := registry().backend(name).info.prepare) is not None:
            prepare()
    return runnable, unavailable


def _build(
    info: BackendInfo, told: Callable[..., Context], timeout: float, *, check: bool, **more: Any
) -> Communicator:
    """The communicator over the transport that the backend makes of all that it is `told`."""
    assert info.connect is not None, "a preference holds only backends that connect"
    made: list[Communicator] = []

    def make(transport: Transport) -> None:
        discard()
        made.append(Communicator(transport, context, info, connect_part, timeout=timeout, check=check, **more))

    def discard() -> None:
        while made:
            discard_unconnected(made.pop())

    context = told(meanwhile=make)
    try:
        transport = _connect(info.connect, context)
    except BaseException:
        discard()
        raise
    if not made or made[0].transport is not transport:
        make(transport)
    return made.pop()  # what was made may hold `make`, and must not hold the communicator


def _connect(connect: Callable[[Context], Transport], context: Context) -> Transport:
    """The transport; to a journal, connecting is the communicator's op number 0."""
    journal = context.journal
    if journal is None:
        return _in_time(connect, context)
    journal.enter("connect", 0, 0, None, None, -1)
    try:
        transport = _in_time(connect, context)
    except BaseException as error:
        journal.leave(error)
        raise
    journal.leave(None)
    return transport


def _in_time(connect: Callable[[Context], Transport], context: Context) -> Transport:
    began = time.monotonic()
    try:
        return connect(context)
    except TimeoutError as error:
        if isinstance(error, HoldfastError):
            raise
        raise OpTimeout("connect", 0, time.monotonic() - began) from error


def _forget(identity: tuple[str, str, int], place: places.MeetingPlace, nonce: str) -> None:
    """The rank may connect again. Until this is called `place` is held, and so the store that it may serve."""
    with _lock:
        _open.discard(identity)
        connected.discard(nonce)


def _offer(size: int, preference: list[str], unavailable: dict[str, str]) -> Offer:
    return Offer(secrets.token_hex(16), this_process(), size, preference, shorten(unavailable), checks_are_on())


def _asked(backend: str, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The backends to try, in order, and why this process cannot run some of them. An unknown one is such a reason:
    other ranks may have its plugin, and learn here that this one has not.

    Raises ValueError for no backend, `Unsupported` for one that only has a memory plane.
    """
    names = _names(backend, device)
    known = [name for name in names if name in registry().backends]
    for name in known:
        _check_connects(name)
    unavailable = _unavailable(known)
    for name in names:
        if name not in known:
            try:
                registry().backend(name)
            except BackendUnavailable as error:
                unavailable[name] = error.reason
    return names, unavailable


def _preference(backend: str, device: torch.device) -> list[str]:
    """The backends to try, in order. Names that are unknown, or of planes, are refused before anybody is met."""
    names = _names(backend, device)
    for name in names:
        _check_connects(name)
    return names


def _names(backend: str, device: torch.device) -> list[str]:
    if backend == "auto":
        order = ["shm", "gloo"] if device.type == "cpu" else ["nccl", "rccl"]
        return [name for name in order if name in registry().backends]
    names = [name.strip() for name in backend.split(",") if name.strip()]
    if not names:
        raise ValueError("backend is empty: pass a name, a preference list such as 'ucx,gloo', or 'auto'")
    return names


def _check_connects(name: str) -> None:
    if registry().backend(name).info.connect is None:
        raise Unsupported(f"a communicator over {name!r}", "it offers a memory plane only: comms.memory()")


def _unavailable(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        status = registry().backend(name).status
        if isinstance(status, Unavailable):
            found[name] = status.reason
    return found


def _unfit(names: Sequence[str], peers: Sequence[Peer]) -> dict[str, str]:
    """Backends that cannot join these peers, wherever each could run."""
    found = {}
    for name in names:
        capabilities = registry().backend(name).info.capabilities
        if capabilities.one_process and len({(p.host, p.pid) for p in peers}) > 1:
            found[name] = "the ranks are different processes"
        elif capabilities.one_host and len({p.host for p in peers}) > 1:
            found[name] = "the ranks are on different hosts"
    return found


def _none_available(backend: str, reasons: dict[str, str]) -> BackendUnavailable:
    hints = []
    for name in reasons:
        try:
            status = registry().backend(name).status
        except BackendUnavailable as error:
            hints.append(error.install_hint)
        else:
            hints += [status.install_hint] if isinstance(status, Unavailable) else []
    if len(reasons) == 1 and backend in reasons:
        return BackendUnavailable(backend, reasons[backend], next(filter(None, hints), ""))
    return BackendUnavailable(
        backend, "; ".join(f"{name}: {reason}" for name, reason in reasons.items()), next(filter(None, hints), "")
    )


def _choose(offers: Sequence[Offer], rank: int, name: str) -> BackendInfo:
    """The first backend that all ranks can run: the same on every rank, since all see the same offers."""
    preference = offers[0].preference
    reasons = _unfit(preference, [o.peer for o in offers])
    for r, offer in enumerate(offers):
        for backend, reason in offer.unavailable.items():
            reasons.setdefault(backend, f"rank {r}: {reason}")
    for backend in preference:
        if backend not in reasons:
            if rank == 0:
                passed = "; ".join(f"not {b}: {why}" for b, why in reasons.items())
                log.info(
                    "communicator %r of %d ranks uses %s%s",
                    name,
                    len(offers),
                    backend,
                    passed and f" ({passed})",
                )
            return registry().backend(backend).info
    raise _none_available(",".join(preference), reasons)
