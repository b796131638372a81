"""Automations on a real server notify and react."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from blocks import Workspace
from deployments.automations import MARK, install, main, remove
from deployments.installation import Installation
from tasks.events import BackupFinished, BackupMissed, SnapshotDeleted, VerificationFailed, emit
from tests.fixtures.deployed import Deployed
from tests.fixtures.prefect_server import make
from tests.fixtures.waiting import until
from torpor.shared.errors import InvalidInput
from torpor.shared.values import SnapshotId, WorkspaceName

pytestmark = pytest.mark.together("automations and make up")

NAME = WorkspaceName("heard")
SNAPSHOT = SnapshotId("20261120T234913Z-1f0c9ab2")
BLOCK = "custom-webhook/tests"
"""The server looks for what did not happen each few seconds; the machine may be busy."""


class Inbox:
    """Where notifications arrive: a web hook on loopback."""

    def __init__(self) -> None:
        self.mail: list[dict[str, str]] = []
        mail = self.mail

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                mail.append(json.loads(self.rfile.read(size)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, *words: str) -> list[dict[str, str]]:
        """The notifications whose subject or body has all ``words``."""
        return [
            one for one in self.mail if all(word in one["subject"] + one["body"] for word in words)
        ]


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
        made.server.shutdown()
        made.server.server_close()


def _told(inbox: Inbox, *words: str) -> list[dict[str, Any]]:
    return until(lambda: inbox.of(*words), f"a message says {words}", every_s=0.2)


def _ours(deployed: Deployed) -> dict[str, dict[str, Any]]:
    found = deployed.ask("automations/filter", {})
    return {one["name"]: one for one in found if one["name"].startswith(MARK)}


def test_events_notify_and_pause(
    deployed: Deployed, inbox: Inbox, installation: Installation
) -> None:
    printed = make(installation, "automations", "--notify", BLOCK)
    assert printed.count("installed  torpor: ") == 5
    assert len(_ours(deployed)) == 5

    # an event of this process arrives as it was sent, and notifies
    emit(SnapshotDeleted(workspace=NAME, snapshot=SNAPSHOT, reason="retention"))
    emit(BackupMissed(workspace=NAME, expected_hours=26, message="none since Monday"))
    wanted = {"filter": {"event": {"name": ["torpor.snapshot.deleted"]}}}
    event = until(
        lambda: [
            one
            for one in deployed.ask("events/filter", wanted)["events"]
            if one["resource"]["prefect.resource.id"] == f"torpor.snapshot.{NAME}.{SNAPSHOT}"
        ],
        "the event has arrived",
        every_s=0.2,
    )[0]
    assert event["payload"] == {"workspace": NAME, "snapshot": SNAPSHOT, "reason": "retention"}
    assert {one["prefect.resource.id"] for one in event["related"]} == {f"torpor.workspace.{NAME}"}
    (missed,) = _told(inbox, f"torpor.backup.missed torpor.workspace.{NAME}")
    assert "message: none since Monday" in missed["body"]

    # a failed verification pauses prune and notifies
    prune = {"deployments": {"name": {"any_": ["prune"]}}}
    assert not deployed.ask("deployments/filter", prune)[0]["paused"]
    emit(VerificationFailed(workspace=NAME, snapshots=[SNAPSHOT], problems=1, message="damaged"))
    until(
        lambda: deployed.ask("deployments/filter", prune)[0]["paused"],
        "prune is paused",
        every_s=0.2,
    )
    _told(inbox, "torpor.verification.failed")
    deployment = deployed.ask("deployments/filter", prune)[0]["id"]
    deployed.resume(deployment)

    # a run of the worker that finds no backup sends an event and fails; both notify
    Workspace(name=NAME).save(NAME, overwrite=True)
    run = deployed.end(deployed.start("check-backup", {"workspace": NAME}))
    assert run["state_type"] == "FAILED"
    assert "has no snapshot at all" in run["state"]["message"]
    _told(inbox, "torpor.backup.missed", "has no snapshot at all")
    _told(inbox, "prefect.flow-run.Failed", run["name"])


def test_the_server_alone_notices_missing_backups(deployed: Deployed, inbox: Inbox) -> None:
    install(BLOCK, silent_hours=10 / 3600)
    emit(BackupFinished(workspace=NAME, snapshot=SNAPSHOT, deleted=[]))
    _told(inbox, "no backup was heard of")


def test_installing_again_renews_and_leaves_off_what_is_off(
    deployed: Deployed, inbox: Inbox
) -> None:
    names = install(BLOCK)
    before = _ours(deployed)
    assert sorted(before) == sorted(names)
    off = next(one for one in before.values() if "fall silent" in one["name"])
    deployed.switch_off(off["id"])
    install(BLOCK, silent_hours=50)
    after = _ours(deployed)
    assert {name: one["id"] for name, one in after.items()} == {
        name: one["id"] for name, one in before.items()
    }
    assert [one["name"] for one in after.values() if not one["enabled"]] == [off["name"]]
    assert after[off["name"]]["trigger"]["within"] == 50 * 3600
    assert sorted(remove()) == sorted(names)
    assert _ours(deployed) == {}


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
        install(block)
    assert _ours(deployed) == {}


def test_without_a_server_the_next_step_is_said(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert main([]) == 1
    assert "no Prefect server answers at http://127.0.0.1:9/api: run `make up`" in (
        capsys.readouterr().err
    )
