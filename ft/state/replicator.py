"""Keeps all state that is attached to a session while ranks die and join.

Replicated state goes to newcomers from the ranks that have it. Sharded state is kept redundantly and restored in each
epoch: from memory or, if a part is lost with all its copies, from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.ops import Recv, Send
from holdfast.comms.quantities import integer
from holdfast.ft import events
from holdfast.ft.membership.view import Timeouts
from holdfast.ft.state import transfer
from holdfast.ft.state.checkpoints import Checkpoints
from holdfast.ft.state.codec import decode_state, encode_state
from holdfast.ft.state.fetching import Fetch, Fetched, Fetcher, MemoryPlanes
from holdfast.ft.state.leaves import Leaf, PartLayout, RankMesh, all_ranks, encode_local_shards, place
from holdfast.ft.state.restoring import PartStore, complete_size, restore, shifts
from holdfast.ft.state.transfer import Stateful
from holdfast.ft.step_protocol import FAILURES, Decision
from holdfast.ft.telemetry.event_log import EventLog

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Build = Callable[["DeviceMesh"], Mapping[str, Stateful]]
"""Returns model, optimizer and the like over a mesh of all ranks. Called in each epoch; must build the same things."""
Shape = Callable[[int], Mapping[str, int]]
"""Returns the mesh's dimensions by name for a number of ranks, such as {"replicate": 2, "shard": 4} for 8.
Called for each number of ranks that is possible; must return the same names every time."""

MOST_COPIES = 64


class Sharded(Mapping[str, Any]):
    """The things that `build` returned in this epoch, by name. Made by `Session.attach_sharded`.

    They belong to the transaction: change them inside an attempt; if it fails, their state is restored. Look them up
    again in each epoch: things that were built for an earlier epoch cannot be used.
    """

    def __init__(self, build: Build, copies: int, shape: Shape | None) -> None:
        if not callable(build):
            raise TypeError(f"build must be a function of a DeviceMesh, not {type(build).__name__}")
        copies = integer(copies, "copies")
        if not 0 <= copies <= MOST_COPIES:
            raise ValueError(f"copies={copies} is out of range: 0 to {MOST_COPIES} neighbours keep a copy of each part")
        if shape is not None and not callable(shape):
            raise TypeError(f"mesh must be a function of the number of ranks, not {type(shape).__name__}")
        self.copies = copies
        self._build = build
        self._shape = shape
        self._names: tuple[str, ...] = ()
        self._things: dict[str, Stateful] = {}

    def __repr__(self) -> str:
        return f"<Sharded: {', '.join(self._things) or 'not built yet'}>"

    def __getitem__(self, name: str) -> Any:
        if not self._things:
            raise HoldfastError(f"{name!r} is built when the next attempt begins: its state is that of an epoch")
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    @property
    def things(self) -> dict[str, Stateful]:
        """The things built in this epoch, by name, to save and load their state."""
        return self._things

    def drop(self) -> None:
        """Drop the things that were built for an epoch that is over."""
        self._things = {}

    @property
    def may_have_replicas(self) -> bool:
        """Whether ranks may have equal parts; with a `mesh` function, known for sure only once built."""
        return self._shape is not None

    def mesh(self, size: int) -> RankMesh:
        """The mesh of `size` ranks. Raises ValueError, TypeError if the `mesh` function returns none of that size."""
        if self._shape is None:
            return all_ranks(size)
        asked = self._shape(size)
        if not isinstance(asked, Mapping) or not all(isinstance(name, str) and name for name in asked):
            raise TypeError(f"mesh({size}) must give a dict of sizes by name, not {asked!r}")
        sizes = tuple(integer(each, f"mesh({size})[{name!r}]") for name, each in asked.items())
        if any(each < 1 for each in sizes):
            raise ValueError(f"mesh({size}) gave {dict(asked)}: each size must be a whole number, 1 or more")
        found = RankMesh(tuple(asked), sizes)
        if not sizes or found.size != size:
            raise ValueError(f"mesh({size}) gave {dict(asked)}, which is a mesh of {found.size} ranks")
        if self._names not in ((), found.names):
            raise ValueError(f"mesh({size}) has dimensions {found.names}; for other sizes they were {self._names}")
        self._names = found.names
        return found

    def build(self, mesh: DeviceMesh) -> None:
        """Build for a new epoch. Raises TypeError if `build` returns no dict of things with a state."""
        made = self._build(mesh)
        if not isinstance(made, Mapping) or not made:
            raise TypeError(
                f"build() must return a dict of what it built, such as {{'model': model, 'optimizer': optimizer}}, "
                f"not {type(made).__name__}"
            )
        for name, thing in made.items():
            check_stateful(thing, f"build() returned {name!r}, a {type(thing).__name__}, which has")
        self._things = dict(made)


def check_stateful(thing: object, subject: str) -> None:
    """Raise TypeError, which begins with `subject`, for a thing without a state that can be given and taken."""
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise TypeError(f"{subject} no {method}()")


_log = logging.getLogger("holdfast.ft")

_LOOK_STEPS = 1024
"""Attached state is checked after 1, 2, 4 ... steps, and then after every `_LOOK_STEPS` steps."""

_LARGE = 256 << 20
"""Bytes kept from which on a garbage collection, to free the old model's memory at once, is worth its time."""


