"""Replicate: restore one snapshot on many machines at once."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from blocks import Workspace
from flows.procedures.fleet import MOST_MACHINES, MOST_TASKS, Fleet
from tasks.budgets import what_is_left
from tasks.flow import flow
from tasks.machines import (
    endpoint_of,
    left_unfinished,
    look_for_offers,
    own_machine,
    renting,
    show_offers,
)
from tasks.opening import open_workspace, probe_store
from tasks.phases import phase, seconds_by_phase
from tasks.restore import NEWEST, pick_snapshot_to_wake
from tasks.runner import runner
from torpor.control.remote.exchange import Exchange, PeerMode
from torpor.control.rental.search import Offers
from torpor.control.reports import ReplicateReport
from torpor.shared.errors import InvalidInput, MachineError

MOST_SPARES: Final = 16


@flow("replicate", at_once=MOST_TASKS)
def replicate(
    workspace: Workspace | str,
    count: Annotated[int, Field(ge=0, le=MOST_MACHINES)] = 2,
    snapshot: str = NEWEST,
    machines: list[str] = [],  # noqa: B006 - a form shows the default; it is never changed
    spares: Annotated[int, Field(ge=0, le=MOST_SPARES)] = 0,
    peers: PeerMode = "auto",
    full_check: bool = True,
    accept_paths: list[str] = [],  # noqa: B006
) -> ReplicateReport:
    """Restore one snapshot on many machines at once, byte for byte.

    A machine that fails is destroyed and reported; the others go on.

    Args:
        workspace: The Workspace block to replicate, or its name.
        count: The number of machines to rent, 0 to 64.
        snapshot: The snapshot's id, or newest.
        machines: Your own machines to restore on as well, each as user@host:port.
        spares: Start N extra machines, keep the first `count` that become ready, and destroy the
            rest. Also replaces up to N machines that fail later.
        peers: Whether machines pass packs on to each other: never, always, or auto, which measures
            and does it while it is faster than the store.
        full_check: Read and hash every restored byte at the end, not names and attributes only.
        accept_paths: Directories of the snapshot that are not among the workspace's paths, to
            restore all the same. Without them such a snapshot is refused.
    """
    _check(count, spares, machines)
    total = count + len(machines)
    exchange = Exchange(peers, total)
    opened = open_workspace(workspace).accepting(accept_paths)
    probe_store(opened)
    wanted, opened = pick_snapshot_to_wake(opened, snapshot)
    with renting(opened) as held:
        left = left_unfinished(opened, held, alone=False) if count else []
        new = max(0, count + spares - len(left))
        offers = look_for_offers(opened, new) if count else Offers([], [])
        fleet = Fleet(
            opened, wanted, held, offers, count, spares, exchange, runner().run, full_check, total
        )
        with phase("replicate"):
            fleet.bring(left, machines)
        if count:
            show_offers(opened, held, offers)
    report = ReplicateReport(
        workspace=opened.spec.name,
        snapshot=wanted.snapshot,
        root=wanted.root,
        wanted=total,
        replaced=fleet.replaced,
        source=exchange.decision,
        replicas=fleet.replicas,
        seconds=seconds_by_phase(),
        budgets=what_is_left(opened) if count else [],
    )
    runner().table(
        key=f"replicate-{opened.spec.name}", rows=report.rows(), description=report.summary()
    )
    if fleet.fault is not None:
        raise fleet.fault
    if total and not report.ready:
        raise MachineError(
            f"none of {total} machines came up with snapshot {wanted.snapshot} of workspace "
            f"{opened.spec.name}; the first: {report.failed[0].words if report.failed else '-'}. "
            "The snapshot is untouched: fix the cause and run replicate again"
        )
    return report


def _check(count: int, spares: int, machines: list[str]) -> None:
    named = [endpoint_of(own_machine(text)) for text in machines]
    if len({(one.host, one.port, one.user) for one in named}) < len(named):
        raise InvalidInput("a machine of your own is named twice: name each only once")
    if not 0 <= count <= MOST_MACHINES or not 0 <= spares <= MOST_SPARES:
        raise InvalidInput(
            f"count is 0 to {MOST_MACHINES} and spares 0 to {MOST_SPARES}, not {count} and {spares}"
        )
    if not 1 <= count + len(machines) <= MOST_MACHINES:
        raise InvalidInput(
            f"{count} machines to rent and {len(machines)} of your own: together there must be 1 "
            f"to {MOST_MACHINES}"
        )
