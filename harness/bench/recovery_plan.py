"""What `holdfast bench recovery` measures: the options of the command are the fields of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from holdfast.harness.bench.collectives.definitions import parse_size


@dataclass(frozen=True)
class RecoveryPlan:
    """Kill ranks chosen at random, `kills` times, `together` of them at once. Raises ValueError if none would be left.

    With `proposer` also the one that proposes the next epoch, as soon as the register has it. With `spares` a job takes
    one for each rank that is killed, and as many kills; without, each kill is of a new job, which goes on with one rank
    less.
    """

    backend: Annotated[str, typer.Option(help="A backend whose ranks are processes.")] = "shm"
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Ranks of the job.")] = 4
    kills: Annotated[int, typer.Option(min=1, help="How often to kill.")] = 50
    spares: Annotated[int, typer.Option(min=0, help="Hot spares to promote; 0: go on with one rank less.")] = 0
    size: Annotated[str, typer.Option(help="Bytes of the all_reduce.")] = "64K"
    seed: Annotated[int, typer.Option(help="Chooses who is killed, and when.")] = 0
    together: Annotated[int, typer.Option(min=1, help="How many ranks to kill at once.")] = 1
    proposer: Annotated[
        bool, typer.Option("--proposer", help="Then kill the rank that proposes the next epoch, too, before it tells.")
    ] = False
    stopped: Annotated[
        bool, typer.Option("--stop", help="Stop ranks (SIGSTOP), do not kill them: they are found by their silence.")
    ] = False
    device: Annotated[str, typer.Option(help="Where the tensors are: cpu, or a GPU that all ranks share.")] = "cpu"

    def __post_init__(self) -> None:
        if not 0 < self.together <= self.lost < self.ranks:
            raise ValueError(f"{self.lost} of {self.ranks} ranks cannot die and somebody recover")
        if self.proposer and self.spares:
            raise ValueError("a job whose proposer dies is used once: ask for no spares")
        parse_size(self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of the all_reduce."""
        return parse_size(self.size)

    @property
    def lost(self) -> int:
        """How many ranks a job loses at a time."""
        return self.together + self.proposer
