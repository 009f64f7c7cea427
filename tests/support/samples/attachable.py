"""An object with a state of any kind, for tests of `Session.attach` and of the transfer of state."""

from __future__ import annotations

from typing import Any


class Attachable:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
