"""A switch gives the outputs and gradients of a dense model; the living agree on the ranks to mask."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from holdfast.comms import Communicator, Mismatch, OpTimeout, Revoked, StaleEpoch, Unsupported
from holdfast.comms import experts as frames
from holdfast.comms.experts import DECISION, REPORT, MaskAgreement, Received, Switch
from holdfast.harness import LocalCluster
from support.comms.meeting import alone
from support.comms.ranks import on_ranks, on_ranks_of, second_tier, shared_ranks
from support.source_tree import module_of
from support.waiting import PATIENCE

SIZE, EXPERTS, TOP_K, HIDDEN, STEPS = 3, 7, 2, 5, 2
CALLS = 60
"""About as many calls of its links as a rank makes in a test's steps; each is a point at which it may die."""

Tensor = torch.Tensor
threads = shared_ranks(SIZE, "inproc", timeout=4 * PATIENCE)


class Killed(Exception):
    """The rank is dead, as far as the others can tell."""


class MortalLinks:
    """Links that end their rank at a call: 0 is the first, -1 none. What was sent before has arrived."""

    def __init__(self, links: frames.Links, point: int) -> None:
        self._links, self._left = links, point

    def __getattr__(self, name: str) -> Any:
        if name in ("send", "receive"):
            if self._left == 0:
                self._links.close()
                raise Killed
            self._left -= 1
        return getattr(self._links, name)


