"""Verify: is every object that snapshots name there and as it was written, and does it restore?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from blocks import Workspace
from flows.drill_machine import drill_machine, end_left_drills
from flows.hibernate import PARTS_AT_ONCE
from flows.phases import Phases
from flows.run_name import run_name
from tasks.events import SnapshotVerified, VerificationFailed, emit
from tasks.machines import endpoint_of, find_machine, open_session, own_machine
from tasks.place import Place, open_place, probe_store
from tasks.progress import Progress
from tasks.restore import (
    begin_restore,
    check_restore,
    finish_restore,
    pick_snapshot,
    restore_part,
)
from tasks.verification import examine_packs, judge_verified, look_at_objects, pick_snapshots
from torpor.control.remote.examination import Examination, PackWork
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.session import Session
from torpor.control.upkeep.verification import Survey
from torpor.control.upkeep.verify_report import Depth, VerifyReport
from torpor.shared.errors import InvalidInput, SnapshotDamaged, TorporError
from torpor.shared.values import SnapshotId

MOST_PARTS: Final = 64


@flow(
    name="verify",
    flow_run_name=run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=PARTS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def verify(
    workspace: Workspace | str,
    snapshot: str = "newest",
    depth: Depth = "quick",
    machine: str = "",
) -> VerifyReport:
    """See whether snapshots are whole in the store; fail, and name the files, where one is not.

    Nothing of yours is changed anywhere, and work may go on meanwhile.

    Args:
        workspace: The Workspace block to verify, or its name.
        snapshot: Which snapshot: its id, newest, or all.
        depth: quick compares sizes and checksums of every object with what the store says; full
            reads every byte on a machine and checks every hash; drill restores onto a machine that
            is rented for it, compares everything, and destroys it.
        machine: For full, the machine that reads: its id, or user@host:port of your own. Empty: the
            workspace's only machine, or where it has none, one that is rented for it.
    """
    phases = Phases()
    with phases.phase("prepare"):
        if machine and depth != "full":
            raise InvalidInput(
                f"a {depth} verify takes no machine: leave `machine` empty, or choose full"
            )
        place = open_place(workspace)
        probe_store(place)
        end_left_drills(place)
        wanted = pick_snapshots(place, snapshot)
    with phases.phase("look"):
        found = look_at_objects(place, wanted)
    if depth == "full":
        with _reader(place, machine, phases) as session, phases.phase("read"):
            _examine(place, session, found)
    elif depth == "drill":
        _drill(place, found, wanted, phases)
    with phases.phase("judge"):
        report = VerifyReport.of(depth, found, judge_verified(found), phases.seconds)
    create_table_artifact(
        key=f"verify-{place.spec.name}", table=report.rows(), description=report.message()
    )
    _tell(place, found, report)
    return report


@contextmanager
def _reader(place: Place, wanted: str, phases: Phases) -> Iterator[Session]:
    """A machine that reads: the named one, the workspace's own, or one that is rented for it."""
    has_one = any(
        machine.label is not None
        and machine.label.workspace == place.spec.name
        and machine.state != "gone"
        for machine in place.provider.list_own()
    )
    if wanted or has_one:
        with phases.phase("connect"):
            live = own_machine(wanted) if "@" in wanted else find_machine(place, wanted)
            session = open_session(place, endpoint_of(live))
        with session:
            yield session
        return
    with drill_machine(place, phases) as session:
        yield session


def _examine(place: Place, session: Session, found: Survey) -> None:
    works = [PackWork(pack, chunks) for pack, chunks in found.works()]
    parts = _shares(works)
    name = place.spec.name
    progress = Progress(f"verify-{name}-progress", f"Workspace {name}, every hash", found.bytes)
    futures = [
        examine_packs.submit(
            Examination(session, place.store, name, place.key, part), number, progress
        )
        for number, part in enumerate(parts)
    ]
    for future in futures:
        for one in future.result():
            found.heard(one.pack, one.fault, one.damaged)
    progress.done()


def _shares(works: Sequence[PackWork]) -> list[list[PackWork]]:
    """At most 64 parts of about as many bytes each."""
    shares: list[list[PackWork]] = [[] for _ in range(min(MOST_PARTS, len(works)))]
    sizes = [0] * len(shares)
    for work in sorted(works, key=lambda work: -work.pack.size):
        least = sizes.index(min(sizes))
        shares[least].append(work)
        sizes[least] += work.pack.size
    return shares


def _drill(place: Place, found: Survey, wanted: Sequence[SnapshotId], phases: Phases) -> None:
    """Each snapshot onto a machine of its own, one after the other."""
    for snapshot in wanted:
        if not found.readable(snapshot):
            continue
        with drill_machine(place, phases) as session, phases.phase("restore"):
            try:
                _restore(place, session, snapshot)
            except SnapshotDamaged as fault:
                found.blame(snapshot, f"the drill failed: {fault}")


def _restore(place: Place, session: Session, snapshot: SnapshotId) -> None:
    stored = pick_snapshot(place, snapshot)
    run = f"{flow_run.id}-{snapshot}"
    restore = RemoteRestore(session, place.store, stored, place.key, run, parts=place.spec.parts)
    try:
        plan = begin_restore(restore, resume=False)
        name = place.spec.name
        progress = Progress(
            f"verify-{name}-progress", f"Workspace {name}, drill of {snapshot}", plan.bytes
        )
        futures = [restore_part.submit(restore, part, progress) for part in plan.parts]
        for future in futures:
            future.result()
        finish_restore(restore)
        check_restore(restore, True)
        progress.done()
    finally:
        with suppress(TorporError):  # the machine goes anyway
            restore.end()


def _tell(place: Place, found: Survey, report: VerifyReport) -> None:
    """Events; and the flow ends as failed where something is wrong, after its artifact."""
    name = place.spec.name
    if not report.failed:
        for snapshot in report.whole:
            if root := found.root_of(snapshot):
                emit(SnapshotVerified(workspace=name, snapshot=snapshot, root=root))
        return
    damaged = [one for one in report.snapshots if one not in report.whole]
    emit(
        VerificationFailed(
            workspace=name,
            snapshots=damaged,
            problems=sum(one.damaged_objects + bool(one.fault) for one in report.damaged),
            message=report.message(),
        )
    )
    raise SnapshotDamaged(f"{report.message()}. The table of this run names files and objects")
