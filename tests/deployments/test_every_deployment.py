"""Each deployment of prefect.yaml is run once by the real worker, and completes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blocks import Workspace
from deployments.installation import Installation
from flows import list_machines, list_snapshots
from tasks.workspace_blocks import open_workspace
from tests.fixtures.deployed import Deployed, homes_of, place_of
from tests.fixtures.small_stack import small_stack
from torpor.control.jobs.records import Job

pytestmark = pytest.mark.together("automations and make up")

NAME = "every"
Parameters = Callable[[], dict[str, Any]]


def _nothing_more() -> dict[str, Any]:
    return {}


def _newest() -> dict[str, Any]:
    return {"snapshot": list_snapshots(NAME)[0].snapshot}


def _oldest() -> dict[str, Any]:
    return {"snapshot": list_snapshots(NAME)[-1].snapshot}


def _restored() -> dict[str, Any]:
    (machine,) = list_machines(NAME)
    return {"path": "notes/a.txt", "into": "~/recovered", "machine": machine.id}


def _small() -> dict[str, Any]:
    return {"rounds": 1, "minutes": 1}


def _job() -> Job:
    """A job as the run that drives it has recorded it."""
    jobs = open_workspace(NAME).jobs
    made = Job(
        id=secrets.token_hex(6),
        workspace=jobs.workspace,
        block=NAME,
        command=["true"],
        created_unix=time.time(),
    )
    return jobs.take(made, "another run")


def _running() -> dict[str, Any]:
    return {"job": _job().id}


def _over() -> dict[str, Any]:
    over = msgspec.structs.replace(_job(), state="succeeded")
    return {"job": open_workspace(NAME).jobs.end(over).id}


def _deploy() -> dict[str, Any]:
    return {"stack": _stack(NAME)}


def _stack(name: str) -> str:
    """A saved stack with a port of its own."""
    stack = small_stack(
        proof_method="GET", proof_path="/api", proof_body="", proof_answer="version"
    )
    stack.save(name, overwrite=True)
    return name


def _starts() -> dict[str, Any]:
    return {"stacks": [_stack(f"{NAME}-started")], "rounds": 1}


STAGES: list[dict[str, Parameters]] = [
    {"create": _nothing_more, "adopt": lambda: {"release": True}},
    {"backup": lambda: {"keep_last": 5}, "backup/backup-all": lambda: {"dry_run": True}},
    {
        "snapshots": lambda: {"find": "*.txt"},
        "pin": lambda: {**_newest(), "reason": "a test"},
        "verify": _nothing_more,
    },
    {
        "prune": _nothing_more,
        "reconcile": _nothing_more,
        "compare": lambda: {"hours": 2.5},
        "spend": lambda: {"timezone": "Europe/Berlin"},
        "watch": lambda: {"dry_run": False, "backup_hours": 26},
        "watch/watch-dry-run": _nothing_more,  # beside the one that acts
    },
    {
        "job": _over,
        "jobs": _nothing_more,
        "job-status": _over,
    },
    {"hibernate": _nothing_more},  # not beside an open job, which would refuse it
    {
        "wake": _nothing_more,
        "pin": lambda: {**_oldest(), "remove": True},
        "benchmark": _starts,
    },
    {"sync": _oldest, "diff": _nothing_more, "deploy": _deploy},
    {
        "restore-path": _restored,
        "delete-snapshots": lambda: {"snapshots": [_oldest()["snapshot"]]},
        "replicate": lambda: {"count": 1},
        "benchmark": _small,
        "cancel-job": _running,
    },
]
"""What runs at the same time, one stage after the other, and with which parameters. They are few: a
worker gives a run up where the server is too busy for it for a minute."""


def test_every_deployment_is_run_by_a_worker(
    deployed: Deployed, installation: Installation, tmp_path: Path
) -> None:
    Workspace(name=NAME).save(NAME, overwrite=True)
    for number, stage in enumerate(STAGES):
        runs = {}
        for name, parameters in stage.items():
            # Other tests' workspaces are not looked at.
            of_some = name in ("watch", "watch/watch-dry-run", "jobs")
            given = {"workspaces": [NAME]} if of_some else {"workspace": NAME}
            given |= parameters()
            if name == "benchmark":
                given["folder"] = str(tmp_path)
            runs[name] = deployed.start(name, given)
        for name, run in runs.items():
            ended = deployed.end(run)
            assert ended["state_type"] == "COMPLETED", f"{name}: {ended['state']['message']}"
            pool, queue = ("torpor-jobs", "normal") if name == "job" else ("torpor", "default")
            assert (ended["work_pool_name"], ended["work_queue_name"]) == (pool, queue)
            assert ended["infrastructure_pid"]  # a worker's process, not this one
            if name != "create":
                assert deployed.pages(run), f"{name} tells nothing"
        if number == 0:
            home = place_of(installation, NAME)
            (home / "notes").mkdir(parents=True)
            (home / "notes" / "a.txt").write_text("a note\n")
        elif number == 2:
            (home / "notes" / "b.txt").write_text("another\n")
    for job in open_workspace(NAME).jobs.open():
        open_workspace(NAME).jobs.end(msgspec.structs.replace(job, state="cancelled"))
    assert len(list_snapshots(NAME)) == 1
    homes = homes_of(installation, NAME)
    assert len(homes) == 2  # the woken one and its replica
    found = sorted(path.name for home in homes for path in home.rglob("a.txt"))
    assert found == ["a.txt"] * 3  # the workspace on both, and the path that was restored
