"""Bugs in what a node does around the membership: detectors, the register client, connections and clocks."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.ft.detectors.heartbeat import HeartbeatDetector
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.membership.view import View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.node import Node
from holdfast.ft.node.register import RegisterClient
from holdfast.ft.node.table_sharing import TableSharing
from holdfast.harness.simulate.known_bugs.known_bug import bad_result, known_bug


@known_bug(
    "detector lost without a stand-in",
    "a detector that raises is left out, and nothing takes its place",
    "ours, first draft",
    Detectors,
    "_lose",
)
def _without_stand_in(lose: Callable[..., None]) -> object:
    return lambda self, name, why, error=None: None


@known_bug(
    "answer waited for without end",
    "a proposal whose answer is lost is never given up",
    "missing deadline",
    RegisterClient,
    "propose",
)
def _waits_for_every_answer(propose: Callable[..., None]) -> object:
    def broken(self: RegisterClient, expected: int, view: View) -> None:
        propose(self, expected, view)
        if self._deadline is not None:
            self._deadline.cancel()

    return broken


@known_bug(
    "view installed twice",
    "a view that is announced in an op and then in a message begins its epoch twice",
    "at-least-once delivery",
    EpochGuard,
    "install",
)
def _installs_again(install: Callable[..., None]) -> object:
    def broken(self: EpochGuard, view: View) -> None:
        if self._view is not None and self._view.epoch == view.epoch:
            self._view = None
        install(self, view)

    return broken


@known_bug(
    "late connection tells nothing",
    "what was set before a connection stood, and could not be sent, is not sent over it",
    "messages dropped while connecting",
    TableSharing,
    "linked",
)
def _says_nothing_again(linked: Callable[..., None]) -> object:
    return lambda self, peer: None


@bad_result(
    "stopped by the view before",
    "evidence about the members of one view ends the epoch of the next",
    "ours, found by this simulator",
    Node,
    "_judges_another",
)
def _never(judges: bool, *_: object) -> bool:
    return False


@bad_result(
    "dead process confirmed",
    "a process that has ended is not stopped either, so its host confirms to the others that it lives",
    "ours, found by this simulator",
    HeartbeatDetector,
    "_lives",
)
def _always(lives: bool, *_: object) -> bool:
    return True
