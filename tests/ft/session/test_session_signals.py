"""A signal's handler may end a session at any point of the session's code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast import ft
from holdfast.comms import StaleEpoch
from holdfast.comms.system.keys import create_key
from holdfast.comms.system.signal_safety import OwnSteps

CODE = str(Path(ft.__file__).parent.parent), threading.__file__, sys.modules["contextlib"].__file__ or ""


class State:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weights": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass


def call_at_line(number: int, handler: Callable[[], None], body: Callable[[], None]) -> int:
    """Run `body()`, and `handler()` at the start of its `number`th line, as that of a signal; the number of lines."""
    lines = 0

    def at_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == number:
            handler()
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(CODE) else None)
    try:
        body()
    finally:
        sys.settrace(None)
    return lines


def run(folder: Path, number: int) -> int:
    """A whole job of one member, whose session is ended at a line; the number of lines of its code."""
    session = ft.Session(
        "shm", size=1, job="job", register=f"sqlite://{folder}/{number}.sqlite", key_file=folder / "job.key"
    )

    def job() -> None:
        session.attach("state", State())
        with session:
            for attempt in session.steps(2):
                with attempt:
                    attempt.comm.all_reduce(torch.ones(3))

    try:
        return call_at_line(number, lambda: session.__exit__(None, None, None), job)
    except StaleEpoch as error:
        assert "its session was closed" in str(error)
        return 0


@pytest.mark.parametrize("points", [12, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.timeout(600)
def test_a_handler_ends_a_session_at_any_line_of_its_code(points: int, tmp_path: Path) -> None:
    """The rest of the job runs to its end or is told that the session was closed, and nothing is left behind."""
    create_key(tmp_path / "job.key")
    before = set(threading.enumerate())
    total = run(tmp_path, 0)
    assert total > 1000
    for point in range(points):
        run(tmp_path, 1 + total * point // points)
        left = {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast")}
        assert not left


def test_what_a_handler_asks_for_amid_own_steps_is_done_right_after() -> None:
    steps, done = OwnSteps(), list[str]()
    with steps:
        with steps:
            assert steps.interrupted
            steps.do_after(lambda: done.append("close"))
        done.append("outer steps")
        others = threading.Thread(target=lambda: done.append(f"interrupted elsewhere: {steps.interrupted}"))
        others.start()
        others.join()
    assert done == ["outer steps", "interrupted elsewhere: False", "close"] and not steps.interrupted
