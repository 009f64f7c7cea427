"""What the membership state machine is told (events), and what it asks its process to do (effects).

Some events are sent as they are from member to member: `holdfast.ft.node.messages`.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.ft.membership.view import Member, StepError, View, ViewDelta

LEFT = "it left: "
"""How the evidence of a `Death` begins, for people, if the process left the job; its reason follows."""


class Death(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process that has certainly ended or left, and the evidence for it.

    `error` is the name of the type of the exception with which it left the job ("": there was none).
    """

    id: str
    evidence: str
    error: str = ""


class Started(Struct, frozen=True):
    """This process asks to take part in the job."""


class ViewRead(Struct, frozen=True):
    """The register, or the member `teller`, holds this view (None: the register is empty)."""

    view: View | None
    teller: str = ""


class ViewDeltaReceived(Struct, frozen=True):
    """The member `teller` sent the next view, as its difference from the one before."""

    change: ViewDelta
    teller: str = ""


class EpochHeard(Struct, frozen=True):
    """A sign of life of `member` carried `epoch`, which is not the newest epoch known here."""

    member: Member
    epoch: int


class CasWon(Struct, frozen=True):
    """The compare-and-set succeeded: the register holds the proposed view."""

    view: View


class CasLost(Struct, frozen=True):
    """Another process was first; `view` is what the register holds now."""

    view: View | None


class CasFailed(Struct, frozen=True):
    """The register could not be reached; the view may have been written or not."""

    reason: str


class ProvenDeaths(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Processes that have ended: the kernel reported it, or they announced that they leave."""

    deaths: tuple[Death, ...]


class Unreachable(Struct, frozen=True):
    """This process concludes from suspicions that the job must go on without `member`, which may live.

    The register decides: only one side of a partition gets the next epoch.
    """

    member: str
    evidence: str


class EpochBroken(Struct, frozen=True):
    """An op of this process failed in `epoch` without a dead or suspected member: the epoch cannot go on."""

    epoch: int
    reason: str


class Stalled(Struct, frozen=True):
    """A member of this host was observed not to run at all for the whole suspect time."""

    member: str
    evidence: str


class Suspicion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`observer` no longer hears from `member`, which is on another host.

    `number` counts the statements of `observer` about `member`, so that a late message does not replace a newer one. 0
    marks a new statement of this process.
    """

    member: str
    observer: str
    evidence: str
    number: int = 0


class Cleared(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`observer` hears from `member` again. `number` as for `Suspicion`."""

    member: str
    observer: str
    number: int = 0


class SpareAnnounced(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process outside the view is ready to join it."""

    member: Member


class Tick(Struct, frozen=True):
    """The time `wake_at` has come."""


class LocalFinished(Struct, frozen=True):
    """This process has committed the last step of the job, in `epoch`.

    It holds for that epoch only: in the next one a new member may need the state first. `stopped`: all members left
    the steps before the last one, for `reason`.
    """

    epoch: int
    reason: str = "all steps are committed"
    stopped: bool = False


class LocalFailed(Struct, frozen=True):
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


class Revoke(Struct, frozen=True):
    """End every pending op of `epoch`. `dead` are its lost members; empty if a newer view just replaces it."""

    epoch: int
    dead: tuple[Death, ...]
    reason: str


class Propose(Struct, frozen=True):
    """Compare-and-set the register from epoch `expected` (0: empty) to `view`.

    The answer is the event CasWon, CasLost or CasFailed.
    """

    expected: int
    view: View


class Announce(Struct, frozen=True):
    """Tell the members `to` that `view` is the newest view.

    With `change`, send only this difference from the view before; a member that lacks that view reads the register.
    """

    view: View
    to: tuple[Member, ...]
    change: ViewDelta | None = None


class ReadRegister(Struct, frozen=True):
    """Read the register soon, because another member knows `epoch`; if that succeeds, answer with ViewRead."""

    epoch: int


class Report(Struct, frozen=True):
    """Tell the members `to` what this process has found.

    That is deaths that they cannot see themselves, or a member of another host that it suspects or has cleared.
    """

    finding: ProvenDeaths | Suspicion | Cleared
    to: tuple[Member, ...]


class AnnounceSelf(Struct, frozen=True):
    """Tell `to`, members of `view`, that this process is a spare."""

    view: View
    to: tuple[Member, ...]


class Install(Struct, frozen=True):
    """Switch to `view`: build its communicator, or end if its phase says so."""

    view: View


class Evicted(Struct, frozen=True):
    """This process was a member and is not in `view`: it can do nothing more in this job."""

    view: View
    reason: str


class Refused(Struct, frozen=True):
    """This process cannot take part; it has changed nothing."""

    reason: str


class Fence(Struct, frozen=True):
    """End the process of a silent member with SIGKILL, so that its death is certain."""

    member: Member
    reason: str


Effect = Revoke | Propose | Announce | ReadRegister | Report | AnnounceSelf | Install | Evicted | Refused | Fence
