"""`--sleep-after` of `create` and `wake`: saved with the workspace, and never a promise that nobody
keeps."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import flows
from blocks import Workspace
from deployments import idle
from deployments.server import Server
from flows.procedures import listing
from tasks.alert_server import NO_WATCH, Sleeping
from tasks.prefect_alerts import PrefectAlerts
from torpor.shared.errors import InvalidInput, RunCancelled, WorkspaceAwake
from torpor_cli.app import app
from torpor_cli.settings import edit

NAME = "to-sleep"
TWIN = "to-sleep-too"
HALF_AN_HOUR = ("--sleep-after", "30m")


@pytest.fixture
def begun(prefect_server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flows that were run. One offer fits, and whoever is asked says yes."""
    names: list[str] = []
    Workspace(name=NAME, when_idle="report").save(NAME, overwrite=True)
    found = SimpleNamespace(
        rows=lambda: [{"market": "vast"}],
        fitting=[SimpleNamespace(offer=SimpleNamespace(bound_usd_h=0.5))],
    )
    for name in ("wake", "create"):
        monkeypatch.setattr(flows, name, lambda name=name, **given: names.append(name))
    monkeypatch.setattr(listing, "list_offers", lambda *given, **more: found)
    monkeypatch.setattr("torpor_cli.machines.connected", nullcontext)
    monkeypatch.setattr("torpor_cli.flow_runs.connected", lambda: nullcontext("http://ui"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    _watches(monkeypatch, Sleeping())
    return names


def _watches(monkeypatch: pytest.MonkeyPatch, *seen: Sleeping) -> None:
    """What the schedule of watch does, at each look; the last one stays."""
    looks = [*seen]
    monkeypatch.setattr(
        PrefectAlerts, "sleeping", lambda self: looks.pop(0) if len(looks) > 1 else looks[0]
    )


def _run(*words: str) -> None:
    app([*words], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("command", ["wake", "create"])
def test_a_workspace_sleeps_after_the_time_that_wake_or_create_names(
    begun: list[str], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    _run(command, NAME, *HALF_AN_HOUR)
    block = Workspace.load(NAME)
    assert (block.sleep_minutes, block.when_idle, begun) == (30, "hibernate", [command])
    assert f"{NAME} sleeps after 30 min without work" in capsys.readouterr().err
    _run(command, NAME, "--yes")
    assert Workspace.load(NAME).sleep_minutes == 30


def test_after_a_no_to_the_price_nothing_is_rented_and_nothing_changed(
    begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: "n")
    with pytest.raises(RunCancelled, match="nothing was rented"):
        _run("create", NAME, *HALF_AN_HOUR)
    assert (Workspace.load(NAME).sleep_minutes, begun) == (0, [])


@pytest.mark.parametrize("after", ["30s", "90s", "5h", "0m"])
def test_a_time_that_no_sampler_can_see_is_a_mistake(begun: list[str], after: str) -> None:
    with pytest.raises(InvalidInput, match="1m to 4h"):
        _run("create", NAME, "--yes", "--sleep-after", after)
    assert begun == []


def test_a_machine_of_the_users_own_never_sleeps_by_itself(begun: list[str]) -> None:
    with pytest.raises(InvalidInput, match="ends none of your own"):
        _run("wake", NAME, "--machine", "me@host", *HALF_AN_HOUR)
    assert begun == []


@pytest.mark.parametrize(
    ("watches", "why"),
    [
        (NO_WATCH, "the schedule of watch is off"),
        (Sleeping("watch only reports idle machines"), "watch only reports"),
        (Sleeping(only=("other",)), "looks at other workspaces only: other"),
    ],
)
@pytest.mark.parametrize("asked", ["--yes", "nobody"])
def test_unattended_nothing_is_rented_that_nobody_would_put_to_sleep(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, watches: Sleeping, why: str, asked: str
) -> None:
    _watches(monkeypatch, watches)
    if asked == "nobody":
        monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match=f"{why}.*torpor up --idle hibernate"):
        _run("create", NAME, *HALF_AN_HOUR, *([asked] if asked == "--yes" else []))
    assert (Workspace.load(NAME).sleep_minutes, begun) == (0, [])


def test_the_schedule_is_switched_on_by_whoever_says_yes(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _watches(monkeypatch, NO_WATCH, Sleeping())
    switched: list[Any] = []
    monkeypatch.setattr(idle, "choose", lambda installation, chosen: switched.append(chosen))
    _run("create", NAME, *HALF_AN_HOUR)
    said = capsys.readouterr()
    assert "does nothing by itself: the schedule of watch is off" in said.err
    assert "Switch the schedule of watch on?" in said.out + said.err
    assert "warning" not in said.err
    assert (switched, begun, Workspace.load(NAME).sleep_minutes) == (["hibernate"], ["create"], 30)


def test_whoever_says_no_gets_the_machine_and_is_told_that_it_stays(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _watches(monkeypatch, NO_WATCH)
    monkeypatch.setattr("builtins.input", lambda asked: "n" if "Switch" in asked else "y")
    monkeypatch.setattr(idle, "choose", lambda *given: pytest.fail("nobody has agreed to that"))
    _run("create", NAME, *HALF_AN_HOUR)
    assert f"an idle machine of {NAME} stays and costs money" in capsys.readouterr().err
    assert begun == ["create"]


def test_two_blocks_of_one_workspace_must_agree_before_anything_is_rented(
    begun: list[str],
) -> None:
    """Watch hibernates nothing of a workspace whose blocks differ in when it is idle."""
    Workspace(name=NAME).save(TWIN, overwrite=True)
    try:
        with pytest.raises(InvalidInput, match=f"`torpor edit {TWIN} sleep_minutes=30"):
            _run("create", NAME, *HALF_AN_HOUR)
        assert (Workspace.load(NAME).sleep_minutes, begun) == (0, [])
        Workspace(name=NAME, sleep_minutes=30).save(TWIN, overwrite=True)
        _run("create", NAME, *HALF_AN_HOUR)
        assert begun == ["create"]
    finally:
        Workspace.delete(TWIN)


def test_what_somebody_else_has_set_meanwhile_stays(
    begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(asked: str) -> str:
        Workspace(name=NAME, disk_gib=7).save(NAME, overwrite=True)
        return "y"

    monkeypatch.setattr("builtins.input", meanwhile)
    with pytest.raises(WorkspaceAwake, match="somebody has changed its settings meanwhile"):
        _run("create", NAME, *HALF_AN_HOUR)
    block = Workspace.load(NAME)
    assert (block.disk_gib, block.sleep_minutes, begun) == (7, 0, [])


def test_edit_says_where_the_time_has_no_effect(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torpor_cli.settings.connected", nullcontext)
    edit(NAME, "sleep_minutes=30", "when_idle=hibernate")
    assert capsys.readouterr().err == ""
    _watches(monkeypatch, NO_WATCH)
    edit(NAME, "sleep_minutes=60")
    assert "the schedule of watch is off: an idle machine" in capsys.readouterr().err
    assert Workspace.load(NAME).sleep_minutes == timedelta(hours=1).total_seconds() / 60
