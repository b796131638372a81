"""A job whose time or money is spent ends by itself: its work is stored, its machine is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import create, job
from flows.procedures.listing import list_offers
from tasks.budgets import check_budgets, within_budgets
from tasks.job_limits import Limits, approve, spent_by
from tasks.jobs import cost_of
from tasks.plain_runner import PlainRunner
from tests.fixtures.driver import JOB, Story, attempt_on, drive_job, hurried, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.rentals import handed_over
from tests.fixtures.waiting import until
from torpor.control.jobs.records import Approval, Job, Stop, new_job_id
from torpor.control.jobs.report import JobReport
from torpor.control.money import exhaustion
from torpor.control.money.budgets import Budget, OpenBudget
from torpor.control.rental.search import Offers
from torpor.shared.errors import BudgetExceeded, InvalidInput, JobFailed, ProviderUnavailable
from torpor.shared.values import MachineId, ObjectKey

pytestmark = pytest.mark.usefixtures("needs_server")

ID = "3f2a9c81d04e"
# Renamed into place: a command that ends while it writes leaves no empty file.
_COUNT = "i=0; while true; do i=$((i+1)); echo $i > step.new; mv step.new step; sleep 0.1; done"
_LONG = ["sh", "-c", _COUNT]


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
        ({"max_hours": 2 / 3600}, "its time is over: the command ran for "),
        ({"max_usd": 0.003}, "its money is spent: 0.00 $ of 0.00 $ so far"),  # at 4 $ an hour
    ],
    ids=["time", "money"],
)
def test_a_job_that_has_used_what_it_may_is_stored_and_its_machine_ends(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], why: str
) -> None:
    monkeypatch.setattr(exhaustion, "LEAST_S", 0.0)
    ended, said = _over(lab, **limits)
    rows = {row["what"]: row["value"] for row in job_rows(lab, ended)}
    most = limits.get("max_usd", limits.get("max_hours", 0) * 3600)
    assert rows["limits"].endswith(f"of {most:.2f} $" if "max_usd" in limits else " h"), rows
    assert (ended.state, ended.attempts[-1].end) == ("over budget", "stopped")
    assert ended.why.startswith(why)
    assert lab.machines() == [] and ended.final == lab.snapshots()[0].snapshot
    assert ". Cost: " in said and f"Its work is in snapshot {ended.final}" in said
    assert "run it again: `torpor job run demo -- sh -c " in said
    woken = lab.workspace(MachineId(wake_plainly(lab.opened).machine))
    assert (woken / "a.txt").read_text() == "kept" and int((woken / "step").read_text()) > 0


def job_rows(lab: Lab, job_: Job) -> list[dict[str, str]]:
    return JobReport(job_, cost_of(lab.opened, job_)).rows()


def test_what_the_money_of_a_job_does_not_pay_for_an_hour_is_not_rented(
    lab: Lab, place: Path
) -> None:
    hibernate_plainly(lab.opened)
    before = len(lab.market.orders)
    ended, said = _over(lab, max_usd=3.9)
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
            create.fn(DEMO, job=ID, max_usd=3.9)
        with pytest.raises(InvalidInput, match="name the `job`, too"):
            create.fn(DEMO, max_usd=3.9)
        assert lab.market.orders == []
        machine = create.fn(DEMO, job=ID, max_usd=5.0).id
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
        assert job.fn(DEMO, ["cat", "train.py"], job=ID).job == again.job
    assert (again.job.state, again.job.id == ID) == ("succeeded", False)
    assert lab.machines() == []


def test_a_copy_of_a_run_is_not_answered_with_the_job_of_the_first_one(lab: Lab) -> None:
    """As "Copy to new run" of Prefect makes one, also with another command."""
    lab.workspace(lab.rent().id).mkdir()
    with PlainRunner(lab.opened) as first:
        done = job.fn(DEMO, ["true"], job=ID).job
        assert (done.state, done.begun_by) == ("succeeded", first.run)
        assert job.fn(DEMO, ["true"], job=ID).job == done  # started again
    with PlainRunner(lab.opened), pytest.raises(InvalidInput, match="with `job` empty"):
        job.fn(DEMO, ["false"], job=ID)
    with PlainRunner(lab.opened):
        assert job.fn(DEMO, job=ID).job == done  # it continues what another run has begun
    assert [one.id for one in lab.opened.jobs.ended()] == [ID]


def test_a_retry_that_is_started_again_goes_on_with_its_own_job(lab: Lab) -> None:
    """The named job is that of the first try."""
    lab.workspace(lab.rent().id).mkdir()
    begun = []
    with PlainRunner(lab.opened) as run:
        with pytest.raises(JobFailed):
            job.fn(DEMO, ["false"], job=ID)
        second = left_job(lab, new_job_id(run.run), command=["true"])
        begun.append(job.fn(DEMO, ["true"], job=ID).job)
        begun.append(job.fn(DEMO, ["true"], job=ID).job)
    assert [(one.id, one.state) for one in begun] == [(second.id, "succeeded")] * 2
    assert len(lab.opened.jobs.ended()) == 2


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
            list_offers(DEMO, starts=False, nodes=2, max_usd=7.9)
    lab.opened = replace(lab.opened, providers=(lab.market,))
    with PlainRunner(lab.opened):
        assert list_offers(DEMO, starts=False, max_usd=4.0).fitting
        with pytest.raises(BudgetExceeded, match=r"pays for 3\.9"):
            list_offers(DEMO, starts=False, max_usd=3.9)
    lab.opened = replace(lab.opened, providers=(apart,))
    with (
        PlainRunner(lab.opened),
        pytest.raises(InvalidInput, match="machines that reach each other"),
    ):
        list_offers(DEMO, starts=False, nodes=2)


class Moving:
    """By how many $ an hour a spot price has risen on average; None: its market does not say."""

    rise: float | None = 0.0

    def rise_usd_h(self, offer: str, begin_unix: float, end_unix: float) -> float:
        if self.rise is None:
            raise ProviderUnavailable("no history now")
        return self.rise


@pytest.fixture
def moving(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Moving:
    """Of a machine that a job has used for an hour: offered at 4 $, which may become 10 $."""
    monkeypatch.setattr(exhaustion, "LEAST_S", 0.0)
    moves = Moving()
    monkeypatch.setattr(lab.market, "rise_usd_h", moves.rise_usd_h, raising=False)
    machine, rental = handed_over(lab.opened)
    hour_ago = time.time() - 3600
    lab.opened.rentals.change(
        rental, created_unix=hour_ago, spot=True, most_usd_h=10.0, on_demand_usd_h=10.0, job=JOB
    )
    left_job(
        lab, attempts=[attempt_on(machine, rental, began_unix=hour_ago)], max_usd=6.0,
        created_unix=hour_ago - 1,
    )  # fmt: skip
    return moves


def _stop(lab: Lab) -> Stop | None:
    (record,) = lab.opened.jobs.open()
    with PlainRunner(lab.opened):
        Limits(lab.opened).look(record)
    return lab.opened.jobs.stop_asked(JOB)


def test_a_price_that_may_rise_ends_a_job_when_it_has_risen_and_not_before(
    lab: Lab, moving: Moving
) -> None:
    """At the most that it may cost, the job would have been stopped after 36 minutes."""
    assert _stop(lab) is None
    moving.rise = 1.9
    assert _stop(lab) is None
    moving.rise = 2.1
    stop = _stop(lab)
    assert stop is not None and stop.state == "over budget"
    assert stop.why.startswith("its money is spent: 6.10 $ of 6.00 $ so far")


def test_what_nobody_can_say_of_a_price_counts_at_the_most(lab: Lab, moving: Moving) -> None:
    moving.rise = None
    stop = _stop(lab)
    assert stop is not None and "10.00 $ of 6.00 $" in stop.why


def test_a_machine_that_is_lost_when_the_money_is_spent_is_the_end_of_the_job(
    lab: Lab, moving: Moving, story: Story
) -> None:
    """Nothing is rented in its place, and the report says what it cost beside its limit."""
    moving.rise = 2.5
    assert _stop(lab) is not None
    lab.market.alive.clear()
    (record,) = lab.opened.jobs.open()
    ended = drive_job(lab, record)
    assert (ended.state, ended.attempts[-1].end) == ("over budget", "machine lost")
    assert story.did == [] and len(ended.attempts) == 1 and lab.opened.rentals.open() == []
    assert lab.opened.jobs.open() == []
    rows = {row["what"]: row["value"] for row in job_rows(lab, ended)}
    assert rows["limits"] == "6.50 of 6.00 $"  # of the hour, at its mean price
    assert rows["saved by spot"] == "3.50 $ of 10.00 $ (35 %), for the same hours on demand"


def test_a_machine_that_is_lost_before_the_money_is_spent_has_no_dearer_successor(
    lab: Lab, place: Path, request: pytest.FixtureRequest
) -> None:
    """The loss is seen first: what is left pays for no other machine for an hour."""
    hibernate_plainly(lab.opened)
    request.getfixturevalue("moving")
    lab.market.alive.clear()
    (record,) = lab.opened.jobs.open()
    ended = drive_job(lab, record)
    assert (ended.state, len(ended.attempts)) == ("over budget", 1)
    assert lab.opened.rentals.open() == []
    assert "what is left of the job's money pays for" in ended.why


def test_a_job_that_has_ended_costs_no_more_while_its_machine_is_kept(
    lab: Lab, moving: Moving
) -> None:
    (record,) = lab.opened.jobs.open()
    half = record.created_unix + 1 + 1800
    ended = msgspec.structs.replace(record, state="cancelled", ended_unix=half)
    cost = cost_of(lab.opened, ended)
    assert cost.usd == pytest.approx(5.0, abs=0.01)  # of at most 10 $ an hour
    (rental,) = lab.opened.rentals.open()
    lab.opened.rentals.change(rental, state="ended")  # a day later, say
    assert cost_of(lab.opened, ended).usd == pytest.approx(5.0, abs=0.01)


def test_what_spot_saves_is_not_known_where_its_market_states_no_price_on_demand(
    lab: Lab, moving: Moving
) -> None:
    (record,) = lab.opened.jobs.open()
    (rental,) = lab.opened.rentals.open()
    lab.opened.rentals.change(rental, on_demand_usd_h=0.0)
    assert cost_of(lab.opened, record).saved.startswith("not known")
    lab.opened.rentals.change(lab.opened.rentals.open()[0], spot=False)
    assert cost_of(lab.opened, record).saved == ""


def _approved(**more: Any) -> Approval:
    return Approval(approved_unix=time.time(), **more)


def test_a_job_goes_on_past_its_limit_where_a_person_has_approved_it(
    lab: Lab, moving: Moving, story: Story
) -> None:
    (record,) = lab.opened.jobs.open()
    with PlainRunner(lab.opened):
        assert approve(lab.opened, record, _approved(max_usd=40.0)).max_usd == 40.0
    moving.rise = 5.9
    seen: list[float] = []
    story.during = lambda: seen.append(lab.opened.jobs.open()[0].max_usd)
    ended = drive_job(lab, record)
    assert (ended.state, ended.max_usd, seen) == ("succeeded", 40.0, [40.0])
    assert lab.opened.jobs.approved(JOB) is None  # it goes with the job


def test_an_approval_counts_while_the_job_is_driven(lab: Lab, moving: Moving, story: Story) -> None:
    moving.rise = 1.0
    (record,) = lab.opened.jobs.open()

    def during() -> None:
        approve(lab.opened, lab.opened.jobs.open()[0], _approved(max_usd=40.0))
        until(lambda: lab.opened.jobs.open()[0].max_usd == 40.0, "its driver has read it")
        moving.rise = 5.9

    story.during = during
    assert drive_job(lab, record).state == "succeeded"


def test_an_approval_that_cannot_be_believed_changes_no_limit(
    lab: Lab, moving: Moving, story: Story
) -> None:
    """Whoever holds the bucket's key alone can write one, and not sign it."""
    moving.rise = 2.5
    (record,) = lab.opened.jobs.open()
    key = ObjectKey(f"workspaces/{DEMO}/jobs/approved/{JOB}")
    lab.store.put(key, b'{"most_usd": 1000.0, "approved_unix": 1.0}')
    story.during = lambda: until(
        lambda: lab.opened.jobs.stop_asked(JOB) is not None, "the job is asked to stop"
    )
    ended = drive_job(lab, record)
    assert (ended.state, ended.max_usd) == ("over budget", 6.0)


