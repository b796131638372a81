"""A deploy whose server starts before its workspace is restored."""

from __future__ import annotations

import hashlib
import os

from flows import deploy
from tasks.plain_runner import PlainRunner
from tests.fixtures.fault_proxy import Fault, gets
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.small_stack import small_stack
from tests.fixtures.world import World
from torpor.control.deploy.report import DeployReport

SERVE = ["{bin}serve.py", "{port}", "{model_path}"]


def _asleep(world: World) -> bytes:
    """The workspace has a snapshot and no machine; returns what a server reads of it."""
    place = world.workspace(world.rent().id)
    (place / "d").mkdir(parents=True)
    (place / "model").write_text("a word")
    weights = os.urandom(6 << 20)
    (place / "d/weights").write_bytes(weights)
    (place / "rest").write_bytes(os.urandom(24 << 20))
    hibernate_plainly(world.opened)
    return weights


def test_the_server_starts_at_once_and_reads_what_is_restored(world: World) -> None:
    weights = _asleep(world)
    world.proxy.add(Fault("delay", gets("/packs/"), count=1000, delay_s=0.5))
    command = 'sha256sum d/weights > read; test -f rest; exec python3 "$@"'
    stack = small_stack(server=["sh", "-euc", command, "sh", *SERVE])
    steps: list[str] = []
    with PlainRunner(world.opened, wait_factor=0.1, before=steps.append):
        report: DeployReport = deploy.fn("demo", stack, gate=True)
    begins = max(n for n, step in enumerate(steps) if step.startswith("start attempt"))
    assert begins < steps.index("finish restore")
    assert report.gate == "the server started before its files were there"
    place = world.workspace(report.machine)
    assert (place / "read").read_text().split()[0] == hashlib.sha256(weights).hexdigest()
    assert (place / "rest").stat().st_size == 24 << 20
    assert report.warnings == []


def test_a_server_that_moves_a_directory_of_the_restore_is_started_last_by_another_round(
    world: World,
) -> None:
    _asleep(world)
    world.proxy.add(Fault("delay", gets("/packs/"), count=3, delay_s=8.0))
    server = ["sh", "-euc", 'mv d gone; exec python3 "$@"', "sh", *SERVE]
    report = run_plainly(world.opened, deploy, small_stack(server=server), gate=True)
    assert report.gate.startswith("not used: a server that started early wrote")
    place = world.workspace(report.machine)
    assert (place / "gone/weights").stat().st_size == 6 << 20
    assert not (place / "d").exists()


def test_a_deploy_says_why_it_has_no_gate(world: World) -> None:
    _asleep(world)
    report = run_plainly(world.opened, deploy, small_stack(fetch=["true"]), gate=True)
    assert report.gate == "not used: the fetch command needs the whole workspace"
    assert any(report.gate in str(row["value"]) for row in report.rows())
