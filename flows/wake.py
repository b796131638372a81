"""Wake: a snapshot becomes a workspace on a machine again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from blocks import Workspace
from flows.hibernate import PARTS_AT_ONCE
from flows.phases import Phases
from tasks.machines import (
    create_machine,
    destroy_created,
    endpoint_of,
    find_offers,
    hand_over,
    open_session,
    own_machine,
    take_lease,
)
from tasks.place import Place, open_place, probe_store
from tasks.progress import Progress
from tasks.restore import (
    begin_restore,
    check_restore,
    finish_restore,
    pick_snapshot,
    restore_part,
)
from torpor.errors import TorporError, WorkspaceBusy
from torpor.ledger import Lease
from torpor.remote.restore import Finished, RemoteRestore, RestorePlan
from torpor.remote.session import Session
from torpor.reports import WakeReport
from torpor.values import Machine, StoredSnapshot

NEWEST: Final = "newest"


def _run_name() -> str:
    workspace = flow_run.parameters.get("workspace")
    return f"wake-{getattr(workspace, 'name', workspace)}"


@flow(
    name="wake",
    flow_run_name=_run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=PARTS_AT_ONCE),  # type: ignore[arg-type]
    persist_result=False,
)
def wake(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    machine: str = "",
    full_check: bool = True,
) -> WakeReport:
    """Bring a workspace back on a new machine, byte for byte.

    What fails on the way destroys what it created; the snapshot is only read.

    Args:
        workspace: The Workspace block to wake, or its name.
        snapshot: Which snapshot: its id, or newest.
        machine: user@host:port of a machine of your own to wake on. Empty: rent one.
        full_check: Read and hash every restored byte at the end, not names and attributes only.
    """
    phases = Phases()
    with phases.phase("prepare"):
        place = open_place(workspace)
        probe_store(place)
        wanted = pick_snapshot(place, snapshot)
    with _tenancy(place, machine, phases) as tenancy:
        with phases.phase("connect"):
            session = open_session(place, endpoint_of(tenancy.machine))
        with session:
            report = _restore(place, session, tenancy, wanted, full_check, phases)
    create_table_artifact(
        key=f"wake-{place.spec.name}",
        table=report.rows(),
        description=f"Workspace {place.spec.name} woken from {wanted.snapshot}",
    )
    return report


class _Tenancy:
    """One machine that a workspace is being woken on, and who may end it when that fails.

    A machine that this run created is destroyed on failure. One that an earlier run left
    unfinished is only destroyed once its agent has said that it holds an unfinished restore and
    nothing else: unknown is not idle. One that was handed over is the user's.
    """

    def __init__(self, place: Place, machine: Machine, lease: Lease | None, fresh: bool) -> None:
        self.machine = machine
        self.fresh = fresh
        self._place = place
        self._lease = lease
        self._ours = fresh and lease is not None

    def hand_over(self) -> None:
        self._ours = False  # first: a write whose answer is lost may have been done
        if self._lease is not None:
            hand_over(self._place, self._lease, self.machine)

    def holds_nothing_else(self) -> None:
        """The agent began the restore: the targets were empty, or an unfinished restore's."""
        self._ours = self._lease is not None

    def end_failed(self) -> None:
        if self._ours and self._lease is not None:
            destroy_created(self._place, self._lease)


@contextmanager
def _tenancy(place: Place, own: str, phases: Phases) -> Iterator[_Tenancy]:
    """The user's own machine, or a rented one that does not outlive a failure unless it must."""
    if own:
        yield _Tenancy(place, own_machine(own), None, fresh=True)
        return
    with phases.phase("machine"):
        offers = find_offers(place)
        lease, fresh = take_lease(place)
        try:
            machine = create_machine(place, offers, lease, fresh)
        except BaseException:
            if fresh:
                destroy_created(place, lease)
            raise
    tenancy = _Tenancy(place, machine, lease, fresh=fresh)
    try:
        yield tenancy
    except WorkspaceBusy:
        raise  # another run wakes it on this very machine: hands off
    except BaseException:
        tenancy.end_failed()
        raise


def _restore(
    place: Place,
    session: Session,
    tenancy: _Tenancy,
    wanted: StoredSnapshot,
    full_check: bool,
    phases: Phases,
) -> WakeReport:
    restore = RemoteRestore(
        session, place.store, wanted, place.key, str(flow_run.id), parts=place.spec.parts
    )
    try:
        with phases.phase("plan"):
            plan = begin_restore(restore, resume=not tenancy.fresh)
        finished = Finished(plan.files, plan.bytes, [], 0)
        if not plan.complete:
            tenancy.holds_nothing_else()
            with phases.phase("restore"):
                _restore_parts(place, restore, plan)
            with phases.phase("finish"):
                finished = finish_restore(restore)
            with phases.phase("check"):
                check_restore(restore, full_check)
        tenancy.hand_over()
    finally:
        with suppress(TorporError):  # the agent gives up by itself when it cannot be told
            restore.end()
    return _report(place, tenancy.machine, wanted, plan, finished, full_check, phases)


def _restore_parts(place: Place, restore: RemoteRestore, plan: RestorePlan) -> None:
    name = place.spec.name
    progress = Progress(
        f"wake-{name}-progress",
        f"Workspace {name} from {restore.wanted.snapshot}",
        sum(part.bytes for part in plan.parts),
    )
    futures = [restore_part.submit(restore, part, progress) for part in plan.parts]
    for future in futures:
        future.result()
    progress.done()


def _report(
    place: Place,
    machine: Machine,
    wanted: StoredSnapshot,
    plan: RestorePlan,
    finished: Finished,
    full_check: bool,
    phases: Phases,
) -> WakeReport:
    endpoint = endpoint_of(machine)
    return WakeReport(
        workspace=place.spec.name,
        snapshot=wanted.snapshot,
        root=wanted.root,
        machine=machine.id,
        host=endpoint.host,
        port=endpoint.port,
        user=endpoint.user,
        roots=plan.roots,
        files=finished.files,
        bytes=finished.bytes,
        stored_bytes=plan.stored_bytes,
        checked=_checked(plan, full_check),
        warnings=finished.warnings,
        seconds=phases.seconds,
        price_usd_h=machine.price_usd_h,
    )


def _checked(plan: RestorePlan, full_check: bool) -> str:
    if plan.complete:
        return "by the earlier wake that restored it; nothing was written by this one"
    return "every byte and attribute" if full_check else "names and attributes"
