"""Wake: a snapshot becomes a workspace on a machine again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from blocks import Workspace
from flows.hibernate import PARTS_AT_ONCE
from flows.phases import Phases
from flows.restoration import Restoration
from flows.run_name import run_name
from flows.tenancy import Tenancy, rented
from tasks.machines import endpoint_of, find_offers, open_session, take_lease
from tasks.place import Place, open_place, probe_store
from tasks.progress import Progress
from tasks.restore import pick_snapshot, restore_part
from torpor.control.remote.restore import RemoteRestore, RestorePlan
from torpor.control.reports import WakeReport
from torpor.shared.errors import RestoreUnfinished
from torpor.shared.values import StoredSnapshot

NEWEST: Final = "newest"


@flow(
    name="wake",
    flow_run_name=run_name,
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
    try:
        report = _bring(place, wanted, machine, full_check, phases)
    except RestoreUnfinished as left:  # of another snapshot: a rented machine goes for that
        if machine:
            raise
        get_run_logger().warning("%s; another machine is rented instead", left)
        report = _bring(place, wanted, machine, full_check, phases)
    create_table_artifact(
        key=f"wake-{place.spec.name}",
        table=report.rows(),
        description=f"Workspace {place.spec.name} woken from {wanted.snapshot}",
    )
    return report


def _bring(
    place: Place, wanted: StoredSnapshot, own: str, full_check: bool, phases: Phases
) -> WakeReport:
    with _tenancy(place, own, phases) as tenancy:
        with phases.phase("connect"):
            session = open_session(place, endpoint_of(tenancy.machine))
        with session:
            work = Restoration(place, session, tenancy, wanted, str(flow_run.id), phases)
            with work.begun() as plan:
                if not plan.complete:
                    with phases.phase("restore"):
                        _restore_parts(place, work.remote, plan)
                return work.complete(plan, full_check)


@contextmanager
def _tenancy(place: Place, own: str, phases: Phases) -> Iterator[Tenancy]:
    """The user's own machine, or a rented one that does not outlive a failure unless it must."""
    if own:
        yield Tenancy.own(place, own)
        return
    with ExitStack() as renting:
        with phases.phase("machine"):
            offers = find_offers(place)
            lease, fresh = take_lease(place)
            tenancy = renting.enter_context(rented(place, offers, lease, fresh))
        yield tenancy


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
