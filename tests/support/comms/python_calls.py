"""What a call costs in Python, counted: the same on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def functions_entered(call: Callable[[], object]) -> list[str]:
    """The names of the functions of Python that `call()` enters, itself among them if it is one."""
    entered = list[str]()

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered
