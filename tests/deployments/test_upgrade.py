"""What an installation of an earlier version holds goes on with this one."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
from pathlib import Path
from typing import Final

from deployments.installation import CHECKOUT
from tests.fixtures.deployed import homes_of, place_of
from tests.fixtures.environments import environment
from tests.fixtures.own_installation import Alone
from tests.fixtures.prefect_api import ask
from tests.fixtures.trees import Tree, differences, fill, kept
from tests.fixtures.waiting import until
from torpor.shared.values import MIB

BEFORE: Final = "0274044dba45774dd6a2d7352b963a330e92f1c0"
"""An earlier version, as a commit of this repository: its records are signed and its blocks
have their key beside the database. It runs with its own packages."""
NAMES: Final = ("asleep", "awake", "working")
COMMAND: Final = "touch begun; until test -e go; do sleep 0.1; done; echo done > result"

CREATE = """
import flows
from blocks import Workspace
from flows import create
for name in sys.argv[1:]:
    Workspace(name=name).save(name)
    create(name)
say(flows.__file__)
"""
LEAVE = """
from flows import hibernate
from prefect.deployments import run_deployment
hibernate("asleep")
given = {"workspace": "working", "command": ["sh", "-c", sys.argv[1]]}
run_deployment("job/job", parameters=given, timeout=0)
say(None)
"""
GO_ON = """
from flows import hibernate, wake
wake("asleep")
hibernate("awake")
wake("awake")
say(None)
"""
RESULT = """
from flows import reconcile, wake
from tasks.workspace_blocks import open_workspace
(job,) = open_workspace("working").jobs.ended()
wake("working")
kinds = {finding.kind for finding in reconcile("working").findings}
say({"state": job.state, "ends": [attempt.end for attempt in job.attempts],
     "left": sorted(kinds - {"in use", "another workspace's"})})
"""


def _earlier_version(folder: Path) -> Path:
    """Its files, with the codecs' libraries of this version."""
    folder.mkdir()
    archive = ["git", "archive", "--format=tar", BEFORE]
    packed = subprocess.run(archive, cwd=CHECKOUT, check=False, capture_output=True)
    assert packed.returncode == 0, f"the whole history is needed: {packed.stderr.decode()}"
    subprocess.run(["tar", "-x"], cwd=folder, check=True, input=packed.stdout)
    for library in (CHECKOUT / "gpu_kernels" / "built").glob("*.so"):
        shutil.copy(library, folder / "gpu_kernels" / "built")
    return folder


def _switch_watch_on(alone: Alone) -> None:
    """With the request that the switch in the UI sends."""
    login, api = alone.server.login, f"{alone.server.api_url}/deployments"
    watch = ask("GET", f"{api}/name/watch/watch", by=login)
    (schedule,) = watch["schedules"]
    ask("PATCH", f"{api}/{watch['id']}/schedules/{schedule['id']}", {"active": True}, by=login)


def _tree(alone: Alone, name: str) -> Tree:
    """What was written before; a job writes beside it."""
    return kept(place_of(alone.installation, name) / "data")


def test_machines_snapshots_jobs_and_schedules_go_on_with_this_version(
    alone: Alone, tmp_path: Path
) -> None:
    checkout = _earlier_version(tmp_path / "before")
    packages = environment(tmp_path / "env", checkout, "-c", checkout / "constraints.txt")
    before = dataclasses.replace(alone, checkout=checkout, interpreter=packages)
    before.up()
    assert Path(before.python(CREATE, *NAMES)).is_relative_to(before.checkout)
    for seed, name in enumerate(NAMES):
        fill(place_of(alone.installation, name) / "data", random.Random(seed), big_bytes=MIB)
    trees = {name: _tree(alone, name) for name in NAMES}
    before.python(LEAVE, COMMAND)
    working = place_of(alone.installation, "working")
    until((working / "begun").exists, "the job's command was started", every_s=0.2)
    _switch_watch_on(before)
    before.down()

    alone.up()
    alone.python(GO_ON)
    for name in ("asleep", "awake"):
        assert not differences(trees[name], _tree(alone, name))

    (working / "go").touch()
    until(
        lambda: not homes_of(alone.installation, "working"),
        "the schedule of watch has continued the job, which hibernates when it has ended",
        every_s=1.0,
    )
    result = alone.python(RESULT)
    assert result == {"state": "succeeded", "ends": ["command ended"], "left": []}
    working = place_of(alone.installation, "working")
    assert (working / "result").read_text() == "done\n"
    assert not differences(trees["working"], _tree(alone, "working"))
