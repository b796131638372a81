"""The steps of autosave: what a rented machine needs to save its workspace by itself, what it says
of its saves, and the end of superfluous ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tasks.ownership import check_still_owner
from tasks.retention import tell_of_deletion
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.standing_by import give_book
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.jobs.standby import OWN_SAVES, book_for, renewed_s
from torpor.control.remote.agent import Agent
from torpor.control.reports import moment
from torpor.control.safety import Verified
from torpor.control.store.marks import COMMIT_S
from torpor.control.upkeep.autosaves import delete_superseded, thin
from torpor.control.upkeep.lineage import StoredState
from torpor.control.upkeep.pins import Pin, holds
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import TorporError
from torpor.shared.format.names import manifest_key
from torpor.shared.plain_text import plain
from torpor.shared.values import Label, Machine, SnapshotId, snapshot_id
from torpor.shared.wire.autosave import AutosaveState, EndAutosave, LookAtAutosave

ANSWER_S: Final = 60.0
END_S: Final = 20.0
"""The longest that ending a machine's own saves may take, in seconds. It is asked within the minute
for which a warrant holds (``torpor.control.safety.HOLDS_S``), so it must be well below that."""
MINUTE_S: Final = 60.0
OLD_S: Final = 900.0
OLD_INTERVALS: Final = 3
"""A machine's newest save is too old after these intervals, and no sooner than after OLD_S."""
_SHOWN: Final = 3
"""How many saves a report names in full."""


class AutosaveSummary(NamedTuple):
    """How a machine's own saves go, for people. ``fail``: the machine should save by itself, and
    does not."""

    words: str
    fail: bool = False


NO_SAVES: Final = AutosaveSummary("")


@step("start autosave", retries=ONCE)
def start_autosave(opened: OpenWorkspace, session: Agent, machine: Machine) -> None:
    """Let the machine save its workspace by itself from now on, on top of what it holds now, unless
    a job there saves it. What fails here, `watch` does later."""
    try:
        if not _saves(opened, machine):
            return
        state = _look(opened, session)
        if not _is_open(opened, state.job):
            _give_book(opened, session, machine, state)
    except TorporError as error:
        runner().log.warning(
            "machine %s does not save its workspace by itself yet: %s", machine.id, error
        )


def renew_autosave(opened: OpenWorkspace, session: Agent, machine: Machine) -> AutosaveSummary:
    """What the machine says of its saves; NO_SAVES where the machine should make none. Gives it
    grants for further saves when half of the grants' time is over, a save failed, or the snapshot
    that its tree goes on from is gone, and then deletes superfluous ones."""
    try:
        if not _saves(opened, machine):
            return NO_SAVES
        state = _look(opened, session)
        if _is_open(opened, state.job):  # the run that drives the job gives the machine its grants
            return AutosaveSummary(f"job {plain(state.job)} saves it, {_until(state)}")
        ends_s = state.until_unix - time.time()
        # an older autosave process does not say how long its grants last
        lasts_s = state.lasts_s or COMMIT_S
        is_fresh = ends_s >= lasts_s - renewed_s(lasts_s)
        is_as_wanted = bool(state.interval_s) == bool(opened.spec.save_minutes)
        is_whole = is_fresh and is_as_wanted and state.left >= OWN_SAVES
        lasts = state.lives and not state.job and is_whole
        is_gone = state.line is not None and not _is_there(opened, state.line)
        if not lasts or state.error or is_gone:
            opened.store.probe()  # asks the store how long grants may last
            _give_book(opened, session, machine, state)
            _tell(opened, thin(opened.store, opened.spec.name, opened.seal), "a newer autosave is")
    except TorporError as error:
        return AutosaveSummary(f"its own saves cannot go on: {error}", fail=True)
    if state.job:
        job = plain(state.job)
        return AutosaveSummary(f"job {job}, which is over, saved it until now: its own saves begin")
    told = _told(state, opened.spec.save_minutes)
    if is_gone and not told.fail:
        why = "it was deleted, or is on its way. It saves again"
        return AutosaveSummary(f"snapshot {state.line}, its newest, is not in the store: {why}")
    return told


def line_held(opened: StoredWorkspace, session: Agent) -> SnapshotId | None:
    """The snapshot that the workspace on the machine goes on from, as the machine says: what it
    has restored or stored last. None where it holds none that is whole."""
    return held_and_saving(opened, session)[0]


def held_and_saving(opened: StoredWorkspace, session: Agent) -> tuple[SnapshotId | None, bool]:
    """The snapshot that ``line_held`` returns, and whether the machine saves the workspace by
    itself. Only a machine that was handed over does."""
    state = _look(opened, session)
    return (None if state.line is None else snapshot_id(state.line)), state.lives


def end_autosave(opened: StoredWorkspace, session: Agent) -> None:
    """End the machine's own saves before a destroy. Otherwise the machine would take the destroy
    for a market's notice, and save once more what is stored already. A failure is a warning."""
    with suppress(TorporError):
        ask_to_end(opened, session)


def ask_to_end(opened: StoredWorkspace, session: Agent) -> None:
    """End the machine's own saves. Idempotent."""
    request_id = f"autosave:{secrets.token_hex(8)}"
    session.call(EndAutosave(opened.spec.name), request_id=request_id, within_s=END_S)


