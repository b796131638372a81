"""The schedules that `make up` adds, paused. From then on they belong to the user.

They are not in prefect.yaml, because each deploy resets a schedule to what is written there: one
that was switched on in the UI would be off again after the next `make up`, and no backup would
run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule


class Offered(NamedTuple):
    """A schedule of one deployment: its name, and when, in UTC. ``of_one``: it is for one
    workspace; else for the whole installation."""

    deployment: str
    slug: str
    cron: str
    of_one: bool = True


OFFERED: Final = (
    Offered("backup/backup", "nightly", "0 3 * * *"),
    Offered("check-backup/check-backup", "hourly", "30 * * * *"),
    Offered("watch/watch", "every-two-minutes", "*/2 * * * *", of_one=False),
)


def offer_schedules(workspace: str, metrics: Path) -> None:
    """Add the paused schedules, for ``workspace``, to deployments that have none at all.
    ``metrics`` is the file that `watch` writes."""
    of_all = {"dry_run": False, "metrics": str(metrics)}
    with get_client(sync_client=True) as client:
        for offered in OFFERED:
            deployment = client.read_deployment_by_name(offered.deployment)
            if deployment.schedules:
                continue  # they belong to the user
            schedule = DeploymentScheduleCreate(
                schedule=CronSchedule(cron=offered.cron, timezone="UTC"),
                active=False,
                parameters={"workspace": workspace} if offered.of_one else of_all,
                slug=offered.slug,
            )
            client.create_deployment_schedules(deployment.id, [schedule])
