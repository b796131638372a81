"""Each deployment of prefect.yaml is run once by the real worker, and completes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocks import Workspace
from deployments.installation import CHECKOUT, Installation
from flows import list_machines, list_snapshots
from tests.fixtures.deployed import Deployed
from torpor.control.providers.local_folder import folder_of

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
    return {
        "parts": [1],
        "content_mib": 8,
        "rounds": 1,
        "minutes": 1,
        "machines": [1],
        "object_mib": [1],
        "other_tools": False,
    }


STAGES: list[dict[str, Parameters]] = [
    {"create": _nothing_more},
    {"backup": lambda: {"keep_last": 5}},
    {
        "check-backup": _nothing_more,
        "snapshots": _nothing_more,
        "find": lambda: {"pattern": "*.txt"},
        "pin": lambda: {**_newest(), "reason": "a test"},
        "verify": _nothing_more,
        "prune": _nothing_more,
        "reconcile": _nothing_more,
        "spend": lambda: {"timezone": "Europe/Berlin"},
        "watch": _nothing_more,
    },
    {"hibernate": _nothing_more},
    {"wake": _nothing_more, "unpin": _oldest},
    {"sync": _oldest, "diff": _nothing_more},
    {
        "restore-path": _restored,
        "delete-snapshots": lambda: {"snapshots": [_oldest()["snapshot"]]},
        "replicate": lambda: {"count": 1},
        "benchmark": _small,
    },
]
"""What runs at the same time, one stage after the other, and with which parameters."""


def test_every_deployment_has_a_run_here() -> None:
    named = re.findall(r"^  - name: (\S+)$", (CHECKOUT / "prefect.yaml").read_text(), re.MULTILINE)
    assert len(named) > 10
    planned = [name for stage in STAGES for name in stage]
    assert sorted(planned) == sorted(named), "give every deployment a run in STAGES"


def test_every_deployment_is_run_by_a_worker(
    deployed: Deployed, installation: Installation, tmp_path: Path
) -> None:
    Workspace(name=NAME).save(NAME, overwrite=True)
    for number, stage in enumerate(STAGES):
        runs = {}
        for name, parameters in stage.items():
            of_all = name == "watch"
            given = parameters() if of_all else {"workspace": NAME, **parameters()}
            if name == "benchmark":
                given["folder"] = str(tmp_path)
            runs[name] = deployed.start(name, given)
        for name, run in runs.items():
            ended = deployed.end(run)
            assert ended["state_type"] == "COMPLETED", f"{name}: {ended['state']['message']}"
            assert ended["work_pool_name"] == "torpor"
            assert ended["infrastructure_pid"]  # a worker's process, not this one
            if name != "create":
                assert deployed.pages(run), f"{name} tells nothing"
        if number == 0:
            (machine,) = list_machines(NAME)
            assert machine.label is not None
            home = folder_of(installation.machines, machine.label).home / "workspace"
            (home / "notes").mkdir(parents=True)
            (home / "notes" / "a.txt").write_text("a note\n")
        elif number == 2:
            (home / "notes" / "b.txt").write_text("another\n")
    assert len(list_snapshots(NAME)) == 1
    machines = list_machines(NAME)
    assert len(machines) == 2  # the woken one and its replica
    homes = [
        folder_of(installation.machines, one.label).home
        for one in machines
        if one.label is not None
    ]
    found = sorted(path.name for one in homes for path in one.rglob("a.txt"))
    assert found == ["a.txt"] * 3  # the workspace on both, and the path that was restored
