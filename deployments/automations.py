"""``make automations``: name who is told of alerts, and install what only the server can do.

    make automations                                        # a failed verification pauses prune
    make automations NOTIFY=slack-webhook/mine              # that block tells of alerts
    make automations NOTIFY="slack-webhook/mine email/me"   # and both do

`watch` sends the alerts (torpor/control/alerts). The server itself tells that no `watch` completes:
nobody else could. Running the command again updates the automations; one that is switched off stays
off. None deletes anything.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.events.actions import PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    temporary_settings,
)

from deployments.installation import Installation
from deployments.server import answers, server_of
from tasks.events import VerificationFailed
from tasks.own_deployments import read_own
from tasks.prefect_alerts import NOTIFIERS, TAG
from torpor.shared.errors import InvalidInput, TorporError

MARK: Final = "torpor: "
"""The prefix of our automations' names; others are left alone."""
SILENT_MINUTES: Final = 30.0
"""Minutes without a completed `watch` after which the server alerts. `watch` completes every two
minutes, and a look at many machines may take ten."""
_PAUSES: Final = f"{MARK}a failed verification pauses prune"
_SILENT: Final = f"{MARK}tell that watch is silent"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make automations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--notify", metavar="TYPE/NAME", nargs="+", default=[], help="notification blocks"
    )
    parser.add_argument("--silent-minutes", type=float, default=SILENT_MINUTES, metavar="MINUTES")
    parser.add_argument("--remove", action="store_true", help="remove all of them")
    options = parser.parse_args(arguments)
    server = server_of(Installation.here())
    try:
        if not answers(server):
            raise InvalidInput(f"no Prefect server answers at {server.api_url}: run `torpor up`")
        login = server.login or PREFECT_API_AUTH_STRING.value()
        settings = {PREFECT_API_URL: server.api_url, PREFECT_API_AUTH_STRING: login}
        with temporary_settings(updates=settings):
            names = remove() if options.remove else install(options.notify, options.silent_minutes)
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    for name in names:
        print(f"  {'removed' if options.remove else 'installed'}  {name}")
    if not options.remove and not options.notify:
        print("  no notifications: name a notification block with NOTIFY=TYPE/NAME")
    elif not options.remove:
        print("  watch tells of alerts: switch its schedule on, under Deployments > watch")
    return 0


def install(notify: Sequence[str] = (), silent_minutes: float = SILENT_MINUTES) -> list[str]:
    """Make or update the automations; returns their names. ``notify``: notification blocks of
    Prefect's, as type/name, which from then on tell of alerts; without any, who was named before
    stays. Raises InvalidInput."""
    if not 10 / 60 <= silent_minutes <= 24 * 60:
        raise InvalidInput(f"--silent-minutes is {silent_minutes:g}: use 0.17 (10 s) to 1440")
    with get_client(sync_client=True) as client:
        wanted = [_pause_prune(read_own(client, "prune/prune").id)]
        if notify:
            watch = read_own(client, "watch/watch").id
            blocks = [_notifier(client, one) for one in notify]
            wanted.append(_silence(watch, blocks, silent_minutes))
            _name_notifiers(client, list(notify))
        for automation in wanted:
            _put(client, automation)
    return [automation.name for automation in wanted]


def remove() -> list[str]:
    """Remove every automation whose name begins with ``MARK``, and tell nobody of alerts from now
    on; returns their names."""
    with get_client(sync_client=True) as client:
        ours = [one for one in client.read_automations() if one.name.startswith(MARK)]
        for automation in ours:
            client.delete_automation(automation.id)
        with contextlib.suppress(ObjectNotFound):
            client.delete_variable_by_name(NOTIFIERS)
    return [automation.name for automation in ours]


def _pause_prune(prune: UUID) -> AutomationCore:
    return AutomationCore(
        name=_PAUSES,
        description="What is damaged may still be mended from packs that prune would delete. "
        "Resume the deployment when the cause is known.",
        trigger=EventTrigger(expect={VerificationFailed.event}, posture=Posture.Reactive),
        actions=[PauseDeployment(source="selected", deployment_id=prune)],
    )


def _silence(watch: UUID, blocks: Sequence[UUID], minutes: float) -> AutomationCore:
    body = (
        f"No scheduled run of watch has completed for {minutes:g} minutes. Meanwhile nobody looks "
        "at machines: idle machines and spent budgets cost money, deadlines are not renewed, jobs "
        "are not continued, and no other alert is sent.\n"
        "Next step: run `make up` on the host of the server, which starts what is missing. Then "
        "see under Deployments > watch that its schedule is on and what its last run says; "
        "worker.log and server.log say more."
    )
    completed = {"prefect.flow-run.Completed"}
    return AutomationCore(
        name=_SILENT,
        description="Works without a worker: the server itself waits for the next run of watch. "
        "It begins with the first one.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.id": f"prefect.deployment.{watch}",
                "prefect.resource.role": "deployment",
            },
            after=completed,
            expect=completed,
            posture=Posture.Proactive,
            within=timedelta(minutes=minutes),
        ),
        actions=[
            SendNotification(block_document_id=one, subject="torpor: watch is silent", body=body)
            for one in blocks
        ],
    )


def _name_notifiers(client: SyncPrefectClient, names: list[str]) -> None:
    if client.read_variable_by_name(NOTIFIERS) is None:
        client.create_variable(VariableCreate(name=NOTIFIERS, value=names, tags=[TAG]))
    else:
        client.update_variable(VariableUpdate(name=NOTIFIERS, value=names, tags=[TAG]))


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    there = client.read_automations_by_name(automation.name)
    if not there:
        client.create_automation(automation)
        return
    kept = automation.model_copy(update={"enabled": there[0].enabled})
    client.update_automation(there[0].id, kept)


def _notifier(client: SyncPrefectClient, reference: str) -> UUID:
    slug, slash, name = reference.partition("/")
    try:
        document = client.read_block_document_by_name(name, slug, include_secrets=False)
    except ObjectNotFound:
        document = None
    schema = None if document is None else document.block_schema
    if not slash or document is None or schema is None:
        raise InvalidInput(
            f"the server {client.api_url} has no block {reference!r}: add a notification block on "
            "the UI's page Blocks (Slack Webhook, Email, Custom Webhook, ...) and name it as "
            "type/name, such as slack-webhook/mine"
        )
    if "notify" not in schema.capabilities:
        raise InvalidInput(
            f"the block {reference} cannot notify: name a notification block, such as "
            "slack-webhook/mine"
        )
    return document.id


if __name__ == "__main__":
    sys.exit(main())
