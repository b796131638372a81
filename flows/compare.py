"""Compare: where to rent for a workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from blocks import Workspace
from flows.procedures.offers import offers_everywhere
from tasks.flow import flow
from tasks.restore import NEWEST
from tasks.runner import runner
from tasks.workspace_blocks import open_workspace
from torpor.control.compare.choices import frame

if TYPE_CHECKING:
    from pandas import DataFrame
else:
    DataFrame = object  # Prefect evaluates the annotations, and importing pandas takes a second


@flow("compare")
def compare(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    hours: Annotated[float, Field(gt=0, le=8784)] = 8.0,
    spot: Literal["never", "allowed", "only"] = "allowed",
    everywhere: bool = True,
) -> DataFrame:
    """Show what all markets offer for a workspace: prices, start and restore times, and what each
    can do.

    Rents nothing and changes nothing. The GPU, disk, regions and limits of the workspace hold.

    Args:
        workspace: The Workspace block to rent for, or its name.
        snapshot: The id of the snapshot to restore there, or newest.
        hours: How long the machine is rented, in hours.
        spot: Whether to compare spot machines. A wake follows the workspace block.
        everywhere: Ask all provider blocks, not only those that the workspace names.

    Returns:
        A pandas DataFrame with one row for each offer. `rejected` is empty for an offer that fits,
        else the reason; docs/guide/costs.md explains the columns.

    Raises:
        SnapshotMissing: The workspace has no snapshot of that id.
        InvalidInput: A setting of the workspace cannot be understood.

    Example:
        The cheapest five offers for ten hours:
        ```python
        from flows import compare

        table = compare("mywork", hours=10)
        print(table[table.rejected == ""].head())
        ```
    """
    opened = open_workspace(workspace).freezing
    report, found = offers_everywhere(opened, snapshot, hours, spot, everywhere)
    runner().table(
        key=f"compare-{opened.spec.name}", rows=report.rows(), description=report.title()
    )
    return frame(found)
