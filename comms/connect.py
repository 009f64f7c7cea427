"""`connect`: ranks meet, exchange what each can run, take the first backend that all can run, and connect.

There is no silent fallback: rank 0 logs the choice and the reasons; if no backend of the preference runs on every rank,
all ranks raise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from holdfast.comms import rendezvous as places
from holdfast.comms.communicator import Communicator, Connector, discard_unconnected
from holdfast.comms.errors import (
    BackendUnavailable,
    HoldfastError,
    Mismatch,
    OpTimeout,
    PeerFailed,
    Unsupported,
    again,
)
from holdfast.comms.executor import OpSettings
from holdfast.comms.plugins.hints import Hints, Value, parse_hints
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.rendezvous import tcp
from holdfast.comms.rendezvous.handles import VERSION, Members, ProcessHandle, epoch_of, fingerprint, parse_members
from holdfast.comms.rendezvous.meeting_store import StoreSilent
from holdfast.comms.rendezvous.offer_exchange import (
    MeetingCounter,
    Offer,
    OfferExchange,
    connected_ranks,
    meeting_counters,
    shorten,
)
from holdfast.comms.rendezvous.tcp import LOOPBACK, address_for
from holdfast.comms.system import forks
from holdfast.comms.system.environment import flag, own_address
from holdfast.comms.system.keys import job_key
from holdfast.comms.system.local_causes import reraise_local_cause
from holdfast.comms.system.signal_safety import shared_lock
from holdfast.comms.transport.base import Context, Peer, Transport
from holdfast.comms.transport.liveness import is_gone, this_host, this_process

log = logging.getLogger("holdfast.comms")

_NAMED_RANKS = 8
"""The number of a part's ranks that an error names by their numbers in the whole."""

_counts = meeting_counters()
_lock = shared_lock()

forks.run_in_children(connected_ranks.clear)