@step("delete superseded autosaves", retries=ONCE)
def delete_autosaves(opened: OpenWorkspace, verified: Verified) -> list[str]:
    """Delete the autosaves whose work the verified snapshot has, and pin the snapshots that alone
    hold files which the verified one lacks. Returns in words what was pinned. A failure is a
    warning."""
    ended = None
    try:
        check_still_owner(opened)  # the save has taken hours
        ended = delete_superseded(opened.store, verified, opened.seal)
    except TorporError as error:
        words = [f"superfluous autosaves were not deleted, nor compared with it: {error}"]
    else:
        _tell(opened, ended.deleted, f"snapshot {verified.snapshot} is verified and")
        words = []
    words += _pinned(opened, verified.snapshot, ended and ended.holds)
    for line in words:
        runner().log.warning("%s", line)
    return words


def pinned_for_others(
    opened: OpenWorkspace, newest: SnapshotId, others: Sequence[StoredState] = ()
) -> list[str]:
    """Pin the snapshots that alone hold what this snapshot lacks, or what the first of the tips
    ``others`` lack. Returns in words what was pinned. A failure is a warning."""
    words, pins = [], None
    try:
        succession = Succession(opened.store, opened.spec.name, opened.seal)
        for snapshot in (newest, *(tip.snapshot for tip in others[:_SHOWN])):
            succession.hold(snapshot)
        pins = succession.holds
    except TorporError as error:
        words = [f"older snapshots were not compared with snapshot {newest}: {error}"]
    words += _pinned(opened, newest, pins)
    for line in words:
        runner().log.warning("%s", line)
    return words


def _saves(opened: OpenWorkspace, machine: Machine) -> bool:
    """Whether a machine is to save by itself: if the block has ``save_minutes``, or if the market
    gives notice before it takes the machine. Never the user's own machine, and never one with a
    job, whose driver gives the machine its books."""
    if machine.label is None or opened.job:
        return False
    return bool(opened.spec.save_minutes) or _may_be_told(opened, machine, machine.label)


def _may_be_told(opened: OpenWorkspace, machine: Machine, label: Label) -> bool:
    """Whether the machine may get a notice and act on it: a spot machine of a market that gives
    notice, and the only machine of its workspace. The save of one machine among several would not
    be what a wake should bring."""
    if not opened.markets.of(machine.provider).abilities.notices:
        return False
    handed = [one for one in opened.rentals.open() if one.state == "handed over"]
    return [one.label for one in handed] == [label] and handed[0].spot


def _look(opened: StoredWorkspace, session: Agent) -> AutosaveState:
    request_id = f"autosave:{secrets.token_hex(8)}"
    return session.call(LookAtAutosave(opened.spec.name), request_id=request_id, within_s=ANSWER_S)


def _is_open(opened: OpenWorkspace, job: str) -> bool:
    return bool(job) and any(one.id == job for one in opened.jobs.open())


def _give_book(
    opened: OpenWorkspace, session: Agent, machine: Machine, seen: AutosaveState
) -> None:
    """Give the machine a book. ``seen``: what the machine says of its saves. A job that has got a
    book since then keeps it."""
    spec, line = opened.spec, seen.line
    basis = line if line and _is_there(opened, line) else None
    every_s = MINUTE_S * spec.save_minutes
    book = book_for(opened.store, spec, opened.key, "", basis, every_s=every_s)
    give_book(opened, session, machine, book, instead_of=seen.job)


def _is_there(opened: OpenWorkspace, snapshot: SnapshotId) -> bool:
    return opened.store.head(manifest_key(opened.spec.name, snapshot)) is not None


def _told(state: AutosaveState, every_minutes: int) -> AutosaveSummary:
    # wait longer than one look only where the machine's autosave process always ends
    if not state.lives:
        return AutosaveSummary("nothing saved it until now: it begins", fail=True)
    if state.error:
        return AutosaveSummary(f"its own save failed: {plain(state.error)}", fail=True)
    if not every_minutes:
        return AutosaveSummary(f"saves when its market takes it away, {_until(state)}")
    if state.unsaved_s > max(OLD_S, OLD_INTERVALS * state.interval_s):
        return AutosaveSummary(f"its newest save is {state.unsaved_s / 60:.0f} min old", fail=True)
    if state.stored_unix is None:
        return AutosaveSummary("no save is due yet")
    minutes = state.interval_s / 60
    at = moment(min(state.stored_unix, 4e9))
    return AutosaveSummary(f"saved at {at}, every {minutes:.1f} min, {_until(state)}")


def _until(state: AutosaveState) -> str:
    """When the machine's own saves end if no run renews their grants."""
    return f"until {moment(min(state.until_unix, 4e9))} by itself"


def _tell(opened: OpenWorkspace, deleted: list[SnapshotId], newer: str) -> None:
    for snapshot in deleted:
        tell_of_deletion(opened, snapshot, f"{newer} newer and has its work")


def _pinned(
    opened: OpenWorkspace, newest: SnapshotId, pins: Mapping[SnapshotId, Pin] | None
) -> list[str]:
    """What reports and wakes say of snapshots that torpor has pinned, but for the ``newest``.
    ``pins``: as the caller has just read them; None where that failed."""
    try:
        pins = holds(opened.store, opened.spec.name) if pins is None else pins
    except TorporError as error:
        return [f"which snapshots torpor has pinned is not known: {error}"]
    newest_first = sorted(pins.keys() - {newest}, reverse=True)
    lines = [
        f"snapshot {snapshot} stays until you delete it: {pins[snapshot].reason}. To bring these "
        f"files back, name {snapshot} as `snapshot` of wake or restore-path; to drop them, name it "
        "in delete-snapshots"
        for snapshot in newest_first[:_SHOWN]
    ]
    more = newest_first[_SHOWN:]
    return lines + ([f"so do {len(more)} more snapshots: {', '.join(more)}"] if more else [])
