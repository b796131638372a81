"""Autosave: a machine stores its workspace by itself every few minutes.

These requests hold no workspace.
"""

from __future__ import annotations

import msgspec

from torpor.shared.values import WorkspaceName
from torpor.shared.wire.job import NoticeSource, OwnSave, StandBy
from torpor.shared.wire.losses import Moment
from torpor.shared.wire.request import Count, Nothing, Request, Snapshot, Words


class AutosaveState(msgspec.Struct, frozen=True):
    """``lives``: a process saves the workspace. Without it, only ``line`` and ``job`` are known.

    ``job``: the job on this machine that saves the workspace instead, as long as its grants last or
    may last; empty without one.
    ``line``: the snapshot that the tree goes on from. ``saved``: the newest save of this process.
    ``stored_unix``: when the store last had all of the workspace: after a save, or a look that
    found nothing new; ``unsaved_s``: how long ago that was, or the begin of the process where it
    has saved nothing. ``error``: why the last try failed. ``interval_s``: the time between the last
    two tries, or to the next one where that is longer. ``left``: manifests that it may still write.
    ``until_unix``: when its grants end, by the control side's clock, and ``lasts_s``: how long they
    last in all."""

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
    destroyed must not take that for a notice. A job's supervisor loses its grants. Idempotent."""

    op = "autosave.end"
    workspace: WorkspaceName


class Autosave(Request[Nothing], frozen=True):
    """Save the workspace of ``book`` as often as it says, and when the machine will be taken away,
    until the grants end. Starts a process for it, or hands the book to the one that lives;
    one of another bundle is replaced. WorkspaceBusy while a job on the machine saves the workspace,
    unless it is the job ``instead_of``, which is over: its supervisor loses its grants.

    The next save comes 50 times as long after the last one as that kept all cores or the line busy,
    and 10 times as long as it took, or later. After one that failed it comes with the next book,
    and goes on with what that one stored."""

    op = "autosave"
    book: StandBy
    notices: list[NoticeSource]
    instead_of: str = ""
