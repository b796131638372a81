"""``make automations``: install automations that react to events of workspaces.

    make automations                            # a failed verification pauses prune
    make automations NOTIFY=slack-webhook/mine  # and notify by that block

Running the command again updates its automations; one that is switched off stays off.
The events are those of tasks/events.py. Automations notify and pause; none deletes anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
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
from tasks.events import (
    BackupFailed,
    BackupFinished,
    BackupMissed,
    BudgetExhausted,
    BudgetReached,
    MachineUnknown,
    VerificationFailed,
)
from torpor.shared.errors import InvalidInput, TorporError

MARK: Final = "torpor: "
"""The prefix of our automations' names; others are left alone."""
SILENT_HOURS: Final = 26.0
"""A day between backups, and two hours more."""
UNKNOWN_LOOKS: Final = 15
"""So many looks of `watch` within an hour, at one machine, could not say whether it is idle."""
TROUBLE: Final = {
    BackupFailed.event,
    BackupMissed.event,
    BudgetExhausted.event,
    BudgetReached.event,
    VerificationFailed.event,
}
_SUBJECT: Final = "torpor: {{ event.event }} {{ event.resource.id }}"
_BODY: Final = """\
{{ event.event }} at {{ event.occurred }}
{{ event.resource.id }}
{% for name, value in event.payload.items() %}{{ name }}: {{ value }}
{% endfor %}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make automations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--notify", metavar="TYPE/NAME", default="", help="a notification block")
    parser.add_argument("--silent-hours", type=float, default=SILENT_HOURS, metavar="HOURS")
    parser.add_argument("--remove", action="store_true", help="remove all of them")
    options = parser.parse_args(arguments)
    server = server_of(Installation.here())
    try:
        if not answers(server):
            raise InvalidInput(f"no Prefect server answers at {server.api_url}: run `make up`")
        login = server.login or PREFECT_API_AUTH_STRING.value()
        settings = {PREFECT_API_URL: server.api_url, PREFECT_API_AUTH_STRING: login}
        with temporary_settings(updates=settings):
            names = remove() if options.remove else install(options.notify, options.silent_hours)
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    for name in names:
        print(f"  {'removed' if options.remove else 'installed'}  {name}")
    if not options.remove and not options.notify:
        print("  no notifications: name a notification block with NOTIFY=TYPE/NAME")
    return 0


def install(notify: str = "", silent_hours: float = SILENT_HOURS) -> list[str]:
    """Make or update the automations; returns their names. ``notify`` is a notification block of
    Prefect's, as type/name; without it they only pause. Raises InvalidInput."""
    if not 10 / 3600 <= silent_hours <= 24 * 366:
        raise InvalidInput(f"--silent-hours is {silent_hours:g}: use 0.003 (10 s) to 8784 (a year)")
    with get_client(sync_client=True) as client:
        wanted = [_pause_prune(_deployment(client, "prune/prune"))]
        if notify:
            wanted += _notifications(_notifier(client, notify), silent_hours)
        for automation in wanted:
            _put(client, automation)
    return [automation.name for automation in wanted]


def remove() -> list[str]:
    """Remove every automation whose name begins with ``MARK``; returns their names."""
    with get_client(sync_client=True) as client:
        ours = [one for one in client.read_automations() if one.name.startswith(MARK)]
        for automation in ours:
            client.delete_automation(automation.id)
    return [automation.name for automation in ours]


def _pause_prune(prune: UUID) -> AutomationCore:
    return AutomationCore(
        name=f"{MARK}a failed verification pauses prune",
        description="What is damaged may still be mended from packs that prune would delete. "
        "Resume the deployment when the cause is known.",
        trigger=EventTrigger(expect={VerificationFailed.event}, posture=Posture.Reactive),
        actions=[PauseDeployment(source="selected", deployment_id=prune)],
    )


def _notifications(block: UUID, silent_hours: float) -> list[AutomationCore]:
    tell = SendNotification(block_document_id=block, subject=_SUBJECT, body=_BODY)
    silence = SendNotification(
        block_document_id=block,
        subject="torpor: no backup was heard of",
        body=f"A workspace whose backups finished before has had none for {silent_hours:g} hours. "
        "See that a worker runs, and that the schedule of the deployment `backup` is on.",
    )
    crashed = SendNotification(
        block_document_id=block,
        subject="torpor: {{ event.event }} {{ flow_run.name }}",
        body="{{ flow_run.name }}: {{ flow_run.state.message }}\n{{ flow_run|ui_url }}",
    )
    return [
        AutomationCore(
            name=f"{MARK}tell of trouble",
            description="A backup failed or was missed, a verification failed, or four fifths or "
            "all of a budget are spent.",
            trigger=EventTrigger(expect=TROUBLE, posture=Posture.Reactive),
            actions=[tell],
        ),
        AutomationCore(
            name=f"{MARK}tell of machines that cannot be judged",
            description="`watch` could not say for half an hour whether a machine is idle.",
            trigger=EventTrigger(
                expect={MachineUnknown.event},
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=UNKNOWN_LOOKS,
                within=timedelta(hours=1),
            ),
            actions=[tell],
        ),
        AutomationCore(
            name=f"{MARK}tell when backups fall silent",
            description="Works without a worker: the server itself waits for the next backup.",
            trigger=EventTrigger(
                after={BackupFinished.event},
                expect={BackupFinished.event},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                within=timedelta(hours=silent_hours),
            ),
            actions=[silence],
        ),
        AutomationCore(
            name=f"{MARK}tell of runs that crashed or failed",
            description="Also of what failed before it could tell: a block that is missing, say.",
            trigger=EventTrigger(
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related={
                    "prefect.resource.id": "prefect.tag.torpor",
                    "prefect.resource.role": "tag",
                },
                expect={"prefect.flow-run.Crashed", "prefect.flow-run.Failed"},
                posture=Posture.Reactive,
            ),
            actions=[crashed],
        ),
    ]


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    there = client.read_automations_by_name(automation.name)
    if not there:
        client.create_automation(automation)
        return
    kept = automation.model_copy(update={"enabled": there[0].enabled})
    client.update_automation(there[0].id, kept)


def _deployment(client: SyncPrefectClient, name: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound:
        raise InvalidInput(
            f"the server {client.api_url} has no deployment {name}: run `make up` first, or "
            "`prefect deploy --all`"
        ) from None


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
            "the Blocks page (Slack Webhook, Email, Custom Webhook, ...) and name it as type/name, "
            "such as slack-webhook/mine"
        )
    if "notify" not in schema.capabilities:
        raise InvalidInput(
            f"the block {reference} cannot notify: name a notification block, such as "
            "slack-webhook/mine"
        )
    return document.id


if __name__ == "__main__":
    sys.exit(main())