def checks_are_on() -> bool:
    """Whether HOLDFAST_CHECK, or torch's debug level DETAIL, turns agreement checks on.

    Raises ValueError for a value of HOLDFAST_CHECK that is neither on nor off.
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
    hints: Hints | None = None,
) -> Communicator:
    """Connect this process, as one rank, with the others; collective.

    `backend` is a name, a preference list ("ucx,gloo"), or "auto". `rank` and `size` default to RANK and WORLD_SIZE.
    `name` distinguishes communicators that meet at the same place. `timeout` (seconds) bounds this call, and is the
    default for every op. `hints` are settings of the backend, the same on all ranks: `holdfast backends --hints` lists
    them. A backend of a preference list, or of "auto", that lacks one of them is not taken.

    Any process that can write to the rendezvous can join as a rank, or keep a rank out: from the port's network, for
    loopback from the same machine, for a file with access to its folder. If HOLDFAST_KEY_FILE names a job's key
    (`holdfast run` makes one), what the ranks write there is authenticated with it, and only processes with the key
    can join. The key protects the rendezvous, not the tensors: no backend encrypts or authenticates those.

    Raises `BackendUnavailable` (on every rank, if one lacks the backend), `Mismatch` (ranks disagree, or this rank is
    taken), `OpTimeout` (naming the missing ranks), `PeerFailed`, `CorruptData` (another program wrote to the
    rendezvous), `KeyRefused`, ValueError.
    """
    timeout = seconds(timeout)
    if _is_peerless(backend):
        rank, size = places.rank_and_size(rank, size)
        alone = KnownMembers(rank=rank, peers=[this_process()] * size, store=dist.HashStore(), epoch=0, name=name)
        return connect_members(backend, alone, device=device, timeout=timeout, hints=hints)
    deadline = time.monotonic() + timeout
    rank = None if rank is None else integer(rank, "rank")
    size = None if size is None else integer(size, "size")
    where = torch.device("cpu" if device is None else device)
    preference, unavailable = _requested_backends(backend, where, hints, unknown=True)
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
    offer = _offer(place.size, preference, unavailable, agreed=_as_texts(hints), auto=backend == "auto")
    try:
        with _lock:
            if identity in connected_ranks:
                raise Mismatch(
                    f"rank {place.rank} of {name!r} is connected in this process already; close it first, or pass "
                    "another name"
                )
            connected_ranks[identity] = offer.nonce
            count = _counts(identity)
        exchange = OfferExchange(
            place,
            name,
            count,
            deadline=deadline,
            timeout=timeout,
            key=key,
            renew=find if place.by_rank_0 and not place.served else None,
        )
        del place
        decide = functools.partial(_choose, rank=exchange.place.rank, name=name)
        with exchange.meeting(offer, decide) as meeting:
            communicator = _join(
                meeting.decision,
                KnownMembers(
                    rank=exchange.place.rank,
                    peers=[each.peer for each in meeting.offers],
                    store=meeting.store,
                    epoch=0,
                    name=name,
                    address=own_address(),
                ),
                where,
                deadline,
                OpSettings(
                    timeout,
                    any(each.check for each in meeting.offers),
                    functools.partial(_release_rank, identity, exchange.place, offer.nonce),
                ),
                hints,
            )
            communicator._membership.request = backend
            return communicator
    except BaseException:
        _release_rank(identity, None, offer.nonce)
        raise


def _is_peerless(backend: str) -> bool:
    """Whether `backend` connects without other ranks. Raises `Unsupported` for a list with such a backend."""
    known = registry().backends
    named = [name.strip() for name in backend.split(",")]
    found = [name for name in named if name in known and known[name].capabilities.peerless]
    if found and len(named) > 1:
        raise Unsupported(f"{found[0]!r} in a preference list", "it moves nothing: ask for it alone")
    return bool(found)


@reraise_local_cause("connecting")
def connect_part(
    whole: Communicator,
    members: tuple[int, ...],
    count: MeetingCounter,
    *,
    timeout: float,
    name: str | None = None,
    hints: Hints | None = None,
) -> Communicator:
    """Connect `members` of a communicator as a new one; collective over the members. See `connect_members`.

    `count` numbers the communicators of exactly these ranks. The part inherits the hints and the timeout of ops.
    """
    context = whole._context
    hints = {**context.hints, **_parse_hints(whole.backend, hints)}
    deadline = time.monotonic() + timeout
    rank = members.index(whole.rank)
    within = f"{whole.name}/{'-'.join(map(str, members))}"
    place = places.MeetingPlace(rank, len(members), context.store, within, f"the rendezvous of {whole.name!r}")

    def check_abort() -> None:
        if (error := whole.over) is not None:
            raise again(error)

    exchange = OfferExchange(place, within, count, deadline=deadline, timeout=timeout, check_abort=check_abort)
    agreed = _as_texts(hints) | ({} if name is None else {"name": f"as {name!r}"})
    offer = _offer(len(members), [whole.backend], {}, agreed)
    with _naming_members(whole, members), exchange.meeting(offer, lambda offers: None) as meeting:
        return connect_members(
            whole.backend,
            KnownMembers(
                rank=rank,
                peers=[context.peers[member] for member in members],
                store=meeting.store,
                epoch=whole.epoch,
                name=f"{within}.{meeting.number}" if name is None else name,
            ),
            device=whole.device,
            timeout=max(0.0, deadline - time.monotonic()),
            hints=hints,
            over=lambda: whole.over,
            settings=OpSettings(whole._executor.timeout, recorder=whole._recorder),
        )


def unconnected(
    backend: str = "auto",
    *,
    name: str = "default",
    device: str | torch.device | None = None,
    timeout: float = 30.0,
    hints: Hints | None = None,
) -> Communicator:
    """Make a communicator without members: its ops raise `NotConnected` until `reconfigure` has been called.

    The arguments are those of `connect`. Its rank is -1 and its size 0. Raises `BackendUnavailable` if this process can
    run none of the backends.
    """
    where = torch.device("cpu" if device is None else device)
    runnable, unavailable = runnable_backends(backend, where, hints)
    if not runnable:
        raise _none_available(backend, unavailable)
    info = registry().backend(runnable[0]).info
    store, given = dist.HashStore(), _parse_hints(info.name, hints)
    context = Context(0, 1, name, 0, where, store, (this_process(),), 0.0, links=info.links, hints=given)
    transport: Transport = _UNCONNECTED()
    transport.rank, transport.size, transport.medium = 0, 1, "not connected"
    communicator = Communicator(transport, context, info, _CONNECTOR, OpSettings(seconds(timeout)))
    communicator.rank, communicator.size = -1, 0
    communicator._executor.begin_unconnected()
    communicator._membership.request = backend
    return communicator


def make_handle(communicator: Communicator) -> tuple[str, object]:
    """This process's handle as a member, and the store that it names, which lives as long as it is held."""
    device, request = communicator.device, communicator._membership.request
    runnable, _ = runnable_backends(request or communicator.backend, device, communicator._context.hints)
    address = address_for(communicator.peers) if own_address() == "" else own_address()
    store = tcp.serve(address, 0, communicator._executor.timeout)
    handle = ProcessHandle(
        VERSION,
        fingerprint(job_key()),
        this_process(),
        next(_handle_numbers),
        device.type,
        tuple(runnable),
        f"{address}:{store.port}",
    )
    return handle.encode(), store


