"""Compare: where to rent for a workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from blocks import Workspace
from tasks.comparison import ask_markets, choose_terms, read_past
from tasks.flow import flow
from tasks.restore import NEWEST
from tasks.runner import runner
from tasks.workspace_blocks import open_workspace
from torpor.control.compare.choices import frame
from torpor.control.compare.page import page, rows
from torpor.control.compare.uses import advise
from torpor.control.reports import without

if TYPE_CHECKING:
    from pandas import DataFrame
else:
    DataFrame = object  # Prefect evaluates the annotations, and pandas takes a second to import


@flow("compare")
def compare(
    workspace: Workspace | str,
    snapshot: str = NEWEST,
    hours: Annotated[float, Field(gt=0, le=8784)] = 8.0,
    spot: Literal["never", "allowed", "only"] = "allowed",
    everywhere: bool = True,
) -> DataFrame:
    """Show what all markets offer for a workspace: prices, start and restore times, what each can
    do, and which offer suits which use.

    Rents nothing and changes nothing. The GPU, disk, regions and limits of the workspace hold.

    Args:
        workspace: The Workspace block to rent for, or its name.
        snapshot: The id of the snapshot to restore there, or newest.
        hours: How long the machine is rented, in hours.
        spot: Whether to compare spot machines. A wake follows the workspace block.
        everywhere: Ask all provider blocks, not only those that the workspace names.
    """
    opened = open_workspace(workspace).freezing
    terms = choose_terms(opened, snapshot, hours, spot)
    past, unread = read_past(opened, terms)
    found = ask_markets(opened, terms, past, everywhere)
    title = f"Where to rent for workspace {opened.spec.name}, {hours:g} h{without(unread)}"
    runner().table(key=f"compare-{opened.spec.name}", rows=rows(found), description=title)
    runner().page(
        key=f"compare-{opened.spec.name}-page",
        markdown=page(found, advise(found), unread),
        description=title,
    )
    return frame(found)
