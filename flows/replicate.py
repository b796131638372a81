"""Replicate: restore one snapshot on many machines at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blocks import Workspace
from flows.procedures.fleet import MOST_MACHINES, MOST_SPARES, MOST_TASKS, Fleet, FleetRequest
from tasks.branch import branch
from tasks.budgets import what_is_left
from tasks.flow import flow
from tasks.machines import end_abandoned, left_unfinished, look_for_offers, renting, show_offers
from tasks.ownership import check_owner
from tasks.restore import NEWEST, pick_snapshot_to_wake
from tasks.run_table import shown
from tasks.workspace_blocks import open_workspace, probe_store
from torpor.control.remote.part_tracker import PartTracker, PeerMode
from torpor.control.rental.search import Offers
from torpor.control.reports import ReplicateReport
from torpor.shared.values import WantChange


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
    gpu: str = "",
    regions: list[str] = [],  # noqa: B006
    agreed_usd_h: Annotated[float | None, Field(ge=0)] = None,
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
        gpu: The GPUs for these machines, in order of preference, as in the Workspace block. Empty:
            those of the block.
        regions: The regions to rent in this time. Empty: those of the block.
        agreed_usd_h: What each machine may come to by the hour, in USD, as a person has agreed.
            Empty: nobody was asked, and the limit of the block holds.

    Returns:
        In `ready`, the machines to log in to, with `host`, `port` and `user`; in `failed`, the
        others with their reasons.

    Raises:
        MachineError: No machine came up. Where some did, the report is returned and those stay.
        NoOffer: Nothing on sale fits the workspace.
        BudgetExceeded: A budget cannot pay for an hour of the machines.
        SnapshotMissing: The workspace has no snapshot of that id.
        InvalidInput: `count`, `spares` or `machines` do not fit together.
        Recovered: Another control side has recovered the workspace, and owns it.

    Example:
        Start eight machines, and list their addresses:
        ```python
        from flows import replicate

        for one in replicate("mywork", count=8, spares=2).ready:
            print(one.user, one.host, one.port)
        ```
    """
    request = FleetRequest(count, spares, machines, full_check)
    tracker = PartTracker(peers, request.total)
    change = WantChange(gpu=gpu.strip(), regions=regions, agreed_usd_h=agreed_usd_h)
    opened = open_workspace(workspace).accepting(accept_paths).wanting(change)
    with branch():  # the steps of each machine follow these in Prefect's graph
        probe_store(opened)
        check_owner(opened)
        wanted, opened = pick_snapshot_to_wake(opened, snapshot)
        with renting(opened) as held:  # ends the machines that were not handed over
            if count:
                end_abandoned(held)
            left = left_unfinished(opened, held, alone=False) if count else []
            offers = look_for_offers(opened, request.new(left)) if count else Offers([], [])
            fleet = Fleet(opened, wanted, held, offers, request, tracker)
            # The steps on each machine: create machine, open session, begin restore, restore shares
            # (each is retried by itself), finish restore, check restore, hand over machine.
            fleet.bring(left)
            if count:
                show_offers(opened, held, offers)
    report = fleet.report(what_is_left(opened) if count else [])
    fault = fleet.fault or report.fault()
    if fault is not None:
        raise shown(report, fault)
    return report
