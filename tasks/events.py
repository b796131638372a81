"""Events for Prefect, which automations can act on.

An event only repeats what the store and the provider know; torpor decides nothing by events
(docs/contributing/safety.md). A failure to send an event is a warning. No event holds a secret.

Names are ``torpor.NOUN.VERB``, resources ``torpor.workspace.NAME``, ``torpor.snapshot.NAME.ID``,
``torpor.machine.NAME.ID`` and ``torpor.alert.KIND.ID``; every event of a workspace is related to
it. See deployments/automations.py.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from tasks.runner import runner
from torpor.shared.values import MachineId, SnapshotId, WorkspaceName

_MOST_TEXT: Final = 1000
"""Most characters of an error's message in an event; the run's log has all of it."""
_MOST_NAMES: Final = 100
"""Most snapshots that an event names; its numbers count all of them."""


class WorkspaceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a workspace; the fields are the payload."""

    event: ClassVar[str]

    workspace: WorkspaceName

    def resource(self) -> str:
        """The id of the event's resource."""
        return f"torpor.workspace.{self.workspace}"


class _OfSnapshot(WorkspaceEvent, frozen=True, kw_only=True):
    snapshot: SnapshotId

    def resource(self) -> str:
        return f"torpor.snapshot.{self.workspace}.{self.snapshot}"


class _OfMachine(WorkspaceEvent, frozen=True, kw_only=True):
    machine: MachineId
    provider: str

    def resource(self) -> str:
        return f"torpor.machine.{self.workspace}.{self.machine}"


class SnapshotCommitted(_OfSnapshot, frozen=True, kw_only=True):
    """The manifest is in the store."""

    event: ClassVar[str] = "torpor.snapshot.committed"
    files: int
    bytes: int


class SnapshotVerified(_OfSnapshot, frozen=True, kw_only=True):
    """The snapshot was read back and every pack exists."""

    event: ClassVar[str] = "torpor.snapshot.verified"
    root: str


class SnapshotDeleted(_OfSnapshot, frozen=True, kw_only=True):
    """The manifest is gone; prune will free the packs."""

    event: ClassVar[str] = "torpor.snapshot.deleted"
    reason: str


class MachineCreated(_OfMachine, frozen=True, kw_only=True):
    """The machine is rented and SSH answers; it costs money from now on."""

    event: ClassVar[str] = "torpor.machine.created"
    price_usd_h: float


class MachineHandedOver(_OfMachine, frozen=True, kw_only=True):
    """The machine is the user's: only a verified snapshot may end it."""

    event: ClassVar[str] = "torpor.machine.handed-over"


class MachineDestroyed(_OfMachine, frozen=True, kw_only=True):
    """The provider says that the machine is gone."""

    event: ClassVar[str] = "torpor.machine.destroyed"
    reason: str


class MachineIdle(_OfMachine, frozen=True, kw_only=True):
    """Nothing has run on the machine for long enough: it is being hibernated."""

    event: ClassVar[str] = "torpor.machine.idle"
    reason: str


class BackupFinished(WorkspaceEvent, frozen=True, kw_only=True):
    """A new snapshot is verified, and retention has run."""

    event: ClassVar[str] = "torpor.backup.finished"
    snapshot: SnapshotId
    deleted: list[SnapshotId]


class BackupFailed(WorkspaceEvent, frozen=True, kw_only=True):
    """There is no new verified snapshot; nothing was deleted."""

    event: ClassVar[str] = "torpor.backup.failed"
    error: str
    message: str


class VerificationFailed(WorkspaceEvent, frozen=True, kw_only=True):
    """Stored objects are missing or changed."""

    event: ClassVar[str] = "torpor.verification.failed"
    snapshots: list[SnapshotId]
    problems: int
    message: str


class FirstRestored(WorkspaceEvent, frozen=True, kw_only=True):
    """What the workspace wants first is restored and compared, and can be used; the rest follows.
    The machine is not handed over yet: a wake that fails later destroys it."""

    event: ClassVar[str] = "torpor.workspace.first-restored"
    snapshot: SnapshotId
    machine: MachineId
    provider: str
    names: int
    bytes: int
    seconds: float


class PacksPruned(WorkspaceEvent, frozen=True, kw_only=True):
    """Packs that no manifest names were deleted."""

    event: ClassVar[str] = "torpor.packs.pruned"
    packs: int
    bytes: int


class AlertRaised(WorkspaceEvent, frozen=True, kw_only=True):
    """An alert of `watch` (docs/guide/unattended.md) has lasted so long that people are told: sent
    once for each alert. ``workspace`` is the name of its block, and empty for an alert of the whole
    installation; ``message`` is the cause and the next step, ``name`` is the alert's own, in
    hex."""

    event: ClassVar[str] = "torpor.alert.raised"
    kind: str
    subject: str
    title: str
    message: str
    name: str

    def resource(self) -> str:
        """The id of the event's resource, such as
        ``torpor.alert.machine-unknown.3f2a9c81d04e3f2a9c81d04e``."""
        return f"torpor.alert.{self.kind.replace(' ', '-')}.{self.name}"


def emit(happened: WorkspaceEvent) -> None:
    """Send an event; a failure is a warning in the log."""
    try:
        payload = {name: _short(value) for name, value in msgspec.to_builtins(happened).items()}
        resource = {"prefect.resource.id": happened.resource()}
        workspace = f"torpor.workspace.{happened.workspace}"
        related = {
            "prefect.resource.id": workspace,
            "prefect.resource.role": "workspace",
            "prefect.resource.name": str(happened.workspace),
        }
        is_related = happened.workspace and resource["prefect.resource.id"] != workspace
        runner().event(
            event=happened.event,
            resource={**resource, "prefect.resource.name": str(happened.workspace)},
            related=[related] if is_related else [],
            payload=payload,
        )
    except Exception as error:  # noqa: BLE001 - an event tells of work, and must not undo it
        runner().log.warning("the event %s was not sent: %s", happened.event, error)


def _short(value: object) -> object:
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    return value[:_MOST_NAMES] if isinstance(value, list) else value
