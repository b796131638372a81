"""Each performance goal has a figure in the kept results."""

from __future__ import annotations

from benchmarks.goals import GOALS, table


def test_each_goal_is_met_or_missed_by_a_kept_figure() -> None:
    _, _, *rows = table()
    assert len(rows) == len(GOALS)
    assert [row for row in rows if not row.endswith(("| met |", "| missed |"))] == []
