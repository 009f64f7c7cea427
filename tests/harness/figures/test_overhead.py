"""`holdfast bench overhead` measures what it says: every variant, and steps with and without a session."""

from __future__ import annotations

from holdfast.harness.bench.overhead.overhead import VARIANTS, run, table


def test_every_part_is_measured() -> None:
    cost = run(rounds=8, work_ms=1.0)
    assert [op.variant for op in cost.ops] == list(VARIANTS)
    assert cost.ops[0].ratio == 1
    assert all(op.us > 0 and op.alone_us > 0 for op in cost.ops)
    assert 0 < cost.ops[1].alone_extra_us < 100
    assert cost.step.bare_ms >= 0.1
    assert 0 < cost.step.background < 1
    assert "under ft.Session" in table(cost)
