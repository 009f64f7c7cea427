"""The words of the membership core: what can happen to it (events) and what it asks for (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.ft.membership.step_error import StepError
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import ViewDelta


@dataclass(frozen=True, slots=True)
class Death:
    """A member that is gone for certain, and how that is known."""

    id: str
    evidence: str


# Events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """This process wants to take part."""


@dataclass(frozen=True, slots=True)
class ViewRead:
    """The register, or the member `teller`, shows this view (None: the register is empty)."""

    view: View | None
    teller: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """The member `teller` tells of the view that follows another, by what is different."""

    change: ViewDelta
    teller: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """`member` lives, and the newest epoch that it knows is `epoch`. To be told when that is not the newest here."""

    member: Member
    epoch: int


@dataclass(frozen=True, slots=True)
class CasWon:
    """The register took the view that was proposed."""

    view: View


@dataclass(frozen=True, slots=True)
class CasLost:
    """Somebody else was first; `view` is what the register holds now."""

    view: View | None


@dataclass(frozen=True, slots=True)
class CasFailed:
    """The register could not be reached. Whether the view was written is not known."""

    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """Processes that are gone: the kernel says so, or they said good-bye."""

    deaths: tuple[Death, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """An op of this process failed in `epoch`, and nobody is found to be to blame: the epoch cannot go on."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """A member of this host that was looked at and did not run at all for the whole suspect time."""

    member: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`observer`, on another host than `member`, does not hear from it any more. `word` counts what it has said of it:
    what is told late does not take the place of what was said later. 0: it is said here and now.
    """

    member: str
    observer: str
    evidence: str
    word: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """`observer` hears from `member` again. `word` as for `Suspicion`."""

    member: str
    observer: str
    word: int = 0


@dataclass(frozen=True, slots=True)
class SpareAnnounced:
    """A process outside the view is ready to be taken into it."""

    member: Member


@dataclass(frozen=True, slots=True)
class SpareGone:
    """A spare that cannot be promoted any more."""

    member: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `wake_at` is reached."""


@dataclass(frozen=True, slots=True)
class LocalFinished:
    """This process has committed the last step of the job, and said so in `epoch`: in the next one somebody may have to
    be given the state first. `stopped`: all members have left the steps before the last one, as `reason` says.
    """

    epoch: int
    reason: str = "all steps are committed"
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class LocalFailed:
    """The user's code raised `error` here, and the job is to end with it, as `reason` says."""

    error: StepError
    reason: str


Event = (
    Started
    | ViewRead
    | Changed
    | Heard
    | CasWon
    | CasLost
    | CasFailed
    | Proof
    | Broken
    | Stalled
    | Suspicion
    | Cleared
    | SpareAnnounced
    | SpareGone
    | Tick
    | LocalFailed
    | LocalFinished
)


# Effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Revoke:
    """End every pending op of `epoch`. `dead` are the members of it that are gone: none if it is just
    replaced.
    """

    epoch: int
    dead: tuple[Death, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set the register from `expected` (0: empty) to `view`; answer with CasWon, CasLost or
    CasFailed.
    """

    expected: int
    view: View


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell `to` that `view` is the view now. With `change`, what is different from the one before is enough: whoever
    has missed that one asks the register.
    """

    view: View
    to: tuple[Member, ...]
    change: ViewDelta | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Read the register soon, and answer with ViewRead if that succeeds: somebody knows of `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell `to` of deaths that they cannot see themselves."""

    deaths: tuple[Death, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Testify:
    """Tell `to` what this process, as an observer, sees of another host's members."""

    seen: tuple[Suspicion | Cleared, ...]
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class AnnounceSelf:
    """Tell `to`, members of `view`, that this process is a spare."""

    view: View
    to: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Install:
    """`view` holds from here on: build its communicator, or end if its phase says so."""

    view: View


@dataclass(frozen=True, slots=True)
class Evicted:
    """This process is not in `view` though it was in one before: it can do nothing more in this job."""

    view: View
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This process cannot take part, and has changed nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """End the member's process for certain (SIGKILL), so that its silence becomes a proof."""

    member: Member
    reason: str


Effect = Revoke | Propose | Announce | Ask | Report | Testify | AnnounceSelf | Install | Evicted | Refused | Fence