class StateReplicator:
    """The attached state of one process.

    `over(epoch)` returns the error that ended an epoch (None: it is not over); `reach(name)` is called at fault points.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        event_log: EventLog,
        over: Callable[[int], HoldfastError | None],
        reach: Callable[[str], None],
    ) -> None:
        self.attached: dict[str, transfer.Stateful] = {}
        self.sharded: Sharded | None = None
        self.checkpoints: Checkpoints | None = None
        self.closed = False
        """Whether nothing more can be attached: the steps have begun."""
        self._timeouts, self._events, self._over, self._reach = timeouts, event_log, over, reach
        self._planes, self._fetcher = MemoryPlanes(), Fetcher()
        self._part_store: PartStore | None = None
        self._epoch = -1
        self._mesh = RankMesh((), ())
        self._known: dict[str, Leaf] = {}
        self._layouts: dict[int, PartLayout] = {}
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._unfit: dict[str, str] = {}

    def close(self) -> None:
        """Close the memory planes and drop all fetched and built state. Idempotent."""
        with contextlib.ExitStack() as closing:
            for close in (self.drop, self._fetcher.forget, self._planes.close):
                closing.callback(close)

    def drop(self) -> None:
        """Drop what was built for an epoch that is over."""
        self._seen = []
        if self.sharded is not None:
            self.sharded.drop()

    @property
    def needs_group(self) -> bool:
        """Whether the attached state needs torch's process group."""
        return self.sharded is not None or self.checkpoints is not None

    @property
    def _relies_on_replicas(self) -> bool:
        """Whether the sharded state has neither copies nor checkpoints."""
        return self.sharded is not None and not self.sharded.copies and self.checkpoints is None

    @property
    def patience(self) -> float:
        """Seconds that ranks wait for newcomers that are still getting the state."""
        return self._timeouts.operation + self._timeouts.join

    def check(self) -> None:
        """Raise ValueError if the death of any rank would end the job."""
        if self._relies_on_replicas and self.sharded is not None and not self.sharded.may_have_replicas:
            raise ValueError("copies=0 and no checkpoints(): the death of any rank would end the job")

    # Attachments, which a user makes before the first step ---------------------------------------------------------

    def attach(self, name: str, thing: transfer.Stateful) -> None:
        """See `Session.attach`."""
        check_stateful(thing, f"{name!r} cannot be attached: {type(thing).__name__} has")
        if name in self.attached:
            raise ValueError(f"something is attached as {name!r} already")
        self._check_open(f"{name!r} must be attached")
        encode_state({name: thing.state_dict()})
        self.attached[name] = thing

    def attach_sharded(self, build: Build, copies: int, mesh: Shape | None, wanted: int) -> Sharded:
        """See `Session.attach_sharded`. `wanted` is the number of members that the job wants; 0: it is not known."""
        self._check_open("attach_sharded() must be called")
        if self.sharded is not None:
            raise HoldfastError("something sharded is attached already; let one build() return everything")
        sharded = Sharded(build, copies, mesh)
        if wanted and copies >= max(wanted, 2):
            raise ValueError(f"copies={copies}: in a job of {wanted} ranks each has {wanted - 1} neighbours")
        if wanted:
            sharded.mesh(wanted)
        import torch.distributed.tensor  # noqa: F401  # here, so that a promoted spare does not pay for the import

        self.sharded = sharded
        return sharded

    def keep_checkpoints(self, directory: str | os.PathLike[str], every: int, last: int | None) -> None:
        """See `Session.checkpoints`."""
        self._check_open("checkpoints() must be called")
        self.checkpoints = Checkpoints(directory, every, last)

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise HoldfastError(f"{what} before steps()")

    # Replicated state -----------------------------------------------------------------------------------------

    def transfer_state(
        self, comm: Communicator, hosts: Sequence[str], decision: Decision, done: int, *, founding: bool
    ) -> int | None:
        """Send the state after `done` steps to newcomers, or receive it as one; collective.

        Returns the number of steps done in the received state, on a newcomer; None on the others. If the state cannot
        be sent, a newcomer raises `StateNotGiven` and the others go on without it; while the job is `founding`, all
        raise it.
        """
        moving = transfer.StateTransfer(
            comm,
            self._planes.agree(comm, hosts),
            decision,
            self.attached,
            self._timeouts.operation,
            self.patience,
            self._reach,
        )

        def refused(reason: str) -> None:
            self._events.emit(events.StateRefused(step=done - 1, epoch=comm.epoch, reason=reason))
            if founding:
                raise transfer.StateNotGiven(comm.rank, reason)

        if comm.rank not in decision.receivers:
            moving.offer(done, refused)
            return None
        began = time.monotonic()
        pulled = moving.pull(self._fetcher, self._fetch(comm, lambda: self._reach("sync.before_chunk")))
        if pulled.unlike:
            _log.warning("ranks %s have another state than rank %d", pulled.unlike, decision.source)
        fetched = pulled.fetched
        self._events.emit(
            events.StateReceived(
                step=pulled.done - 1,
                epoch=comm.epoch,
                source=decision.source,
                bytes=fetched.nbytes,
                seconds=time.monotonic() - began,
                via="communicator" if moving.plane is None else moving.plane.name,
                sources={str(rank): nbytes for rank, nbytes in fetched.moved.items()},
                kept=fetched.kept,
                lost=tuple(sorted(fetched.lost)),
            )
        )
        return pulled.done

    def confirm_transfer(self, comm: Communicator) -> None:
        """Let the other ranks continue: this newcomer has recorded its state. Collective."""
        comm.barrier(timeout=self.patience)

    def _fetch(self, comm: Communicator, before: Callable[[], None]) -> Fetch:
        return functools.partial(
            self._fetcher.fetch,
            timeout=self._timeouts.operation,
            over=lambda: self._over(comm.epoch),
            before=before,
        )

    def look(self, done: int) -> None:
        """Warn of attached state that newcomers can no longer get; checks at ever longer intervals.

        An optimizer has most of its state only after its first step, so the check in `attach` cannot see it.
        """
        if done == 0 or (done & (done - 1) and done % _LOOK_STEPS):
            return
        for name, thing in self.attached.items():
            reason = ""
            try:
                encode_state({name: thing.state_dict()})
            except FAILURES:
                raise
            except Exception as error:
                reason = transfer.reason_of(error)
            known, self._unfit[name] = self._unfit.get(name, ""), reason
            if reason and reason != known:
                self._events.emit(events.StateUnfit(step=done - 1, name=name, reason=reason))

    # Sharded state --------------------------------------------------------------------------------------------

    def enter(self, comm: Communicator, hosts: Sequence[str], done: int) -> int:
        """Build the sharded state for the epoch of `comm`, as it was after `done` steps; collective.

        Returns the number of steps done from which the job continues: fewer than `done` only if all copies of a part
        are lost and a checkpoint replaces them. Raises HoldfastError if there is neither.
        """
        if self._epoch == comm.epoch or not self.needs_group:
            return done
        began = time.monotonic()
        with _library(comm):
            done, source, fetched = self._enter(comm, hosts, done)
        self._epoch = comm.epoch
        self._check_replicas(comm, done, source == "built")
        if source:
            self._events.emit(
                events.StateRestored(
                    step=done - 1,
                    epoch=comm.epoch,
                    source=source,
                    bytes=fetched.nbytes,
                    sources={str(rank): nbytes for rank, nbytes in fetched.moved.items()},
                    kept=fetched.kept,
                    lost=tuple(sorted(fetched.lost)),
                    seconds=time.monotonic() - began,
                )
            )
        return done

    def _enter(self, comm: Communicator, hosts: Sequence[str], done: int) -> tuple[int, str, Fetched]:
        part_store = self._parts_on(comm.device)
        self._mesh = all_ranks(comm.size) if self.sharded is None else self.sharded.mesh(comm.size)
        kept = part_store.of(done)
        newest = -1
        if self.checkpoints is not None:
            self.checkpoints.agree(comm, done)
            newest = self.checkpoints.newest()
        held = comm.all_gather_object([part.share for part in kept])
        size = complete_size(held, comm.size)
        if self.sharded is None:
            if done == 0 < newest:
                assert self.checkpoints is not None
                self._load_all(self.checkpoints.load(newest, self._mesh, None, comm.rank, comm.device))
                comm.barrier()
                self._reach("restore.after_load")
                return newest, "checkpoint", Fetched()
            return done, "", Fetched()
        if size is None and newest < 0 and done > 0:
            raise HoldfastError(
                f"the state after {done} steps is lost: no rank has kept {_missing(held)}, and there is no checkpoint; "
                "keep more copies, or checkpoints()"
            )
        devices = self._build(comm)
        fetched = Fetched()
        if size is not None:
            self._reach("restore.before_fetch")
            plane = self._planes.agree(comm, hosts)
            found = restore(
                comm,
                plane,
                kept,
                size,
                self._mesh,
                self._fetch(comm, lambda: self._reach("restore.before_chunk")),
                self.patience,
            )
            fetched = found.fetched
            self._known = {leaf.path: leaf for leaf in found.layout.leaves}
            self._load(found.description, found.layout.leaves, found.tensors, devices, comm.device)
            self._fetcher.forget()
            source = "own" if found.parts <= {part.layout.part for part in kept if part.own} else "neighbour"
        elif newest >= 0:
            assert self.checkpoints is not None
            state = self.checkpoints.load(newest, self._mesh, devices, comm.rank, comm.device)
            self._load_all(state)
            done, source = newest, "checkpoint"
        else:
            source = "built"
        self._reach("restore.before_copies")
        self._copy(comm, hosts, done)
        comm.barrier()
        self._reach("restore.after_load")
        part_store.keep_only(done, comm.size)
        return done, source, fetched

    def _check_replicas(self, comm: Communicator, done: int, first: bool) -> None:
        """Check that the built state can outlive any rank; if not, ValueError if `first`, else a warning."""
        if not self._relies_on_replicas:
            return
        own = next(part for part in self._parts_on(comm.device).of(done) if part.layout.part == comm.rank)
        if own.layout.share[1] < comm.size:
            return
        said = "copies=0, no checkpoints(), and no two ranks have the same part of the state: the death of any ends it"
        if first:
            raise ValueError(said)
        _log.warning("%s", said)

    def _build(self, comm: Communicator) -> DeviceMesh:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        assert self.sharded is not None
        self.sharded.drop()
        if self._part_store is not None and self._part_store.nbytes > _LARGE:
            gc.collect()
        names, sizes, kind = self._mesh.names, self._mesh.sizes, comm.device.type
        group: Any = dist.group.WORLD
        if len(names) == 1:
            devices = DeviceMesh.from_group(group, kind, mesh_dim_names=names)
        else:
            devices = init_device_mesh(kind, sizes, mesh_dim_names=names)
        self.sharded.build(devices)
        twice = self.sharded.things.keys() & self.attached.keys()
        if twice:
            raise ValueError(f"{min(twice)!r} is attached, and returned by build() too")
        return devices

    def _load(
        self,
        description: bytes,
        leaves: Sequence[Leaf],
        tensors: Sequence[torch.Tensor],
        devices: DeviceMesh,
        device: torch.device,
    ) -> None:
        assert self.sharded is not None
        whole = [
            place(leaf, local.to(device), self._mesh, devices) for leaf, local in zip(leaves, tensors, strict=True)
        ]
        state = decode_state(description, whole)
        transfer.check_names(state, self.sharded.things)
        transfer.load(state, self.sharded.things)

    def _load_all(self, state: dict[str, Any]) -> None:
        things = {**self.attached, **(self.sharded.things if self.sharded is not None else {})}
        if state.keys() != things.keys():
            raise Mismatch(
                f"attached here: {', '.join(sorted(things))}; the checkpoint is of: {', '.join(sorted(state))}; "
                "use another directory for another job"
            )
        transfer.load(state, things)

    # Around each step -----------------------------------------------------------------------------------------

    def stage(self, comm: Communicator, hosts: Sequence[str], version: int) -> None:
        """Keep the state after `version` steps beside the current state, here and on neighbours; collective."""
        if self.sharded is not None:
            with _library(comm):
                self._copy(comm, hosts, version)

    def committed(self, done: int) -> None:
        """Make the state after `done` steps the current one, and remove older versions."""
        if self.sharded is not None and self._part_store is not None:
            self._part_store.keep_only(done)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint must be written after `done` steps; the same on all ranks."""
        return self.checkpoints is not None and self.checkpoints.due(done)

    def begin(self, comm: Communicator, done: int) -> None:
        """Before an attempt, write a checkpoint if one is due; collective.

        Raises HoldfastError if sharded state was changed since the last commit.
        """
        if any(tensor._version != version for tensor, version in self._seen):
            raise HoldfastError(
                "what attach_sharded() built was changed outside of an attempt, where the change is on no copy; "
                "call optimizer.step() inside of the `with attempt:` block"
            )
        if not self.saves(done):
            return
        assert self.checkpoints is not None
        began = time.monotonic()
        with _library(comm), torch.no_grad():
            state = {name: thing.state_dict() for name, thing in self.attached.items()}
            if self.sharded is not None:
                state |= {name: thing.state_dict() for name, thing in self.sharded.things.items()}
            taken, leaves, _ = encode_local_shards(state, self._mesh, comm.rank, self._known)
            self._reach("checkpoint.before_save")
            self.checkpoints.save(done, taken.description, leaves, taken.tensors)
        seconds = time.monotonic() - began
        self._events.emit(events.CheckpointSaved(step=done - 1, epoch=comm.epoch, seconds=seconds))

    def _copy(self, comm: Communicator, hosts: Sequence[str], version: int) -> None:
        assert self.sharded is not None
        began = time.monotonic()
        self._reach("copies.before_copy")
        part_store = self._parts_on(comm.device)
        with torch.no_grad():
            state = {name: _state_of(thing) for name, thing in self.sharded.things.items()}
            taken, leaves, mine = encode_local_shards(state, self._mesh, comm.rank, self._known)
            own = part_store.new(version, self._layout(leaves, comm.rank), taken.description)
            for index, tensor in enumerate(mine):
                own.layout.view(own.buffer, index).copy_(tensor)
        parts = [own]
        moves: list[Send | Recv] = []
        to = shifts(hosts, self.sharded.copies)
        for shift in to:
            theirs = (comm.rank - shift) % comm.size
            copy = part_store.new(version, self._layout(leaves, theirs), taken.description, own=False)
            moves += [Send(own.buffer, (comm.rank + shift) % comm.size), Recv(copy.buffer, theirs)]
            parts.append(copy)
        if moves:
            comm.batch_send_recv(moves)
        part_store.put(parts)
        self._seen = [(tensor, tensor._version) for tensor in mine]
        self._reach("copies.after_copy")
        seconds, nbytes = time.monotonic() - began, own.layout.nbytes * len(to)
        self._events.emit(events.PartCopied(step=version - 1, epoch=comm.epoch, bytes=nbytes, seconds=seconds))

    def _layout(self, leaves: tuple[Leaf, ...], part: int) -> PartLayout:
        known = self._layouts.get(part)
        if known is None or known.mesh != self._mesh or known.leaves != leaves:
            known = self._layouts[part] = PartLayout(leaves, self._mesh, part)
            self._known = {leaf.path: leaf for leaf in leaves}
        return known

    def _parts_on(self, device: torch.device) -> PartStore:
        if self._part_store is None:
            self._part_store = PartStore(device)
        return self._part_store


def _state_of(thing: transfer.Stateful) -> dict[str, Any]:
    """The state of `thing`; of a module the parameters themselves, because their version counters show changes."""
    if isinstance(thing, torch.nn.Module):
        state: dict[str, Any] = thing.state_dict(keep_vars=True)
        return state
    return thing.state_dict()


@contextmanager
def _library(comm: Communicator) -> Iterator[None]:
    """Raise the error that ended `comm` in place of the error that torch's libraries raise because of it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, *FAILURES):
        raise
    except BaseException as error:
        if isinstance(comm.over, FAILURES):
            raise comm.over.again() from error
        raise


def _missing(held: Sequence[Sequence[tuple[int, int, int]]]) -> str:
    there: dict[int, set[int]] = {}
    for rank in held:
        for _, number, count in rank:
            there.setdefault(count, set()).add(number)
    if not there:
        return "any part of it"
    count = max(there, key=lambda count: len(there[count]))
    return f"part {', '.join(map(str, sorted(set(range(count)) - there[count])))} of {count}"
