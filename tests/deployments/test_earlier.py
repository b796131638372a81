"""What an earlier version of torpor left running, as processes that no parent holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments import worker
from deployments.down import down, own_server, runs
from deployments.earlier import end_earlier, served_by_earlier
from deployments.installation import Installation
from deployments.processes import begin, running
from torpor.control.processes import end_processes, identify
from torpor.control.supervision import LOCK, Parent

WAITS = [sys.executable, "-c", "import time; time.sleep(600)"]
ROLES = (LOCK, "server", *worker.ROLES, "register")
OWN = "http://127.0.0.1:4321/api"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Installation]:
    made = Installation(tmp_path)
    made.port_file.write_text("4321\n")
    yield made
    end_processes(lambda: running(made, *ROLES), polite_s=0.0)


def _begin(made: Installation, role: str, **words: str) -> int:
    return begin(made, role, WAITS, {"PREFECT_API_URL": OWN, **words}, apart=True).pid


def test_they_are_ended_once_and_their_flow_runs_go_on(made: Installation) -> None:
    run = _begin(made, "job-worker", PREFECT__FLOW_RUN_ID="1")
    assert served_by_earlier(made) is None  # a run of today's worker looks alike
    pids = [_begin(made, role) for role in ROLES]
    served = served_by_earlier(made)
    assert served
    assert (served.api_url, served.own, served.login) == (OWN, True, made.login())
    assert runs(made)
    assert own_server(made) is None
    end_earlier(made)
    assert [identify(pid) for pid in pids] == [None] * len(pids)
    assert identify(run) is not None
    assert not runs(made)


def test_a_server_of_the_users_own_is_named(made: Installation) -> None:
    _begin(made, LOCK, PREFECT_API_URL="https://prefect.example/api")
    served = served_by_earlier(made)
    assert served
    assert (served.api_url, served.own) == ("https://prefect.example/api", False)


def test_children_of_a_supervisor_that_lives_are_none_of_them(made: Installation) -> None:
    child = _begin(made, "server")
    with made.locked(LOCK):
        Parent(1, OWN, own=True).write(made.folder)
        assert served_by_earlier(made) is None
        end_earlier(made)
        assert identify(child) is not None


def test_down_ends_them_too(made: Installation) -> None:
    pids = [_begin(made, role) for role in ROLES]
    down(made)
    assert [identify(pid) for pid in pids] == [None] * len(pids)
