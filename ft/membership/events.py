"""What the membership state machine is told (events), and what it asks its process to do (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ft.membership.view import Member, StepError, View
from holdfast.ft.membership.view_delta import ViewDelta

LEFT = "it left: "
"""How the evidence of a `Death` begins, for people, if the process left the job; its reason follows."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process that has certainly ended or left, and the evidence for it.

    `error` is the name of the type of the exception with which it left the job ("": there was none).
    """

    id: str
    evidence: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """This process asks to take part in the job."""


@dataclass(frozen=True, slots=True)
class ViewRead:
    """The register, or the member `teller`, holds this view (None: the register is empty)."""

    view: View | None
    teller: str = ""


@dataclass(frozen=True, slots=True)
class ViewDeltaReceived:
    """The member `teller` sent the next view, as its difference from the one before."""

    change: ViewDelta
    teller: str = ""


@dataclass(frozen=True, slots=True)
class EpochHeard:
    """A sign of life of `member` carried `epoch`, which is not the newest epoch known here."""

    member: Member
    epoch: int


@dataclass(frozen=True, slots=True)
class CasWon:
    """The compare-and-set succeeded: the register holds the proposed view."""

    view: View


@dataclass(frozen=True, slots=True)
class CasLost:
    """Another process was first; `view` is what the register holds now."""

    view: View | None


@dataclass(frozen=True, slots=True)
class CasFailed:
    """The register could not be reached; the view may have been written or not."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProvenDeaths:
    """Processes that have ended: the kernel reported it, or they announced that they leave."""

    deaths: tuple[Death, ...]


@dataclass(frozen=True, slots=True)
class Unreachable:
    """This process concludes from suspicions that the job must go on without `member`, which may live.

    The register decides: only one side of a partition gets the next epoch.
    """

    member: str
    evidence: str


@dataclass(frozen=True, slots=True)
class EpochBroken:
    """An op of this process failed in `epoch` without a dead or suspected member: the epoch cannot go on."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """A member of this host was observed not to run at all for the whole suspect time."""

    member: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`observer` no longer hears from `member`, which is on another host.

    `number` counts the statements of `observer` about `member`, so that a late message does not replace a newer one. 0
    marks a new statement of this process.
    """

    member: str
    observer: str
    evidence: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """`observer` hears from `member` again. `number` as for `Suspicion`."""

    member: str
    observer: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class SpareAnnounced:
    """A process outside the view is ready to join it."""

    member: Member


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `wake_at` has come."""


@dataclass(frozen=True, slots=True)
class LocalFinished:
    """This process has committed the last step of the job, in `epoch`.

    It holds for that epoch only: in the next one a new member may need the state first. `stopped`: all members left
    the steps before the last one, for `reason`.
    """

    epoch: int
    reason: str = "all steps are committed"
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """The user's code raised `error` here, and the job has to end with it, for `reason`."""

    error: StepError
    reason: str


Event = (
    Started
    | ViewRead
    | ViewDeltaReceived
    | EpochHeard
    | CasWon
    | CasLost
    | CasFailed
    | ProvenDeaths
    | Unreachable
    | EpochBroken
    | Stalled
    | Suspicion
    | Cleared
    | SpareAnnounced
    | Tick
    | LocalFailed
    | LocalFinished
)


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
