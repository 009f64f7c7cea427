"""`Switch`: dispatch tokens to the experts of all ranks, and combine what they return, though a rank dies.

One step is an exchange of rows and an agreement. `dispatch` sends each token to its experts' ranks (frames OUT). In
`combine` the results return (frames BACK), and the living agree on the ranks that no one uses in this step: see
`MaskAgreement`. The backward pass is a step of its own: the gradients of the results go out, those of the tokens back.

A frame's memory may be written again when its reader has read it. OUT: the reader sends BACK after it has read all OUT.
BACK: it reports after it has read all BACK. Its sender writes the next one only after it has heard that report.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, RegionGone, Revoked, StaleEpoch, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.quantities import integer_in, seconds

Tensor = torch.Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OUT, BACK, REPORT, DECISION, ABORT = range(5)
"""The kinds of frames: rows to experts, rows back, and what `MaskAgreement` sends; or that the switch is over."""
_FENCED = -1
_ABORT_SECONDS = 0.2
_REFUSED = -1
"""Rows of a BACK frame to a rank whose OUT frame was refused."""
_SLICE_SECONDS = 0.05
"""How often a wait checks whether another rank has fenced the silent one."""


@dataclass(frozen=True, slots=True)
class Received:
    """What `dispatch` returns: the rows for this rank's experts, in the order of `Switch.local_experts`.

    `counts[i]` is the number of rows for `local_experts[i]`; rows of one expert are in the order of their source ranks.
    """

    tokens: Tensor
    counts: Tensor

    def split(self) -> tuple[Tensor, ...]:
        """The rows of each local expert."""
        return torch.split(self.tokens, self.counts.tolist())


@dataclass(slots=True)
class _Routing:
    """Where the rows of one dispatch went, and where those that came are from."""

    experts: Tensor
    owners: Tensor
    order: Tensor
    sent: list[slice]
    """For each rank, the part of `order` that it was sent."""
    sent_counts: list[list[int]]
    came: dict[int, list[int]] = field(default_factory=dict)
    """For each rank that has sent rows, how many for each local expert."""

    def rows_from(self, rank: int) -> int:
        return sum(self.came.get(rank, ()))


class Switch:
    """An exchange of tokens between the experts of a communicator's ranks that outlives a rank.

    Each rank calls `dispatch`, runs its experts on what it received, and calls `combine`. If a rank dies, the others'
    combine returns as soon as its death is seen: its experts are masked, `alive` names those that are left, and the
    following steps go on without it, in the same epoch. All living ranks leave out the same ranks in each step. A rank
    that closes its switch is masked like one that died.

    A rank that is silent for `timeout` seconds (stopped, or cut off) is not known to be dead. `silence="raise"`, the
    default, ends the switch on all ranks: `OpTimeout` names the silent one, the others raise `Revoked`. With
    `silence="mask"` the silent rank is fenced and masked, and raises `StaleEpoch` if it comes back. That takes memory
    that can be written while its owner is stopped, as on one host. Elsewhere both sides of a cut could go on.

    It is collective to make one. Not for several threads at once. Gradients pass through both calls; every living rank
    must then run the backward pass, in the same order.
    """

    def __init__(
        self,
        comm: Communicator,
        experts: int | Sequence[int | Sequence[int]],
        *,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        renormalise: bool = False,
        silence: str = "raise",
        timeout: float = 30.0,
    ) -> None:
        """`experts` is their number, in equal blocks on the ranks, or the rank of each expert.

        An expert with several ranks has copies there: its tokens go to the first that lives. `max_tokens` is the most
        that one rank dispatches. `renormalise` scales the weights of a token's living experts to the sum of all.
        """
        if comm.device.type != "cpu":
            raise Unsupported(f"experts on {comm.device}", "use a communicator of a CPU device")
        if dtype not in DTYPES:
            raise ValueError(f"tokens cannot be {dtype}; use one of {', '.join(map(str, DTYPES))}")
        if silence not in ("raise", "mask"):
            raise ValueError(f"silence={silence!r}: it is 'raise' or 'mask'")
        self.rank, self.size, self.epoch = comm.rank, comm.size, comm.epoch
        self.top_k = integer_in(top_k, "top_k", 1)
        self.hidden, self.max_tokens = integer_in(hidden, "hidden", 1), integer_in(max_tokens, "max_tokens", 1)
        self.dtype, self.renormalise, self._masks_silent = dtype, bool(renormalise), silence == "mask"
        self._placement = _placement(experts, comm.size)
        if self.top_k > len(self._placement):
            raise ValueError(f"top_k={top_k}, and there are {len(self._placement)} experts")
        self._hosted = [[e for e, at in enumerate(self._placement) if r in at] for r in range(comm.size)]
        self.timeout = seconds(timeout)
        self._rows = self.max_tokens * self.top_k
        self._head = 3 + max(comm.size, *(len(hosted) for hosted in self._hosted))
        self._check_alike(comm, silence)
        payload = math.ceil(self._rows * self.hidden * dtype.itemsize / 8)
        self._links = Links(comm, self._head, payload, self._masks_silent, self.timeout)
        self._payload_words = payload
        self._participants = frozenset(range(comm.size))
        self._gone: set[int] = set()
        self._fenced: set[int] = set()
        """Those of `_gone` that were fenced."""
        self._unread = [0] * comm.size
        """For each rank, its decisions that this rank has not read, since it did not need them."""
        self._unreadable: set[int] = set()
        """The ranks whose OUT frame of this step did not come, or cannot be true."""
        self._step = 0
        self._routing: _Routing | None = None
        self._weights: Tensor | None = None
        self._linked: Tensor | None = None
        self._over: HoldfastError | None = None
        self._deadline = 0.0
        self._choose_owners()

    def _check_alike(self, comm: Communicator, silence: str) -> None:
        experts = [list(ranks) for ranks in self._placement]
        mine = [experts, self.top_k, self.hidden, self.max_tokens, str(self.dtype), self.renormalise, silence]
        for rank, theirs in enumerate(comm.all_gather_object(mine, timeout=self.timeout)):
            if theirs != mine:
                raise Mismatch(f"rank {rank} makes a switch of {theirs}, rank {comm.rank} one of {mine}")

    # -- the ranks

    @property
    def alive(self) -> tuple[bool, ...]:
        """Whether each rank takes part: the same on all living ranks after each step. A rank never comes back."""
        return tuple(rank in self._participants for rank in range(self.size))

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return tuple(self._hosted[self.rank])

    @property
    def reachable(self) -> tuple[bool, ...]:
        """Whether each expert has a living rank."""
        return tuple(owner >= 0 for owner in self._owners.tolist())

    def _choose_owners(self) -> None:
        """The first living rank of each expert, or -1, and its place among the rows sent to all."""
        owners = [next((r for r in ranks if r in self._participants), -1) for ranks in self._placement]
        self._owners = torch.tensor(owners, device="cpu")
        widest = max(len(hosted) for hosted in self._hosted)
        keys = [o * widest + self._hosted[o].index(e) if o >= 0 else self.size * widest for e, o in enumerate(owners)]
        self._keys, self._width = torch.tensor(keys, device="cpu"), widest

    # -- the calls

    def dispatch(self, tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> Received:
        """Send each token to its experts; return the rows for the experts of this rank.

        `tokens` is (n, hidden), `expert_ids` and `weights` are (n, top_k). Raises ValueError before anything moves if
        they do not fit: the call may then be repeated.
        """
        self._check_usable()
        if self._routing is not None:
            raise Mismatch("dispatch was called again before combine: each dispatch needs its combine")
        self._check_tokens(tokens, expert_ids, weights)
        routing = self._route(expert_ids)
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # so the backward pass is the same on all ranks
        rows = cast(Tensor, _Out.apply(tokens, self, routing))  # type: ignore[no-untyped-call]
        self._routing, self._weights, self._linked = routing, weights, rows
        counts = [sum(came[i] for came in routing.came.values()) for i in range(len(self.local_experts))]
        return Received(rows, torch.tensor(counts, dtype=torch.int64, device="cpu"))

    def combine(self, outputs: Tensor) -> Tensor:
        """Return the experts' outputs to their tokens, and add them up by weight, in the order of `expert_ids`.

        `outputs` has a row for each row of `Received.tokens`. The sum is computed in float32 (float64 for float64). A
        token with no living expert gets zeros.
        """
        self._check_usable()
        routing, weights, linked = self._routing, self._weights, self._linked
        if routing is None or weights is None or linked is None:
            raise Mismatch("combine was called without a dispatch before it")
        if outputs.shape != linked.shape or outputs.dtype != self.dtype or not outputs.is_cpu:
            raise ValueError(
                f"combine needs {self.dtype} on cpu of shape {tuple(linked.shape)}, as dispatch returned: "
                f"not {outputs.dtype} on {outputs.device} of {tuple(outputs.shape)}"
            )
        self._routing = self._weights = self._linked = None
        rows = cast(Tensor, _Back.apply(outputs, linked, self, routing))  # type: ignore[no-untyped-call]
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        wide_weights = weights.to(wide)
        live = torch.tensor([*self.alive, False], device="cpu")[routing.owners]
        used = wide_weights * live
        if self.renormalise:
            total = used.sum(1, keepdim=True)
            used = used * (wide_weights.sum(1, keepdim=True) / torch.where(total == 0, 1.0, total))
        per_token = rows.view(-1, self.top_k, self.hidden).to(wide)
        return torch.bmm(used[:, None, :], per_token).squeeze(1).to(self.dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over the living ranks, in place, in rank order.

        All get equal bits, and agree on the ranks that are in the sum. It is for what all ranks have, such as the
        gradients of a router. Divide by `sum(switch.alive)` for a mean.
        """
        self._check_usable()
        if self._routing is not None:
            raise Mismatch("all_reduce was called between dispatch and combine")
        if tensor.dtype not in DTYPES or not tensor.is_cpu:
            raise ValueError(f"all_reduce takes floating-point tensors on cpu, not {tensor.dtype} on {tensor.device}")
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        mine = tensor.detach().to(wide).reshape(-1).contiguous()
        theirs = {rank: torch.zeros_like(mine) for rank in self._participants if rank != self.rank}
        room = self._payload_words * 8 // wide.itemsize
        for start in range(0, max(mine.numel(), 1), room):
            part = slice(start, min(start + room, mine.numel()))
            self._exchange_equal(mine[part], {rank: whole[part] for rank, whole in theirs.items()})
        theirs[self.rank] = mine
        total = torch.zeros_like(mine)
        for rank in sorted(self._participants):
            total += theirs[rank]
        with torch.no_grad():
            tensor.copy_(total.view_as(tensor))
        return tensor

    def close(self) -> None:
        """Leave: the others mask this rank. Idempotent; not collective."""
        if self._over is None:
            self._over = Revoked(self.epoch, "this rank has closed the switch", own=True)
        self._links.close()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- checks

    def _check_usable(self) -> None:
        if self._over is not None:
            raise Revoked(self.epoch, f"the switch has ended: {self._over}") from self._over

    def _check_tokens(self, tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if tokens.dim() != 2 or tokens.shape[1] != self.hidden or tokens.dtype != self.dtype or not tokens.is_cpu:
            raise ValueError(
                f"tokens are {self.dtype} on cpu of shape (n, {self.hidden}), "
                f"not {tokens.dtype} on {tokens.device} of {tuple(tokens.shape)}"
            )
        if len(tokens) > self.max_tokens:
            raise ValueError(f"{len(tokens)} tokens, and the switch was made for max_tokens={self.max_tokens}")
        for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
            if tuple(tensor.shape) != (len(tokens), self.top_k) or not tensor.is_cpu:
                raise ValueError(
                    f"{name} must be of shape ({len(tokens)}, {self.top_k}) on cpu, "
                    f"not {tuple(tensor.shape)} on {tensor.device}"
                )
        if expert_ids.dtype not in (torch.int64, torch.int32) or not weights.is_floating_point():
            raise ValueError(f"expert_ids are integers, weights are floats: not {expert_ids.dtype}, {weights.dtype}")
        if expert_ids.numel() and not (int(expert_ids.min()) >= 0 and int(expert_ids.max()) < len(self._placement)):
            raise ValueError(
                f"expert numbers are 0 to {len(self._placement) - 1}, "
                f"not {int(expert_ids.min())} to {int(expert_ids.max())}"
            )

    # -- one step

    def _route(self, expert_ids: Tensor) -> _Routing:
        experts = expert_ids.detach().reshape(-1).long()
        keys = self._keys[experts]
        order = keys.argsort(stable=True)
        counts = torch.bincount(keys, minlength=self.size * self._width + 1)[:-1].view(self.size, self._width).tolist()
        sent, at = [], 0
        for rank in range(self.size):
            rows = sum(counts[rank])
            sent.append(slice(at, at + rows))
            at += rows
        return _Routing(experts, self._owners[experts].view(-1, self.top_k), order, sent, counts)

    def _others(self) -> list[int]:
        """The other participants, from the next rank on: ranks then send to different ones at a time."""
        ranks = [(self.rank + i) % self.size for i in range(1, self.size)]
        return [rank for rank in ranks if rank in self._participants]

    def _send_back(self, rank: int, rows: int, parts: Sequence[Tensor]) -> None:
        """Send `parts`, one after the other, as a BACK frame; its head says `rows`."""
        elements = sum(part.numel() for part in parts)
        words = math.ceil(elements * parts[0].dtype.itemsize / 8) if parts else 0
        frame = self._frame(rank, BACK, [rows], words)
        if elements:
            torch.cat([part.reshape(-1) for part in parts], out=self._payload(frame, elements, parts[0].dtype))
        self._send(rank, BACK, frame)

    def _frame(self, rank: int, kind: int, head: Sequence[int], words: int) -> Tensor:
        frame = self._links.frame(rank, kind, self._head + words)
        line = [kind, self._step, *head]
        frame[: len(line)] = torch.tensor(line, device="cpu")
        return frame

    def _send(self, rank: int, kind: int, frame: Tensor) -> None:
        """Send a frame to a rank, unless that is gone."""
        if rank in self._gone:
            return
        try:
            self._links.send(rank, kind, frame, self._left())
        except LinkGone:
            self._gone.add(rank)
        except OpTimeout as error:
            self._give_up(rank, error)

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _receive(self, rank: int, kind: int) -> Tensor | None:
        """The next frame of a rank that this rank needs; None if that rank is gone."""
        if rank in self._fenced:  # it may still send, behind what it has not sent in time
            return None
        while self._unread[rank]:
            if self._wait(rank, DECISION) is None:
                return None
            self._unread[rank] -= 1
        return self._wait(rank, kind)

    def _wait(self, rank: int, kind: int) -> Tensor | None:
        has_decided = False
        while True:
            left = self._left()
            try:
                return self._links.receive(rank, kind, min(left, _SLICE_SECONDS) if self._masks_silent else left)
            except LinkGone:
                self._gone.add(rank)
                return None
            except Revoked as error:
                self._over = error.again()
                raise
            except OpTimeout as error:
                if not self._masks_silent or has_decided:
                    self._give_up(rank, error)
                if self._exclude(rank, last=not left):
                    return None
                has_decided = not left  # else it would be fenced now: what it sent has arrived meanwhile

    def _exclude(self, rank: int, last: bool) -> bool:
        """Fence a silent rank after the last wait for it; whether it is out, by this rank or another.

        A rank that was stopped itself finds here that the others have fenced it.
        """
        try:
            fenced = self._links.fence(rank, self._step) if last else self._links.is_fenced(rank)
            if not fenced and self._links.is_fenced(self.rank):
                self._raise_masked()
        except LinkGone:
            fenced = True
        except OpTimeout as error:
            self._give_up(rank, error)
        if fenced:
            self._gone.add(rank)
            self._fenced.add(rank)
            self._begin()  # the others may have waited for the same rank, and need as long for the rest
        return fenced

    def _begin(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def _give_up(self, rank: int, error: OpTimeout) -> NoReturn:
        """End the switch on all ranks: `rank` is silent, which is no proof that it is gone."""
        failure = OpTimeout(f"step {self._step} of a switch", self._step, self.timeout, (rank,))
        self._over = failure.again()
        for other in self._others():
            self._links.abort(other)
        raise failure from error

    def out(self, routing: _Routing, source: Tensor, per_token: int) -> Tensor:
        """Send rows of `source` to experts; `per_token` entries of the order share one row. Returns those that came."""
        self._check_usable()
        self._begin()
        self._step += 1
        self._unreadable = set()
        row_of = routing.order // per_token if per_token > 1 else routing.order
        for rank in self._others():
            rows = row_of[routing.sent[rank]]
            elements = len(rows) * self.hidden
            head = [len(rows), *routing.sent_counts[rank]]
            frame = self._frame(rank, OUT, head, math.ceil(elements * self.dtype.itemsize / 8))
            if elements:
                into = self._payload(frame, elements, self.dtype).view(-1, self.hidden)
                torch.index_select(source, 0, rows, out=into)
            self._send(rank, OUT, frame)
        blocks = {self.rank: source.index_select(0, row_of[routing.sent[self.rank]])}
        came = {self.rank: routing.sent_counts[self.rank][: len(self.local_experts)]}
        for rank in self._others():
            received = self._receive(rank, OUT)
            announced = None if received is None else self._counts_of(received, routing.came.get(rank))
            if received is None or announced is None:
                self._unreadable.add(rank)
                continue
            came[rank] = announced
            blocks[rank] = self._payload(received, sum(announced) * self.hidden, self.dtype).view(-1, self.hidden)
        if not routing.came:
            routing.came = dict(sorted(came.items()))
        for rank, counts in routing.came.items():
            if rank not in blocks:  # gone since: its rows have no gradient
                blocks[rank] = torch.zeros(sum(counts), self.hidden, dtype=self.dtype, device="cpu")
        pieces = {rank: torch.split(blocks[rank], counts) for rank, counts in routing.came.items()}
        in_order = [pieces[rank][i] for i in range(len(self.local_experts)) for rank in routing.came]
        return torch.cat(in_order) if in_order else torch.zeros(0, self.hidden, dtype=self.dtype, device="cpu")

    def _counts_of(self, frame: Tensor, before: Sequence[int] | None) -> list[int] | None:
        """The counts that the head of an OUT frame announces; None if they cannot be true."""
        kind, step, rows, *words = frame[: self._head].tolist()
        counts, rest = words[: len(self.local_experts)], words[len(self.local_experts) : self._width]
        fits = min([rows, *counts]) >= 0 and sum(counts) == rows <= self._rows and not any(rest)
        fits = fits and (len(frame) - self._head) * 8 >= rows * self.hidden * self.dtype.itemsize
        if (kind, step) != (OUT, self._step) or not fits or (before is not None and before != counts):
            return None
        return counts

    def back(self, routing: _Routing, outputs: Tensor) -> Tensor:
        """Return `outputs` to the ranks of their tokens, and agree. Rows of masked ranks are zeros."""
        self._check_usable()
        self._begin()
        sizes = [counts[i] for i in range(len(self.local_experts)) for counts in routing.came.values()]
        blocks = torch.split(outputs, sizes)
        ranks = list(routing.came)
        parts = {rank: blocks[i :: len(ranks)] for i, rank in enumerate(ranks) if rank not in self._unreadable}
        for rank in self._others():
            rows = routing.rows_from(rank) if rank in parts else _REFUSED
            self._send_back(rank, rows, parts.get(rank, ()))
        order = routing.order
        result = torch.zeros(len(order), self.hidden, dtype=self.dtype, device="cpu")
        if parts[self.rank]:
            result.index_copy_(0, order[routing.sent[self.rank]], torch.cat(parts[self.rank]))
        lost: set[int] = set()
        for rank in self._others():
            expected = order[routing.sent[rank]]
            frame = self._receive(rank, BACK)
            rows_in_frame = self._rows_of(frame)
            if rows_in_frame == _REFUSED:  # it could not read what this rank sent
                lost.add(self.rank)
            elif frame is None or rows_in_frame != len(expected):
                lost.add(rank)
            else:
                values = self._payload(frame, len(expected) * self.hidden, self.dtype)
                result.index_copy_(0, expected, values.view(-1, self.hidden))
        for rank in self._agree(lost):
            result[order[routing.sent[rank]]] = 0
        return result

    def _rows_of(self, frame: Tensor | None) -> int | None:
        """The number of rows, or of elements, in a BACK frame; None if it is not of this step."""
        if frame is None:
            return None
        kind, step, rows = frame[:3].tolist()
        return int(rows) if (kind, step) == (BACK, self._step) else None

    def _payload(self, frame: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements of a frame's payload."""
        return frame[self._head :].view(dtype)[:elements]

    def _exchange_equal(self, mine: Tensor, theirs: dict[int, Tensor]) -> None:
        """Send `mine` to all, take theirs, and agree on the ranks that are in the sum."""
        self._begin()
        self._step += 1
        for rank in self._others():
            self._send_back(rank, mine.numel(), [mine])
        lost: set[int] = set()
        for rank in self._others():
            frame = self._receive(rank, BACK)
            if frame is None or self._rows_of(frame) != mine.numel():
                lost.add(rank)
            else:
                theirs[rank].copy_(self._payload(frame, mine.numel(), mine.dtype))
        self._agree(lost)

    def _agree(self, lost: set[int]) -> frozenset[int]:
        """Agree with the living on the ranks to mask; mask them, and return them."""
        agreement = MaskAgreement(self.rank, self._participants, lost)
        others = self._others()
        self._tell(others, REPORT, agreement.lost)
        read = set()
        while (awaited := agreement.awaited) is not None:
            rank, kind = awaited
            frame = self._receive(rank, kind)
            if kind != REPORT:
                read.add(rank)
            agreement.hear(None if frame is None else frame[3 : 3 + self.size].nonzero().view(-1).tolist())
        masked = agreement.decision
        assert masked is not None
        self._tell(others, DECISION, masked)
        for rank in others:
            self._unread[rank] += rank not in read
        if self.rank in masked or not self._links.commit(self._step):
            self._raise_masked()
        if masked:
            self._participants -= masked
            self._choose_owners()
        return masked

    def _raise_masked(self) -> NoReturn:
        masked = StaleEpoch(
            f"rank {self.rank} is masked: the others did not hear it in time, or could not read what it sent; "
            "they go on without it, so rebuild and rejoin in the next epoch"
        )
        self._over = masked.again()
        raise masked

    def _tell(self, ranks: Sequence[int], kind: int, named: frozenset[int]) -> None:
        """Send the ranks in `named` to others."""
        for rank in ranks:
            frame = self._frame(rank, kind, [0, *(other in named for other in range(self.size))], 0)
            self._send(rank, kind, frame)


class _Out(torch.autograd.Function):
    """Rows to experts. The gradients of the rows come back, and those of a token's rows are added up."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, switch: Switch, routing: _Routing) -> Tensor:
        ctx.switch, ctx.routing = switch, routing
        return switch.out(routing, tokens, switch.top_k)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.switch.back(ctx.routing, gradients.contiguous())
        return rows.view(-1, ctx.switch.top_k, ctx.switch.hidden).sum(1), None, None


class _Back(torch.autograd.Function):
    """Results to tokens. `linked` joins the graph to `dispatch`, also where no expert had a row."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, linked: Tensor, switch: Switch, routing: _Routing) -> Tensor:
        ctx.switch, ctx.routing, ctx.linked = switch, routing, linked.shape
        return switch.back(routing, outputs.detach())

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows = ctx.switch.out(ctx.routing, gradients.contiguous(), 1)
        return rows, rows.new_zeros(ctx.linked), None, None


def _placement(experts: int | Sequence[int | Sequence[int]], size: int) -> tuple[tuple[int, ...], ...]:
    """For each expert, the ranks that have it, the first to be used first."""
    if isinstance(experts, int):
        number = integer_in(experts, "experts", size)
        return tuple((expert * size // number,) for expert in range(number))
    placement = []
    for expert, at in enumerate(experts):
        ranks = (at,) if isinstance(at, int) else tuple(at)
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"expert {expert} is placed on {list(ranks)}: it needs ranks that differ")
        placement.append(tuple(integer_in(rank, f"the rank of expert {expert}", 0, size - 1) for rank in ranks))
    if not placement:
        raise ValueError("a switch needs an expert at least")
    return tuple(placement)


class LinkGone(Exception):
    """The rank at the other end has ended, left or been fenced: it takes part in no later step."""


class Links:
    """The links of one rank to the others, through a window, which reaches memory directly or by messages.

    Each pair of ranks stands alone: the end of one is reported by the links to it, and disturbs no other. Frames of one
    rank arrive in the order in which it sent them. A frame is a tensor of int64: a head of fixed size, then a payload.

    Each rank exposes, for each other one, a slot a kind of frame. A frame is written in its place, and signalled. A
    slot is free again when its next frame can come: see `Switch`. Element 0 of a rank's window is the last step that it
    decided, or `_FENCED`. Either is set by compare-and-swap, so a rank decides a step or is fenced, never both.
    """

    def __init__(self, comm: Communicator, head: int, payload: int, fences: bool, timeout: float) -> None:
        """Open links for frames of `head` words and up to `payload` more; collective."""
        if not registry().backends[comm.backend].capabilities.windows:
            raise Unsupported(
                f"experts over {comm.backend!r}", "it has no windows: `holdfast backends` lists those that do"
            )
        self._rank, self._epoch, self._fences, self._timeout = comm.rank, comm.epoch, fences, timeout
        whole = head + payload
        self._sizes = [whole, whole, head, head, 1]
        self._starts = [sum(self._sizes[:kind]) for kind in range(5)]
        self._slot = sum(self._sizes)
        self._memory = torch.zeros(1 + comm.size * self._slot, dtype=torch.int64, device="cpu")
        self._window = comm.window(self._memory, timeout)
        self._mapped: dict[int, Tensor] = {}
        if self._window.info.access == "mapped":
            for rank in range(comm.size):
                with contextlib.suppress(RegionGone):  # it is gone already: a signal to it finds that
                    self._mapped[rank] = self._window.map(rank)
        elif fences:
            self.close()
            raise Unsupported(
                f"silence='mask' over this {comm.backend!r}",
                "a stopped rank cannot be fenced there, and might go on alone later; use silence='raise', or a backend "
                "that maps windows between processes of one host (`holdfast backends`)",
            )

    def frame(self, rank: int, kind: int, words: int) -> Tensor:
        """Memory for a frame to `rank`: fill it and send it, before the next one is asked for."""
        start = self._place(self._rank, kind)
        theirs = self._mapped.get(rank)
        return torch.zeros(words, dtype=torch.int64, device="cpu") if theirs is None else theirs[start : start + words]

    def _place(self, owner: int, kind: int) -> int:
        """The first element of the slot for `owner`'s frames."""
        return 1 + owner * self._slot + self._starts[kind]

    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        """Send a frame. Raises `LinkGone`, `OpTimeout`."""
        with self._reported(rank):
            if rank not in self._mapped:
                self._window.put(frame, rank, self._place(self._rank, kind), timeout)
            self._window.signal(rank, timeout)

    def receive(self, rank: int, kind: int, timeout: float) -> Tensor:
        """Wait for the next frame of `rank`, which is of this kind. Raises `LinkGone`, `OpTimeout`.

        The frame is valid until that rank has been sent the report of the step. Raises `Revoked` if the rank aborted.
        """
        with self._reported(rank):
            self._window.wait_signal(rank, timeout)
        if self._memory[self._place(rank, ABORT)]:
            why = f"rank {rank} has ended the switch: it did not hear a rank in time, and raised that"
            raise Revoked(self._epoch, why, OpTimeout)
        start = self._place(rank, kind)
        return self._memory[start : start + self._sizes[kind]]

    @contextlib.contextmanager
    def _reported(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RegionGone as error:
            if self._window.closed:
                raise
            raise LinkGone(str(error)) from error

    def commit(self, step: int) -> bool:
        """Record that this rank has decided `step`; False if it was fenced before."""
        if not self._fences:
            return True
        return self._window.compare_swap(self._rank, 0, step - 1, step, self._timeout) != _FENCED

    def fence(self, rank: int, step: int) -> bool:
        """Exclude a silent rank unless it has decided `step`; whether it is excluded now."""
        while _FENCED < (decided := self._decided(rank)) < step:
            with self._reported(rank):
                self._window.compare_swap(rank, 0, decided, _FENCED, self._timeout)
        return decided == _FENCED

    def is_fenced(self, rank: int) -> bool:
        """Whether a rank has fenced `rank`."""
        return self._fences and self._decided(rank) == _FENCED

    def _decided(self, rank: int) -> int:
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._reported(rank):
            self._window.get(word, rank, 0, self._timeout)
        return int(word)

    def abort(self, rank: int) -> None:
        """Make the waits of `rank` for this rank raise `Revoked`, as far as it can be reached."""
        with contextlib.suppress(HoldfastError):
            one = torch.ones(1, dtype=torch.int64, device="cpu")
            self._window.put(one, rank, self._place(self._rank, ABORT), _ABORT_SECONDS)
            self._window.signal(rank, _ABORT_SECONDS)

    def close(self) -> None:
        """Leave: the others' links to this rank raise `LinkGone`."""
        self._window.close()


class MaskAgreement:
    """One rank's part in the agreement of a step's living ranks on the ranks to mask. Without I/O.

    The caller sends `lost`, then hears what `awaited` names, in a loop. `decision` is None until `awaited` is; the
    caller then sends it to the other participants.

    Rank x may die while it sends its results: rank 0 has them, rank 1 does not. All that live on must leave x out, or
    none may; and more ranks may die while they agree. When a rank has all the results that will come, it reports to all
    others the ranks that it lost.

    1. It waits for the report of each participant, or until that one is gone. If all have reported, and none lost a
       rank, it decides "no rank", sends that decision to all, and returns. This is every step without a death: no
       further wait.
    2. Else it proposes the union of the reports that it heard. It waits, for each participant of a lower rank in turn,
       until it has that one's decision, which replaces its proposal, or that one is gone. Then it decides on its
       proposal, and sends the decision to all.

    docs/internals/decisions/mask-agreement.md proves that the living decide alike.
    """

    def __init__(self, rank: int, participants: Iterable[int], lost: Iterable[int]) -> None:
        self._rank, self._participants = rank, sorted(participants)
        self.lost = frozenset(lost)
        self._proposal, self._complete = self.lost, not self.lost
        self._unheard = [(other, REPORT) for other in self._participants if other != rank]
        self._decides_alone = False
        self.decision: frozenset[int] | None = None
        self._proceed()

    @property
    def awaited(self) -> tuple[int, int] | None:
        """The rank and the kind of the message to hear next; None once this rank has decided."""
        return self._unheard[0] if self._unheard else None

    def hear(self, named: Iterable[int] | None) -> None:
        """Take the message that `awaited` names: the ranks in it, or None if its sender is gone without it."""
        _, kind = self._unheard.pop(0)
        if kind == DECISION:
            if named is not None:
                self._proposal = frozenset(named)
        elif named is None:
            self._complete = False
        else:
            self._proposal |= frozenset(named)
            self._complete = self._complete and not self._proposal
        self._proceed()

    def _proceed(self) -> None:
        if self._unheard:
            return
        if not self._complete and not self._decides_alone:
            self._decides_alone = True
            self._unheard = [(other, DECISION) for other in self._participants if other < self._rank]
        if not self._unheard:
            self.decision = frozenset() if self._complete else self._proposal
