"""The steps of a snapshot as tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tasks.events import SnapshotCommitted, SnapshotVerified, VerificationFailed, emit
from tasks.phases import phase
from tasks.progress import Progress, doing
from tasks.retries import ONCE, WHILE_BUSY
from tasks.run_table import current_flow
from tasks.runner import runner
from tasks.step import step
from tasks.waiting import waits_of
from tasks.workspace import StoredWorkspace
from torpor.control.deploy.bases import is_base, shown_name
from torpor.control.remote.agent import Agent
from torpor.control.remote.preview import preview
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.safety import Verified, Warrant, verify_snapshot, warrant_to_destroy
from torpor.control.store.manifests import read_with_object
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.control.upkeep.superseded import Succession
from torpor.shared.errors import SnapshotDamaged
from torpor.shared.values import Machine, ObjectKey, StoredSnapshot, WorkspaceName
from torpor.shared.wire.request import Event
from torpor.shared.wire.snapshot import Committed, PassesOutcome

begin_snapshot = step("begin snapshot", retries=WHILE_BUSY, says="beginning a snapshot")(
    RemoteSnapshot.begin
)
look_for_new = step("look for what is new", phase="scan", says="looking for what is new")(
    RemoteSnapshot.walk
)
preview_snapshot = step(
    "preview snapshot", phase="scan", says="looking at what would be stored, and at what would not"
)(preview)


@step("store", run_name="store from pass {number}")
def store(
    snapshot: RemoteSnapshot, number: int, passes: int, unusable: Sequence[ObjectKey]
) -> PassesOutcome:
    """Have the machine look for new content and store it, in up to ``passes`` passes, until a pass
    finds nothing new. The first is pass ``number`` of the snapshot. ``unusable`` packs are stored
    again."""
    with _Shown(snapshot.spec.name, number) as shown:
        return snapshot.store(passes, unusable, shown.event)


class _Shown:
    """Shows passes as phases of the run: the search for new content, and then how much of it is
    stored."""

    def __init__(self, name: WorkspaceName, number: int) -> None:
        self._name = name
        self._before = number - 1
        self._pass_number = 1
        self._bar: Progress | None = None
        self._shown = ExitStack()

    def __enter__(self) -> _Shown:
        self._look()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            (bar.give_up if error is not None else bar.done)()
        self._shown.close()

    def event(self, event: Event) -> None:
        if event.away is not None:
            waits_of(runner()).hear(event.away)
            return
        if event.pass_number > self._pass_number:
            self.__exit__(None, None, None)
            self._pass_number = event.pass_number
            self._look()
        if event.pass_number == self._pass_number and event.total:
            if self._bar is None:
                self._store(event.total)
            else:
                self._bar.event(self._pass_number, event)

    def _look(self) -> None:
        self._shown.enter_context(phase("scan"))
        self._shown.enter_context(
            doing(f"looking for what is new, pass {self._before + self._pass_number}")
        )

    def _store(self, total_bytes: int) -> None:
        self._shown.close()
        self._shown.enter_context(phase("store"))
        self._bar = Progress(
            f"hibernate-{self._name}-progress",
            f"storing {shown_name(self._name)}, pass {self._before + self._pass_number}",
            total_bytes,
        )


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
    RemoteSnapshot.unusable_packs
)


@step("commit", retries=ONCE, phase="commit", says="writing the manifest")
def commit(
    snapshot: RemoteSnapshot, statistics: dict[str, int]
) -> tuple[StoredSnapshot, Committed]:
    """Write the manifest. From then on the snapshot exists."""
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
) -> tuple[Verified, SnapshotLines | None]:
    """Read the manifest back and compare every pack with what the store says it has. From then on
    the snapshot counts as one of ``machine``. Before that, earlier snapshots that alone hold files
    which it lacks are pinned, because the next look goes back to this snapshot and no further. That
    look reads other manifests, so the proof reads this one again. Also returns the lines of the
    workspace as they were listed for that look."""
    store, seal, lines = opened.store, opened.seal, None
    if not is_base(stored.workspace):
        read = read_with_object(store, stored, seal, opened.spec.paths)
        succession = Succession(store, stored.workspace, seal, has_read=read)
        succession.hold(stored.snapshot)
        lines = succession.lines
    try:
        verified = verify_snapshot(
            store,
            stored,
            seal,
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
    return verified, lines


@step("confirm", phase="confirm", says="comparing the disk with the snapshot")
def confirm(
    opened: StoredWorkspace,
    snapshot: RemoteSnapshot,
    verified: Verified,
    machine: Machine,
    session: Agent,
    unused: Callable[[], None],
) -> Warrant:
    """Compare the disk once more; return the warrant to destroy, or raise StillChanging. Before
    each destroy the warrant calls ``unused``, which raises while somebody else uses the machine."""
    return warrant_to_destroy(
        opened.store,
        opened.seal,
        verified,
        machine,
        session.hello.machine,
        snapshot.confirm,
        unused,
    )
