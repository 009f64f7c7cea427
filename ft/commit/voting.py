"""Exchanges the votes on the open step among the ranks of a new communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.communicator import Communicator
from holdfast.ft.commit.decision import FIELDS, Vote


def collect(comm: Communicator, mine: Vote, timeout: float) -> list[Vote]:
    """Every rank's vote, in rank order; collective.

    Needs no op if the votes came with the connections, as `connect_payloads`.
    """
    said: Sequence[Sequence[int]] | None = comm.connect_payloads
    if said is None:
        votes = torch.zeros(comm.size, FIELDS, dtype=torch.int64, device=comm.device)
        comm.all_gather_single(votes, torch.tensor([mine.numbers()], device=comm.device), timeout=timeout)
        said = votes.tolist()
    return [Vote.of(numbers) for numbers in said]
