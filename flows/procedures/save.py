"""One snapshot of a machine's workspace, until it is verified or the machine is destroyed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Final, Self

import msgspec

from flows.procedures.rounds import rounds
from tasks.autosave import delete_autosaves, end_autosave, start_autosave
from tasks.guards import EndingMachine, Guard, ask_first, check_guards
from tasks.jobs import check_not_frozen
from tasks.lineage import is_behind, look_for_work_elsewhere
from tasks.machines import destroy_machine, rental_of
from tasks.phases import seconds_by_phase
from tasks.programs import Quiet, check_frozen, quiesce
from tasks.progress import doing
from tasks.retention import delete_earlier
from tasks.runner import runner
from tasks.snapshot import (
    begin_snapshot,
    commit,
    compare_packs,
    confirm,
    log_losses,
    log_stored,
    look_at_homes,
    look_for_losses,
    store,
    verify,
)
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.losses import USER_FILES, Lost, judge_losses, not_kept, with_home, with_missed
from torpor.control.remote.agent import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import HibernateReport
from torpor.control.safety import Verified, Warrant
from torpor.shared.errors import (
    AgentLost,
    EndUnproven,
    GrantExpired,
    StillChanging,
    TorporError,
    UnsafeDestroy,
    UnsavedWork,
)
from torpor.shared.format.lineage import lineage_of
from torpor.shared.values import Machine, ObjectKey, SnapshotId, StoredSnapshot
from torpor.shared.wire.snapshot import Committed, Missed, PassesOutcome, UserFiles

MAX_PASSES: Final = 10
"""Most passes of a snapshot, over all rounds. A workspace that still changes in the tenth pass
needs a quiesce hook, not an eleventh pass."""
BEFORE_QUIET: Final = 2
"""Passes while the programs still run: the second one stores little, so that the programs pause
only briefly afterwards."""
KEPT_PASSES: Final = 3
"""Passes over a machine that is kept. It need not come to rest: files that change are named in the
snapshot."""
MAX_ROUNDS: Final = 3
"""Most commits of a snapshot whose disk changes between the commit and the last look."""
ANOTHER_ROUND: Final = (AgentLost, GrantExpired, StillChanging)
"""The errors that begin another round: the agent was replaced, the grants ended because the control
side slept before the commit, or the disk changed after it."""

LOSSES_S: Final = 2.0
"""Seconds that a finished snapshot waits for the look at what would be lost."""
LOSSES_TO_REFUSE_S: Final = 60.0
"""Seconds that a finished snapshot waits for that look where the block refuses losses, or where the
machine was adopted, because its user worked there before."""


def take_snapshot(
    workspace: StoredWorkspace,
    session: Agent,
    machine: Machine,
    *,
    look: bool = False,
) -> tuple[HibernateReport, Verified]:
    """Store the workspace of a machine that is kept, and verify it. What changes meanwhile is named
    in the report. ``look``: as in Snapshot."""
    with Snapshot(workspace, session, machine, look=look) as snapshot:
        for again in rounds(MAX_ROUNDS, *ANOTHER_ROUND):
            with again:
                verified = snapshot.save()
    return snapshot.report(), verified


def back_up(
    opened: OpenWorkspace, session: Agent, machine: Machine, *, only_adds: bool = False
) -> tuple[HibernateReport, Verified]:
    """Take a snapshot of a machine that its user keeps, and warn of what it lacks. The machine's
    own saves go on from the new snapshot. ``only_adds``: delete no save that the snapshot replaces,
    and leave the machine's own saves to the owner of the workspace."""
    check_not_frozen(opened, machine)
    report, verified = take_snapshot(opened, session, machine, look=True)
    log_losses(machine, report.lost)
    if only_adds:
        return report, verified
    start_autosave(opened, session, machine)
    return with_warnings(report, delete_autosaves(opened, verified)), verified


def with_warnings(report: HibernateReport, words: Sequence[str]) -> HibernateReport:
    """The report with these warnings added, such as what only older saves hold."""
    return msgspec.structs.replace(report, warnings=[*report.warnings, *words])