def check_members_of(
    communicator: Communicator, uuid: int | str, handles: Sequence[str] | Set[str], hints: Hints | None
) -> tuple[int, Members, str, dict[str, Value]]:
    """See `Communicator.check_members`. Returns the epoch, the members, and their backend with its hints."""
    epoch, members = epoch_of(uuid), parse_members(handles, communicator.handle())
    if uuid in communicator._membership.used:
        raise HoldfastError(f"reconfigure: uuid {uuid!r} was already used; take a new one")
    if gone := [rank for rank, peer in enumerate(members.peers) if is_gone(peer)]:
        raise PeerFailed(gone, "its process has ended")
    chosen = choose_backend(",".join(members.backends), members.peers, communicator.device)
    return epoch, members, chosen, _parse_hints(chosen, {**communicator._context.hints, **(hints or {})})


@reraise_local_cause("connecting")
def connect_members_of(
    communicator: Communicator,
    uuid: int | str,
    handles: Sequence[str] | Set[str],
    timeout: float,
    hints: Hints | None,
) -> Communicator:
    """See `Communicator.reconfigure`: ends what `communicator` was, and returns what it is to become."""
    deadline = time.monotonic() + timeout
    epoch, members, backend, agreed_hints = check_members_of(communicator, uuid, handles, hints)
    membership = communicator._membership
    membership.name = membership.name or communicator.name
    membership.used.add(uuid)
    communicator.close()
    place = _place_of(members, membership.store, timeout)
    scope = f"reconfigure/{members.handles[0].number}/{uuid}"  # communicators of the first's process share its store
    exchange = OfferExchange(place, scope, MeetingCounter(), deadline=deadline, timeout=timeout, key=job_key())
    agreed = {"the handles": f"of digest {members.digest}", **_as_texts(agreed_hints)}
    size = len(members.handles)
    with exchange.meeting(_offer(size, [backend], {}, agreed), lambda offers: None) as meeting:
        return connect_members(
            backend,
            KnownMembers(
                rank=members.rank,
                peers=members.peers,
                store=meeting.store,
                epoch=epoch,
                name=f"{membership.name}/{uuid}",
                address=own_address(),
            ),
            device=communicator.device,
            timeout=max(0.0, deadline - time.monotonic()),
            hints=agreed_hints,
            settings=OpSettings(
                communicator._executor.timeout, recorder=communicator._recorder, hooks=communicator.hooks
            ),
        )


def _place_of(members: Members, own: object, timeout: float) -> places.MeetingPlace:
    """The store of the first member, where all meet."""
    first = members.handles[0]
    key = f"own:{first.at}"
    if members.rank == 0:
        assert isinstance(own, dist.Store)
        return places.MeetingPlace(0, len(members.handles), own, key, first.at, served=True, by_rank_0=True)

    def check_first() -> None:
        if is_gone(first.peer):
            raise PeerFailed((0,), "its process has ended")

    host, port = first.place
    if host == LOOPBACK and first.peer.host != this_host():
        raise HoldfastError(
            f"the first member listens on {host} alone, and is on another host; set HOLDFAST_HOST there to an address "
            "that the others reach, or pass another handle first"
        )
    try:
        store = tcp.dial(host, port, timeout, 0, check_first)
    except StoreSilent:
        check_first()
        raise
    return places.MeetingPlace(members.rank, len(members.handles), store, key, first.at, by_rank_0=True)


