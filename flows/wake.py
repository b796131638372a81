"""Wake: a snapshot becomes a workspace on a machine again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    with _machine(place, machine, phases) as (live, hand_over):
        with phases.phase("connect"):
            session = open_session(place, endpoint_of(live))
        with session:
            report = _restore(place, session, live, wanted, full_check, phases, hand_over)
    create_table_artifact(
        key=f"wake-{place.spec.name}",
        table=report.rows(),
        description=f"Workspace {place.spec.name} woken from {wanted.snapshot}",
    )
    return report


@contextmanager
def _machine(
    place: Place, own: str, phases: Phases
) -> Iterator[tuple[Machine, Callable[[], None]]]:
    """The user's own machine, or a rented one, and what hands it over. A rented one that was not
    handed over is destroyed on failure."""
    if own:
        yield own_machine(own), lambda: None
        return
    handed_over = False

    def hand_over() -> None:
        nonlocal handed_over
        handed_over = True  # first: a write whose answer is lost may have been done
        place.ledger.hand_over(lease)

    with phases.phase("machine"):
        offers = find_offers(place)
        lease = take_lease(place)
    try:
        with phases.phase("machine"):
            machine = create_machine(place, offers, lease)
        yield machine, hand_over
    except WorkspaceBusy:
        raise  # another run wakes it on this very machine: hands off
    except BaseException:
        if not handed_over:
            destroy_created(place, lease)
        raise


def _restore(
    place: Place,
    session: Session,
    machine: Machine,
    wanted: StoredSnapshot,
    full_check: bool,
    phases: Phases,
    hand_over: Callable[[], None],
) -> WakeReport:
    restore = RemoteRestore(
        session, place.store, wanted, place.key, str(flow_run.id), parts=place.spec.parts
    )
    complete = False
    try:
        with phases.phase("plan"):
            plan = begin_restore(restore)
        with phases.phase("restore"):
            _restore_parts(place, restore, plan)
        with phases.phase("finish"):
            finished = finish_restore(restore)
        with phases.phase("check"):
            check_restore(restore, full_check)
        # Before the agent is told: killed in between, the machine is the user's and whole. The
        # other way round it would look unfinished, and the next wake would take it for its own.
        hand_over()
        complete = True
    finally:
        with suppress(TorporError):  # the agent gives up by itself when it cannot be told
            restore.end(complete=complete)
    return _report(place, machine, wanted, plan, finished, full_check, phases)


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
        checked="every byte and attribute" if full_check else "names and attributes",
        warnings=finished.warnings,
        seconds=phases.seconds,
        price_usd_h=machine.price_usd_h,
    )
