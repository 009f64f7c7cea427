"""Effects: what the membership state machine asks its process to do."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ft.membership.events import Cleared, Death, Suspicion
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta


@dataclass(frozen=True, slots=True)
class Revoke:
    """End every pending op of `epoch`. `dead` are its lost members; empty if a newer view just replaces it."""

    epoch: int
    dead: tuple[Death, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set the register from epoch `expected` (0: empty) to `view`.

    The answer is the event CasWon, CasLost or CasFailed.
    """

    expected: int
    view: View


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the members `to` that `view` is the newest view.

    With `change`, send only this difference from the view before; a member that lacks that view reads the register.
    """

    view: View
    to: tuple[Member, ...]
    change: ViewDelta | None = None


@dataclass(frozen=True, slots=True)
class ReadRegister:
    """Read the register soon, because another member knows `epoch`; if that succeeds, answer with ViewRead."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ReportDeaths:
    """Tell the members `to` of deaths that they cannot see themselves."""

    deaths: tuple[Death, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class ReportSuspicions:
    """Tell the members `to` which members of other hosts this process suspects, or has cleared."""

    seen: tuple[Suspicion | Cleared, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class AnnounceSelf:
    """Tell `to`, members of `view`, that this process is a spare."""

    view: View
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Install:
    """Switch to `view`: build its communicator, or end if its phase says so."""

    view: View


@dataclass(frozen=True, slots=True)
class Evicted:
    """This process was a member and is not in `view`: it can do nothing more in this job."""

    view: View
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This process cannot take part; it has changed nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """End the process of a silent member with SIGKILL, so that its death is certain."""

    member: Member
    reason: str


Effect = (
    Revoke
    | Propose
    | Announce
    | ReadRegister
    | ReportDeaths
    | ReportSuspicions
    | AnnounceSelf
    | Install
    | Evicted
    | Refused
    | Fence
)
