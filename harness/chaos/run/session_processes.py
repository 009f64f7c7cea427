"""Jobs of sessions: the workloads, one function a kind that every process runs, and the processes by their ranks.

Each workload writes into the job's event log what the checkers need: which shards it worked on in which attempt
(`samples`), a digest of its state after each step (`state`), and now and then its use of resources (`resources`).

"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.reproducible import sum_contributions
from holdfast.ft import Session, Timeouts
from holdfast.ft.console.units import counted
from holdfast.ft.events import ResourcesUsed, SamplesTaken, StateDigested
from holdfast.ft.membership.view import View
from holdfast.ft.registers import RegisterAway
from holdfast.ft.session import Attempt
from holdfast.ft.telemetry.event_log import CLOSE_SECONDS, EventLog
from holdfast.harness.chaos.faults.storage import small_disk
from holdfast.harness.chaos.run.process_set import (
    EXITED_WELL,
    NoTargetProcess,
    ProcessSet,
    Results,
    RunProcess,
    Victim,
)
from holdfast.harness.chaos.scenario import Scenario
from holdfast.harness.chaos.workload import AllReduce, Ddp, Python
from holdfast.harness.cluster.job import Job
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.cluster.rank_worker import Prepare

RESOURCES_SECONDS = 1.0


class Notes:
    """The event log of a rank's work, under the name of its session in the logs."""

    def __init__(self, session: Session) -> None:
        self._log = EventLog(session.identity)
        self._next = 0.0

    def samples(self, attempt: Attempt) -> None:
        """Log the shards that this rank works on in an attempt: written before others can commit it with this rank."""
        shards, total = tuple(attempt.shards), attempt.total_shards
        self._log.emit(SamplesTaken(step=attempt.step, epoch=attempt.epoch, shards=shards, of=total))
        self._log.flush(CLOSE_SECONDS)

    def state(self, step: int, digest: str) -> None:
        """Log the digest of the state after a committed step."""
        self._log.emit(StateDigested(step=step, digest=digest))
        now = time.monotonic()
        if now >= self._next:
            self._next = now + RESOURCES_SECONDS
            self._log.emit(resources())

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def report_state(session: Session, step: int, state: Any) -> None:
    """Log a digest of the state after a committed step, which chaos compares between ranks ("equal bits").

    `state` is what `digest_of` takes: a module, tensors, arrays, numbers, text, nested. Raises `NoDigest` for others.
    Does nothing in a job without logs.
    """
    log = EventLog(session.identity)
    log.emit(StateDigested(step=step, digest=digest_of(state)))
    log.close()


def resources() -> ResourcesUsed:
    """The numbers of descriptors and threads of this process, and its resident bytes."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return ResourcesUsed(descriptors=descriptors, threads=threading.active_count(), resident=resident)


class NoDigest(HoldfastError, TypeError):
    """A value has bits that no checksum can be taken of."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"chaos cannot compare {what}: return, or report, tensors, numpy arrays, numbers and text, in mappings, "
            'sequences, sets and dataclasses; or compare no results, with expect.weights = "unchecked"'
        )


def digest_of(thing: Any) -> str:
    """A checksum of tensors, arrays, numbers and text, in mappings, sequences, sets and dataclasses.

    It is equal for equal bits alone: every part goes into it with its type and its length. Raises `NoDigest` for a
    value of another type, whose `repr` may leave out bits, or may have an address in it.
    """
    found = xxhash.xxh3_128()
    _feed(found, thing)
    return found.hexdigest()


_KINDS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (type(None), repr),
    (bool, repr),
    (int, hex),  # Python refuses to write long numbers in decimals
    (float, float.__repr__),
    (complex, complex.__repr__),
    (str, str.__repr__),
    (torch.dtype, repr),
    (torch.device, repr),
)
"""Types whose values a text tells apart; bool is an int, too."""


def _feed(found: xxhash.xxh3_128, thing: Any) -> None:
    if isinstance(thing, torch.Tensor):
        _feed_leaf(found, f"tensor {thing.dtype} {tuple(thing.shape)}", _bits(thing))
    elif isinstance(thing, np.ndarray | np.generic):
        if thing.dtype.hasobject or isinstance(thing, np.ma.MaskedArray):
            raise NoDigest(f"a numpy {type(thing).__name__} of {thing.dtype}")
        _feed_leaf(found, f"array {thing.dtype!r} {thing.shape}", thing.tobytes())
    elif isinstance(thing, enum.Enum):
        _feed_leaf(found, f"enum {_type_name(thing)}", repr(thing.name).encode())
    elif isinstance(thing, bytes | bytearray):
        _feed_leaf(found, "bytes", thing)
    elif kind := next(((kind, text) for kind, text in _KINDS if isinstance(thing, kind)), None):
        _feed_leaf(found, kind[0].__name__, kind[1](thing).encode(errors="surrogatepass"))
    elif isinstance(thing, torch.nn.Module | torch.optim.Optimizer):
        _feed(found, thing.state_dict())
    elif isinstance(thing, Mapping):
        _feed_all(found, "mapping", sorted(digest_of(key) + digest_of(value) for key, value in thing.items()))
    elif isinstance(thing, Sequence):
        _feed_all(found, "sequence", thing)
    elif isinstance(thing, Set):
        _feed_all(found, "set", sorted(map(digest_of, thing)))
    elif isinstance(thing, msgspec.Struct):
        values = {name: getattr(thing, name) for name in thing.__struct_fields__}
        _feed_all(found, _type_name(thing), (values,))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        values = {each.name: getattr(thing, each.name) for each in dataclasses.fields(thing)}
        _feed_all(found, _type_name(thing), (values,))
    else:
        raise NoDigest(f"a value of type {_type_name(thing)}")


