# mypy: disable-error-code="override, assignment"
"""`HoldfastProcessGroup`: torch's process group over a `Communicator`.

Synchronous ops run in the calling thread, asynchronous ones on the communicator's worker. A lock serialises calling
threads (autograd's, too): ops are ordered as their threads entered.

torch's stubs name one overload of each method; overrides here take all of them, hence the mypy comment above.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect
from holdfast.comms.errors import HoldfastError, OpTimeout, Revoked, Unsupported
from holdfast.comms.plugins.hints import Hints
from holdfast.comms.plugins.registry import registry
from holdfast.comms.system.environment import flag
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.comms.torchdist import calls
from holdfast.comms.torchdist.calls import (
    LIST,
    LISTS,
    SIZES,
    TENSOR,
    Call,
    form,
    is_async,
    overloads,
    reduction,
    seconds,
)
from holdfast.comms.torchdist.group_store import MonitoredBarrier, group_store
from holdfast.comms.torchdist.hooks import CompletedWork, Hook, TorchHooks, check_available
from holdfast.comms.torchdist.p2p_channels import P2PChannels
from holdfast.comms.torchdist.window import GroupWindow
from holdfast.comms.torchdist.works import TorchWork, untraced
from holdfast.comms.work import DONE, Work


@dataclass(frozen=True, slots=True)
class Options:
    """`pg_options` of `init_process_group("holdfast")` and `new_group`.

    `backend` is a holdfast backend's name, a preference list ("ucx,gloo"), or "auto". `device` is the device of the
    group's tensors. `over` is an existing communicator to run over, which its owner closes.
    """

    backend: str = "auto"
    device: str = "cpu"
    over: Communicator | None = field(default=None, repr=False, compare=False)


def resolve_options(given: object, inherited: Options | None) -> Options:
    """The options of a new group: those given, else HOLDFAST_BACKEND, else those of the default group.

    Raises TypeError for options of another backend.
    """
    if given is not None:
        if not isinstance(given, Options):
            raise TypeError(
                f"pg_options must be a holdfast.comms.torchdist.Options, not {type(given).__name__}; "
                "pass Options(backend=NAME), or set HOLDFAST_BACKEND"
            )
        return given
    if named := os.environ.get("HOLDFAST_BACKEND"):
        return Options(backend=named)
    return inherited or Options()


AVAILABLE = hasattr(c10d.Backend, "reconfigure")
"""Whether the installed torch calls methods of its backends that Python overrides."""


def refused(name: str, instead: str) -> Callable[..., Any]:
    """A method of torch's that raises `Unsupported`: what is accepted and ignored would be found out too late."""

    def refuse(self: object, *arguments: object, **named: object) -> Any:
        raise Unsupported(f"{name} of a holdfast process group", instead)

    return refuse


