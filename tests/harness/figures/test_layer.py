"""`holdfast bench layer` calls what it says, in turn, and compares each way with the first."""

from __future__ import annotations

import pytest

from holdfast.comms.errors import Unsupported
from holdfast.harness.bench.overhead.layer import HOLDFAST, WAYS, run, table


@pytest.mark.parametrize("backend", sorted(WAYS))
def test_each_way_is_measured_at_each_size(backend: str) -> None:
    cost = run(backend, [8, 65_536], rounds=6)
    assert [(call.nbytes, call.way) for call in cost.calls] == [(n, way) for n in (8, 65_536) for way in WAYS[backend]]
    for call in cost.calls:
        assert 0 < call.least_us <= call.us
        if call.way == WAYS[backend][0]:
            assert (call.extra_us, call.speed) == (0, 1)
    assert HOLDFAST in table(cost)


def test_a_transport_of_our_own_is_no_layer() -> None:
    with pytest.raises(Unsupported, match="shm"):
        run("shm", [8])
