"""What does an exchange for experts cost that outlives a rank? `python docs/experiments/experts.py`.

One by `comms.experts` takes turns with one by `all_to_all_single`. Both route the same tokens, to experts that return
them as they are, and add them up by weight; the results are compared with the tokens. A second part kills random ranks,
between dispatch and combine and at any moment, checks each survivor's results, and measures from the SIGKILL to the
last survivor's combined result.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from holdfast.comms.errors import BackendUnavailable, HoldfastError
from holdfast.comms.experts import Switch
from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.results import Noise, figures, others
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns

if TYPE_CHECKING:
    from holdfast.comms import Communicator

Tensor = torch.Tensor

SWITCH, COLLECTIVE = "switch", "all_to_all"
_STEPS_BEFORE_KILL = 8
_SECONDS_BEFORE_KILL = 0.05


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What each rank sends in a step."""

    tokens: int = 256
    hidden: int = 1024
    experts: int = 12
    top_k: int = 2

    def batch(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, experts and weights of a rank; the weights of a token add up to 1."""
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randn(self.tokens, self.hidden, generator=generator)
        weights, chosen = torch.rand(self.tokens, self.experts, generator=generator).softmax(1).topk(self.top_k)
        return tokens, chosen, weights / weights.sum(1, keepdim=True)


class ExchangeTime(msgspec.Struct, frozen=True):
    """A dispatch and a combine of one contestant: medians over all steps, of the slowest rank.

    `gb_per_s` counts the bytes of the rows that leave a rank, there and back.
    """

    contestant: str
    ms: float
    gb_per_s: float


class KillTime(msgspec.Struct, frozen=True):
    """From SIGKILL to the combined result of the last survivor, over all kills."""

    backend: str
    kills: int
    median_ms: float
    best_ms: float
    worst_ms: float


class ExpertsBench(msgspec.Struct, frozen=True):
    """A whole run. `others`: CPUs that other processes used meanwhile. `absent`: contestants that cannot run here."""

    ranks: int
    load: ExpertLoad
    exchanges: tuple[ExchangeTime, ...]
    kills: KillTime | None
    absent: tuple[str, ...]
    others: float


def run(
    contestants: Sequence[str],
    ranks: int,
    load: ExpertLoad,
    rounds: int,
    steps: int,
    kills: int,
    kill_backend: str,
    seed: int,
    progress: Callable[[str], None],
) -> ExpertsBench:
    """Measure contestants, named as "switch:shm" or "all_to_all:gloo", in turns; then kill so often."""
    noise, absent = Noise(zygote_pid), list[str]()
    with ExitStack() as stack:
        exchangers: dict[str, Exchanger] = {}
        for name in contestants:
            way, _, backend = name.partition(":")
            if way not in (SWITCH, COLLECTIVE):
                raise ValueError(f"{name}: a contestant is {SWITCH}:BACKEND or {COLLECTIVE}:BACKEND")
            try:
                cluster = stack.enter_context(LocalCluster(ranks, backend, threads=1, echo=False, timeout=300.0))
                exchangers[name] = Exchanger(name, cluster)
            except BackendUnavailable as error:
                absent.append(f"{name}: {error.reason}")
        turns = take_turns(Exchanging(load, steps, progress), exchangers, range(rounds), _raise)
    moved = 2 * load.tokens * load.top_k * load.hidden * 4 * (ranks - 1) / ranks
    exchanges = []
    for name, taken in turns.items():
        median = statistics.median(seconds for turn in taken for seconds in turn.seconds["step"])
        exchanges.append(ExchangeTime(name, 1e3 * median, moved / median / 1e9))
    died = kill_again_and_again(kill_backend, ranks, kills, seed, progress) if kills else None
    return ExpertsBench(ranks, load, tuple(exchanges), died, tuple(absent), noise.cpus())


@dataclass(frozen=True, slots=True)
class Exchanger:
    """A contestant: its name, and its ranks."""

    name: str
    cluster: LocalCluster


class Exchanging(Workload[Exchanger]):
    """Steps of an exchange; each rank checks its last result."""

    name = "exchange"

    def __init__(self, load: ExpertLoad, steps: int, progress: Callable[[str], None]) -> None:
        self._load, self._steps, self._progress = load, steps, progress

    def turn(self, contestant: Exchanger, number: int) -> TimedTurn:
        """Many steps; each takes as long as on its slowest rank. Raises HoldfastError if a result is wrong."""
        self._progress(f"{contestant.name}, round {number + 1}")
        by_switch = contestant.name.startswith(SWITCH)
        of_ranks = contestant.cluster.run(_measure, by_switch, self._load, self._steps)
        return TimedTurn({"step": [max(step) for step in zip(*of_ranks, strict=True)]}, wrong=0)


def _raise(name: str, error: Exception) -> None:
    raise error


def _measure(comm: Communicator, by_switch: bool, load: ExpertLoad, steps: int) -> list[float]:
    """The seconds of each step on this rank; raises HoldfastError if a result is wrong."""
    tokens, chosen, weights = load.batch(comm.rank)
    seconds = []
    with ExitStack() as stack, torch.no_grad():
        if by_switch:
            switch = stack.enter_context(
                Switch(comm, load.experts, top_k=load.top_k, hidden=load.hidden, max_tokens=load.tokens)
            )
        for number in range(steps + 2):
            comm.barrier()
            began = time.perf_counter()
            if by_switch:
                combined = switch.combine(switch.dispatch(tokens, chosen, weights).tokens)
            else:
                combined = exchange_by_collective(comm, tokens, chosen, weights, load.experts)
            if number >= 2:
                seconds.append(time.perf_counter() - began)
        comm.barrier()
    if not torch.allclose(combined, tokens, atol=1e-4):
        raise HoldfastError("the exchange has changed the tokens")
    return seconds


def exchange_by_collective(comm: Communicator, tokens: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Dispatch and combine by three `all_to_all_single`: counts, rows, rows back. Experts lie in equal blocks."""
    local, top_k = experts // comm.size, chosen.shape[1]
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    coming = torch.empty_like(counts)
    comm.all_to_all_single(coming, counts)
    sent = counts.view(comm.size, local).sum(1).tolist()
    taken = coming.view(comm.size, local).sum(1).tolist()
    rows = torch.empty(sum(taken), tokens.shape[1])
    comm.all_to_all_single(rows, tokens.index_select(0, order // top_k), taken, sent)
    expert_of = torch.arange(local).repeat(comm.size).repeat_interleave(coming)
    by_expert = expert_of.argsort(stable=True)
    outputs = rows.index_select(0, by_expert)  # the experts see their rows together
    rows.index_copy_(0, by_expert, outputs)
    back = torch.empty(len(order), tokens.shape[1])
    comm.all_to_all_single(back, rows, sent, taken)
    result = torch.empty_like(back).index_copy_(0, order, back)
    return torch.bmm(weights[:, None, :], result.view(len(tokens), top_k, -1)).squeeze(1)


def kill_again_and_again(backend: str, ranks: int, kills: int, seed: int, progress: Callable[[str], None]) -> KillTime:
    """Kill a random rank so often: between dispatch and combine of a random step, and at any moment, in turns.

    Raises HoldfastError if a survivor has a wrong result, or if survivors disagree about the step of the death.
    """
    chance, times = random.Random(seed), []
    with (
        LocalCluster(ranks, backend, threads=1, echo=False, timeout=120.0) as cluster,
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
    ):
        place = Path(folder) / "killed"
        for number in range(kills):
            progress(f"kill {number + 1} of {kills}")
            victim, amid = chance.randrange(ranks), number % 2 == 0
            moment = chance.randrange(_STEPS_BEFORE_KILL) if amid else chance.uniform(0.0, _SECONDS_BEFORE_KILL)
            outcomes = cluster.outcomes(_outlive, victim, moment, place)
            living = [outcome for outcome in outcomes if outcome.rank != victim]
            failed = next((outcome.error for outcome in living if outcome.error is not None), None)
            if failed is not None:
                raise failed
            if len({outcome.value[0] for outcome in living}) != 1:
                raise HoldfastError(f"survivors of kill {number + 1} disagree: {[each.value for each in living]}")
            if amid:
                times.append(max(outcome.value[1] for outcome in living) - float(place.read_text()))
    return KillTime(backend, kills, 1e3 * statistics.median(times), 1e3 * min(times), 1e3 * max(times))


def _outlive(comm: Communicator, victim: int, moment: int | float, place: Path) -> tuple[int, float]:
    """Run steps until three after the victim's death, and check each: the step that masked it, and when that ended.

    `moment` is the step between whose dispatch and combine the victim kills itself, or the seconds until it does. It
    writes the time of the former to `place`.
    """
    load = ExpertLoad(tokens=64, hidden=64, experts=2 * comm.size)
    tokens, chosen, weights = load.batch(comm.rank)
    masked_in, end, number = -1, 0.0, 0
    with ExitStack() as stack, torch.no_grad():
        switch = stack.enter_context(
            Switch(comm, load.experts, top_k=load.top_k, hidden=load.hidden, max_tokens=load.tokens)
        )
        if comm.rank == victim and isinstance(moment, float):
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while masked_in < 0 or number < masked_in + 4:
            received = switch.dispatch(tokens, chosen, weights)
            if comm.rank == victim and number == moment:
                place.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            combined = switch.combine(received.tokens)
            if masked_in < 0 and not switch.alive[victim]:
                masked_in, end = number, time.monotonic()
            lives = torch.tensor(switch.alive).repeat_interleave(load.experts // comm.size)
            expected = tokens * (weights * lives[chosen]).sum(1, keepdim=True)
            if not torch.allclose(combined, expected, atol=1e-4):
                raise HoldfastError(f"rank {comm.rank} has a wrong result in step {number}")
            number += 1
        if sum(switch.alive) != comm.size - 1:
            raise HoldfastError(f"rank {comm.rank} sees {switch.alive}, and rank {victim} alone was killed")
    return masked_in, end


def show(bench: ExpertsBench) -> None:
    """Print the times of the contestants, and what the kills cost."""
    out = console()
    columns = ("contestant", "a step", "GB/s a rank")
    table = figures(f"{counted(bench.ranks, 'rank')}", columns, names=("contestant",), caption=others(bench.others))
    for exchange in bench.exchanges:
        table.add_row(exchange.contestant, f"{exchange.ms:.2f} ms", f"{exchange.gb_per_s:.2f}")
    out.print(table)
    for absent in bench.absent:
        out.print(f"not measured: {absent}")
    if (died := bench.kills) is not None:
        out.print(
            f"{counted(died.kills, 'kill')} over {died.backend}, all results right; SIGKILL to the survivors' combined "
            f"result: median {died.median_ms:.1f} ms, {died.best_ms:.1f} to {died.worst_ms:.1f}"
        )


def main() -> None:
    """Print the results; an error if a result is wrong or survivors disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everyone = [f"{SWITCH}:shm", f"{SWITCH}:gloo", *(f"{COLLECTIVE}:{backend}" for backend in ("shm", "gloo", "mpi"))]
    parser.add_argument("--contestants", nargs="*", default=everyone, help="switch:BACKEND, all_to_all:BACKEND")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of a rank in a step")
    parser.add_argument("--hidden", type=int, default=1024, help="floats of a token")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--kills", type=int, default=20, help="then kill a rank so often, at random")
    parser.add_argument("--kill-backend", default="shm")
    parser.add_argument("--seed", type=int, default=0, help="chooses whom to kill, and when")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    load, notes = ExpertLoad(asked.tokens, asked.hidden, 4 * asked.ranks), console(stderr=True)
    bench = run(
        asked.contestants, asked.ranks, load, asked.rounds, asked.steps, asked.kills, asked.kill_backend, asked.seed,
        notes.print,
    )  # fmt: skip
    if asked.json:
        print_json(bench)
    else:
        show(bench)


if __name__ == "__main__":
    main()