def test_an_approval_replaces_one_that_cannot_be_believed(lab: Lab, moving: Moving) -> None:
    (record,) = lab.opened.jobs.open()
    key = ObjectKey(f"workspaces/{DEMO}/jobs/approved/{JOB}")
    lab.store.put(key, b'{"most_usd": 1000.0, "approved_unix": 1.0}')
    with PlainRunner(lab.opened):
        assert approve(lab.opened, record, _approved(max_hours=3.0)).max_usd == 6.0


def test_an_approval_that_comes_too_late_or_would_never_end_is_refused(
    lab: Lab, moving: Moving
) -> None:
    (record,) = lab.opened.jobs.open()
    endless = msgspec.structs.replace(record, max_usd=0.0)
    with pytest.raises(InvalidInput, match="nothing would end it"):
        approve(lab.opened, endless, _approved(past_budgets=True))
    assert lab.opened.jobs.approved(JOB) is None
    moving.rise = 2.5
    assert _stop(lab) is not None
    with pytest.raises(InvalidInput, match=r"being stopped already .*Run it again"):
        approve(lab.opened, record, _approved(max_usd=40.0))
    assert lab.opened.jobs.approved(JOB) is None  # else it would hold for the next run of the job


@pytest.mark.parametrize(
    ("attempts", "goes_on"),
    [([], True), ([{"end": "machine lost"}], True), ([{"end": "command ended"}], False)],
    ids=["nodes of its first attempt", "nodes after a loss", "its end"],
)
def test_an_approval_holds_while_the_nodes_of_a_job_are_renewed(
    lab: Lab, attempts: list[dict[str, Any]], goes_on: bool
) -> None:
    """Its machine is hibernated, and the job goes on with new ones."""
    machine, rental = handed_over(lab.opened)
    of = [attempt_on(machine, rental, ended_unix=2.0, status=0, **one) for one in attempts]
    record = left_job(lab, nodes=2, state="hibernating", attempts=of, max_usd=0.01)
    if not goes_on:
        with pytest.raises(InvalidInput, match=r"being stopped already \(hibernating\)"):
            approve(lab.opened, record, _approved(max_usd=40.0))
        assert lab.opened.jobs.approved(JOB) is None
        return
    approve(lab.opened, record, _approved(max_hours=1.0))
    assert approve(lab.opened, record, _approved(max_usd=40.0)).max_usd == 40.0
    approval = lab.opened.jobs.approved(JOB)
    assert approval is not None and (approval.max_usd, approval.max_hours) == (40.0, 1.0)


