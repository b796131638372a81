"""`torpor down` asks before rented machines run on with nobody who looks after them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from deployments.down import served
from deployments.installation import Installation
from tasks.rented import RentedNow
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.rental.records import Rental
from torpor.control.supervision import LOCK, Supervision
from torpor.shared.errors import InvalidInput, RunCancelled, TorporError
from torpor.shared.values import Label, MachineId, WorkspaceName
from torpor_cli import installation
from torpor_cli.exit_codes import WRONG_USE, explained

RENTED = Rental(
    label=Label("me", WorkspaceName("mywork"), "a" * 16),
    provider="vast://1",
    state="handed over",
    created_unix=0.0,
    price_usd_h=0.5,
    machine=MachineId("77"),
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`machines` of each time that torpor was ended. It runs, on a terminal, and rents one."""
    times: list[bool] = []
    monkeypatch.setattr(
        "deployments.down.down", lambda installation, machines: times.append(machines)
    )
    monkeypatch.setattr("deployments.down.runs", lambda installation: True)
    monkeypatch.setattr("deployments.down.served", lambda installation: None)
    monkeypatch.setattr("torpor_cli.server.connected", nullcontext)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    _rents(monkeypatch, lambda: RentedNow([RENTED], {}))
    return times


def _rents(monkeypatch: pytest.MonkeyPatch, now: Callable[[], RentedNow]) -> None:
    monkeypatch.setattr("tasks.rented.rented_now", now)


def _answers(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    def answered(asked: str) -> str:
        print(asked)
        return answer

    monkeypatch.setattr("builtins.input", answered)


def test_it_shows_each_machine_with_its_price_and_ends_after_a_yes_alone(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answers(monkeypatch, "")
    with pytest.raises(RunCancelled, match="nothing was ended"):
        installation.down()
    assert ended == []
    said = "".join(capsys.readouterr())
    shown = ("mywork", "vast://1", "77", "0.500", "1 machine is rented", "12.00 $ a day")
    warned = ("watch, schedules and budgets stop", "torpor hibernate WORKSPACE", "[y/N]")
    for words in shown + warned:
        assert words in said, words
    _answers(monkeypatch, "y")
    installation.down(machines=True)
    assert ended == [True]


def test_without_a_terminal_it_wants_a_yes(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes") as refused:
        installation.down()
    assert explained(refused.value)[0] == WRONG_USE
    assert ended == []
    installation.down(yes=True)
    assert ended == [False]


@pytest.mark.parametrize("away", [TorporError("the server is away"), ValueError("what is it")])
def test_it_asks_where_nobody_can_say_what_is_rented(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch, away: Exception
) -> None:
    def nobody_says() -> RentedNow:
        raise away

    _rents(monkeypatch, nobody_says)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match=f"Nobody can say which machines are rented: {away}"):
        installation.down()
    _rents(monkeypatch, lambda: RentedNow([], {"mywork": "its store is away"}))
    with pytest.raises(InvalidInput, match="whether machines are rented for mywork"):
        installation.down()
    assert ended == []


def test_it_asks_nothing_where_nothing_is_rented_or_nothing_runs(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _rents(monkeypatch, lambda: RentedNow([], {}))
    installation.down()
    monkeypatch.setattr("deployments.down.runs", lambda installation: False)
    _rents(monkeypatch, lambda: RentedNow([RENTED], {}))
    installation.down()
    assert ended == [False, False]


def test_it_asks_where_the_server_of_its_workers_is_not_known_and_another_one_is_connected(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server elsewhere rents nothing, and would say so."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    elsewhere = {"api_url": "https://torpor.example.org/api", "login": "torpor:secret"}
    (tmp_path / "connection").write_text(json.dumps(elsewhere))
    _rents(monkeypatch, lambda: RentedNow([], {}))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match=r"Nobody can say.*https://torpor\.example\.org/api"):
        installation.down()
    assert ended == []


def test_the_server_that_is_asked_is_the_one_of_its_workers_also_where_it_is_its_users(
    tmp_path: Path,
) -> None:
    here = Installation(tmp_path)
    assert served(here) is None
    users = Supervision(os.getpid(), "http://prefect.team.example:4200/api", own=False)
    with here.locked(LOCK):
        users.write(tmp_path)
        assert served(here) == users.api_url


@pytest.mark.rule(9)
def test_the_login_of_the_shells_server_goes_to_no_server_of_the_workers(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`torpor up` served the user's team, and this shell names another server with its login."""
    served = "http://team.example.org:4200/api"
    asked: list[str] = []

    def now() -> RentedNow:
        asked.append(os.environ["PREFECT_API_URL"])
        return RentedNow([], {})

    _rents(monkeypatch, now)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("deployments.down.served", lambda installation: served)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    monkeypatch.setenv("PREFECT_API_URL", "https://other.example.org/api")
    with pytest.raises(InvalidInput, match=f"serve {served}, and https://other.example.org/api"):
        installation.down()
    assert (ended, asked) == ([], [])
    monkeypatch.setenv("PREFECT_API_URL", served)
    installation.down()
    assert (ended, asked) == ([False], [served])


def test_it_asks_the_server_that_is_about_to_end_whatever_the_shell_means(
    ended: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:hunter2")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "login").write_text("torpor:own\n")
    (tmp_path / "server.port").write_text("4321\n")
    own = "http://127.0.0.1:4321/api"
    monkeypatch.setattr("deployments.down.served", lambda installation: own)

    def now() -> RentedNow:
        asked.append((os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]))
        return RentedNow([], {})

    _rents(monkeypatch, now)
    installation.down()
    assert (asked, ended) == ([(own, "torpor:own")], [False])