def experts() -> list[Tensor]:
    """Their weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(EXPERTS)]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights: uneven, and none on one rank in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    number = 0 if (rank, step) == (1, 1) else 4 + 3 * rank
    tokens = torch.randn(number, HIDDEN, generator=generator, dtype=torch.float64)
    weights, chosen = torch.rand(number, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    return tokens, chosen, weights


def switch_of(comm: Communicator, **options: Any) -> Switch:
    return Switch(comm, EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=12, dtype=torch.float64, **options)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def run_experts(switch: Switch, received: Received, weights: Sequence[Tensor]) -> Tensor:
    parts = zip(received.split(), switch.local_experts, strict=True)
    return torch.cat([rows @ weights[expert].to(rows.dtype) for rows, expert in parts])


def reference(switch: Switch, tokens: Tensor, chosen: Tensor, gates: Tensor, alive: Sequence[bool]) -> Tensor:
    """The combined outputs, computed densely in float64, of the experts of the ranks in `alive`."""
    weights = torch.stack(experts())
    owners = torch.tensor([expert * SIZE // EXPERTS for expert in range(EXPERTS)])
    used = gates.double() * torch.tensor(alive)[owners][chosen]
    if switch.renormalise:
        total = used.sum(1, keepdim=True)
        used = used * gates.double().sum(1, keepdim=True) / torch.where(total == 0, 1.0, total)
    results = torch.einsum("nh,nkhj->nkj", tokens.double(), weights[chosen])
    return (used[:, :, None] * results).sum(1)


Alive = list[tuple[bool, ...]]


def mortal_steps(
    comm: Communicator, deaths: Sequence[int], meeting: threading.Barrier, renormalise: bool
) -> Alive | None:
    """Steps with a forward and a backward pass; `deaths[rank]` is the call at which a rank dies, if it is not -1.

    The results must be the reference's. Returns which ranks were alive after each pass, None if this one died.
    """
    alive, weights = Alive(), experts()
    with switch_of(comm, renormalise=renormalise) as switch:
        switch._links = MortalLinks(switch._links, deaths[comm.rank])  # type: ignore[assignment]
        try:
            for step in range(STEPS):
                tokens, chosen, gates = batch(comm.rank, step)
                tokens.requires_grad_()
                gates.requires_grad_()
                received = switch.dispatch(tokens, chosen, gates)
                combined = switch.combine(run_experts(switch, received, weights))
                alive.append(switch.alive)
                expected = reference(switch, tokens, chosen, gates, switch.alive)
                assert close(combined, expected)
                combined.sum().backward()  # type: ignore[no-untyped-call]
                alive.append(switch.alive)
                assert tokens.grad is not None and tokens.grad.isfinite().all()
                assert gates.grad is not None and gates.grad.isfinite().all()
                if alive[-1] == alive[-2]:
                    (gradient,) = torch.autograd.grad(expected.sum(), tokens)
                    assert close(tokens.grad, gradient)
        except Killed:
            return None
        finally:
            meeting.wait(PATIENCE)
    return alive


def check_outcomes(outcomes: Sequence[Alive | None]) -> None:
    """The living agree in each step, and mask no living rank."""
    survivors = {rank: alive for rank, alive in enumerate(outcomes) if alive is not None}
    for alive in survivors.values():
        assert alive == next(iter(survivors.values()))
        assert all(alive[-1][rank] for rank in survivors)


@given(st.tuples(*[st.just(-1) | st.integers(0, CALLS + 4)] * SIZE), st.booleans())
def test_the_living_have_the_results_of_the_living(
    threads: LocalCluster, deaths: tuple[int, ...], renormalise: bool
) -> None:
    check_outcomes(threads.run(mortal_steps, deaths, threading.Barrier(SIZE), renormalise))


def test_a_rank_may_die_at_every_point(threads: LocalCluster) -> None:
    def every_point(comm: Communicator, meetings: Sequence[threading.Barrier]) -> list[Alive | None]:
        return [
            mortal_steps(comm, [point if rank == point % SIZE else -1 for rank in range(SIZE)], meeting, False)
            for point, meeting in enumerate(meetings)
        ]

    outcomes = threads.run(every_point, [threading.Barrier(SIZE) for _ in range(CALLS)])
    assert [None in of_point for of_point in zip(*outcomes, strict=True)] == [True] * CALLS
    for of_point in zip(*outcomes, strict=True):
        check_outcomes(of_point)


@on_ranks(SIZE, timeout=4 * PATIENCE)
def test_outputs_and_gradients_are_those_of_a_dense_model(comm: Communicator) -> None:
    own = [weight.requires_grad_() for weight in experts()]
    dense = [weight.requires_grad_() for weight in experts()]
    with switch_of(comm) as switch:
        for step in range(STEPS):
            tokens, chosen, gates = batch(comm.rank, step)
            tokens.requires_grad_()
            gates.requires_grad_()
            combined = switch.combine(run_experts(switch, switch.dispatch(tokens, chosen, gates), own))
            (combined**2).sum().backward()  # type: ignore[no-untyped-call]
            for rank in range(SIZE):
                rows, ids, weights = batch(rank, step)
                if rank == comm.rank:
                    rows, weights = rows.requires_grad_(), weights.requires_grad_()
                results = torch.einsum("nh,nkhj->nkj", rows, torch.stack(dense)[ids])
                output = (weights.double()[:, :, None] * results).sum(1)
                (output**2).sum().backward()  # type: ignore[no-untyped-call]
                if rank == comm.rank:
                    assert close(combined, output)
                    assert_close([tokens.grad, gates.grad], [rows.grad, weights.grad], rtol=1e-6, atol=1e-9)
        of_experts = [(own[expert].grad, dense[expert].grad) for expert in switch.local_experts]
        assert_close(*zip(*of_experts, strict=True), rtol=1e-6, atol=1e-9)
        assert switch.alive == (True,) * SIZE
        comm.barrier()


@pytest.mark.parametrize("victim", [0, *second_tier(2)])
def test_a_rank_is_killed_and_the_others_go_on_in_the_same_epoch(process_backend: str, victim: int) -> None:
    """The victim kills itself between dispatch and combine of the second of three steps."""

    def body(comm: Communicator) -> None:
        alive, weights = (True,) * SIZE, experts()
        with switch_of(comm) as switch:
            for step in range(3):
                tokens, chosen, gates = batch(comm.rank, step)
                received = switch.dispatch(tokens, chosen, gates)
                if step == 1:
                    alive = tuple(rank != victim for rank in range(SIZE))
                    if comm.rank == victim:
                        os.kill(os.getpid(), signal.SIGKILL)
                combined = switch.combine(run_experts(switch, received, weights))
                assert switch.alive == alive
                assert close(combined, reference(switch, tokens, chosen, gates, alive))
            total = switch.all_reduce(torch.full((100,), 2.0**comm.rank))
            assert switch.alive == alive and bool((total == 7 - 2**victim).all())

    with LocalCluster(SIZE, process_backend, timeout=4 * PATIENCE) as cluster:
        outcomes = cluster.outcomes(body)
    assert [outcome.error for rank, outcome in enumerate(outcomes) if rank != victim] == [None] * 2


def test_the_tokens_of_a_dead_rank_go_to_the_copies_of_its_experts(threads: LocalCluster) -> None:
    def with_copies(comm: Communicator, meeting: threading.Barrier) -> list[Tensor]:
        outputs: list[Tensor] = []
        with Switch(comm, [(0, 1), (1, 2), (2, 0)], top_k=2, hidden=1, max_tokens=3) as switch:
            for _ in range(3):
                received = switch.dispatch(torch.ones(3, 1), torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.ones(3, 2))
                if comm.rank == 2 and len(outputs) == 1:
                    break
                factors = [
                    rows * 10.0**expert for rows, expert in zip(received.split(), switch.local_experts, strict=True)
                ]
                outputs.append(switch.combine(torch.cat(factors)).flatten())
        meeting.wait(PATIENCE)
        return outputs

    whole, degraded = torch.tensor([11.0, 110.0, 101.0]), torch.tensor([11.0, 10.0, 1.0])
    for rank, outputs in enumerate(threads.run(with_copies, threading.Barrier(SIZE))):
        expected = [whole] if rank == 2 else [whole, degraded, whole]
        assert [output.tolist() for output in outputs] == [output.tolist() for output in expected]


def test_a_sum_that_is_larger_than_a_frame_has_whole_ranks(threads: LocalCluster) -> None:
    def add(comm: Communicator, meeting: threading.Barrier, point: int) -> list[float] | None:
        with Switch(comm, SIZE, top_k=1, hidden=4, max_tokens=4) as switch:
            switch._links = MortalLinks(switch._links, point if comm.rank == 1 else -1)  # type: ignore[assignment]
            try:
                return sorted(set(switch.all_reduce(torch.full((50,), 2.0**comm.rank)).tolist()))
            except Killed:
                return None
            finally:
                meeting.wait(PATIENCE)

    for point in (0, 1, 3, 7, 12, 17, 23):
        results = threads.run(add, threading.Barrier(SIZE), point)
        assert results[0] == results[2] in ([5.0], [7.0])


@on_ranks_of("threads")
def test_bfloat16_is_added_up_in_float32(comm: Communicator) -> None:
    with Switch(comm, 9, top_k=9, hidden=1, max_tokens=1, dtype=torch.bfloat16) as switch:
        ids, weights = torch.arange(9)[None], torch.tensor([[1.0] + [1 / 512] * 8])
        received = switch.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), ids, weights)
        total = float(switch.combine(received.tokens).detach())
    assert total == 1 + 8 / 512  # in bfloat16 each of the small ones would vanish


@on_ranks_of("threads")
def test_bad_input_moves_nothing_and_the_call_may_be_repeated(comm: Communicator) -> None:
    ids, gates, rows = torch.tensor([[0, 5]]), torch.ones(1, 2), torch.ones(1, 4)
    refused: list[tuple[str, Tensor, Tensor, Tensor]] = [
        ("0 to 5.*not 0 to 6", rows, torch.tensor([[0, 6]]), gates),
        (".", rows, torch.tensor([[-1, 0]]), gates),
        ("max_tokens=3", torch.ones(4, 4), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)),
        (".", rows.double(), ids, gates),
        (".", torch.ones(1, 5), ids, gates),
        (".", rows, ids[:, :1], gates),
        (".", rows, ids, torch.ones(2, 2)),
        (".", rows, ids, gates.long()),
    ]
    with Switch(comm, 6, top_k=2, hidden=4, max_tokens=3) as switch:
        for words, *bad in refused if comm.rank == 1 else []:
            with pytest.raises(ValueError, match=words):
                switch.dispatch(*bad)
        with pytest.raises(Mismatch, match="without a dispatch"):
            switch.combine(rows)
        received = switch.dispatch(rows, ids, gates)
        with pytest.raises(Mismatch, match="before combine"):
            switch.dispatch(rows, ids, gates)
        with pytest.raises(ValueError, match="combine needs"):
            switch.combine(torch.ones(len(received.tokens) + 1, 4))
        assert switch.combine(received.tokens).tolist() == [[2.0] * 4]
        comm.barrier()


@on_ranks_of("threads")
def test_arguments_that_make_no_switch_or_differ_between_ranks(comm: Communicator) -> None:
    wrong: list[dict[str, Any]] = [
        *({"experts": experts} for experts in (2, [0, 1, 3], [0, 1, (2, 2)], [])),
        {"top_k": 0},
        {"top_k": 7},
        {"dtype": torch.int64},
        {"silence": "ignore"},
    ]
    for each in wrong:
        arguments = {"experts": 6, "top_k": 2, "hidden": 4, "max_tokens": 3} | each
        with pytest.raises(ValueError):
            Switch(comm, arguments.pop("experts"), **arguments)
    with pytest.raises(Mismatch, match=r"rank [02]"):
        Switch(comm, 6, top_k=2, hidden=4, max_tokens=3 + (comm.rank == 2))


class LyingLinks(MortalLinks):
    """Links that change the heads of frames of one kind as they leave."""

    def __init__(self, links: frames.Links, kind: int, word: int) -> None:
        super().__init__(links, -1)
        self._kind, self._word = kind, word

    def send(self, rank: int, kind: int, frame: Tensor, timeout: float) -> None:
        if kind == self._kind:
            frame[self._word] += 1
        self._links.send(rank, kind, frame, timeout)


@pytest.mark.parametrize(
    ("kind", "word"), [(frames.OUT, 1), (frames.OUT, 2), (frames.OUT, 3), (frames.BACK, 1), (frames.BACK, 2)]
)
def test_a_rank_whose_counts_cannot_be_true_is_masked_and_told(threads: LocalCluster, kind: int, word: int) -> None:
    """More rows than counts announce, counts that differ from the rows, another step's: the others are not harmed."""

    def body(comm: Communicator, meeting: threading.Barrier) -> None:
        with switch_of(comm) as switch:
            if comm.rank == 0:
                switch._links = LyingLinks(switch._links, kind, word)  # type: ignore[assignment]
            try:
                with pytest.raises(StaleEpoch, match="rank 0 is masked") if comm.rank == 0 else nullcontext():
                    for step in range(STEPS):
                        tokens, chosen, gates = batch(comm.rank, step)
                        received = switch.dispatch(tokens, chosen, gates)
                        combined = switch.combine(run_experts(switch, received, experts()))
                        assert close(combined, reference(switch, tokens, chosen, gates, switch.alive))
                    assert switch.alive == (False, True, True)
                if comm.rank == 0:
                    with pytest.raises(Revoked, match="masked"):
                        switch.dispatch(tokens, chosen, gates)
            finally:
                meeting.wait(PATIENCE)

    threads.run(body, threading.Barrier(SIZE))


