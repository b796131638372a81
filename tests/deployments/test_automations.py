"""Automations on a real server notify and react."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.events import emit_event

from blocks import Workspace
from deployments.automations import MARK, install, main, remove
from deployments.installation import Installation
from tasks.events import SnapshotDeleted, VerificationFailed, emit
from tasks.prefect_alerts import PrefectAlerts
from tests.fixtures.deployed import Deployed
from tests.fixtures.inbox import Inbox
from tests.fixtures.prefect_server import make
from tests.fixtures.waiting import until
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId, WorkspaceName

pytestmark = pytest.mark.together("automations and make up")

NAME = WorkspaceName("heard")
SNAPSHOT = SnapshotId("20261120T234913Z-1f0c9ab2")
BLOCK = "custom-webhook/tests"
"""The server looks for what did not happen each few seconds; the machine may be busy."""


@pytest.fixture
def inbox(deployed: Deployed) -> Iterator[Inbox]:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    made = Inbox()
    CustomWebhookNotificationBlock(
        name="tests", url=made.url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    ).save("tests", overwrite=True)
    try:
        yield made
    finally:
        remove()
        made.close()


def _told(inbox: Inbox, *words: str) -> list[dict[str, Any]]:
    return until(lambda: inbox.of(*words), f"a message says {words}", every_s=0.2)


def _ours(deployed: Deployed) -> dict[str, dict[str, Any]]:
    found = deployed.ask("automations/filter", {})
    return {rule["name"]: rule for rule in found if rule["name"].startswith(MARK)}


def test_events_pause_prune_and_watch_tells_of_failures(
    deployed: Deployed, inbox: Inbox, installation: Installation
) -> None:
    printed = make(installation, "automations", "--notify", BLOCK)
    assert printed.count("installed  torpor: ") == 2
    assert len(_ours(deployed)) == 2

    # an event of this process arrives as it was sent
    emit(SnapshotDeleted(workspace=NAME, snapshot=SNAPSHOT, reason="retention"))
    wanted = {"filter": {"event": {"name": ["torpor.snapshot.deleted"]}}}
    event = until(
        lambda: [
            event
            for event in deployed.ask("events/filter", wanted)["events"]
            if event["resource"]["prefect.resource.id"] == f"torpor.snapshot.{NAME}.{SNAPSHOT}"
        ],
        "the event has arrived",
        every_s=0.2,
    )[0]
    assert event["payload"] == {"workspace": NAME, "snapshot": SNAPSHOT, "reason": "retention"}
    assert {item["prefect.resource.id"] for item in event["related"]} == {
        f"torpor.workspace.{NAME}"
    }

    # a failed verification pauses prune
    prune = {"deployments": {"name": {"any_": ["prune"]}}}
    assert not deployed.ask("deployments/filter", prune)[0]["paused"]
    emit(VerificationFailed(workspace=NAME, snapshots=[SNAPSHOT], problems=1, message="damaged"))
    until(
        lambda: deployed.ask("deployments/filter", prune)[0]["paused"],
        "prune is paused",
        every_s=0.2,
    )
    deployment = deployed.ask("deployments/filter", prune)[0]["id"]
    deployed.resume(deployment)

    # a run of the worker fails; the next run of watch tells of it by the block, once
    Workspace(name=NAME).save(NAME, overwrite=True)
    run = deployed.end(deployed.start("wake", {"workspace": NAME}))
    assert run["state_type"] == "FAILED"
    for _ in range(2):
        seen = deployed.end(deployed.start("watch", {"workspaces": [NAME], "dry_run": False}))
        assert seen["state_type"] == "COMPLETED", seen["state"]
    (told,) = inbox.of(f"torpor: wake for workspace {NAME} failed")
    for words in (
        "Flow: wake",
        "Deployment: wake/wake",
        f"Run: {run['name']}",
        f"workspace {NAME} has no snapshot",
        "Next step: correct the cause and wake the workspace again",
    ):
        assert words in told["body"]


@pytest.mark.rule(19)
def test_the_server_alone_notices_that_watch_is_silent(deployed: Deployed, inbox: Inbox) -> None:
    install([BLOCK], silent_minutes=10 / 60)
    watch = {"deployments": {"name": {"any_": ["watch"]}}}
    deployment = deployed.ask("deployments/filter", watch)[0]["id"]
    emit_event(
        event="prefect.flow-run.Completed",
        resource={"prefect.resource.id": "prefect.flow-run.one"},
        related=[
            {
                "prefect.resource.id": f"prefect.deployment.{deployment}",
                "prefect.resource.role": "deployment",
            }
        ],
    )
    told = _told(inbox, "torpor: watch is silent")[0]  # it may come again
    assert "Next step: run `make up`" in told["body"]


def test_installing_again_renews_and_leaves_off_what_is_off(
    deployed: Deployed, inbox: Inbox
) -> None:
    names = install([BLOCK])
    before = _ours(deployed)
    assert sorted(before) == sorted(names)
    assert PrefectAlerts().notifiers() == [BLOCK]
    off = next(rule for rule in before.values() if "silent" in rule["name"])
    deployed.switch_off(off["id"])
    install([BLOCK], silent_minutes=50)
    after = _ours(deployed)
    assert {name: rule["id"] for name, rule in after.items()} == {
        name: rule["id"] for name, rule in before.items()
    }
    assert [rule["name"] for rule in after.values() if not rule["enabled"]] == [off["name"]]
    assert after[off["name"]]["trigger"]["within"] == 50 * 60
    assert sorted(remove()) == sorted(names)
    assert _ours(deployed) == {} and PrefectAlerts().notifiers() == []


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("custom-webhook/nobody", "has no block 'custom-webhook/nobody'"),
        ("nothing", "name it as type/name"),
        ("workspace/demo", "the block workspace/demo cannot notify"),
    ],
)
def test_a_block_that_cannot_notify_is_refused(deployed: Deployed, block: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        install([block])
    assert _ours(deployed) == {}


def test_without_a_server_the_next_step_is_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert main([]) == 1
    assert "no Prefect server answers at http://127.0.0.1:9/api: run `torpor up`" in (
        capsys.readouterr().err
    )
