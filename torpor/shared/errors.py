"""Every error torpor raises on purpose.

    TorporError
    ├── InvalidInput            the user named something that cannot be; nothing was touched
    │   ├── WorkspaceInvalid    a workspace path is missing, empty, unreadable or not a directory
    │   ├── WorkspaceAwake      the workspace is on a machine already: no other one is rented
    │   ├── WorkspaceAsleep     it is on no machine, which what was asked for needs
    │   └── BudgetUnread        a budget names a workspace that is not here: nothing is rented
    ├── StoreError              the object store
    │   ├── StoreDenied         403: credentials or grant refused
    │   ├── StoreArchived       the object is in an archive: ask for its restore first
    │   ├── StoreMissing        no such bucket or object
    │   ├── StoreUnavailable  * 5xx, 429, timeouts, resets, bodies cut short
    │   │   ├── StoreUnreachable* its host refuses connections, or has no address
    │   │   ├── StoreFull       its disk or its quota: somebody has to free space first
    │   │   └── StoreAway       it was away for as long as the patience of its block
    │   ├── KeyUnknown          the key of the block opens nothing there
    │   ├── KeyDamaged          the key object was changed by which the key of the block opens
    │   ├── RecordRefused       a record that no control side of this store signed, or damaged
    │   ├── StoreCorrupt      * bytes are not those that were written
    │   ├── GrantExpired      * a grant's time is over; ask for a new one
    │   ├── ObjectExists        a write-once name is taken
    │   └── ObjectChanged       another write came first; read the object again
    ├── MachineError            a machine, SSH, the agent on it
    │   ├── MachineUnreachable* no TCP or SSH connection
    │   ├── MachineDenied       SSH authentication refused
    │   ├── HostKeyChanged      the machine's host key is not the pinned one
    │   ├── MachineUnfit        the agent cannot run there, or its disk cannot hold a file
    │   ├── DiskFull            no space or quota left
    │   ├── MachineInUse        not idle, or not known to be; an idle hibernate leaves it alone
    │   ├── HookFailed          the user's own command on the machine failed
    │   └── AgentLost         * the agent or the connection to it went away
    ├── SnapshotError
    │   ├── ManifestInvalid     a manifest that lies, is damaged, or of an unknown version
    │   │   └── OtherPaths      it names directories that the user has not allowed
    │   ├── SnapshotMissing     no snapshot of that name, or none at all
    │   ├── SnapshotDamaged     a pack or chunk is gone or does not match its hash
    │   ├── SnapshotKept        pinned, or the newest: it is not deleted
    │   ├── SnapshotOverdue     the newest one is older than a backup's schedule allows
    │   ├── WrongKey            sealed with another key, or sealed and no key given
    │   ├── StillChanging       files changed in every pass
    │   ├── UnsavedWork         the machine holds work that is in no snapshot
    │   ├── LacksWork           the newest snapshot lacks what another one has; name the one to take
    │   ├── RestoreUnfinished   the machine holds what an earlier run began to restore, no more
    │   └── WorkspaceBusy       another run holds this workspace on this machine
    ├── ProviderError
    │   ├── NoOffer             nothing on sale fits
    │   ├── CreateFailed        the provider rented nothing, or ended it again; try the next offer
    │   │   ├── NoCapacity      in the offer's failure domain
    │   │   └── QuotaReached    of the account, for this GPU in this region
    │   ├── CreateUncertain     the answer was lost: a machine may exist, or may appear later
    │   │   └── OrderUnpaid     an order stands, and a payment would start its machine
    │   ├── EndUnproven         a machine was told to end; the provider has not proven that it has
    │   ├── ProviderDenied      login, permission, balance: nothing can be rented there now
    │   ├── ProviderUnavailable*  no answer, 429, 5xx; nothing was changed
    │   ├── UnexpectedAnswer    an answer of a shape that we do not know; never an empty list
    │   │   └── MachineUnread   a list has a machine that may be ours and cannot be read
    │   └── NotOurs             the machine does not carry our label and rental
    │       └── HandedOver      another run has handed it to its user meanwhile
    │           └── Recovered   another control side has recovered the workspace, and owns it
    ├── BudgetExceeded          what was to be rented would cost more than a budget allows
    ├── JobFailed               a job has ended without success; its work is stored
    ├── NotDelivered            a notification block did not accept a message
    ├── DeployFailed            a server did not come up, or gave a wrong answer
    │   └── StartedTooEarly     it wrote where files were still restored; start it after that
    ├── UnsafeDestroy           a destroy without a proof that fits the live machine
    ├── RunCancelled            the user or the control side stopped the run
    │   └── NewerFiles          a folder's files are newer where it was to be sent: they are kept
    └── Unforeseen              none of ours: what one machine, market or store said raised it

    * retryable: the same call may succeed later.

Messages name the object, the host, the cause and the next step. No traceback is meant to reach
a user for an error of this tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from torpor.shared.plain_text import plain


class TorporError(Exception):
    """Base of the tree. ``retryable`` says whether the same call may succeed later. Messages, and
    the texts of other errors within them, pass through ``plain_text.plain``: a message may quote
    file names of a machine, and must be safe in records and on terminals."""

    retryable: ClassVar[bool] = False

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(arg if isinstance(arg, int | float) else plain(str(arg)) for arg in args)
        )

    def to_wire(self) -> dict[str, str]:
        """The error as JSON for the agent's protocol: class name and message."""
        return {"type": type(self).__name__, "message": str(self)}


