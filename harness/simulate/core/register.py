"""The register in virtual time: linearizable, sometimes away. A failed write may have taken effect."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.ft.membership.events import CasFailed, CasLost, CasWon
from holdfast.ft.membership.view import View
from holdfast.ft.ports import Answer


class SimulatedRegister:
    """Holds the newest view. `watchers` are called once after the next write.

    `away` counts current outages, `writes` those in which writes still take effect, `losing` those in which the answers
    to proposals are lost, and `lost_writes` those of these in which they take effect. Every answer comes `late` seconds
    later.
    """

    def __init__(self, view: View | None) -> None:
        self.view = view
        self.away = 0
        self.writes = 0
        self.losing = 0
        self.lost_writes = 0
        self.late = 0.0
        self.on_write: Callable[[View], None] = lambda view: None
        self.watchers: list[Callable[[], None]] = []

    @property
    def epoch(self) -> int:
        return 0 if self.view is None else self.view.epoch

    def compare_and_set(self, expected: int, view: View) -> Answer:
        """Handle a proposal that arrives now."""
        if view.epoch != expected + 1:
            raise ValueError(f"the view after epoch {expected} has epoch {expected + 1}, not {view.epoch}")
        if self.away and not self.writes:
            return CasFailed("the register is away")
        if self.epoch == expected:
            self.view = view
            self.on_write(view)
            watchers, self.watchers = self.watchers, []
            for look in watchers:
                look()
            return CasFailed("the answer was lost") if self.away else CasWon(view)
        return CasFailed("the register is away") if self.away else CasLost(self.view)