def test_a_silent_rank_ends_the_switch_on_all_ranks(threads: LocalCluster) -> None:
    """Rank 1 goes silent between dispatch and combine, until the others are done."""

    def body(comm: Communicator, meeting: threading.Barrier) -> str:
        with Switch(comm, SIZE, top_k=1, hidden=1, max_tokens=1, timeout=2.0, silence="raise") as switch:
            received = switch.dispatch(torch.ones(1, 1), torch.tensor([[1]]), torch.ones(1, 1))
            try:
                if comm.rank == 1:
                    meeting.wait(PATIENCE)
                with pytest.raises((OpTimeout, Revoked)) as ended:
                    switch.combine(received.tokens)
                    switch.combine(switch.dispatch(torch.ones(1, 1), torch.tensor([[0]]), torch.ones(1, 1)).tokens)
                return f"{ended.type.__name__}: {ended.value}"
            finally:
                if comm.rank != 1:
                    meeting.wait(PATIENCE)
                comm.barrier()

    messages = threads.run(body, threading.Barrier(SIZE))
    assert any(message.startswith("OpTimeout") and "waiting for rank 1" in message for message in messages)
    assert messages[1].startswith("Revoked")


@pytest.mark.parametrize("backend", ["shm", *second_tier("ucx")])
def test_a_stopped_process_is_masked_if_asked(backend: str) -> None:
    def body(comm: Communicator) -> str | tuple[bool, ...]:
        with Switch(comm, SIZE, top_k=1, hidden=1, max_tokens=1, timeout=2.0, silence="mask") as switch:
            pid = comm.peers[1].pid
            comm.barrier()
            if comm.rank == 1:
                os.kill(pid, signal.SIGSTOP)
            try:
                for _ in range(2):
                    received = switch.dispatch(torch.ones(1, 1), torch.tensor([[1]]), torch.ones(1, 1))
                    switch.combine(received.tokens)
                return switch.alive
            except StaleEpoch as error:
                return str(error)
            finally:
                if comm.rank == 0:
                    os.kill(pid, signal.SIGCONT)

    with LocalCluster(SIZE, backend, timeout=4 * PATIENCE) as cluster:
        results = cluster.run(body)
    assert results[0] == results[2] == (True, False, True)
    assert "rank 1 is masked" in str(results[1])


