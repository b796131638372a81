"""The steps of a deploy: environments in the store, and small programs on the machine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Final

from blocks import Stack
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.deploy import bases
from torpor.control.deploy.stack import EnvironmentFacts
from torpor.control.deploy.stack import Stack as StackValue
from torpor.control.remote.agent import Session
from torpor.control.remote.probe import Probed
from torpor.control.safety import Verified
from torpor.shared.errors import DeployFailed, TorporError
from torpor.shared.values import SnapshotId, StoredSnapshot, WorkspaceName
from torpor.shared.wire.restore import NoteReady

DAY_S: Final = 24 * 3600.0
NOTE_S: Final = 300.0
"""Seconds for the agent to look at every name of a workspace."""


def open_stack(stack: Stack | str) -> StackValue:
    """Load the Stack block with that reference or name."""
    return Stack.of(stack).value()


def facts_of(machine: Probed) -> EnvironmentFacts:
    """What an environment depends on, of a machine that an agent is attached to."""
    return EnvironmentFacts(
        machine.platform.python,
        machine.glibc,
        machine.platform.machine,
        machine.cuda,
        machine.user_home,
    )


@step("find environment", says="looking for a stored environment")
def find_base(base: StoredWorkspace, reason: str) -> StoredSnapshot | None:
    """The environment in the store that fits such a machine; None if there is none yet."""
    return bases.find(base.store, base.spec.name, base.seal, reason, base.spec.paths)


@step("distrust environment")
def distrust_base(base: StoredWorkspace, found: StoredSnapshot) -> None:
    """Mark an environment as damaged, so that no deploy uses it any more."""
    bases.distrust(base.store, base.spec.name, found.snapshot)


@step("keep environment")
def keep_base(base: StoredWorkspace, verified: Verified, reason: str) -> bool:
    """Use this environment from now on; False if another deploy has stored one meanwhile."""
    return bases.keep(base.store, verified, reason)


@step("drop environment")
def drop_base(base: StoredWorkspace, verified: Verified) -> None:
    """Delete an environment that is not to be used."""
    bases.drop(base.store, verified)


@step("forget environment")
def forget_base(base: StoredWorkspace) -> None:
    """Delete an environment that a benchmark made."""
    bases.forget(base.store, base.spec.name)


@step("forget measured environments")
def forget_measured_bases(opened: OpenWorkspace) -> None:
    """Delete the environments that a killed benchmark has left under this scratch name."""
    bases.forget_measured(opened.store, opened.spec.name)


@step("expire environments")
def expire_bases(opened: OpenWorkspace, unused_s: float) -> list[SnapshotId]:
    """Delete the environments that no deploy has used for ``unused_s`` seconds."""
    return bases.expire(
        opened.store, lambda name: opened.base(name, []).seal, unused_s, time.time()
    )


def expire_unused_bases(opened: OpenWorkspace, days: float) -> None:
    """Delete the environments that no deploy has used for ``days`` days. A failure is only
    logged, because the server runs and its machine is handed over."""
    try:
        for snapshot in expire_bases(opened, days * DAY_S):
            runner().log.info("environment %s was not used for %g days: deleted", snapshot, days)
    except TorporError as error:
        runner().log.warning("unused environments were not deleted: %s", error)


@step("run on machine")
def run_on_machine(session: Session, argv: Sequence[str]) -> str:
    """Run a small program on the machine; returns what it prints. DeployFailed if it fails."""
    done = session.execute(argv)
    if done.exit:
        words = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise DeployFailed(f"{argv[0]} ended with status {done.exit} on the machine: {words}")
    return done.stdout.decode("utf-8", "replace")


@step("look for files")
def holds_files(session: Session, folders: Sequence[str]) -> bool:
    """Whether one of the directories on the machine is there and not empty."""
    return bool(session.execute(["find", *folders, "-mindepth", "1", "-print", "-quit"]).stdout)


@step("note what was used")
def note_ready(session: Session, workspace: WorkspaceName) -> None:
    """Note that files which the server has used by now come first in the next restore. A failure is
    only logged, because the server runs."""
    request = f"{runner().run}:ready:{secrets.token_hex(8)}"
    try:
        session.call(NoteReady(workspace), request_id=request, within_s=NOTE_S)
    except TorporError as error:
        runner().log.warning("what the server has used was not noted: %s", error)
