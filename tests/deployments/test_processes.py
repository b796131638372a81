"""Which processes count as the installation's own."""

from __future__ import annotations

from pathlib import Path

from deployments.installation import Installation
from deployments.processes import mark, running, started_process
from tests.fixtures.other_account import process_of_another
from tests.fixtures.waiting import until
from torpor.control.processes import all_processes


def test_a_process_of_another_account_masks_no_dead_worker(tmp_path: Path) -> None:
    """Any account can start one with the worker's mark, which it reads in no secret place."""
    made = Installation(tmp_path)
    (word,) = (f"{name}={value}".encode() for name, value in mark(made, "worker").items())
    with process_of_another(mark(made, "worker")) as pid:

        def marked() -> list[int]:
            found = all_processes(others_too=True).items()
            return [process.pid for process, words in found if word in words]

        until(lambda: pid in marked(), "it has begun")
        assert running(made, "worker") == []
        assert started_process(made, "worker") is None
