"""Verify: check that every object of the snapshots exists, is unchanged, and restores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from blocks import Workspace
from flows.procedures.drill_machine import drill_machine, end_left_drills
from flows.procedures.parts import do_parts
from flows.procedures.restore import restore_all, restore_run
from tasks.events import SnapshotVerified, VerificationFailed, emit
from tasks.flow import flow
from tasks.machines import chosen_machine, machines_of, open_session
from tasks.phases import phase, seconds_by_phase
from tasks.restore import new_restore, pick_snapshot
from tasks.run_table import shown
from tasks.verification import (
    examine_packs,
    judge_verified,
    look_at_objects,
    pick_snapshots,
    record_verified,
)
from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_stored, open_workspace, probe_store, say_of_home
from torpor.control.remote.agent import Session
from torpor.control.remote.examination import Examination, PackWork
from torpor.control.upkeep.verification import Verification
from torpor.control.upkeep.verify_report import Depth, VerifyReport
from torpor.shared.errors import InvalidInput, SnapshotDamaged
from torpor.shared.values import SnapshotId

MOST_PARTS: Final = 64


@flow("verify")
def verify(
    workspace: Workspace | str,
    snapshot: str = "newest",
    depth: Depth = "quick",
    machine: str = "",
    accept_paths: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
) -> VerifyReport:
    """Check that snapshots are whole in the store; otherwise fail and name the files.

    A verify changes nothing of yours. You can go on working.

    Args:
        workspace: The Workspace block to verify, or its name.
        snapshot: The snapshot's id, newest, or all.
        depth: quick compares sizes and checksums of every object with what the store says; full
            reads every byte on a machine and checks every hash; drill restores onto a machine that
            is rented for it, compares everything, and destroys it.
        machine: For full, the machine that reads: its id, or user@host:port of your own. Empty: the
            workspace's only machine, or a rented one if it has none.
        accept_paths: Directories of the snapshots that are not among the workspace's paths, and
            are right all the same. Without them such a snapshot fails.

    Returns:
        The counts of snapshots, `whole` ones and `objects`, and in `seconds` how long each phase
        took.

    Raises:
        SnapshotDamaged: An object is missing or differs. The message names the files, and the
            newest whole snapshot.
        SnapshotMissing: The workspace has no snapshot, or none of that id.
        InvalidInput: `machine` is given and `depth` is not full.

    Example:
        Check every object of every snapshot:
        ```python
        from flows import verify

        print(verify("mywork", snapshot="all").rows())
        ```
    """
    if machine and depth != "full":
        raise InvalidInput(
            f"a {depth} verify takes no machine: leave `machine` empty, or choose full"
        )
    opening = open_stored if depth == "quick" else open_workspace
    opened = opening(workspace).accepting(accept_paths)
    probe_store(opened)
    say_of_home(opened, "`torpor verify {} all` looks at that")
    end_left_drills(opened)
    wanted = pick_snapshots(opened, snapshot)
    found = look_at_objects(opened, wanted)
    if depth == "full" and (works := [PackWork(*work) for work in found.works()]):
        with _reader(opened, machine) as session, phase("read"):
            _examine(opened, session, found, works)
    elif depth == "drill":
        _drill(opened, found, wanted)
    verdicts = judge_verified(found)
    record_verified(opened, found, verdicts)
    report = VerifyReport.of(depth, found, verdicts, seconds_by_phase())
    _emit(opened, found, report)
    return report


@contextmanager
def _reader(opened: OpenWorkspace, wanted: str) -> Iterator[Session]:
    """The machine that reads: the named one, the workspace's own, or a rented one."""
    if wanted or machines_of(opened).machines:
        live = chosen_machine(opened, wanted)
        with open_session(opened, live) as session:
            yield session
        return
    with drill_machine(opened) as session:
        yield session


def _examine(
    opened: OpenWorkspace, session: Session, found: Verification, works: Sequence[PackWork]
) -> None:
    parts = _shares(works)
    name = opened.spec.name
    examined = do_parts(
        f"verify-{name}-progress",
        f"checking every hash of {name}",
        found.bytes,
        list(enumerate(parts)),
        lambda part, progress: examine_packs.submit(
            Examination(session, opened.store, name, opened.key, part[1]), part[0], progress
        ),
    )
    for packs in examined:
        for one in packs:
            found.heard(one.pack, one.fault, one.damaged)


def _shares(works: Sequence[PackWork]) -> list[list[PackWork]]:
    """At most 64 parts of about equal bytes."""
    shares: list[list[PackWork]] = [[] for _ in range(min(MOST_PARTS, len(works)))]
    sizes = [0] * len(shares)
    for work in sorted(works, key=lambda work: -work.pack.size):
        least = sizes.index(min(sizes))
        shares[least].append(work)
        sizes[least] += work.pack.size
    return shares


def _drill(opened: OpenWorkspace, found: Verification, wanted: Sequence[SnapshotId]) -> None:
    """Restore each snapshot onto a machine of its own, one after the other. Snapshots that are
    known to be damaged are left out."""
    for snapshot in wanted:
        if not found.whole_so_far(snapshot):
            continue
        with drill_machine(opened) as session:
            try:
                _restore(opened, session, snapshot)
            except SnapshotDamaged as fault:
                found.blame(snapshot, f"the drill failed: {fault}")


def _restore(opened: OpenWorkspace, session: Session, snapshot: SnapshotId) -> None:
    stored = pick_snapshot(opened, snapshot)
    restore = new_restore(opened, session, stored)
    with restore_run(restore, rented=True):
        restore_all(restore, "verify")


def _emit(opened: OpenWorkspace, found: Verification, report: VerifyReport) -> None:
    """Send the events of this verify; SnapshotDamaged if something is wrong."""
    name = opened.spec.name
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
            message=report.title(),
        )
    )
    fault = SnapshotDamaged(f"{report.title()}. The table of this run names files and objects")
    raise shown(report, fault)