def _feed_leaf(found: xxhash.xxh3_128, kind: str, data: bytes | bytearray) -> None:
    found.update(f"{kind}, {len(data)} bytes:".encode())
    found.update(data)


def _feed_all(found: xxhash.xxh3_128, kind: str, parts: Sequence[Any]) -> None:
    found.update(f"{kind}, {len(parts)} parts:".encode())
    for each in parts:
        _feed(found, each)


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        raise NoDigest(f"a {type(tensor).__name__} that is not in the memory of one process, of {tensor.layout}")
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _type_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


class Vector:
    """A state of one tensor, which new members receive."""

    def __init__(self, elements: int) -> None:
        self.tensor = torch.zeros(elements)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor.copy_(state["tensor"])


def contribution(spec: AllReduce, step: int, shard: int) -> torch.Tensor:
    """The vector that a shard adds in a step: the same on every rank."""
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + step * 1009 + shard)
    return torch.randn(spec.elements, generator=generator)


def all_reduce(session: Session, spec: AllReduce, steps: int) -> Any:
    """See `AllReduce`. Returns the final state."""
    state, total = Vector(spec.elements), torch.empty(spec.elements)
    session.attach("state", state)
    with Notes(session) as notes:
        for attempt in session.steps(steps):
            with attempt:
                time.sleep(spec.pause)
                notes.samples(attempt)
                parts = [contribution(spec, attempt.step, shard) for shard in attempt.shards]
                sum_contributions(attempt.comm, parts, total)
            if attempt.committed:
                state.tensor.mul_(0.9).add_(total)
                notes.state(attempt.step, digest_of(state.tensor))
    return state.tensor


