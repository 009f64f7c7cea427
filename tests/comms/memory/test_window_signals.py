"""A signal that was delivered is received, whatever its rank does next, and what was put arrives."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from holdfast.comms import OpTimeout, RegionGone
from holdfast.comms.onesided.window import Exposure, Window, WindowInfo
from holdfast.comms.transport.base import WindowMemory, closed_there

Tensor = torch.Tensor


class OneSignaller(WindowMemory):
    """A window in which rank 0 does something whenever the waiting rank looks whether it lives."""

    sizes = (0,)

    def __init__(self, at_look: Callable[[OneSignaller], None]) -> None:
        super().__init__(1)
        self.arrived = 0
        self._at_look = at_look

    def count_signals(self, rank: int) -> int:
        return self.arrived

    def check_live(self, rank: int) -> None:
        self._at_look(self)

    def write(self, rank: int, offset: int, source: Tensor, deadline: float) -> None: ...

    def read(self, rank: int, offset: int, into: Tensor, deadline: float) -> None: ...

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return 0

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return 0

    def signal(self, rank: int, deadline: float) -> None: ...

    def flush(self, rank: int | None, deadline: float) -> None: ...

    def close(self) -> None: ...


def in_ten_seconds() -> float:
    return time.monotonic() + 10.0


def test_a_signal_between_the_looks_at_the_counter_and_at_the_rank_is_received() -> None:
    def signal_and_close(window: OneSignaller) -> None:
        window.arrived = 1
        raise closed_there(0)

    window = OneSignaller(signal_and_close)
    window.wait_signal(0, in_ten_seconds())
    with pytest.raises(RegionGone, match="rank 0 has closed its window"):
        window.wait_signal(0, in_ten_seconds())


def test_each_wait_consumes_one_signal() -> None:
    def signal_twice(window: OneSignaller) -> None:
        window.arrived += 2

    window = OneSignaller(signal_twice)
    for _ in range(4):
        window.wait_signal(0, in_ten_seconds())
    assert window.arrived == 4


def test_a_wait_ends_at_its_deadline() -> None:
    with pytest.raises(OpTimeout, match="wait_signal"):
        OneSignaller(lambda window: None).wait_signal(0, time.monotonic())


def test_what_was_put_arrives_before_the_ranks_meet_to_withdraw_their_tensors() -> None:
    """Also where one rank has left before."""
    happened: list[object] = []

    class Posting(OneSignaller):
        sizes = (8, 8, 8)

        def flush(self, rank: int | None, deadline: float) -> None:
            happened.append(rank)
            if rank == 1:
                raise closed_there(1)

    info = WindowInfo((2,) * 3, ((2,),) * 3, torch.float32, torch.device("cpu"), "messages", atomics=False)
    exposure = Exposure(Posting(lambda window: None), info)
    window = Window(lambda tensor, timeout: exposure, lambda timeout: happened.append("all meet"), 0, 10.0, None)
    window.register(torch.zeros(2))
    window.deregister()
    assert happened == [0, 1, 2, "all meet"]
    window.close()


def test_no_backend_waits_for_signals_in_its_own_way(window_memories: list[type[WindowMemory]]) -> None:
    assert len(window_memories) >= 2
    assert [kind for kind in window_memories if kind.wait_signal is not WindowMemory.wait_signal] == []


@pytest.fixture
def window_memories() -> list[type[WindowMemory]]:
    """The window memories of all backends."""
    import holdfast.comms.onesided.mapped
    import holdfast.comms.onesided.requests  # noqa: F401

    found, kinds = [], [WindowMemory]
    while kinds:
        found.append(kind := kinds.pop())
        kinds += kind.__subclasses__()
    return found
