"""What a user has set up before going away, and tidies up after, run in the installation's
environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefect.blocks.notifications import CustomWebhookNotificationBlock

from blocks import Budget, GcpProvider, Idleness, LocalProvider, SSHIdentity, Tuning, Workspace
from blocks.reference import load_named
from tasks.workspace_blocks import open_workspace
from tests.fixtures.rentals import handed_over, standing
from tests.unattended.look import NAMES
from torpor.control.providers.local.folder import folder_of
from torpor.control.safety import never_handed_over

QUIET = Idleness(
    idle_minutes=1,
    idle_people=False,
    idle_cpu_percent=1e9,
    idle_network_kib_s=1e9,
    idle_disk_kib_s=1e9,
)
"""The machines share this host, which is busy."""


def prepare(number: int, machines: str, hook: str, gcp: dict[str, Any]) -> dict[str, Any]:
    """Where a person can log in to the machine that will be idle."""
    CustomWebhookNotificationBlock(
        name="tests", url=hook, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    ).save("tests", overwrite=True)
    LocalProvider(folder=machines, price_usd_h=1.0).save("paid", overwrite=True)
    QUIET.save("quiet", overwrite=True)
    Tuning().save("small", overwrite=True)
    for name, settings in (
        (f"idle{number}", {"idle": "quiet"}),
        (f"spent{number}", {"when_idle": "report"}),
        (f"kept{number}", {"when_idle": "report"}),
        (f"work{number}", {"when_idle": "report"}),
        (f"left{number}", {}),
    ):
        paid = {"provider": "local-provider/paid", "tuning": "small"}
        Workspace(name=name, **paid, **settings).save(name, overwrite=True)
    idle = None
    for name in (f"spent{number}", f"kept{number}", f"work{number}", f"idle{number}"):
        idle, rental = handed_over(open_workspace(name))
        home = folder_of(Path(machines), rental.label).home / "workspace"
        home.mkdir(parents=True)
        (home / "a.txt").write_text(f"{name}\n")
    # Saved when its machine runs: nothing is rented that a budget cannot pay for an hour.
    Budget(usd_month=0.01, workspaces=[f"spent{number}"]).save(f"spent{number}", overwrite=True)

    left = open_workspace(f"left{number}")
    _, rental = standing(left)
    left.rentals.change(rental, state="abandoned", why="its answer was lost")

    GcpProvider(**gcp).save("far", overwrite=True)
    Workspace(name=f"far{number}", provider="gcp-provider/far", gpu="L4").save(
        f"far{number}", overwrite=True
    )
    handed_over(open_workspace(f"far{number}"))
    assert idle is not None and idle.endpoint is not None
    key = load_named(SSHIdentity, "default", of="a test").private_key.get_secret_value()
    at = idle.endpoint
    return {"host": at.host, "port": at.port, "user": at.user, "key": key}


def tidy_up(number: int) -> None:
    """End what a cycle leaves, so that the next one finds the installation no larger."""
    for name in (f"kept{number}", f"far{number}"):
        opened = open_workspace(name)
        for machine in opened.providers[0].list_own():
            if machine.label is not None and machine.label.workspace == name:
                warrant = never_handed_over(machine, machine.label)
                opened.providers[0].destroy(machine, warrant)
        for rental in opened.rentals.open():
            opened.rentals.change(rental, state="ended", why="its cycle is over")
    for name in NAMES:
        Workspace.delete(f"{name}{number}")
    Budget.delete(f"spent{number}")


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    if "machines" in order:
        print(json.dumps(prepare(**order)))
    else:
        tidy_up(**order)
