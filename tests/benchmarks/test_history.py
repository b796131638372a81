"""What a flow asks of its store does not grow with the snapshots of its workspace."""

from __future__ import annotations

import pytest

from benchmarks.history import measure

FEW = 8
"""Objects that a flow may read more: what was stored since the catalog was written."""


@pytest.mark.usefixtures("needs_server")
def test_a_flow_reads_as_many_objects_of_a_long_history_as_of_a_short_one() -> None:
    rows = measure([5, 60], rounds=1, shapes=["lines"])["rows"]["lines"]
    assert rows["60"].keys() == {"wake", "backup", "status", "hibernate"}
    for flow, long in rows["60"].items():
        assert long["requests"]["get"] <= rows["5"][flow]["requests"]["get"] + FEW, flow
    assert rows["60"]["wake"]["first"]["get"] > rows["60"]["wake"]["requests"]["get"] + FEW