@contextlib.contextmanager
def _naming_members(whole: Communicator, members: Sequence[int]) -> Iterator[None]:
    """Let errors of a part, which name its ranks, say which ranks of the whole these are."""
    try:
        yield
    except HoldfastError as error:
        if whole.over is not None or members == tuple(range(len(members))):
            raise
        ranks = getattr(error, "missing_ranks" if isinstance(error, OpTimeout) else "ranks", ())
        named = ranks or range(len(members))
        pairs = ", ".join(f"rank {rank} is rank {members[rank]}" for rank in named[:_NAMED_RANKS])
        more = ", ..." if len(named) > _NAMED_RANKS else ""
        copy = error.again()
        copy.args = (f"{error} (of {whole.name!r}, {pairs}{more})",)
        raise copy from error


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMembers:
    """The ranks of an epoch, as one of them (`rank`) knows them all without a meeting.

    `peers` are in rank order. `store` is private to this epoch. `previous` is the communicator of the epoch before,
    aborted and not closed; the backend may reuse its parts. The backend may deliver `connect_payload` to the other
    ranks (`Communicator.connect_payloads`). `address` is where the other ranks reach this host ("": not known).
    """

    rank: int
    peers: Sequence[Peer]
    store: dist.Store
    epoch: int
    name: str = "default"
    previous: Communicator | None = None
    connect_payload: Sequence[int] = ()
    address: str = ""


@reraise_local_cause("connecting")
def connect_members(
    backend: str,
    members: KnownMembers,
    *,
    device: str | torch.device | None = None,
    timeout: float = 30.0,
    hints: Hints | None = None,
    over: Callable[[], HoldfastError | None] = lambda: None,
    settings: OpSettings | None = None,
) -> Communicator:
    """Connect ranks that know each other already, without negotiation: for the rebuild of an epoch.

    `backend` is one name, known to run on all members. `timeout` bounds the call, and is the default for every op
    unless `settings` say another. `hints` are the backend's, as in `connect`. The call raises the error that `over()`
    returns, once it returns one.
    """
    where = torch.device("cpu" if device is None else device)
    ops = replace(settings or OpSettings(timeout), check=checks_are_on())
    return _join(registry().backend(backend).info, members, where, time.monotonic() + timeout, ops, hints, over)


def choose_backend(preference: str, peers: Sequence[Peer], device: str | torch.device | None = None) -> str:
    """The first backend of a preference that this process can run and that reaches all peers."""
    where = torch.device("cpu" if device is None else device)
    names, unavailable = _requested_backends(preference, where)
    unavailable |= _unable_to_connect(names, peers)
    for name in names:
        if name not in unavailable:
            return name
    raise _none_available(preference, unavailable)


def runnable_backends(
    backend: str, device: torch.device, hints: Hints | None = None
) -> tuple[list[str], dict[str, str]]:
    """The backends of a preference that this process can run with these hints, in order; and why not the others.

    Calls `prepare` of those that it can run. Raises `BackendUnavailable` for an unknown name, ValueError for an empty
    preference, and if all lack a hint.
    """
    names, unavailable = _requested_backends(backend, device, hints)
    runnable = [name for name in names if name not in unavailable]
    for name in runnable:
        if (prepare := registry().backend(name).info.prepare) is not None:
            prepare()
    return runnable, unavailable


_CONNECTOR = Connector(connect_part, make_handle, check_members_of, connect_members_of)
_handle_numbers = itertools.count()
_UNCONNECTED = type("Unconnected", (Transport,), dict.fromkeys(Transport.__abstractmethods__, lambda *_: None))
"""The transport of a communicator without members: the executor refuses all ops, and there is nothing to end."""


def _join(
    info: BackendInfo,
    members: KnownMembers,
    device: torch.device,
    deadline: float,
    settings: OpSettings,
    hints: Hints | None,
    over: Callable[[], HoldfastError | None] = lambda: None,
) -> Communicator:
    """Connect the backend's transport, and make a communicator over it."""
    assert info.connect is not None, "a preference holds only backends that connect"
    recorder, previous, size = settings.recorder, members.previous, len(members.peers)
    built: list[Communicator] = []
    connecting = True

    def build(transport: Transport) -> None:
        discard()
        built.append(Communicator(transport, context, info, _CONNECTOR, settings))

    def discard() -> None:
        while built:
            discard_unconnected(built.pop())

    context = Context(
        rank=members.rank,
        size=size,
        name=members.name,
        epoch=members.epoch,
        device=device,
        store=members.store,
        peers=tuple(members.peers),
        deadline=deadline,
        over=lambda: over() if connecting else None,
        journal=None
        if recorder is None
        else recorder.journal(members.name, members.epoch, members.rank, size, info.name),
        previous=None if previous is None or previous.backend != info.name else previous.transport,
        connect_payload=tuple(members.connect_payload),
        address=members.address,
        meanwhile=build,
        links=info.links,
        hints=parse_hints(info.name, info.hints, hints),
    )
    try:
        transport = _connect(info.connect, context)
    except BaseException:
        discard()
        raise
    connecting = False
    if not built or built[0].transport is not transport:
        build(transport)
    return built.pop()  # the context refers to `build`, which must not keep the communicator alive


