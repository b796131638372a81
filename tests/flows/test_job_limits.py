"""A job whose time or money is spent ends by itself: its work is stored, its machine is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flows import create, job
from flows.procedures.listing import list_offers
from tasks.job_limits import spent_by
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import attempt_on, hurried, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from torpor.control.jobs.records import Job
from torpor.control.money import exhaustion
from torpor.shared.errors import BudgetExceeded, InvalidInput, JobFailed
from torpor.shared.values import MachineId

pytestmark = pytest.mark.usefixtures("needs_server")

ID = "3f2a9c81d04e"
_LONG = ["sh", "-c", "i=0; while true; do i=$((i+1)); echo $i > step; sleep 0.1; done"]


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture
def place(lab: Lab) -> Path:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    (place / "a.txt").write_text("kept")
    return place


def _over(lab: Lab, **limits: float) -> tuple[Job, str]:
    with PlainRunner(lab.opened), pytest.raises(JobFailed) as caught:
        job.fn(DEMO, _LONG, **limits)
    (ended,) = lab.opened.jobs.ended(1)
    return ended, str(caught.value)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"most_hours": 2 / 3600}, "its time is over: the command ran for "),
        ({"most_usd": 0.003}, "its money is spent: 0.00 $ of 0.00 $ so far"),  # at 4 $ an hour
    ],
    ids=["time", "money"],
)
def test_a_job_that_has_used_what_it_may_is_stored_and_its_machine_ends(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], why: str
) -> None:
    monkeypatch.setattr(exhaustion, "LEAST_S", 0.0)
    ended, said = _over(lab, **limits)
    assert (ended.state, ended.attempts[-1].end) == ("over budget", "stopped")
    assert ended.why.startswith(why)
    assert lab.machines() == [] and ended.final == lab.snapshots()[0].snapshot
    assert ". Cost: " in said and f"Its work is in snapshot {ended.final}" in said
    assert "run it again: `torpor job run demo -- sh -c " in said
    woken = lab.workspace(MachineId(wake_plainly(lab.opened).machine))
    assert (woken / "a.txt").read_text() == "kept" and int((woken / "step").read_text()) > 0


def test_what_the_money_of_a_job_does_not_pay_for_an_hour_is_not_rented(
    lab: Lab, place: Path
) -> None:
    hibernate_plainly(lab.opened)
    before = len(lab.market.orders)
    ended, said = _over(lab, most_usd=3.9)
    assert ended.state == "over budget" and ended.attempts == []
    assert "it costs 4 $/h; what is left of the job's money pays for 3.9 $/h" in said
    assert len(lab.market.orders) == before


def test_a_job_counts_the_machine_of_its_user_from_its_own_first_attempt(
    lab: Lab, place: Path
) -> None:
    machine, *_ = lab.machines()
    (rental,) = lab.opened.rentals.open()
    record = left_job(
        lab, attempts=[attempt_on(machine, rental, began_unix=rental.created_unix + 1800)]
    )
    spent = spent_by(lab.opened, record, rental.created_unix + 5400)
    assert (spent.usd, spent.usd_h) == (pytest.approx(4.0), 4.0)
    own = msgspec.structs.replace(record, id=rental.job or "0" * 12, attempts=[])
    assert spent_by(lab.opened, own, rental.created_unix + 5400).usd == 0.0


def test_a_machine_is_rented_for_the_job_that_begins_there_next(lab: Lab) -> None:
    """Its money pays for it from the rental on."""
    with PlainRunner(lab.opened):
        with pytest.raises(BudgetExceeded, match=r"pays for 3\.9 \$/h"):
            create.fn(DEMO, job=ID, most_usd=3.9)
        with pytest.raises(InvalidInput, match="name the `job`, too"):
            create.fn(DEMO, most_usd=3.9)
        assert lab.market.orders == []
        machine = create.fn(DEMO, job=ID, most_usd=5.0).id
        place = lab.workspace(machine)
        (place / "train.py").write_text("sent")
        (rental,) = lab.opened.rentals.open()
        own = Job(id=ID, workspace=DEMO, block=DEMO, command=["true"], created_unix=1.0)
        assert spent_by(lab.opened, own, rental.created_unix + 5400).usd == pytest.approx(6.0)
        with pytest.raises(InvalidInput, match="has no job"):
            job.fn(DEMO, job=ID)
        with pytest.raises(JobFailed):
            job.fn(DEMO, ["cat", "nosuch"], job=ID)
        (failed,) = lab.opened.jobs.ended(1)
        assert (failed.id, [one.machine for one in failed.attempts]) == (ID, [machine])
        assert lab.machines() == []
        again = job.fn(DEMO, ["cat", "train.py"], job=ID)  # as a retry of that run
    assert (again.job.state, again.job.id == ID) == ("succeeded", False)
    assert lab.machines() == []


def test_a_quote_names_only_what_the_job_would_rent(lab: Lab, place: Path) -> None:
    hibernate_plainly(lab.opened)
    apart = Market("runpod:1")
    apart.on_sale = [msgspec.structs.replace(apart.on_sale[0], price_usd_h=1.0)]
    apart.abilities = msgspec.structs.replace(apart.abilities, private_network=False)
    lab.opened = replace(lab.opened, providers=(apart, *lab.opened.providers))
    with PlainRunner(lab.opened):
        assert [one.offer.price_usd_h for one in list_offers(DEMO, starts=False).fitting] == [1, 4]
        (fits,) = list_offers(DEMO, starts=False, nodes=2).fitting
        assert fits.offer.provider == lab.market.identity
        with pytest.raises(BudgetExceeded, match=r"2 at 4 .*each cost; .*pays for 7\.9"):
            list_offers(DEMO, starts=False, nodes=2, most_usd=7.9)
    lab.opened = replace(lab.opened, providers=(lab.market,))
    with PlainRunner(lab.opened):
        assert list_offers(DEMO, starts=False, most_usd=4.0).fitting
        with pytest.raises(BudgetExceeded, match=r"pays for 3\.9"):
            list_offers(DEMO, starts=False, most_usd=3.9)
    lab.opened = replace(lab.opened, providers=(apart,))
    with (
        PlainRunner(lab.opened),
        pytest.raises(InvalidInput, match="machines that reach each other"),
    ):
        list_offers(DEMO, starts=False, nodes=2)
