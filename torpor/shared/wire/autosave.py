"""Autosave: a machine stores its workspace by itself, on a schedule and when it will be taken away.

These requests hold no workspace.
"""

from __future__ import annotations

import msgspec

from torpor.shared.values import Compression, Grant, ObjectKey, SnapshotId, WorkspaceName
from torpor.shared.wire.job import NoticeSource, OwnSave
from torpor.shared.wire.losses import Moment
from torpor.shared.wire.request import Count, Nothing, Request, Snapshot, Words
from torpor.shared.wire.snapshot import KnownSnapshot


class SaveGrant(msgspec.Struct, frozen=True):
    """Permission to write one manifest until ``grant`` expires."""

    snapshot: SnapshotId
    created_unix: int
    grant: Grant


class Book(msgspec.Struct, frozen=True):
    """All that a machine needs to save ``workspace`` by itself.

    ``job``: whose save command is ``save_argv``, and whose command may be frozen; empty for the
    saves of no job. ``saves``: one for each save, used in order. ``packs``:
    grants for new packs. ``unusable``: packs of the known snapshots that a manifest must not name.
    ``young``: packs that none of those names and a manifest may: a save that did not end may have
    stored them. The key stays in memory. ``resume_argv``: the counterpart of ``save_argv``, owed
    from before that runs; empty for none. ``authority`` as in BeginsRun. ``every_s``: save so
    often, unless a newer book shows that somebody else has stored the workspace meanwhile; 0: only
    after a notice. ``lasts_s``: seconds until the grants end.
    """

    job: str
    workspace: WorkspaceName
    roots: list[str]
    exclude: list[str]
    accepted: list[str]
    compression: Compression
    key: str | None
    known: list[KnownSnapshot]
    unusable: list[ObjectKey] = msgspec.field(name="lost")
    saves: list[SaveGrant]
    packs: list[Grant]
    save_argv: list[str]
    save_timeout_s: float
    young: list[ObjectKey] = []
    resume_argv: list[str] = []
    authority: str = ""
    every_s: float = 0.0
    lasts_s: float = 3600.0

    def __repr__(self) -> str:
        """Without the grants and the key."""
        return f"Book(workspace={self.workspace!r})"


class AutosaveState(msgspec.Struct, frozen=True):
    """``lives``: a process saves the workspace, or hears for a job that the machine will be taken
    away. Without it, only ``line`` is known.

    ``job``: the job for which it saves, as long as its grants last; empty without one.
    ``line``: the snapshot that the tree goes on from. ``saved``: the newest save of this process.
    ``stored_unix``: when the store last had all of the workspace: after a save, or a look that
    found nothing new; ``unsaved_s``: how long ago that was, or the begin of the process where it
    has saved nothing. ``error``: why the last try failed. ``interval_s``: the time between the last
    two tries, or to the next one where that is longer; 0 where it saves after notices alone.
    ``left``: manifests that it may still write.
    ``until_unix``: when its grants end, by the control side's clock, and ``lasts_s``: how long they
    last in all; both are 0 without any."""

    lives: bool
    job: str = ""
    line: Snapshot | None = None
    saved: OwnSave | None = None
    stored_unix: Moment | None = None
    unsaved_s: Moment = 0.0
    error: Words = ""
    interval_s: float = 0.0
    left: Count = 0
    until_unix: Moment = 0.0
    lasts_s: Moment = 0.0


class LookAtAutosave(Request[AutosaveState], frozen=True):
    """What the process that saves the workspace has done."""

    op = "autosave.look"
    workspace: WorkspaceName


class EndAutosave(Request[Nothing], frozen=True):
    """End the process that saves the workspace, and the save that it makes: a machine that is
    destroyed must not take that for a notice. Idempotent."""

    op = "autosave.end"
    workspace: WorkspaceName


class Autosave(Request[Nothing], frozen=True):
    """Save the workspace of ``book`` as often as it says, and when the machine will be taken away,
    until the grants end. Starts the process for it, or hands the book to the one that lives, in
    place of the one that it has; a process of another bundle is replaced.

    A book without a job takes the place of a job's only where ``instead_of`` names that job, as
    ``autosave.look`` did: WorkspaceBusy otherwise. InvalidInput for the book of a job that was
    stopped there, or while another one runs. After a MachineError nobody knows whether the book is
    used: give another one.

    Without a job, the next save comes 50 times as long after the last one as that kept all cores or
    the line busy, and 10 times as long as it took, or later. After one that failed it comes with
    the next book, and goes on with what that one stored."""

    op = "autosave"
    book: Book
    notices: list[NoticeSource]
    instead_of: str = ""


class HearForAttempt(Request[Nothing], frozen=True):
    """Hear for an attempt of a job, which begins or goes on, that the machine will be taken away.
    Once it is ``over``, the grants for that job are, too. Only the process itself serves this, for
    the agent."""

    op = "autosave.attempt"
    workspace: WorkspaceName
    job: str
    attempt: int
    notices: list[NoticeSource] = msgspec.field(default_factory=list)
    over: bool = False
