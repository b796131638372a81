"""The steps of a snapshot as tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.events import SnapshotCommitted, SnapshotVerified, VerificationFailed, emit
from tasks.progress import Progress
from tasks.retries import ONCE, WHILE_BUSY
from tasks.run_table import current_flow
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import StoredWorkspace
from torpor.control.deploy.bases import is_base
from torpor.control.remote.seam import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.safety import Verified, Warrant, verify_snapshot, warrant_to_destroy
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import Machine, StoredSnapshot
from torpor.shared.wire.snapshot import Committed, PartPlan, PartReport

begin_snapshot = step("begin snapshot", retries=WHILE_BUSY, says="beginning a snapshot")(
    RemoteSnapshot.begin
)
scan = step(
    "scan", run_name="scan {number}", phase="scan", says="looking for what is new, pass {number}"
)(RemoteSnapshot.scan)


@step("store part", run_name="store part {plan.part} of pass {number}")
def store_part(
    snapshot: RemoteSnapshot, number: int, plan: PartPlan, progress: Progress
) -> PartReport:
    """Read, encode and send one part; what the store already has is not sent again."""
    return snapshot.store_part(number, plan, lambda event: progress.event(plan.part, event))


look_for_losses = step("look for losses", phase="look")(RemoteSnapshot.losses)
look_at_homes = step("look at homes", phase="look")(RemoteSnapshot.homes)


def log_losses(machine: Machine, lines: Sequence[str]) -> None:
    """Log what is on the machine and not in the snapshot."""
    for line in lines:
        runner().log.warning("not in the snapshot of machine %s: %s", machine.id, line)


def log_stored(machine: Machine, lines: Sequence[str]) -> None:
    """Log what was stored of the machine beside its workspace."""
    for line in lines:
        runner().log.warning("outside of the workspace of machine %s: %s", machine.id, line)


compare_packs = step("compare packs", says="comparing packs with the store")(
    RemoteSnapshot.lost_packs
)


@step("commit", retries=ONCE, phase="commit", says="writing the manifest")
def commit(
    snapshot: RemoteSnapshot, statistics: dict[str, int]
) -> tuple[StoredSnapshot, Committed]:
    """Write the manifest; then the snapshot exists."""
    stored, committed = snapshot.commit(statistics)
    emit(
        SnapshotCommitted(
            workspace=stored.workspace,
            snapshot=stored.snapshot,
            files=committed.files,
            bytes=committed.bytes,
        )
    )
    return stored, committed


@step("verify", phase="verify", says="verifying {stored.snapshot} in the store")
def verify(
    opened: StoredWorkspace, snapshot: RemoteSnapshot, stored: StoredSnapshot, machine: str
) -> Verified:
    """Read the manifest back and compare every pack with what the store says it has. From then on
    the snapshot counts as one of ``machine``. Before it does, what alone holds what it lacks is
    pinned: the next look goes back to here, and no further."""
    if not is_base(stored.workspace):
        Succession(opened.store, stored.workspace, opened.seal).hold(stored.snapshot)
    try:
        verified = verify_snapshot(
            opened.store,
            stored,
            opened.seal,
            snapshot.reread,
            machine,
            opened.spec.paths,
            current_flow(),
        )
    except SnapshotDamaged as error:
        emit(
            VerificationFailed(
                workspace=stored.workspace,
                snapshots=[stored.snapshot],
                problems=1,
                message=str(error),
            )
        )
        raise
    emit(SnapshotVerified(workspace=stored.workspace, snapshot=stored.snapshot, root=verified.root))
    return verified


@step("confirm", phase="confirm", says="comparing the disk with the snapshot")
def confirm(
    opened: StoredWorkspace,
    snapshot: RemoteSnapshot,
    verified: Verified,
    machine: Machine,
    session: Agent,
    unused: Callable[[], None],
) -> Warrant:
    """Compare the disk once more; return the warrant to destroy, or raise StillChanging. The
    warrant calls ``unused``, which raises while somebody else uses the machine."""
    return warrant_to_destroy(
        opened.store,
        opened.seal,
        verified,
        machine,
        session.hello.machine,
        snapshot.confirm,
        unused,
    )
