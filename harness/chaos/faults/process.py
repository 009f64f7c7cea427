"""Faults of processes: kill, pause, slow down, flip a bit in their memory, or start one more."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from msgspec import Meta
from msgspec.structs import replace

from holdfast.ft.console.units import counted
from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.harness.chaos.fault_type import FaultType, Undo
from holdfast.harness.chaos.run.process_set import Victim
from holdfast.harness.chaos.workload import FLIP_BIT

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario import Scenario

Who = int | str | tuple[int | str, ...] | None

ROLES = {
    "session": ("random", "coordinator", "last", "spare", "joiner"),
    "store": ("random", "publisher", "holder", "reader"),
    "rl": ("driver", "trainer", "spare", "generator", "holder", "environment"),
}
"""The roles that `who` may name, besides ranks.

The coordinator is rank 0, where all others meet in a rebuild; the joiner is the process that was started last;
"random" is drawn from the seed, as often as it is written.
"""


class ProcessFault(FaultType, frozen=True, kw_only=True):
    """A fault of one or several processes: a rank, a role, or a list of them.

    Without any: the process that reached the point of `at`.
    """

    who: Who = None

    @property
    def names(self) -> tuple[int | str, ...]:
        """The named processes, as a list."""
        return () if self.who is None else self.who if isinstance(self.who, tuple) else (self.who,)

    def check(self, scenario: Scenario) -> None:
        family = scenario.workload.family
        for name in self.names:
            if isinstance(name, str) and name not in ROLES[family]:
                raise ValueError(f"who = {name!r}: there are {', '.join(ROLES[family])}")
            if isinstance(name, int) and (family != "session" or not 0 <= name < scenario.job.ranks):
                raise ValueError(f"who = {name}: no such rank ({counted(scenario.job.ranks, 'rank')})")

    def drawn(self, dice: random.Random, scenario: Scenario) -> Self:
        """This fault with ranks, all different, in place of "random"."""
        taken = {name for name in self.names if name != "random"}
        settled: list[int | str] = []
        for name in self.names:
            if name == "random":
                free = [who for who in _everybody(scenario) if who not in taken]
                name = dice.choice(free or _everybody(scenario))
                taken.add(name)
            settled.append(name)
        return replace(self, who=tuple(settled) or None)

    def victims(self, context: FaultContext) -> list[Victim]:
        """The processes that hold the named ranks and roles now."""
        if not self.names:
            return [context.reacher()]
        return [victim for name in self.names for victim in context.find(name)]

    def words(self) -> str:
        who = " and ".join(f"rank {name}" if isinstance(name, int) else f"the {name}" for name in self.names)
        return f"{self.summary}: {who}" if who else self.summary


def _everybody(scenario: Scenario) -> Sequence[int | str]:
    return range(scenario.job.ranks) if scenario.workload.family == "session" else ("publisher", "holder", "reader")


class Kill(ProcessFault, frozen=True, kw_only=True):
    """SIGKILL."""

    summary: ClassVar[str] = "SIGKILL"

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        context.note("kill", victims)
        for victim in victims:
            victim.process.kill()
        return None


class Pause(ProcessFault, frozen=True, kw_only=True):
    """SIGSTOP, and SIGCONT when the fault is over: a process that hangs, its sockets open."""

    summary: ClassVar[str] = "SIGSTOP"

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        context.note("pause", victims)
        for victim in victims:
            victim.process.signal(signal.SIGSTOP)

        def resume() -> None:
            for victim in victims:
                victim.process.signal(signal.SIGCONT)

        return resume


class Slow(ProcessFault, frozen=True, kw_only=True):
    """The process runs for a `share` of the time only: stopped and continued every `period` seconds."""

    summary: ClassVar[str] = "slowed down"
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.3
    period: Annotated[float, Meta(gt=0)] = 0.05

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        context.note("slow", victims, f"share {self.share:g}")
        return _blinking(victims, self.period * (1 - self.share), self.period * self.share)


class Flap(ProcessFault, frozen=True, kw_only=True):
    """The process stops for `off` seconds and runs for `on` seconds, again and again: too short to be evicted."""

    summary: ClassVar[str] = "flapping"
    off: Annotated[float, Meta(gt=0)] = 0.2
    on: Annotated[float, Meta(gt=0)] = 0.3

    def inject(self, context: FaultContext) -> Undo | None:
        victims = self.victims(context)
        context.note("flap", victims)
        return _blinking(victims, self.off, self.on)


class CorruptMemory(ProcessFault, frozen=True, kw_only=True):
    """One bit of the newest version flips in the memory of a holder; the stored checksum stays."""

    summary: ClassVar[str] = "a bit flips in memory"

    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family != "store" or self.names not in ((), ("holder",)):
            raise ValueError('corrupt-memory is for the store, and for who = "holder"')

    def inject(self, context: FaultContext) -> Undo | None:
        victims = context.find("newest holder")
        context.note("corrupt-memory", victims)
        for victim in victims:
            assert isinstance(victim.process, ForkedProcess)
            victim.process.channel.send(FLIP_BIT)
        return None


class Join(FaultType, frozen=True, kw_only=True):
    """`count` more processes start and want to take part. Breaks nothing."""

    summary: ClassVar[str] = "another process joins"
    count: Annotated[int, Meta(ge=1, le=8)] = 1

    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family != "session":
            raise ValueError("only a job of sessions can be joined")

    def inject(self, context: FaultContext) -> Undo | None:
        context.note("join", [])
        for _ in range(self.count):
            context.join()
        return None


def _blinking(victims: Sequence[Victim], off: float, on: float) -> Undo:
    """Stop and continue the processes in turn, in a thread; returns what ends that."""
    over = threading.Event()

    def blink() -> None:
        while not over.is_set():
            for number, seconds in ((signal.SIGSTOP, off), (signal.SIGCONT, on)):
                for victim in victims:
                    victim.process.signal(number)
                if over.wait(seconds):
                    break

    thread = threading.Thread(target=blink, name="holdfast-chaos-blink", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()
        for victim in victims:
            victim.process.signal(signal.SIGCONT)

    return end
