"""Which processes count as flow runs of the installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.installation import Installation
from deployments.processes import flow_runs, mark
from tests.fixtures.other_account import process_of_another
from tests.fixtures.waiting import until
from torpor.control.processes import all_processes


@pytest.mark.rule(21)
def test_a_process_of_another_account_is_no_flow_run(tmp_path: Path) -> None:
    """Any account can start one with the worker's mark, which it reads in no secret place."""
    made = Installation(tmp_path)
    words = mark(made, "worker") | {"PREFECT__FLOW_RUN_ID": "1"}
    wanted = {f"{name}={value}".encode() for name, value in words.items()}
    with process_of_another(words) as pid:

        def marked() -> list[int]:
            found = all_processes(others_too=True).items()
            return [process.pid for process, seen in found if wanted <= seen]

        until(lambda: pid in marked(), "it has begun")
        assert flow_runs(made, "worker") == []
