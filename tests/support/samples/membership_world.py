"""A tiny world for the membership core: a register, a network and processes, all as one immutable value.

Nothing moves by itself. `actions(world)` lists everything that could happen next and `apply(world, action)` makes it
happen, checking every invariant on the way; an explorer tries all orders, a fuzzer random ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from holdfast.ft.membership import events
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Job, Member, OnDeath, Timeouts, View
from support.views import member

BUDGET = ("kills", "ticks", "outages", "finishing", "breaks")
"""What may still happen in a world, so many times; `finishing`: whether members may finish."""


class InvariantBroken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Process:
    """One process: its core, the effects that it asked for and what it has seen."""

    core: Membership
    alive: bool = True
    proposal: events.Propose | None = None
    installed: tuple[int, ...] = ()
    revoked: frozenset[int] = frozenset()
    evicted: bool = False


@dataclass(frozen=True)
class Action:
    """What may happen to a process: an event, the register's decision about its proposal, or (None) its end.

    `by`: the part of the world's budget that allows it; "" if it needs none.
    """

    process: int
    what: events.Event | events.Propose | None
    by: str = ""


@dataclass(frozen=True)
class World:
    """The whole world. `history` holds each view that the register ever held, in order."""

    processes: tuple[Process, ...]
    history: tuple[View, ...] = ()
    mail: frozenset[tuple[int, events.Event]] = frozenset()
    now: float = 0.0
    kills: int = 0
    ticks: int = 0
    outages: int = 0
    finishing: int = 0
    breaks: int = 0

    @property
    def register(self) -> View | None:
        return self.history[-1] if self.history else None

    def running(self) -> list[int]:
        return [i for i, process in enumerate(self.processes) if process.alive and not process.evicted]


def new_world(
    count: int, *, size: int, min_size: int = 1, mesh: int = 64, on_death: OnDeath = "rebuild", **budget: int
) -> World:
    """`count` processes that have not started, of a job of `size` members, with a `budget` of faults.

    In a job of more than `mesh` they report changes to neighbours only.
    """
    job = Job("job", size, min_size, size, ("shm", "gloo"), on_death=on_death)
    cores = (Membership(member(i), job, Timeouts(), frozenset({"shm"}), Shape(mesh=mesh)) for i in range(count))
    return World(tuple(map(Process, cores)), **budget)


def started(world: World) -> World:
    """The world after everything has happened, in one order, that needs neither a fault nor a tick."""
    budget = {what: getattr(world, what) for what in BUDGET}
    world = replace(world, **dict.fromkeys(BUDGET, 0))
    while True:
        action = next(actions(world), None)
        if action is None:
            return replace(world, **budget)
        world = apply(world, action)


def actions(world: World) -> Iterator[Action]:
    """All possible actions. Polls of the register, the safety net, come only when nothing else can happen."""
    quiet = True
    for i, process in enumerate(world.processes):
        if not process.alive or process.evicted:
            continue
        core = process.core
        if core.started_at is None:
            quiet = False
            yield Action(i, events.Started())
            continue
        if process.proposal is not None:
            quiet = False
            yield Action(i, process.proposal)
            if world.outages:
                yield Action(i, events.CasFailed("away"), "outages")
        known = core.evidence.dead.keys()
        for other in core.watched():
            if not world.processes[int(other.id[1:])].alive and other.id not in known:
                quiet = False
                yield Action(i, events.ProvenDeaths((events.Death(other.id, "its process ended"),)))
        if world.kills:
            yield Action(i, None, "kills")
        if world.ticks and core.wake_at is not None:
            yield Action(i, events.Tick(), "ticks")
        if core.view is not None and core.rank() is not None:
            if world.finishing and not core.finished:
                yield Action(i, events.LocalFinished(core.view.epoch), "finishing")
            if world.breaks and core.revoked < core.view.epoch:
                yield Action(i, events.EpochBroken(core.view.epoch, "a connection was lost"), "breaks")
    for i, event in world.mail:
        if world.processes[i].alive:
            quiet = False
            yield Action(i, event)
    if quiet:
        for i in world.running():
            seen = world.processes[i].core.view
            if world.register is not None and (seen is None or seen.epoch < world.register.epoch):
                yield Action(i, events.ViewRead(world.register))


def apply(world: World, action: Action) -> World:
    """The world after `action`. Raises `InvariantBroken`."""
    i, what = action.process, action.what
    process = world.processes[i]
    if action.by and action.by != "finishing":
        world = replace(world, **{action.by: getattr(world, action.by) - 1})
    match what:
        case None:
            mail = frozenset((j, event) for j, event in world.mail if j != i)
            return _with(replace(world, mail=mail), i, replace(process, alive=False, proposal=None))
        case events.Propose(expected, view):
            world = _with(world, i, replace(process, proposal=None))
            if expected != (world.register.epoch if world.register else 0):
                return _send(world, (process.core.me,), events.CasLost(world.register))
            _check_succession(world, view)
            return _send(replace(world, history=(*world.history, view)), (process.core.me,), events.CasWon(view))
        case events.CasFailed():
            world = _with(world, i, replace(process, proposal=None))
        case events.Tick():
            world = replace(world, now=max(world.now, process.core.wake_at or 0.0))
    return _feed(replace(world, mail=world.mail - {(i, what)}), i, what)


def _with(world: World, i: int, process: Process) -> World:
    return replace(world, processes=(*world.processes[:i], process, *world.processes[i + 1 :]))


def _send(world: World, to: Iterable[Member], event: events.Event) -> World:
    return replace(world, mail=world.mail | {(int(other.id[1:]), event) for other in to})


def _feed(world: World, i: int, event: events.Event) -> World:
    process = world.processes[i]
    core, effects = process.core.on(event, world.now)
    world = _with(world, i, replace(process, core=core))
    for effect in effects:
        world = _perform(world, i, effect)
    return world


def _perform(world: World, i: int, effect: events.Effect) -> World:
    process = world.processes[i]
    me = process.core.me
    match effect:
        case events.Propose():
            check(process.proposal is None, f"{me.id} proposes twice at once")
            check(bool(effect.view.reason), "a decision without a reason")
            return _with(world, i, replace(process, proposal=effect))
        case events.Announce(view, to, change):
            return _send(
                world, to, events.ViewRead(view, me.id) if change is None else events.ViewDeltaReceived(change, me.id)
            )
        case events.ReadRegister():
            return _send(world, (me,), events.ViewRead(world.register))
        case events.AnnounceSelf(_, to):
            return _send(world, to, events.SpareAnnounced(me))
        case events.Report(events.ProvenDeaths() as deaths, to):
            return _send(world, to, deaths)
        case events.Install(view):
            _check_install(world, i, view)
            return _with(world, i, replace(process, installed=(*process.installed, view.epoch)))
        case events.Revoke(epoch):
            check(epoch in process.installed, f"{me.id} revokes epoch {epoch} that it never had")
            return _with(world, i, replace(process, revoked=process.revoked | {epoch}))
        case events.Evicted(view):
            check(me.id not in {m.id for m in view.members}, f"{me.id} is told of an eviction that is none")
            return _with(world, i, replace(process, evicted=True))
        case _:
            raise InvariantBroken(f"unexpected here: {effect}")


# Invariants ---------------------------------------------------------------------------------------------------


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantBroken(otherwise)


def _check_install(world: World, i: int, view: View) -> None:
    process = world.processes[i]
    me = process.core.me.id
    check(not process.evicted, f"{me} was evicted and installs epoch {view.epoch}")
    check(view == world.history[view.epoch - 1], f"two memberships of epoch {view.epoch}")
    check(view.phase != "forming", "a job that is being with_chosen_backend was installed")
    if view.phase == "running":
        check(view.rank_of(me) is not None, f"{me} installs a view that it is not in")
    if process.installed:
        last = process.installed[-1]
        check(last < view.epoch, f"{me} goes back from epoch {last} to {view.epoch}")
        check(last in process.revoked, f"{me} installs epoch {view.epoch} while {last} is still in use")


def _check_succession(world: World, view: View) -> None:
    """Check that `view`, which the register takes, is a valid successor of the one before."""
    old = world.register
    check(view.epoch == (old.epoch if old else 0) + 1, "an epoch was left out")
    if old is None:
        return
    check(old.phase in ("forming", "running"), f"a {old.phase} job was changed")
    check(len(view.members) <= view.job.size, "more members than the job wants")
    if old.phase == "running":
        check(view.phase != "forming", "a running job is being with_chosen_backend again")
        kept = [m.id for m in old.members if m in view.members]
        check(kept == [m.id for m in view.members if m in old.members], "survivors changed their order")
        for rank, m in enumerate(old.members):
            alive = world.processes[int(m.id[1:])].alive
            check(not alive or m in view.members, f"rank {rank} lives and was evicted")
        if len(view.members) == len(old.members):
            moved = [m.id for rank, m in enumerate(old.members) if m in view.members and view.members[rank] != m]
            check(not moved, f"{moved} have other ranks though every dead rank was replaced")
    if view.degraded_from:
        check(set(view.members) <= set(old.members), "a newcomer is in a degraded view")
        check(view.degraded_from == (old.degraded_from or old.epoch), "a view goes on over another communicator")
    if view.phase == "running":
        check(len(view.members) >= view.job.min_size, "fewer members than the job can run with")
        check(view.job.backend == "shm", "no backend was chosen")


def check_settled(world: World) -> None:
    """Check a world without further actions: all living members agree, and the job goes on if it can."""
    living = world.running()
    view = world.register
    for i in living:
        core = world.processes[i].core
        if core.wake_at is not None and not core.ended:
            return  # a process still waits for its turn, which a tick would bring
    for i in living:
        check(world.processes[i].core.view == view, f"p{i} does not know the newest view")
    if view is None or view.phase != "running" or not living:
        return
    for m in view.members:
        check(world.processes[int(m.id[1:])].alive, f"{m.id} is dead and still a member")
    for i in living:
        installed = world.processes[i].installed
        if view.rank_of(f"p{i}") is not None:
            check(bool(installed) and installed[-1] == view.epoch, f"p{i} has not installed epoch {view.epoch}")
    wanted = min(view.job.size, len(living))
    if view.degraded_from:  # spares wait until a member asks for a rebuild
        wanted = sum(f"p{i}" in view.ranks for i in living)
    check(len(view.members) == wanted, f"{len(view.members)} members though {wanted} could be")