def test_the_money_of_a_job_is_watched_while_its_nodes_are_renewed(lab: Lab) -> None:
    machine, rental = handed_over(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - 3600, job=JOB)
    lost = attempt_on(machine, rental, ended_unix=2.0, end="machine lost")
    left_job(lab, nodes=2, state="hibernating", attempts=[lost], max_usd=1.0)
    stop = _stop(lab)
    assert stop is not None and "its money is spent" in stop.why


def test_what_was_approved_before_and_not_read_yet_holds_beside_the_next_approval(
    lab: Lab, moving: Moving
) -> None:
    (record,) = lab.opened.jobs.open()
    approve(lab.opened, record, _approved(max_usd=40.0, past_budgets=True))
    then = approve(lab.opened, record, _approved(max_hours=3.0))
    assert (then.max_usd, then.max_hours, then.past_budgets) == (40.0, 3.0, True)
    approve(lab.opened, record, _approved(max_usd=50.0))
    approval = lab.opened.jobs.approved(JOB)
    assert approval is not None
    assert msgspec.structs.replace(record, **approval.changes(record)) == msgspec.structs.replace(
        record, max_usd=50.0, max_hours=3.0, past_budgets=True
    )


def test_past_the_budgets_a_job_rents_up_to_its_own_limit(lab: Lab) -> None:
    offers = Offers(list(lab.market.on_sale), [], {})
    spent = OpenBudget(Budget(name="month", usd_month=Decimal("0.01"), workspaces=(DEMO,)), tuple)
    opened = replace(lab.opened, budgets=lambda: [spent])
    with PlainRunner(opened):
        with pytest.raises(BudgetExceeded, match="budget month"):
            within_budgets(opened, offers, 1)
        approved = replace(opened, past_budgets=True, most_usd_h=4.0)
        assert within_budgets(approved, offers, 1).fitting == offers.fitting
        check_budgets(approved, 4.0)
        with pytest.raises(BudgetExceeded, match=r"pays for 3\.9"):
            within_budgets(replace(approved, most_usd_h=3.9), offers, 1)