def test_experts_need_windows_and_mapped_ones_to_mask_silent_ranks(tmp_path: Path) -> None:
    with alone(tmp_path, "gloo") as comm:
        with pytest.raises(Unsupported, match="fenced"):
            Switch(comm, 1, top_k=1, hidden=1, max_tokens=1, silence="mask")
        comm.backend = "fake"
        with pytest.raises(Unsupported, match="experts over 'fake'; it has no windows"):
            Switch(comm, 1, top_k=1, hidden=1, max_tokens=1)


RESULTS = "results"
Message = tuple[str, frozenset[int]]
Wait = tuple[int, str]


class HasteAgreement(MaskAgreement):
    """A protocol that is wrong: it decides once it has all reports, and hears no decision."""

    def _proceed(self) -> None:
        if not self._unheard:
            self.decision = self._proposal


class Step:
    """One step of some ranks, which send results and agree. `random` chooses which acts, dies and is found dead."""

    def __init__(self, random: Random, size: int, deaths: int, protocol: type[MaskAgreement] = MaskAgreement) -> None:
        self.random, self.ranks, self.protocol = random, range(size), protocol
        self.links: dict[tuple[int, int], deque[Message]] = {(a, b): deque() for a in self.ranks for b in self.ranks}
        self.lost: dict[int, set[int]] = {rank: set() for rank in self.ranks}
        self.decided: dict[int, frozenset[int]] = {}
        self.dead: set[int] = set()
        self.fenced: set[int] = set()
        self.found_dead: set[tuple[int, int]] = set()
        programs = {rank: self.program(rank) for rank in self.ranks}
        waits = {rank: next(program) for rank, program in programs.items()}
        while unfinished := self.unfinished():
            if len(self.dead) < deaths and random.random() < 0.1:
                victim = random.choice([rank for rank in self.ranks if rank not in self.dead])
                if random.random() < 0.3 and victim not in self.decided:
                    self.fenced.add(victim)  # it was silent: it goes on, but may not decide, and is not heard any more
                self.dead.add(victim)
                continue
            rank = random.choice(unfinished + [rank for rank in self.fenced if rank in waits])
            wait, answer = waits[rank], None
            if wait is not None:
                answer = self.hear(rank, wait)
                if answer == "later":
                    continue
            try:
                waits[rank] = programs[rank].send(answer)
            except StopIteration:
                assert rank in self.decided
                del waits[rank]

    def unfinished(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.dead and rank not in self.decided]

    def program(self, rank: int) -> Generator[Wait | None, Message | None, None]:
        """What a rank does: it yields what it waits for, and None after each message sent. It may die there."""
        others = [other for other in self.ranks if other != rank]
        yield None
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((RESULTS, frozenset()))
            yield None
        for other in others:
            if (yield other, RESULTS) is None:
                self.lost[rank].add(other)
        agreement = self.protocol(rank, self.ranks, self.lost[rank])
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((REPORT, agreement.lost))
            yield None
        while agreement.awaited is not None:
            message = yield agreement.awaited
            agreement.hear(None if message is None else message[1])
        assert agreement.decision is not None
        for other in self.random.sample(others, len(others)):
            self.links[rank, other].append((DECISION, agreement.decision))
            yield None
        self.decided[rank] = agreement.decision

    def hear(self, rank: int, wait: Wait) -> Message | str | None:
        """The message, None if its sender is found dead, or "later"."""
        other, kind = wait
        link = self.links[other, rank]
        if other in self.fenced and (other, rank) in self.found_dead:
            return None
        if link and self.random.random() < 0.7:
            message = link.popleft()
            assert message[0] == kind
            return message
        if other in self.dead and (other, rank) not in self.found_dead and self.random.random() < 0.5:
            self.found_dead.add((other, rank))
            if other in self.fenced:
                return None
            for _ in range(self.random.randint(0, len(link))):  # the end of what it sent is lost with it
                link.pop()
        return None if (other, rank) in self.found_dead and not link else "later"