class HoldfastBackend(c10d.Backend):
    """One rank of a group, for torch's ProcessGroup: torch 2.14's interface for the tensors of one device.

    It lets a group have a backend for each device ("cpu:holdfast_device,cuda:nccl"), and forwards all calls to `group`.
    A group that is holdfast's as a whole is a `HoldfastProcessGroup` instead: behind this interface, torch 2.14 and
    2.15 drop what a Work reports beside `wait` and `get_future`, and a group's ranks cannot change.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_time_estimate = _supports_time_estimate = False
    supports_window = False
    supports_abort_hooks = supports_completion_hooks = False

    def __init__(self, group: HoldfastProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def name(self) -> str:
        return self.group.name()

    getBackendName = name  # noqa: N815  # torch's name

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(self.group.name(), timedelta(seconds=self.group.timeout))

    new_window = refused("new_window of one device's backend", "use a group that is holdfast's as a whole")
    register_abort_hook = unregister_abort_hook = refused(
        "register_abort_hook of one device's backend", "use a group that is holdfast's as a whole"
    )
    get_reconfigure_handle = refused("get_reconfigure_handle of one device's backend", "use a group that is holdfast's")
    reconfigure = refused("reconfigure of one device's backend", "use a group that is holdfast's as a whole")
    split = refused("split of one device's backend", "call new_group()")
    merge = refused("merge of one device's backend", "use a group that is holdfast's as a whole, and reconfigure()")
    shrink = refused("shrink of one device's backend", "use a group that is holdfast's as a whole, and reconfigure()")

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        return self.group.allreduce(tensors, opts)

    def start_coalescing(self) -> None:
        self.group._start_coalescing(self.group.communicator.device)

    def end_coalescing(self) -> TorchWork:
        return self.group._end_coalescing(self.group.communicator.device)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(getattr(opts, "timeout", opts), wait_all_ranks)


def forward_shared_calls(group: type[HoldfastProcessGroup]) -> None:
    """Let a backend forward to its group each call that torch has for both, and the backend does not define."""

    def forwarded(name: str) -> Callable[..., Any]:
        return lambda self, *arguments, **named: getattr(self.group, name)(*arguments, **named)

    shared = (vars(group).keys() & set(dir(c10d.Backend))) - vars(HoldfastBackend).keys()
    for name in shared:
        if callable(getattr(group, name)) and not name.startswith("__"):
            setattr(HoldfastBackend, name, forwarded(name))


Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Issue = Callable[..., Work]
"""Issues one op on the communicator, given async_op and the timeout in seconds."""


@untraced
class HoldfastProcessGroup(dist.ProcessGroup):
    """One rank of a group. Made by `init_process_group("holdfast")` and `new_group`, not by hand.

    It runs over `communicator`. Ops take torch's arguments and raise holdfast's errors, which are all RuntimeErrors.
    """

    supports_coalescing = False
    supports_shrinking = AVAILABLE
    """torch keeps the shrunk group behind its interface for backends in Python, which came with 2.14."""
    supports_reconfigure = True
    supports_time_estimate = _supports_time_estimate = False
    supports_abort_hooks = supports_completion_hooks = True
    use_pg_for_symm_mem_rendezvous = False

    memory_stats = refused("memory_stats", "no transport here counts its memory; suspend() releases all of it")
    merge_remote_group = refused("merge_remote_group", "call reconfigure() with the handles of both groups")

    def __init__(self, store: dist.Store, communicator: Communicator, options: Options, timeout: float) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]  # the form for subclasses
        self.communicator = communicator
        self.options = options
        self._store = store
        self._timeout = timeout
        self._usual = communicator.info.options["timeout"]
        self._turn = threading.RLock()
        self._together: list[TorchWork] | None = None
        self._p2p = P2PChannels(communicator, timeout)
        self._monitored = self._monitored_barrier("")
        self._name, self._description = "", "undefined"
        self._issued = self._shrunk = 0
        self._hooks = TorchHooks(communicator.rank, flag("TORCH_DIST_NAN_CHECK"))
        communicator.hooks.on_abort(self._hooks.aborted)
        self._messages = itertools.count(1)
        self._extension, self._extended = 0.0, list[Work]()
        self._timed = False

    # -- identity

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    getRank, getSize = rank, size  # noqa: N815  # torch's names

    def name(self) -> str:
        return "holdfast"

    getBackendName = _get_backend_name = name  # noqa: N815  # torch's names

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.communicator.device.type)]

    def _get_backend(self, device: torch.device) -> HoldfastProcessGroup:
        """This group itself, as the backend of its device."""
        if torch.device(device).type != self.communicator.device.type:
            raise RuntimeError(f"this group takes tensors on {self.communicator.device}, not on {device}")
        return self

    get_backend = _get_backend

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def timeout(self) -> float:
        """The timeout, in seconds, of ops without one of their own."""
        return self._timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ops are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of ops without one of their own."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _enable_collectives_timing(self) -> None:
        """Let `Work._get_duration` tell how long each op ran that is issued from now on."""
        if self.communicator.transport.streams:
            raise Unsupported(
                "_enable_collectives_timing of ops on a stream of a device",
                "their calls end before they do: record torch.cuda.Event(enable_timing=True) around an op",
            )
        self._timed = True

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the timeouts of the ops issued from now on, until the first of these is complete."""
        with self._turn:
            self._extension += timeout.total_seconds()

    def _extend(self, limit: float) -> float:
        if self._extension and any(work.done() for work in self._extended):
            self._extension = 0.0
            self._extended.clear()
        return limit + self._extension

    @property
    def supports_splitting(self) -> bool:
        """Whether `dist.split_group` works. torch's `new_group` splits groups bound to a device by NCCL's own calls."""
        return self.bound_device_id is None

    @property
    def supports_window(self) -> bool:
        """Whether `new_window` works: the transport has windows."""
        return registry().backend(self.communicator.backend).info.capabilities.windows

    def new_window(self, tensor: Tensor | None = None) -> GroupWindow:
        """Make a window on the group, with `tensor` or with one that is registered later; collective.

        Raises `Unsupported` if the transport has no windows.
        """
        return GroupWindow(self.communicator, self._timeout, tensor)

    # -- hooks

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        """Call `hook` (PreHookArgs) before each op; an error in it keeps the op from being issued."""
        check_available()
        self._hooks.before[hook_id] = hook

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call `hook` (PostHookArgs) after each op was issued."""
        check_available()
        self._hooks.after[hook_id] = hook

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call `hook` once the communicator has ended: by an abort, a failed op, or a peer's death."""
        self._hooks.at_abort[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._hooks.at_abort.pop(hook_id, None)

    def _register_on_completion_hook(self, hook: Callable[[CompletedWork], None]) -> None:
        """Call `hook` with each op that is complete or has failed, in the thread that completed it."""
        self._hooks.completed.append(hook)

    def _has_hooks(self) -> bool:
        """Whether there are hooks on completed ops."""
        return bool(self._hooks.completed)

    def _wait_for_pending_works(self) -> None:
        """Wait until the hooks on completed ops have run for all ops that were issued. Raises `OpTimeout`."""
        self._hooks.wait_for_pending(self._timeout)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._hooks.before.pop(hook_id, None)

    def unregister_post_hook(self, hook_id: int) -> None:
        self._hooks.after.pop(hook_id, None)

    @property
    def hooked(self) -> Callable[[str, Call, Callable[[], TorchWork]], TorchWork] | None:
        return self._run_hooked if self._hooks.wanted else None

    def _run_hooked(self, method: str, call: Call, issue: Callable[[], TorchWork]) -> TorchWork:
        outputs = () if call.outputs is call.inputs else call.outputs
        root = getattr(call.opts, "rootRank", -1)
        return self._hooks.run(method, issue, call.inputs, outputs, root, is_async(call.opts))

    # -- reductions

    @overloads(
        dist.AllreduceOptions,
        form("opts", tensors=LIST),
        form("op", "timeout", tensors=LIST),
        form("op", "timeout", tensor=TENSOR),
    )
    def allreduce(self, call: Call) -> TorchWork:
        tensor = calls.one("allreduce", call.outputs, "tensors")
        return self._run([self._all_reduce(tensor, call.opts.reduceOp)], call.outputs, call.opts)

    @overloads(dist.AllreduceCoalescedOptions, form("opts", tensors=LIST))
    def allreduce_coalesced(self, call: Call) -> TorchWork:
        tensors = call.outputs
        if not tensors:
            raise ValueError("allreduce_coalesced: the list of tensors is empty; pass at least one")
        check_outputs(tensors, [f"tensors[{i}]" for i in range(len(tensors))])
        return self._run([self._all_reduce(tensor, call.opts.reduceOp) for tensor in tensors], tensors, call.opts)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Issue:
        return partial(self.communicator.all_reduce, tensor, reduction(op, tensor))

    def _issued_work(self, works: Sequence[Work], tensors: Any, limit: float, began: float | None = None) -> TorchWork:
        """The work of issued ops. `began`: when the first of synchronous ones began."""
        if self._extension:
            self._extended += works
        ran = time.perf_counter() - began if self._timed and began is not None else 0.0
        return TorchWork(works, tensors, limit, self._issued, ran if self._timed else None)

    @overloads(dist.ReduceOptions, form("opts", tensors=LIST), form("root", "op", "timeout", tensor=TENSOR))
    def reduce(self, call: Call) -> TorchWork:
        tensor, root = calls.one_of_root("reduce", call.outputs, call.opts), call.opts.rootRank
        ours = reduction(call.opts.reduceOp, tensor)
        return self._run([partial(self.communicator.reduce, tensor, root, ours)], call.outputs, call.opts)

    @overloads(
        dist.ReduceScatterOptions,
        form("opts", output_tensors=LIST, input_tensors=LISTS),
        form("op", "timeout", output=TENSOR, input=LIST),
    )
    def reduce_scatter(self, call: Call) -> TorchWork:
        output = calls.one("reduce_scatter", call.outputs, "output_tensors")
        given = calls.one("reduce_scatter", call.inputs, "input_tensors")
        ours = reduction(call.opts.reduceOp, output)
        return self._run(
            [partial(self.communicator.reduce_scatter, output, given, ours)],
            call.outputs,
            call.opts,
        )

    @overloads(dist.ReduceScatterOptions, form("opts", outputTensor=TENSOR, inputTensor=TENSOR))
    def reduce_scatter_single(self, call: Call) -> TorchWork:
        return self._reduce_scatter_singles([call.outputs], [call.inputs], call.opts)

    @overloads(dist.ReduceScatterOptions, form("opts", outputs=LIST, inputs=LIST))
    def reduce_scatter_single_coalesced(self, call: Call) -> TorchWork:
        calls.pairs("reduce_scatter_single_coalesced", call.outputs, call.inputs)
        return self._reduce_scatter_singles(call.outputs, call.inputs, call.opts)

    def _reduce_scatter_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        reduce = self.communicator.reduce_scatter_single
        pairs = zip(outputs, inputs, strict=True)
        return self._run([partial(reduce, o, t, reduction(opts.reduceOp, t)) for o, t in pairs], outputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moves

    @overloads(dist.BroadcastOptions, form("opts", tensors=LIST), form("root", "timeout", tensor=TENSOR))
    def broadcast(self, call: Call) -> TorchWork:
        tensor = calls.one_of_root("broadcast", call.outputs, call.opts)
        return self._run([partial(self.communicator.broadcast, tensor, call.opts.rootRank)], call.outputs, call.opts)

    @overloads(
        AllgatherOptions,
        form("opts", output_tensors=LISTS, input_tensors=LIST),
        form("timeout", output_tensors=LIST, input_tensor=TENSOR),
    )
    def allgather(self, call: Call) -> TorchWork:
        outputs = calls.one("allgather", call.outputs, "output_tensors")
        tensor = calls.one("allgather", call.inputs, "input_tensors")
        calls.alike("allgather", [tensor, *outputs])
        return self._run([self._all_gather(outputs, tensor)], outputs, call.opts)

    @overloads(AllgatherOptions, form("opts", output_lists=LISTS, input_list=LIST))
    def allgather_coalesced(self, call: Call) -> TorchWork:
        """`outputs[rank][i]` takes that rank's `inputs[i]`."""
        outputs, inputs = call.outputs, call.inputs
        for of_rank in outputs or [()]:
            calls.pairs("allgather_coalesced", of_rank, inputs)
        for i, tensor in enumerate(inputs):
            calls.alike("allgather_coalesced", [tensor, *(of_rank[i] for of_rank in outputs)])
        issues = [self._all_gather([of_rank[i] for of_rank in outputs], tensor) for i, tensor in enumerate(inputs)]
        return self._run(issues, outputs if len(outputs) > 1 else outputs[0], call.opts)

    def _all_gather(self, outputs: Tensors, tensor: Tensor) -> Issue:
        return partial(self.communicator.all_gather, outputs, tensor)

    @overloads(AllgatherOptions, form("opts", output=TENSOR, input=TENSOR))
    def all_gather_single(self, call: Call) -> TorchWork:
        return self._all_gather_singles([call.outputs], [call.inputs], call.opts)

    @overloads(AllgatherOptions, form("opts", outputs=LIST, inputs=LIST))
    def all_gather_single_coalesced(self, call: Call) -> TorchWork:
        calls.pairs("all_gather_single_coalesced", call.outputs, call.inputs)
        return self._all_gather_singles(call.outputs, call.inputs, call.opts)

    def _all_gather_singles(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        gather = self.communicator.all_gather_single
        return self._run([partial(gather, o, t) for o, t in zip(outputs, inputs, strict=True)], outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @overloads(
        dist.GatherOptions,
        form("opts", output_tensors=LISTS, input_tensors=LIST),
        form("root", "timeout", output_tensors=LIST, input_tensor=TENSOR),
    )
    def gather(self, call: Call) -> TorchWork:
        root = call.opts.rootRank
        tensor = calls.one("gather", call.inputs, "input_tensors")
        outputs = self._of_root("gather", call.outputs, "output_tensors", root)
        return self._run(
            [partial(self.communicator.gather, tensor, outputs, root)],
            outputs or [],
            call.opts,
        )

    @overloads(
        dist.ScatterOptions,
        form("opts", output_tensors=LIST, input_tensors=LISTS),
        form("root", "timeout", output_tensor=TENSOR, input_tensors=LIST),
    )
    def scatter(self, call: Call) -> TorchWork:
        root = call.opts.rootRank
        tensor = calls.one("scatter", call.outputs, "output_tensors")
        inputs = self._of_root("scatter", call.inputs, "input_tensors", root)
        return self._run(
            [partial(self.communicator.scatter, tensor, inputs, root)],
            call.outputs,
            call.opts,
        )

    @overloads(dist.GatherOptions, form("opts", output=TENSOR, input=TENSOR))
    def gather_single(self, call: Call) -> TorchWork:
        """`output`, on the root, takes all ranks' inputs one after the other along its first dimension."""
        root, tensor, size = call.opts.rootRank, call.inputs, self.communicator.size
        outputs = None
        if self.communicator.rank == root:
            if call.outputs.numel() != size * tensor.numel() or not call.outputs.is_contiguous():
                raise ValueError(
                    f"gather_single: output must be contiguous and have {size} times the {tensor.numel()} elements "
                    "of input"
                )
            outputs = list(call.outputs.view(size, *tensor.shape).unbind())
        return self._run(
            [partial(self.communicator.gather, tensor, outputs, root)],
            [call.outputs] if outputs else [],
            call.opts,
        )

    gather_into_tensor = gather_single

    def _of_root(self, op: str, items: Sequence[Tensors], what: str, root: int) -> Tensors | None:
        """The root's only list; None on other ranks."""
        rank = self.communicator.rank
        calls.of_root(op, items, what, rank, root)
        return items[0] if rank == root else None

    @overloads(dist.AllToAllOptions, form("opts", output_tensors=LIST, input_tensors=LIST))
    def alltoall(self, call: Call) -> TorchWork:
        outputs, inputs = call.outputs, call.inputs
        return self._run([partial(self.communicator.all_to_all, outputs, inputs)], outputs, call.opts)

    @overloads(
        dist.AllToAllOptions,
        form("opts", output=TENSOR, input=TENSOR, output_split_sizes=SIZES, input_split_sizes=SIZES),
        form("timeout", output=TENSOR, input=TENSOR, output_split_sizes=SIZES, input_split_sizes=SIZES),
    )
    def all_to_all_single(self, call: Call) -> TorchWork:
        output, tensor = call.outputs, call.inputs
        rows_out, rows_in = (sizes or None for sizes in call.splits)
        return self._run(
            [partial(self.communicator.all_to_all_single, output, tensor, rows_out, rows_in)],
            [output],
            call.opts,
        )

    alltoall_base = all_to_all_single

    @overloads(dist.BarrierOptions, form("opts"), form("timeout"))
    def barrier(self, call: Call) -> TorchWork:
        return self._run([self.communicator.barrier], [], call.opts)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Return once all ranks have come; else raise on all ranks, naming the missing ones. See `MonitoredBarrier`."""
        with self._turn:
            limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            self._monitored.pass_through(self._timeout if limit is None else limit, wait_all_ranks)

    def _monitored_barrier(self, prefix: str) -> MonitoredBarrier:
        store = group_store(self._store, prefix, self._timeout)
        return MonitoredBarrier(store, self.communicator.rank, self.communicator.size)

    # -- point to point: concurrent with collectives, not ordered with them

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> TorchWork:  # noqa: N803  # torch's name
        (tensor,) = tensors

        def issue() -> TorchWork:
            limit = self._extend(self._timeout)
            return self._message(self._p2p.send(tensor, dstRank, tag, limit), tensors, limit, [])

        return self._hooks.run("send", issue, inputs=tensors, root=dstRank)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> TorchWork:  # noqa: N803  # torch's name
        return self._hooks.run("recv", partial(self._receive, tensors, srcRank, tag), outputs=tensors, root=srcRank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        return self._hooks.run("recv_anysource", partial(self._receive, tensors, None, tag), outputs=tensors)

    def _receive(self, tensors: Tensors, src: int | None, tag: int) -> TorchWork:
        (tensor,), limit = tensors, self._extend(self._timeout)
        work = self._p2p.recv(tensor, src, tag, limit)
        return self._message(work, tensors, limit, work.source)

    def _message(self, work: Work, tensors: Tensors, limit: float, source: list[int]) -> TorchWork:
        if self._extension:
            self._extended.append(work)
        number, ran = next(self._messages), 0.0 if self._timed else None
        return self._joined(TorchWork([work], tensors, limit, number, ran, source))

    # -- several ops as one

    def _start_coalescing(self, device: torch.device) -> None:
        with self._turn:
            if self._together is not None:
                raise HoldfastError("ops of this group are being coalesced already; end that first")
            self._together = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        with self._turn:
            together, self._together = self._together or [], None
        return TorchWork(
            [part for work in together for part in work.parts],
            [t for work in together for t in work.result()],
            max((work.timeout.total_seconds() for work in together), default=self._timeout),
            self._issued,
            0.0 if self._timed else None,
        )

    def _joined(self, work: TorchWork) -> TorchWork:
        if self._together is not None:
            self._together.append(work)
        return work

    def _run(self, issues: Sequence[Issue], tensors: Tensors | Sequence[Tensors], opts: Any) -> TorchWork:
        with self._turn:
            limit = seconds(opts.timeout) or self._timeout
            if self._extension:
                limit = self._extend(limit)
            later = is_async(opts) or self._together is not None
            self._issued += len(issues)
            began = time.perf_counter() if self._timed and not later else None
            own = None if limit == self._usual else limit  # an op with a timeout of its own has no short path
            return self._joined(self._issued_work([issue(later, own) for issue in issues], tensors, limit, began))

    # -- reconfiguration: other members, in the same object

    def get_reconfigure_handle(self) -> str:
        """This member's handle, for `reconfigure` on the members of its next group."""
        return self.communicator.handle()

    def reconfigure(
        self,
        given: Any,
        handles: Sequence[str] | Set[str] | None = None,
        timeout: timedelta | float | None = None,
        hints: Hints | None = None,
    ) -> TorchWork:
        """Continue as the group of the members in `handles`: see `Communicator.reconfigure`; collective over these.

        Takes torch 2.14's `ReconfigureOptions`, or `(uuid, handles, timeout, hints)`. Pending ops raise `Revoked`, or
        `PeerFailed` if another member left first; an op that this rank has completed still completes on the others.
        Rank and size are new when this returns.
        """
        if handles is None:
            given, handles, timeout, hints = given.uuid, given.handles, given.timeout, given.hints
        uuid, limit = int(given), seconds(timeout) or self._timeout
        with self._turn:
            self.communicator.check_members(uuid, handles, hints or None)
            self._p2p.close()
            self.communicator.reconfigure(uuid, handles, limit, hints or None)
            self._begin_anew()
        return TorchWork([DONE], [], self._timeout, self._issued)

    def _begin_anew(self) -> None:
        """Go on over the communicator, which has other connections."""
        forget_meshes(self.communicator.device)
        self._p2p = P2PChannels(self.communicator, self._timeout)
        self._monitored = self._monitored_barrier(f"reconfigured/{self.communicator.name}")
        self._hooks.rank = self.communicator.rank

    def suspend(self) -> None:
        """Release memory and connections until `resume`; collective: see `Communicator.suspend`."""
        with self._turn:
            self._p2p.close()
            self.communicator.suspend(self._timeout)

    def resume(self) -> None:
        """Connect again after `suspend`; collective."""
        with self._turn:
            self.communicator.resume(self._timeout)
            self._begin_anew()

    def get_error(self) -> Any:
        """torch's `ErrorType` of the error that ended the communicator; SUCCESS after an abort by this rank."""
        from torch._C._distributed_c10d import ErrorType

        over = self.communicator._executor.over
        if over is None or (isinstance(over, Revoked) and over.own):
            return ErrorType.SUCCESS
        kind = (isinstance(over, Revoked) and over.failure) or type(over)
        late = issubclass(kind, OpTimeout)
        return ErrorType.TIMEOUT if late else ErrorType.COMM_ERROR

    # -- subgroups

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> HoldfastProcessGroup | None:
        """Make a group of `ranks` of this one, over its transport; None on the other ranks."""
        if self.rank() not in ranks:
            return None
        seconds_each = self._timeout if timeout is None else timeout.total_seconds()
        part = self.communicator.split(sorted(ranks), timeout=seconds_each)
        group = HoldfastProcessGroup(dist.PrefixStore(part.name, self._store), part, self.options, seconds_each)
        group.setGroupName(group_name or part.name)
        group.setGroupDesc(group_desc or f"{self._description}:split")
        return group

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None) -> HoldfastBackend:
        """Connect the members of this group that are not excluded; collective over these, for `dist.shrink_group`.

        `shrink_flags` 1 aborts this group's pending ops first. `opts` may name other options of ours. The excluded may
        be dead, but for the process that serves the group's store.
        """
        excluded = set(ranks_to_exclude)
        ranks = [rank for rank in range(self.size()) if rank not in excluded]
        options = self.options if opts is None else resolve_options(opts, self.options)
        if shrink_flags:
            self.abort()
        self._shrunk += 1
        name = f"{self.communicator.name}/shrunk-{'-'.join(map(str, ranks))}.{self._shrunk}"
        store = dist.PrefixStore(name, self._store)
        communicator = connect(
            options.backend,
            rank=ranks.index(self.rank()),
            size=len(ranks),
            rendezvous=store,
            name=name,
            device=torch.device(options.device),
            timeout=self._timeout,
        )
        return HoldfastBackend(HoldfastProcessGroup(store, communicator, options, self._timeout))

    # -- the end

    def abort(self) -> None:
        """End all ops here, and those of peers that wait for this rank, and release all resources."""
        over = Revoked(self.communicator.epoch, "the process group was aborted", own=True)
        self.communicator.abort(over)
        self._p2p.abort(over)
        self.shutdown()

    def shutdown(self) -> None:
        """Release all resources; pending ops raise `Revoked`. Idempotent."""
        self._p2p.close()
        self.communicator.close()


forward_shared_calls(HoldfastProcessGroup)


def behind(group: object) -> HoldfastProcessGroup | None:
    """The `HoldfastProcessGroup` behind a torch process group.

    None for a group over another backend, and for the placeholder that torch returns to ranks outside a group.
    """
    if isinstance(group, HoldfastProcessGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        for device in group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, HoldfastBackend):
                return backend.group
    return None


def forget_meshes(device: torch.device) -> None:
    """Drop what torch keeps of the meshes over former ranks: this process gets its rank in a default group, or another.

    DTensor's ops take the mesh of their results from a cache, and there a mesh equals each other one of the same ranks:
    also one over a group that is gone, in which this process had another rank, and so another part of each tensor.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    _clear_mesh_caches()
    # Each thread has such a cache; the backward passes of a device run in a thread of its own.
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            _ClearInBackward.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


class _ClearInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _clear_mesh_caches()
        return gradient


def _clear_mesh_caches() -> None:
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