class InvalidInput(TorporError):
    pass


class WorkspaceInvalid(InvalidInput):
    pass


class WorkspaceAwake(InvalidInput):
    pass


class WorkspaceAsleep(InvalidInput):
    snapshot: str = ""


class BudgetUnread(InvalidInput):
    pass


class StoreError(TorporError):
    pass


class StoreDenied(StoreError):
    pass


class StoreArchived(StoreError):
    pass


class StoreMissing(StoreError):
    pass


class StoreUnavailable(StoreError):
    retryable = True
    retry_after_s: float = 0.0  # the wait that the store asked for, where it did


class StoreUnreachable(StoreUnavailable):
    pass


class StoreFull(StoreUnavailable):
    retryable = False


class StoreAway(StoreUnavailable):
    retryable = False


class RecordRefused(StoreError):
    """The object is not a record that this torpor wrote. Nothing that it says is carried out."""


class KeyUnknown(StoreError):
    pass


class KeyDamaged(StoreError):
    pass


class StoreCorrupt(StoreError):
    retryable = True


class GrantExpired(StoreError):
    retryable = True


class ObjectExists(StoreError):
    pass


class ObjectChanged(StoreError):
    pass


class MachineError(TorporError):
    pass


class MachineUnreachable(MachineError):
    retryable = True


class MachineDenied(MachineError):
    pass


class HostKeyChanged(MachineError):
    pass


class MachineUnfit(MachineError):
    pass


class DiskFull(MachineError):
    pass


class MachineInUse(MachineError):
    pass


class HookFailed(MachineError):
    pass


class AgentLost(MachineError):
    retryable = True


class SnapshotError(TorporError):
    pass


class ManifestInvalid(SnapshotError):
    pass


class OtherPaths(ManifestInvalid):
    pass


class SnapshotMissing(SnapshotError):
    pass


class SnapshotDamaged(SnapshotError):
    pass


class SnapshotKept(SnapshotError):
    pass


class SnapshotOverdue(SnapshotError):
    pass


class WrongKey(SnapshotError):
    pass


class StillChanging(SnapshotError):
    pass


class UnsavedWork(SnapshotError):
    pass


class LacksWork(SnapshotError):
    pass


class RestoreUnfinished(SnapshotError):
    pass


class WorkspaceBusy(SnapshotError):
    pass


class ProviderError(TorporError):
    pass


class NoOffer(ProviderError):
    pass


class CreateFailed(ProviderError):
    pass


class NoCapacity(CreateFailed):
    pass


class QuotaReached(CreateFailed):
    pass


class CreateUncertain(ProviderError):
    pass


class OrderUnpaid(CreateUncertain):
    pass


class EndUnproven(ProviderError):
    accepted: bool = False  # the provider says that the machine is being ended


class ProviderDenied(ProviderError):
    pass


class ProviderUnavailable(ProviderError):
    retryable = True
    retry_after_s: float = 0.0  # the wait that the provider asked for, where it did


class UnexpectedAnswer(ProviderError):
    pass


class MachineUnread(UnexpectedAnswer):
    machines: Sequence[Any] = ()  # the ``Machine`` values of ours that can be read


class NotOurs(ProviderError):
    pass


class HandedOver(NotOurs):
    pass


class Recovered(HandedOver):
    pass


class BudgetExceeded(TorporError):
    pass


class JobFailed(TorporError):
    pass


class NotDelivered(TorporError):
    pass


class DeployFailed(TorporError):
    pass


class StartedTooEarly(DeployFailed):
    pass


class UnsafeDestroy(TorporError):
    pass


class RunCancelled(TorporError):
    pass


class NewerFiles(RunCancelled):
    pass


class Unforeseen(TorporError):
    pass


_LONGEST: Final = 10_000  # characters kept of a message of an error that is not torpor's


def as_ours(error: Exception) -> TorporError:
    """The error itself, or Unforeseen for one that is not of this tree: a caller that asks several
    machines, workspaces or markets catches TorporError and continues with the others."""
    if isinstance(error, TorporError):
        return error
    found = Unforeseen(f"{type(error).__name__}: {error}"[:_LONGEST])
    found.__cause__ = error
    return found


def from_wire(wire: dict[str, str]) -> TorporError:
    """Rebuild an error that the agent sent. A class that no agent raises, such as a market's,
    becomes a plain MachineError, so that a machine cannot claim what happened on the control
    side."""
    known = {cls.__name__: cls for of in _OF_AN_AGENT for cls in _descendants(of)}
    known |= {cls.__name__: cls for cls in (InvalidInput, WorkspaceInvalid, RunCancelled)}
    message = wire.get("message", "no message")[:_LONGEST]
    return known.get(wire.get("type", ""), MachineError)(message)


_OF_AN_AGENT: Final = (MachineError, SnapshotError, StoreError)


def _descendants(cls: type[TorporError]) -> list[type[TorporError]]:
    return [cls, *(d for sub in cls.__subclasses__() for d in _descendants(sub))]