def faults(step: Step) -> list[str]:
    living = [rank for rank in step.ranks if rank not in step.dead]
    decisions = {step.decided[rank] for rank in living}
    found = []
    if len(decisions) > 1:
        found.append(f"the living disagree: {step.decided}")
    for decision in decisions:
        if decision & set(living):
            found.append(f"{decision} names a living rank")
        if not decision >= set().union(*(step.lost[rank] for rank in living)):
            found.append(f"{decision} lacks a rank that a living one has lost")
    return found


def test_the_living_agree_and_the_model_finds_the_fault_of_a_protocol_of_one_round() -> None:
    for seed in range(6000):
        size = 1 + seed % 5
        step = Step(Random(seed), size, min(seed // 5 % 5, size - 1))
        assert not faults(step), seed
        assert step.dead or set(step.decided.values()) == {frozenset()}, seed
    assert any(faults(Step(Random(seed), 4, 3, HasteAgreement)) for seed in range(3000))


def test_the_example_trains_through_a_kill_and_loses_no_step() -> None:
    def train(session: object) -> list[tuple[int, float, int]]:
        history: list[tuple[int, float, int]] = module_of("examples/train_moe.py").train(session, 40)
        return history

    with LocalCluster(3, "shm", session={"on_death": "go_on"}) as cluster:
        histories = cluster.start(train).results(timeout=4 * PATIENCE)
    assert len(histories) == 2
    for history in histories:
        steps, losses, alive = zip(*history, strict=True)
        assert steps == tuple(range(40)), "each is committed once, in order"
        assert alive == (3,) * 20 + (2,) * 20
        assert losses[-1] < losses[15] < losses[0]