def ddp(session: Session, spec: Ddp, steps: int) -> Any:
    """See `Ddp`. Returns the final parameters."""
    from torch.nn.parallel import DistributedDataParallel

    from holdfast.comms.torchdist.process_group import HoldfastProcessGroup, Options

    torch.manual_seed(spec.seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, spec.hidden), torch.nn.Tanh(), torch.nn.Linear(spec.hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.attach("model", model)
    session.attach("optimizer", optimizer)
    wrapped, epoch = None, None
    with Notes(session) as notes:
        for attempt in session.steps(steps):
            with attempt:
                if epoch != attempt.epoch:
                    group = HoldfastProcessGroup(dist.HashStore(), attempt.comm, Options(), 30.0)
                    wrapped, epoch = DistributedDataParallel(model, process_group=group), attempt.epoch
                    wrapped.register_comm_hook(attempt.comm, _reproducibly)
                assert wrapped is not None
                time.sleep(spec.pause)
                notes.samples(attempt)
                optimizer.zero_grad()
                losses = [_loss(wrapped, spec, attempt.step, shard) for shard in attempt.shards]
                torch.autograd.backward(torch.stack(losses).mean())
            if attempt.committed:
                optimizer.step()
                notes.state(attempt.step, digest_of(model))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _reproducibly(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket of gradients, in bits that do not depend on a gradient's place in the bucket.

    A new DistributedDataParallel begins with other buckets than one that has made a step.
    """
    gradients = bucket.buffer()
    comm.all_reduce(gradients, reproducible=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.div_(comm.size))
    return done


_reproducibly.__annotations__ = {}  # torch compares them with types, and these are text


def _loss(model: torch.nn.Module, spec: Ddp, step: int, shard: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + step * 1009 + shard)
    inputs = torch.randn(32, 16, generator=generator)
    return torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def python(session: Session, spec: Python, steps: int) -> Any:
    """See `Python`."""
    return function_of(spec.target)(session, **spec.arguments)


def function_of(target: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` or `module:name` means. Raises ValueError if there is none."""
    where, _, name = target.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"holdfast_workload_{Path(where).stem}", where)
            if spec is None or spec.loader is None:
                raise ImportError(f"{where} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found = getattr(module, name)
    except Exception as error:  # whatever the user's file raises when it is imported
        raise ValueError(f"workload target {target!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"workload target {target!r} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


BODIES: dict[type, Callable[[Session, Any, int], Any]] = {AllReduce: all_reduce, Ddp: ddp, Python: python}


# Processes ------------------------------------------------------------------------------------------------------------


END_SECONDS = 10.0


def separate_host() -> None:
    """Make this process appear to be on a host of its own."""
    from holdfast.comms.transport import liveness

    os.environ[liveness.HOST] = f"host-{os.getpid()}"
    liveness.this_host.cache_clear()


class SessionProcesses(ProcessSet):
    """A job of `LocalCluster`, each process of which runs `body(session, *args)`."""

    def __init__(
        self,
        scenario: Scenario,
        body: Callable[..., Any],
        args: Sequence[Any],
        prepare: Sequence[Prepare],
        register: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        spec = scenario.job
        if spec.hosts == "many":
            prepare = (*prepare, separate_host)
        timeouts = Timeouts(**{name: getattr(spec.timeouts, name) for name in spec.timeouts.__struct_fields__})
        options = {"min_size": spec.min_size, "shards": spec.shards or spec.ranks, "timeouts": timeouts}
        if register is not None:
            options["register"] = register
        self._replace = spec.replace
        self._view: View | None = None
        self._undo = contextlib.ExitStack()
        try:
            cluster = self._undo.enter_context(
                LocalCluster(
                    spec.ranks,
                    spec.backend,
                    spares=spec.spares,
                    threads=1,
                    echo=False,
                    environ={"OMP_NUM_THREADS": "1", **spec.environ, **(environ or {})},
                    session=options,
                    prepare=prepare,
                )
            )
            if spec.disk is not None:
                self._undo.enter_context(small_disk(cluster.logs, spec.disk))
            self.job: Job = self._undo.enter_context(cluster.start(body, *args))
        except BaseException:
            self._undo.close()
            raise
        self.directory, self.events_directory = self.job.directory, self.job.events_directory
        self._see_new()

    @property
    def register_url(self) -> str:
        return self.job.register_url

    def view(self) -> View | None:
        """The newest known view; None before the first."""
        with contextlib.suppress(HoldfastError):
            self._view = self.job.newest_view() or self._view
        return self._view

    def find(self, name: int | str) -> list[Victim]:
        view = self.view()
        members = () if view is None else view.members
        if isinstance(name, int) or name in ("coordinator", "last"):
            rank = {"coordinator": 0, "last": len(members) - 1}.get(name, name) if isinstance(name, str) else name
            if not 0 <= int(rank) < len(members):
                raise NoTargetProcess(f"there is no rank {rank}: the job has {counted(len(members), 'member')} now")
            return [self._member(view, int(rank))]
        if name == "joiner":
            return [self._victim(self.begun[-1])]
        if name == "spare":
            inside = {member.peer.pid for member in members}
            found = [each for each in self.begun if each.process.alive() and each.process.pid not in inside]
            if not found:
                raise NoTargetProcess("no spare is left")
            return [self._victim(found[0])]
        raise NoTargetProcess(f"nobody is called {name!r} in a job of sessions")

    def join(self) -> None:
        self.job.add()
        self._see_new()

    def over(self, timeout: float) -> bool:
        self.view()
        try:
            over = self.job.over(timeout)
        except RegisterAway:
            over = False
        lost = self._note_ends()
        if self._replace and not over:
            for _ in [each for each in lost if each.how != EXITED_WELL]:
                self.join()
        return over

    def results(self) -> Results:
        view = self.job.newest_view()
        try:
            values = self.job.results(timeout=END_SECONDS)
        except Exception as error:
            return Results(errors=(f"{type(error).__name__}: {error}",), ranks=0)
        ranks = len(view.members) if view is not None else 0
        return Results({f"rank {rank}": value for rank, value in enumerate(values)}, ranks=ranks)

    def close(self) -> None:
        self._undo.close()

    def _see_new(self) -> None:
        for number in range(len(self.begun), len(self.job.processes)):
            process = self.job.processes[number]
            self.begun.append(RunProcess(process.name, "rank", process, time.monotonic()))

    def _member(self, view: View | None, rank: int) -> Victim:
        assert view is not None
        member = view.members[rank]
        process = self.job.process_of(member.peer.pid)
        if process is None:
            raise NoTargetProcess(f"rank {rank} is process {member.peer.pid}, which is not of this job")
        return Victim(member.id, process, rank)

    def _victim(self, begun: RunProcess) -> Victim:
        view = self.view()
        for rank, member in enumerate(() if view is None else view.members):
            if member.peer.pid == begun.process.pid:
                return Victim(member.id, begun.process, rank)
        return Victim(begun.name, begun.process)
