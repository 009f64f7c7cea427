"""`holdfast bench overhead` and `holdfast bench layer` measure every variant that they list."""

from __future__ import annotations

import pytest
import torch

from holdfast.comms.errors import Unsupported
from holdfast.ft.console.console import console
from holdfast.harness.bench.drivers.layered import HOLDFAST, STAND_IN, WAYS
from holdfast.harness.bench.drivers.observed import VARIANTS
from holdfast.harness.bench.overhead import layer, overhead


@pytest.mark.thorough
def test_overhead_measures_every_variant_and_steps_with_and_without_a_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cost = overhead.run(rounds=8, work_ms=1.0)
    assert [op.variant for op in cost.ops] == list(VARIANTS)
    assert cost.ops[0].ratio == 1
    assert all(op.us > 0 and op.alone_us > 0 for op in cost.ops)
    assert 0 < cost.ops[1].alone_extra_us < 100
    assert cost.step.bare_ms >= 0.1
    assert 0 < cost.step.background < 1
    overhead.show(cost, console())
    assert "under ft.Session" in capsys.readouterr().out


def _backend(name: str) -> object:
    if name == STAND_IN:
        return name  # one rank
    gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    return pytest.param(name, marks=[pytest.mark.thorough, *([gpu] if name == "nccl" else [])])


@pytest.mark.parametrize("backend", map(_backend, sorted(WAYS)))
def test_layer_measures_each_way_at_each_size(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    ways = WAYS[backend]
    cost = layer.run(backend, [8, 65_536], rounds=6)
    assert [(call.nbytes, call.way) for call in cost.calls] == [(n, way) for n in (8, 65_536) for way in ways]
    for call in cost.calls:
        assert 0 < call.least_us <= call.us
        if call.way == ways[0]:
            assert (call.extra_us, call.speed) == (0, 1)
    layer.show(cost, console())
    assert HOLDFAST in capsys.readouterr().out


def test_layer_refuses_a_transport_that_wraps_no_library() -> None:
    with pytest.raises(Unsupported, match="shm"):
        layer.run("shm", [8])
