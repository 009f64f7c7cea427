"""What all ranks of a new communicator know of the step that was open: their votes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.communicator import Communicator
from holdfast.ft.verdict import FIELDS, Vote


def collect(comm: Communicator, mine: Vote, timeout: float) -> list[Vote]:
    """Every rank's vote, in rank order; collective. If they came along with the connections, as greetings, no op is
    needed.
    """
    said: Sequence[Sequence[int]] | None = comm.greetings
    if said is None:
        votes = torch.zeros(comm.size, FIELDS, dtype=torch.int64, device=comm.device)
        comm.all_gather_single(votes, torch.tensor([mine.numbers()], device=comm.device), timeout=timeout)
        said = votes.tolist()
    return [Vote.of(numbers) for numbers in said]
