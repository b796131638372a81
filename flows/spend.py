"""Spend: what rentals and storage cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from blocks import Workspace
from tasks.budgets import what_is_left
from tasks.flow import flow
from tasks.runner import runner
from tasks.spending import read_spending
from tasks.workspace_blocks import open_workspace
from torpor.control.money.costs import costs
from torpor.control.money.months import Month, microseconds
from torpor.control.money.page import page
from torpor.control.money.spending import frame, lines, rows
from torpor.control.reports import without
from torpor.control.time_zones import zone_named

if TYPE_CHECKING:
    from pandas import DataFrame
else:
    DataFrame = object  # Prefect evaluates the annotations, and importing pandas takes a second


@flow("spend")
def spend(
    workspace: Workspace | str,
    months: Annotated[int, Field(ge=1, le=120)] = 12,
    timezone: str = "UTC",
) -> DataFrame:
    """Show what machines cost, by month, project, workspace, provider and GPU, and what storage
    costs.

    All workspaces in the store are counted. A record that cannot be believed is named, and the
    figures are shown without it. Changes nothing.

    Args:
        workspace: A Workspace block in whose store to look, or its name.
        months: How many months to show, with this one, 1 to 120.
        timezone: The time zone of months, such as Europe/Berlin.

    Returns:
        A pandas DataFrame with one row for each month, project, workspace, provider and GPU, and
        with `low_usd`, `high_usd` and `unpriced_hours`.

    Raises:
        InvalidInput: The time zone is not known, or the workspace cannot be used.

    Example:
        Dollars by month and project:
        ```python
        from flows import spend

        table = spend("mywork", months=6, timezone="Europe/Berlin")
        print(table.groupby(["month", "project"]).high_usd.sum())
        ```
    """
    zone = zone_named(timezone)
    opened = open_workspace(workspace)
    now = Month.of(microseconds(time.time()), zone)
    since = now.plus(1 - months)
    records = read_spending(opened, since, timezone)
    counted = costs(records.rentals, records.now_unix, zone)
    found = lines(
        [cost for cost in counted if cost.month >= since],
        records.of,
        records.stored,
        opened.store.address,
        now,
    )
    title = f"What the workspaces in {opened.store.address} cost, since {since} ({timezone})"
    title += without(records.unread)
    if records.store_price is None:
        runner().log.warning(
            "storage is not counted: the price of %s is not known. For a store of your own, set "
            "price_gb_month_usd of its Object Store block, 0 if it costs nothing",
            opened.store.address,
        )
    shown = rows(found, records.unread)
    runner().table(key=f"spend-{opened.spec.name}", rows=shown, description=title)
    runner().page(
        key=f"spend-{opened.spec.name}-page",
        markdown=page(
            found,
            what_is_left(opened),
            records.store_price,
            timezone,
            records.unread,
        ),
        description=title,
    )
    return frame(found)
