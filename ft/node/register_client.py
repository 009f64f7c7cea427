"""The requests of a node to the register: one of a kind at a time, each with a deadline.

Reads are repeated; a compare-and-set is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.ft.detectors.detector import Time, Timer
from holdfast.ft.membership.events import CasFailed, ViewRead
from holdfast.ft.membership.view import View
from holdfast.ft.node.ports import Answer, RegisterPort
from holdfast.ft.timeouts import Timeouts

AWAY_SECONDS = 0.2
"""The pause after a register that was away, before it is asked for a newer view again."""
READS_PER_SUSPECT_TIME = 2
"""Reads of the register within the suspect time, in case members could not announce a new view.

A read takes 0.4 ms of code that has left the caches: with one at each heartbeat, that was a third of what a session
costs while nothing fails.
"""


class RegisterClient:
    """Makes requests to `register`; calls `shown` and `answered` with what it holds and answers.

    A compare-and-set that takes longer than `timeouts.rebuild` counts as not answered.
    """

    def __init__(
        self,
        register: RegisterPort,
        time: Time,
        timeouts: Timeouts,
        shown: Callable[[ViewRead], None],
        answered: Callable[[Answer], None],
    ) -> None:
        self._register, self._time, self._timeouts = register, time, timeouts
        self._shown, self._answered = shown, answered
        self._deadline: Timer | None = None
        self._pause: Timer | None = None
        self._number = 0
        """The current compare-and-set: an answer to an earlier one comes too late, and counts no more."""
        self._away_since: float | None = None
        self._newest: View | None = None
        """The newest view that the register was seen to hold."""
        self._reading = self._ended = False

    @property
    def away(self) -> float:
        """Seconds since the first compare-and-set in a row that was not answered; 0 if the last one was."""
        return 0.0 if self._away_since is None else self._time.time() - self._away_since

    def read(self) -> None:
        """Pass the newest view to `shown`, soon; nothing if the register is away."""
        if not self._reading:
            self._reading = True
            self._register.read(self._show)

    def propose(self, expected: int, view: View) -> None:
        """Compare-and-set from epoch `expected` (0: empty) to `view`."""
        self._number += 1
        number = self._number
        self._register.compare_and_set(expected, view, partial(self._take, number))
        if number == self._number:  # a register of this host has answered at once
            patience = self._timeouts.rebuild
            late = CasFailed(f"the register did not answer within {patience:g} s")
            self._deadline = self._time.call_later(patience, self._take, number, late)

    def follow(self) -> None:
        """Pass new views to `shown`: at once while the job is being formed, later now and then.

        Later the members announce views to each other, and the register is read in case they could not: a thread that
        woke at each change would compete with a rebuild for the processor. A register that pushes changes is watched
        all the time: a read would ask another machine, a wait costs nothing.
        """
        if self._ended:
            return
        newest = self._newest
        if newest is None or newest.phase == "forming" or self._register.pushes:
            self._register.watch(0 if newest is None else newest.epoch, self._followed)
        else:
            pause = self._timeouts.suspect / READS_PER_SUSPECT_TIME
            self._pause = self._time.call_later(pause, self._register.read, self._followed)

    def end(self) -> None:
        """Pass on no more answers."""
        self._ended = True
        for timer in (self._deadline, self._pause):
            if timer is not None:
                timer.cancel()

    def _followed(self, found: ViewRead | None) -> None:
        if self._ended:
            return
        if found is None:
            self._pause = self._time.call_later(AWAY_SECONDS, self.follow)
            return
        if found.view is not None and found.view != self._newest:
            self._newest = found.view
            self._shown(found)
        self.follow()

    def _show(self, found: ViewRead | None) -> None:
        self._reading = False
        if found is not None and not self._ended:
            self._shown(found)

    def _take(self, number: int, answer: Answer) -> None:
        if number != self._number or self._ended:
            return
        self._number += 1
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not isinstance(answer, CasFailed):
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._time.time()
        self._answered(answer)
