"""The schedules that `make up` adds, paused. From then on they belong to the user.

They are not in prefect.yaml, because each deploy resets a schedule to what is written there: one
that was switched on in the UI would be off again after the next `make up`, and no backup would
run. They have no parameters: Prefect 3.9.1 empties a schedule's parameters when it is switched on
or edited (`DeploymentScheduleUpdate.parameters`). Runs of a schedule take those of its deployment.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule

from tasks.own_deployments import read_own


class Offered(NamedTuple):
    """A schedule of one deployment: its name, and when, in UTC."""

    deployment: str
    slug: str
    cron: str


WATCH: Final = "watch/watch"
NIGHTLY: Final = "backup/backup-all"
OFFERED: Final = (
    Offered(NIGHTLY, "nightly", "0 3 * * *"),
    Offered(WATCH, "every-two-minutes", "*/2 * * * *"),
)


def offer_schedules(on: Collection[str] = ()) -> None:
    """Add the schedules to deployments that have none at all: paused, but for those of ``on``."""
    with get_client(sync_client=True) as client:
        for offered in OFFERED:
            deployment = read_own(client, offered.deployment)
            if deployment.schedules:
                continue  # existing schedules belong to the user
            schedule = DeploymentScheduleCreate(
                schedule=CronSchedule(cron=offered.cron, timezone="UTC"),
                active=offered.deployment in on,
                slug=offered.slug,
            )
            client.create_deployment_schedules(deployment.id, [schedule])
