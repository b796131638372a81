"""Lists of torpor's values as pandas tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import pandas


def frame(rows: Sequence[msgspec.Struct]) -> pandas.DataFrame:
    """Make a pandas table of a list: one row for each value and one column for each field.

    Args:
        rows: A list that a function called `list_...` returned, or the list in its result.

    Returns:
        The table. Fields named `*_unix` (seconds) and `*_ns` become UTC timestamps in columns
        without that ending. An empty list is an empty table without columns.

    Example:
        The snapshots of a workspace:
        ```python
        from flows import frame, list_kept

        print(frame(list_kept("mywork")))
        ```
    """
    import pandas  # importing it takes a second, which no flow needs to spend

    table = pandas.DataFrame.from_records(
        [msgspec.structs.asdict(row) for row in rows],
        columns=rows[0].__struct_fields__ if rows else None,
    )
    for name in list(table.columns):
        if name.endswith("_unix"):
            times = pandas.to_datetime(table.pop(name), unit="s", utc=True)
            table[name.removesuffix("_unix")] = times
        elif name.endswith("_ns"):
            times = pandas.to_datetime(table.pop(name), unit="ns", utc=True)
            table[name.removesuffix("_ns")] = times
    return table
