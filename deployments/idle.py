"""What becomes of idle machines: asked once by `torpor up`, kept as the schedule of `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, get_args

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate

from deployments.installation import Installation
from deployments.schedules import WATCH
from tasks.own_deployments import read_own
from torpor.control.own_server import connection
from torpor.shared.values import IdleChoice

QUESTION: Final = (
    "watch can look at all machines every two minutes. What becomes of an idle one?\n"
    "  hibernate  store it, verify it, destroy the machine; a workspace may say no\n"
    "  report     say so, and leave it\n"
    "  off        nobody looks: nothing is hibernated, and no job continues by itself\n"
)
SAYS: Final[dict[IdleChoice, str]] = {
    "hibernate": "watch hibernates machines that are idle by the rules of their Workspace block",
    "report": "watch reports idle machines, and hibernates none",
    "off": "nobody looks at machines: an idle one costs money until you hibernate it",
}


def is_chosen(installation: Installation) -> bool:
    """Whether somebody has answered what becomes of idle machines: here, or by the switch of the
    schedule in the UI."""
    if _file(installation).exists():
        return True
    with get_client(sync_client=True) as client:
        return any(one.active for one in read_own(client, WATCH).schedules)


def chosen(installation: Installation) -> IdleChoice | None:
    """The answer that was given to `torpor up`; None where none was."""
    try:
        said = _file(installation).read_text().strip()
    except OSError:
        return None
    return next((idle for idle in get_args(IdleChoice) if idle == said), None)


def choose(installation: Installation, idle: IdleChoice) -> None:
    """Switch the schedule of `watch`, and say what its runs do with idle machines."""
    with get_client(sync_client=True) as client:
        watch = read_own(client, WATCH)
        parameters = {**watch.parameters, "only_report": idle == "report", "dry_run": False}
        paused = watch.paused and idle == "off"
        client.update_deployment(watch.id, DeploymentUpdate(parameters=parameters, paused=paused))
        for schedule in watch.schedules:
            own = {k: v for k, v in schedule.parameters.items() if k not in parameters}
            client.update_deployment_schedule(
                watch.id, schedule.id, active=idle != "off", parameters=own
            )
    # Under `torpor connect` the answer is kept by the other server alone.
    if installation.folder.is_dir() and connection(installation.folder) is None:
        _file(installation).write_text(f"{idle}\n")


def ask() -> IdleChoice:
    """The answer of the person at the terminal; an empty line means report."""
    print(QUESTION, end="")
    while True:
        try:
            answer = input("hibernate, report or off [report]: ").strip().lower() or "report"
        except EOFError:
            answer = "off"
        fitting = [idle for idle in get_args(IdleChoice) if idle.startswith(answer)]
        if len(fitting) == 1:
            chosen: IdleChoice = fitting[0]
            return chosen


def _file(installation: Installation) -> Path:
    return installation.folder / "idle"