class Snapshot:
    """One snapshot over an open session: holds the workspace on the machine, and releases it at the
    end, also after an error. ``guards``: what may keep the machine from being destroyed afterwards;
    None keeps it in any case. ``look``: also look for what the snapshot of a kept machine lacks.
    ``home``: where a user's own files beside the workspace are stored before the machine ends; None
    keeps the machine for them. ``user_files``: this snapshot holds a user's own files beside a
    workspace."""

    def __init__(
        self,
        workspace: StoredWorkspace,
        session: Agent,
        machine: Machine,
        guards: Sequence[Guard] | None = None,
        *,
        look: bool = False,
        home: StoredWorkspace | None = None,
        user_files: UserFiles | None = None,
    ) -> None:
        self._workspace = workspace
        self._session = session
        self._machine = machine
        self._guards = guards or ()
        self._ends = guards is not None
        self._looks = (look or self._ends) and user_files is None
        self._home = home
        self._beside: Snapshot | None = None
        self._lost = Lost()
        self._remote = RemoteSnapshot(
            session, workspace.store, workspace.spec, workspace.key, runner().run, user_files
        )
        self._behind: list[str] = []
        self._resume_fault: list[str] = []
        self._since: SnapshotId | None = None
        self._passes = 0
        self._read_unix = 0.0
        self._restless: list[str] = []
        self._quiet = Quiet()
        self._freezes = self._ends and workspace.spec.freezes
        self._hook = bool(workspace.spec.quiesce)  # the quiesce hook runs once
        self._new_bytes = self._stored_bytes = 0
        self._last: PassesOutcome
        self._stored: StoredSnapshot
        self._committed: Committed
        self._verified: Verified | None = None
        self._destroyed = self._interrupted = self._adopted = False
        self._volumes: Sequence[str] = ()

    def __enter__(self) -> Self:
        label = self._machine.label
        rental = rental_of(self._workspace, label) if self._looks and label else None
        if rental is not None:
            self._adopted, self._volumes = rental.adopted, rental.volumes
        begin_snapshot(self._remote)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if self._destroyed or self._interrupted:
            return
        if self._beside is not None:
            self._beside.__exit__(kind, error, trace)
        ends = isinstance(error, EndUnproven) and error.accepted
        with suppress(TorporError):  # an agent that cannot be reached ends the run by itself
            fault = self._remote.end(committed=self._verified is not None, kept=not ends)
            if fault:
                self._resume_fault = [f"{fault}. What `quiesce` paused may still be paused"]
        for words in (*self._behind, *self._resume_fault):
            runner().log.warning("machine %s: %s", self._machine.id, words)

    def save(self) -> Verified:
        """Store what is new until nothing is, commit, and verify."""
        self.store_changes()
        self.commit()
        return self.verify()

    def store_changes(self) -> None:
        """Store until nothing is new, and until no program writes if the machine ends. The guards
        are asked before the quiesce command runs."""
        waits = self._adopted or self._workspace.spec.left_behind == "refuse"
        if self._ends and self._looks and not waits:  # otherwise what appears meanwhile counts, too
            self._look_for_losses(wait_s=0.0)  # begins beside the passes
        unusable: list[ObjectKey] = []
        left = MAX_PASSES - self._passes
        rested = not (self._hook or self._freezes)  # programs may run again since an earlier round
        last = self._passes + (left if self._ends else min(left, KEPT_PASSES))
        while self._passes < last:
            left = last - self._passes
            seen = self._store(left if rested else min(left, BEFORE_QUIET), unusable)
            unusable, self._restless = [], seen.unaccepted
            if not rested:
                check_guards(self._guards, EndingMachine(self._machine, self._lost))
                self._quiet = quiesce(
                    self._remote,
                    self._session,
                    hook=self._hook,
                    freezes=self._freezes,
                    sealed=self._workspace.seal.sealed,
                )
                rested, self._hook = True, False
                continue
            if seen.unaccepted_count and self._ends:
                break
            if self._looks:
                self._look_for_losses(wait_s=LOSSES_TO_REFUSE_S if waits else LOSSES_S)
                if self._home is not None and with_missed(self._lost, seen.missed).storable:
                    self._store_beside(self._home)
            unusable = compare_packs(self._remote)
            if not unusable:
                self._last = seen
                return
            runner().log.warning(
                "%d packs are missing in the store or marked by prune: storing their chunks again",
                len(unusable),
            )
        raise StillChanging(
            f"workspace {self._workspace.spec.name} on machine {self._machine.id} did not come to "
            f"rest in {self._passes} passes, last: {', '.join(self._restless)}. Nothing was "
            "destroyed. Stop the program that writes there (`quiesce` in the workspace block can), "
            "accept them in `accept_changed` as they are read, or exclude them: what is excluded "
            "is lost with the machine"
        )

    def commit(self) -> None:
        """Write the manifest. StillChanging if the machine ends and files changed meanwhile."""
        self._lost = with_missed(self._lost, self._last.missed)
        if self._last.unchanged or not (self._new_bytes or self._last.missed == Missed()):
            check_guards(self._guards, EndingMachine(self._machine, self._lost, nothing_new=True))
        statistics = {"new_bytes": self._new_bytes, "passes": self._passes}
        self._stored, self._committed = commit(self._remote, statistics)
        if self._ends and self._committed.unaccepted_count:
            raise StillChanging(
                f"{self._committed.unaccepted_count} files changed while they were read: "
                f"{', '.join(self._committed.unaccepted)}. The machine was not destroyed: "
                "hibernate again, or accept these files in `accept_changed`"
            )

    def verify(self) -> Verified:
        """Compare everything in the store with what was committed."""
        self._verified, lines = verify(
            self._workspace, self._remote, self._stored, self._machine.id
        )
        line = lineage_of(self._verified.manifest)
        # in a later round, the parent is a snapshot of an earlier one
        self._since = self._since or line.parent
        # What others store after this listing is newer than this snapshot: the next report names
        # it.
        others = look_for_work_elsewhere(self._workspace, line, self._since, lines)
        self._behind = is_behind(line, others)
        return self._verified

    def confirm(self, verified: Verified) -> Warrant:
        """Look at the homes and compare the disk once more, and ask all guards, for the warrant to
        destroy the machine. The workspace is compared last, because the look at the homes takes
        time. Each time the provider is asked to destroy the machine, the warrant asks again those
        guards that need no answer of the machine."""
        if not self._ends:
            raise UnsafeDestroy(f"machine {self._machine.id} is kept after this snapshot")
        check_frozen(self._quiet.images, verified)
        ending = EndingMachine(self._machine, self._lost, verified)
        ask_first(self._guards, ending)
        self._check_homes()
        last_look = partial(check_guards, self._guards, ending, only_store=True)
        warrant = confirm(
            self._workspace, self._remote, verified, self._machine, self._session, last_look
        )
        check_guards(self._guards, ending)  # a job may have begun during these looks
        return warrant

    def destroy(self, opened: OpenWorkspace, warrant: Warrant) -> None:
        """Destroy the machine until its end is proven."""
        end_autosave(opened, self._session)
        try:
            destroy_machine(opened, self._machine, warrant)
        except BaseException as error:
            self._interrupted = not isinstance(error, Exception)  # the agent may be gone
            raise
        self._destroyed = True
        if self._beside is not None and self._lost.stored:
            self._beside.delete_earlier()

    def change_since_verified(self) -> str | None:
        """How the disk differs from the verified snapshot; None where it does not."""
        if self._verified is None or self._verified.snapshot != self._stored.snapshot:
            return "nothing is verified"
        try:
            confirmed = self._remote.confirm()
        except (AgentLost, UnsavedWork) as error:
            return str(error)
        if not confirmed.unaccepted_count:
            return None
        return f"{confirmed.unaccepted_count} names, as {', '.join(confirmed.unaccepted)}"

    def delete_earlier(self) -> None:
        """Delete the earlier snapshots whose files this verified one has."""
        if self._verified is not None:
            delete_earlier(self._workspace, self._verified)

    @property
    def name(self) -> str:
        """What a person calls the snapshot's content."""
        return f"snapshot {self._stored.snapshot} of {self._stored.workspace}"

    def report(self) -> HibernateReport:
        """The report of this snapshot, which is verified."""
        if self._verified is None:
            raise UnsafeDestroy(f"the snapshot of machine {self._machine.id} is not verified")
        stored, committed, last = self._stored, self._committed, self._last
        # files that are new since the commit, and those found before
        changed = self._remote.confirmed or committed
        return HibernateReport(
            workspace=self._workspace.spec.name,
            snapshot=stored.snapshot,
            root=stored.root,
            machine=self._machine.id,
            destroyed=self._destroyed,
            passes=self._passes,
            files=committed.files,
            bytes=committed.bytes,
            new_bytes=self._new_bytes,
            stored_bytes=self._stored_bytes,
            total_stored_bytes=sum(chunk.stored for chunk in self._verified.manifest.chunks),
            packs=len(self._verified.manifest.packs),
            encoding=committed.encoding,
            sealed=self._workspace.seal.sealed,
            changed=committed.unaccepted,
            skipped=last.skipped,
            skipped_names=not_kept(self._verified.manifest),
            parted_count=last.parted_count,
            parted=last.parted,
            blind=committed.blind,
            read_unix=self._read_unix,
            accepted_count=changed.accepted_count,
            accepted=changed.accepted,
            warnings=[*self._behind, *self._resume_fault],
            lost=self._lost.lines,
            beside=self._lost.stored,
            missed=bool(last.missed.vanished or last.missed.disks),
            programs=[*self._quiet.words],
            seconds=seconds_by_phase(),
            saved_usd_h=self._machine.price_usd_h if self._destroyed else 0.0,
        )

    def _look_for_losses(self, *, wait_s: float) -> None:
        """Look for what is on the machine and not in the snapshot; beyond where links of the
        workspace lead, before a destroy."""
        with doing("looking for what would be lost") if wait_s else nullcontext():
            losses = look_for_losses(
                self._remote,
                rented=self._rented,
                whole=self._ends,
                wait_s=wait_s,
                volumes=self._volumes,
            )
        self._lost = judge_losses(losses, self._workspace.spec)

    def _check_homes(self) -> None:
        """StillChanging unless the homes hold no files of the user's but those that were stored
        beside the workspace, or whose loss was accepted."""
        if self._beside is not None and self._lost.stored:
            changed = self._beside.change_since_verified()
            if changed is None:
                return
        else:
            homes = look_at_homes(self._remote, rented=self._rented, volumes=self._volumes)
            now = judge_losses(homes, self._workspace.spec)
            if now.user_mark == self._lost.user_mark:
                return
            changed = now.user_files or "those that were there have gone"
        raise StillChanging(
            f"files beside the workspace came or changed on machine {self._machine.id} after "
            f"torpor had looked at them: {changed}. The machine was not destroyed: hibernate "
            f"again, or accept the loss of these files: `--accept-lost '{USER_FILES}'`"
        )

    @property
    def _rented(self) -> bool:
        return self._machine.label is not None and not self._adopted

    def _store_beside(self, home: StoredWorkspace) -> None:
        """Store a user's own files beside the workspace as a snapshot of ``home``, and verify it.
        If they cannot be stored, the machine is kept, and the workspace is stored all the same."""
        try:
            beside = self._beside = self._beside or self._begin_beside(home)
            if beside.change_since_verified() is not None:
                beside.save()
        except (AgentLost, GrantExpired):
            raise
        except TorporError as error:
            self._lost = with_home(self._lost, refused=str(error))
        else:
            self._lost = with_home(self._lost, beside.name)
            log_stored(self._machine, self._lost.stored)

    def _begin_beside(self, home: StoredWorkspace) -> Snapshot:
        spec = self._workspace.spec
        files = UserFiles(spec.paths, spec.accept_lost, self._rented, list(self._volumes))
        return Snapshot(home, self._session, self._machine, [], user_files=files).__enter__()

    def _store(self, passes: int, unusable: Sequence[ObjectKey]) -> PassesOutcome:
        began_unix = time.time()
        seen = store(self._remote, self._passes + 1, passes, unusable)
        self._read_unix = max(began_unix, time.time() - max(0.0, seen.ago_s))
        self._passes += seen.passes
        self._new_bytes, self._stored_bytes = seen.new_bytes, seen.stored_bytes
        return seen
