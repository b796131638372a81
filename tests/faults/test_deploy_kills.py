"""A deploy that is killed while it makes an environment: no half of one is ever used, nothing stays
that prune would not free, and the next deploy completes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from blocks import Stack
from flows import deploy
from tasks.plain_runner import PlainRunner
from tests.fixtures.kill_points import killed_in_a_child
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import run_plainly
from tests.fixtures.small_stack import small_stack
from tests.fixtures.world import WORKSPACE, World
from torpor.control.deploy import bases
from torpor.control.deploy.report import DeployReport
from torpor.control.safety import verify_snapshot
from torpor.control.store.manifests import find_snapshot, snapshot_ids
from torpor.control.upkeep.pins import pin_times
from torpor.control.upkeep.prune import PruneRules, plan_prune
from torpor.shared.format.keys import Seal
from torpor.shared.values import BASE, WorkspaceName

PROOF = {"proof_method": "GET", "proof_path": "/api", "proof_body": "", "proof_answer": "version"}
PLAIN = Seal(None)
_SLOW_SETUP = """\
import os, shutil, sys, time
_, into, source = sys.argv
os.makedirs(into + "/bin", exist_ok=True)
open(into + "/half", "w").write("half an environment")
time.sleep(0.5)
shutil.copyfile(source, into + "/bin/serve.py")
os.remove(into + "/half")
"""


@pytest.fixture(autouse=True)
def _soon_abandoned(short_agent: None) -> None:
    """The agent ends the run of a killed deploy within seconds."""


def _killed_before(world: World, label: str) -> None:
    """A deploy whose process dies right before the first step of this label."""

    def die(step: str) -> None:
        if step.startswith(label):
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        with PlainRunner(world.opened, wait_factor=0.1, before=die):
            deploy.fn(WORKSPACE, _stack())

    assert killed_in_a_child(work), f"no step is called {label}"


def _stack() -> Stack:
    stack = small_stack(**PROOF)
    stack.setup[2] = _SLOW_SETUP
    return stack


@pytest.mark.rule(17)
@pytest.mark.parametrize(
    "label",
    [
        "run on machine",  # before the record that an environment is being made here
        "start attempt 1",  # of the setup command
        "begin snapshot",  # the server has answered
        "store",
        "commit",
        "keep environment",
        "expire environments",
    ],
)
def test_a_killed_deploy_leaves_no_half_environment_in_use(world: World, label: str) -> None:
    _killed_before(world, label)
    names = {stored.key.split("/")[1] for stored in world.direct.list(f"workspaces/{BASE}")}
    pinned = [one for name in names for one in pin_times(world.direct, WorkspaceName(name))]
    assert bool(pinned) == (label == "expire environments")

    again: DeployReport = run_plainly(world.opened, deploy, _stack())
    assert not (world.home(again.machine) / "small-stack" / "half").exists()
    (machine,) = world.machines()
    assert machine.id == again.machine and world.leaks() == []
    names = {stored.key.split("/")[1] for stored in world.direct.list(f"workspaces/{BASE}")}
    (name,) = (WorkspaceName(name) for name in names)
    (kept,) = pin_times(world.direct, name)
    verified = verify_snapshot(world.direct, find_snapshot(world.direct, name, kept), PLAIN)
    paths = {entry.path for entry in verified.manifest.entries}
    assert b"half" not in paths and b"bin/serve.py" in paths

    tomorrow = time.time() + bases.LEFT_S + 60
    bases.expire(world.direct, lambda _: PLAIN, 30 * bases.LEFT_S, tomorrow)
    assert snapshot_ids(world.direct, name) == [kept]
    plan = plan_prune(world.direct, name, PLAIN, PruneRules(young_s=0))
    assert plan.stored.packs == len(verified.manifest.packs) + len(plan.unnamed)

    destroy_all(world.provider)
    world.forget_rentals()
    warm: DeployReport = run_plainly(world.opened, deploy, _stack())
    assert warm.environment == f"restored from {kept} of {name}"
