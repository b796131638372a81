"""What the chart's Job tells the Prefect server; flows and pools are those of test_register.py."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocks import Budget
from deployments import cluster, idle, schedules
from deployments.cluster import Team, main, read_teams, set_budget
from deployments.server import Server
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.shared.errors import InvalidInput


def test_a_team_gets_a_budget_of_its_name_which_follows_the_list(prefect_server: Server) -> None:
    Budget.register_type_and_schema()
    set_budget(Team("vision-lab", 12000))
    made = Budget.load("vision-lab", _sync=True)
    assert (made.usd_month, made.project, made.workspaces) == (12000, "vision-lab", [])
    made.timezone = "Europe/Berlin"
    made.save("vision-lab", overwrite=True)
    set_budget(Team("vision-lab", 9000.5))
    kept = Budget.load("vision-lab", _sync=True)
    assert (kept.usd_month, kept.timezone) == (9000.5, "Europe/Berlin")
    Budget.delete("vision-lab", _sync=True)  # other tests open all budgets of this server


def test_it_may_be_repeated_and_names_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: Server
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("teams: [{name: a, namespace: b, gpus: 1, weight: 3, usd_month: 1.2e+3}]\n")
    done: list[object] = []
    steps = ("register_types", "make_stacks", "make_pools", "deploy", "offer_schedules")
    for step in steps:
        monkeypatch.setattr(cluster, step, lambda *_, step=step: done.append(step))
    monkeypatch.setattr(cluster, "set_budget", done.append)
    assert main([str(file)]) == 0
    assert done == [*steps, Team("a", 1200.0)]


class _Server:
    """The two deployments that have schedules, as Prefect's client reads and changes them."""

    def __init__(self) -> None:
        kinds = ("watch/watch", "backup/backup-all")
        self.has = {
            name: SimpleNamespace(id=name, parameters={}, paused=False, schedules=[])
            for name in kinds
        }

    def update_deployment(self, name: str, changes: Any) -> None:
        self.has[name].parameters = changes.parameters

    def create_deployment_schedules(self, name: str, schedules: list[Any]) -> None:
        self.has[name].schedules += schedules

    def is_on(self, name: str) -> list[bool]:
        return [one.active for one in self.has[name].schedules]


def test_watch_begins_as_the_values_say_and_stays_as_somebody_has_switched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing looks after machines, ends what a budget ends, or continues a job."""
    file, server = tmp_path / "values.yaml", _Server()
    file.write_text("teams: []\n")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "state"))
    for step in ("register_types", "make_stacks", "make_pools", "deploy"):
        monkeypatch.setattr(cluster, step, lambda *_: None)
    for module in (cluster, idle, schedules):
        monkeypatch.setattr(module, "get_client", lambda sync_client: nullcontext(server))
        monkeypatch.setattr(module, "read_own", lambda client, name: server.has[name])
    assert main([str(file), "--idle=report", "--nightly=off"]) == 0
    assert (server.is_on("watch/watch"), server.is_on("backup/backup-all")) == ([True], [False])
    watch = server.has["watch/watch"]
    assert watch.parameters["only_report"] is True
    watch.schedules[0].active, watch.parameters = False, {"only_report": False}
    assert main([str(file), "--idle=report", "--nightly=on"]) == 0
    assert (server.is_on("watch/watch"), server.is_on("backup/backup-all")) == ([False], [False])
    assert watch.parameters["only_report"] is False


@pytest.mark.parametrize(
    "text", ["teams: [{name: a}]", "teams: [{name: a, usd_month: much}]", "teams: [", "[]"]
)
def test_a_list_that_cannot_be_read_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match="no list of teams that can be read"):
        read_teams(file)
    assert main([str(file)]) == 1
    assert "values.yaml" in capsys.readouterr().err


def test_values_without_teams_make_no_budget(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("image: {name: torpor}\n")
    assert read_teams(file) == []
    with pytest.raises(InvalidInput, match="no list of teams"):
        read_teams(tmp_path / "missing.yaml")