def _connect(connect: Callable[[Context], Transport], context: Context) -> Transport:
    """Connect the transport. The journal records this as the communicator's op number 0."""
    journal = context.journal
    if journal is None:
        return _connect_or_time_out(connect, context)
    journal.enter("connect", 0, 0, None, None, -1)
    try:
        transport = _connect_or_time_out(connect, context)
    except BaseException as error:
        journal.leave(error)
        raise
    journal.leave(None)
    return transport


def _connect_or_time_out(connect: Callable[[Context], Transport], context: Context) -> Transport:
    began = time.monotonic()
    try:
        return connect(context)
    except TimeoutError as error:
        if isinstance(error, HoldfastError):
            raise
        raise OpTimeout("connect", 0, time.monotonic() - began) from error


def _release_rank(identity: tuple[str, str, int], place: places.MeetingPlace | None, nonce: str) -> None:
    """Let the rank connect again, unless another offer holds it.

    Until then the caller holds `place`, and with it the store that it may serve.
    """
    with _lock:
        if connected_ranks.get(identity) == nonce:
            del connected_ranks[identity]


def _offer(
    size: int, preference: list[str], unavailable: dict[str, str], agreed: dict[str, str], auto: bool = False
) -> Offer:
    nonce = secrets.token_hex(16)
    return Offer(nonce, this_process(), size, preference, shorten(unavailable), checks_are_on(), auto, agreed)


def _as_texts(hints: Hints | None) -> dict[str, str]:
    """Hints as the other ranks compare them."""
    return {f"hint {name!r}": f"as {value!r}" for name, value in (hints or {}).items()}


def _parse_hints(backend: str, hints: Hints | None) -> dict[str, Value]:
    return parse_hints(backend, registry().backend(backend).info.hints, hints)


def _requested_backends(
    backend: str, device: torch.device, hints: Hints | None = None, *, unknown: bool = False
) -> tuple[list[str], dict[str, str]]:
    """The backends to try, in order, and why this process cannot run some of them with these hints.

    An `unknown` one gets a reason, not an error: ranks that have its plugin then learn that this one lacks it. Raises
    ValueError for no backend, and if all known ones lack a hint; `Unsupported` for one that only has a memory plane.
    """
    names, unavailable, lacking, able = _names(backend, device), dict[str, str](), list[str](), 0
    for name in names:
        try:
            found = registry().backend(name)
        except BackendUnavailable as error:
            if not unknown:
                raise
            unavailable[name] = error.reason
            continue
        if found.info.connect is None:
            raise Unsupported(f"a communicator over {name!r}", "it offers a memory plane only: comms.memory()")
        able += 1
        try:
            _parse_hints(name, hints)
        except ValueError as error:
            lacking.append(str(error))
            unavailable[name] = str(error)
        if isinstance(found.status, Unavailable):
            unavailable[name] = found.status.reason
    if lacking and len(lacking) == able:
        raise ValueError("; ".join(lacking))
    return names, unavailable


def _names(backend: str, device: torch.device) -> list[str]:
    if backend == "auto":
        if not (names := registry().by_priority(device.type)):
            raise BackendUnavailable("auto", f"no backend offers itself for tensors on {device.type}", "pass a name")
        return names
    names = [name.strip() for name in backend.split(",") if name.strip()]
    if not names:
        known = ", ".join(sorted(registry().backends))
        raise ValueError(f"backend is empty: pass one of {known}, several in order of preference, or 'auto'")
    return names


def _unable_to_connect(names: Sequence[str], peers: Sequence[Peer]) -> dict[str, str]:
    """Backends that cannot connect these peers, by name, and why: they are limited to one process or host."""
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
    """The first backend that all ranks can run. All ranks choose the same, since they see the same offers."""
    preference = offers[0].preference
    known = [name for name in preference if name in registry().backends]
    reasons = _unable_to_connect(known, [o.peer for o in offers])
    for r, offer in enumerate(offers):
        for backend, reason in offer.unavailable.items():
            reasons.setdefault(backend, f"rank {r}: {reason}")
        for backend in preference:
            if backend not in offer.preference:  # of "auto": ranks may have different plugins
                reasons.setdefault(backend, f"rank {r} has no such backend")
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
