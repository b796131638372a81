"""One record that cannot be believed: what does not concern it goes on, and says that it is without
it. Whoever ends, deletes or rents by a set of records waits until all of it can be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from flows import compare, job_status, jobs, prune, reconcile, spend, watch
from flows.procedures.watch import leftovers, rows
from tasks.machines import renting
from tasks.overview import overview
from tasks.watch import LeftLook, MachineLook
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import Shows, plain, run_plainly
from tests.fixtures.rentals import at_another_account, handed_over, standing
from torpor.control.idleness import Verdict
from torpor.control.jobs.records import Job
from torpor.control.overview import Overviews
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import ProviderUnavailable, RecordRefused
from torpor.shared.values import MIB, MachineId, ObjectKey

_WATCH = import_module("flows.watch")  # whose name in the package is the flow itself
HOUR = 3600.0
FORGED = "0a0a0a0a0a0a"
BODIES: dict[str, bytes] = {
    "unsigned": b'{"state":"handed over"}',
    "no record": b"\xff" * 100,
    "longer than any record": b"[" * (2 * MIB),
}


@pytest.fixture
def refuse(lab: Lab) -> Callable[..., ObjectKey]:
    def put(name: str, body: bytes = BODIES["unsigned"]) -> ObjectKey:
        key = ObjectKey(f"workspaces/{name}")
        lab.store.put(key, body)
        return key

    return put


def _at_once(look: Callable[..., Any]) -> Any:
    """In place of a step that is submitted."""
    return SimpleNamespace(submit=lambda *of: SimpleNamespace(result=lambda: look(*of)))


def _watch(lab: Lab, **options: Any) -> WatchReport:
    with plain(lab.opened):
        return watch.fn(dry_run=False, **options)


def _overview(lab: Lab) -> Overviews:
    """As `torpor status` shows it."""
    with plain(lab.opened):
        seen = overview({"demo": lab.opened}, lambda one: renting(one).machines({}), [])
    return Overviews(seen)


@pytest.mark.rule("H17")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["rentals/open", "rentals/ended", "jobs/open", "jobs/ended"])
def test_what_things_cost_is_shown_without_it(
    lab: Lab, refuse: Callable[..., ObjectKey], kind: str, body: str
) -> None:
    """Before, one object of one workspace kept the figures of the whole bucket from being shown."""
    now = time.time()
    lab.record("other", state="ended", machine="m", created_unix=now - 2 * HOUR,
               seen_unix=now - HOUR, ended_unix=now - HOUR)  # fmt: skip
    lab.record(state="ended", machine="n", created_unix=now - 3 * HOUR, seen_unix=now - HOUR,
               ended_unix=now - HOUR)  # fmt: skip
    key = refuse(f"demo/{kind}/{FORGED}", BODIES[body])
    with Shows(lab.opened) as shows:
        table = spend.fn(DEMO, months=2)
        assert {*table[table.kind == "machines"].workspace} == {"demo", "other"}
        of_rentals = "rentals" in kind  # no other record has a cost
        left_out = [row["cost"] for row in shows.rows if row["month"] == "not counted"]
        assert any(key in cost for cost in left_out) == of_rentals
        assert ("Records that cannot be believed" in shows.markdown) == of_rentals
        compare.fn(DEMO)
        named = [row["outcome"] for row in shows.rows if row["market"] == "not counted"]
        assert any(key in why for why in named) == of_rentals


@pytest.mark.parametrize("kind", ["rentals/open", "rentals/ended", "jobs/open"])
def test_status_shows_the_machines_that_it_does_not_concern(
    lab: Lab, refuse: Callable[..., ObjectKey], kind: str
) -> None:
    """Before, a machine and what it costs were missing from the sum."""
    machine, _ = handed_over(lab.opened)
    key = refuse(f"demo/{kind}/{FORGED}")
    seen = _overview(lab)
    (row,) = seen.workspaces
    assert (row.state, row.machines) == ("awake", [f"{machine.id} at vast:1"])
    assert key in row.trouble and row.month_usd is None
    assert "at least 4.000 $/h" in seen.title()
    told = "not all that is on record of workspace demo can be read"
    if kind != "rentals/ended":  # what is open says whether a machine may be ended
        told = "workspace demo cannot be looked at"
    assert told in _watch(lab).alerts


def test_watch_names_it_once_beside_a_machine_that_nobody_can_look_at(
    lab: Lab, refuse: Callable[..., ObjectKey]
) -> None:
    """Without the machine's market, and with a record that says nothing of machines."""
    machine = at_another_account(lab.opened)
    lab.lose_machines()
    of_machine = f"machine {machine.id} of workspace demo cannot be judged"
    assert _watch(lab).alerts == [of_machine]
    refuse(f"demo/rentals/ended/{FORGED}")
    told = "not all that is on record of workspace demo can be read"
    assert sorted(_watch(lab).alerts) == [of_machine, told]


def test_a_workspace_whose_only_rental_it_is_does_not_count_as_asleep(
    lab: Lab, refuse: Callable[..., ObjectKey]
) -> None:
    _, rental = handed_over(lab.opened)
    refuse(f"demo/rentals/open/{rental.label.rental}")
    (row,) = _overview(lab).workspaces
    assert row.state == "awake?"
    (unknown,) = _watch(lab).watched
    assert unknown.kind == "unknown" and f"rentals/open/{rental.label.rental}" in unknown.reason


def test_a_refused_record_of_what_has_ended_asks_no_market(
    lab: Lab, refuse: Callable[..., ObjectKey]
) -> None:
    """A market that is silent would make a workspace that is asleep `awake?`."""
    lab.record(state="ended", machine="n", created_unix=time.time() - 2 * HOUR,
               seen_unix=time.time() - HOUR, ended_unix=time.time() - HOUR)  # fmt: skip
    key = refuse(f"demo/rentals/ended/{FORGED}")
    lab.market.away = ProviderUnavailable("vast: 503")
    (row,) = _overview(lab).workspaces
    assert (row.state, row.month_usd) == ("new", None)
    assert key in row.trouble and "503" not in row.trouble


@pytest.mark.rule("H17")
def test_a_refused_rental_hides_no_other_machine_of_its_workspace(
    lab: Lab, refuse: Callable[..., ObjectKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at, so that it goes on to save itself; and nothing is hibernated or ended."""
    machine, _ = handed_over(lab.opened)
    other, rental = handed_over(lab.opened)
    key = refuse(f"demo/rentals/open/{rental.label.rental}")
    looked: list[MachineId] = []

    def seen(of: Any, one: Any, *_: Any) -> MachineLook:
        looked.append(one.id)
        return MachineLook(Verdict("idle", "nobody uses it"))

    monkeypatch.setattr(_WATCH, "look_at", _at_once(seen))
    report = _watch(lab)
    assert looked == [machine.id]
    (row,) = [one for one in report.watched if one.machine == machine.id]
    assert (row.kind, row.hibernates) == ("idle", False) and key in row.next_step
    assert [one.machine.id for one in report.findings if one.machine] == [other.id]
    assert {one.id for one in lab.machines()} == {machine.id, other.id}
    found = run_plainly(lab.opened, reconcile)
    assert {one.kind for one in found.findings} == {"in use", "not believed"}
    assert "WITHOUT 1 record" in found.title()
    assert any(key in row["next step"] for row in found.rows())
    with pytest.raises(RecordRefused, match=key):
        run_plainly(lab.opened, reconcile, abandoned=True)


def test_what_a_killed_run_left_stays_while_a_job_of_its_workspace_cannot_be_read(
    lab: Lab, refuse: Callable[..., ObjectKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be about to go on there."""
    machine, rental = standing(lab.opened)
    lab.opened.rentals.change(rental, created_unix=time.time() - HOUR)
    refuse(f"demo/jobs/open/{FORGED}")
    monkeypatch.setattr(rows, "newest_made_unix", _at_once(lambda _: 1.0))
    monkeypatch.setattr(leftovers, "look_at_left", _at_once(lambda *_: LeftLook(False)))
    monkeypatch.setattr(leftovers, "LEFT_S", 0.0)
    (left,) = _watch(lab).left
    assert (left.machine, left.act) == (machine.id, "")


def test_the_list_of_jobs_and_the_cost_of_one_name_it(
    lab: Lab, refuse: Callable[..., ObjectKey]
) -> None:
    facts: dict[str, Any] = {"workspace": DEMO, "block": "demo", "command": ["true"]}
    lab.opened.jobs.take(Job(id="0123456789ab", created_unix=1.0, **facts), "run-1")
    keys = [refuse(f"demo/jobs/{kind}/{FORGED}") for kind in ("ended", "open")]
    with plain(lab.opened):
        listed = jobs.fn([DEMO])
    assert [job.id for job in listed.open] == ["0123456789ab"]
    assert all(key in listed.unread["demo"] for key in keys)
    rental = refuse(f"demo/rentals/open/{FORGED}")
    answer = run_plainly(lab.opened, job_status, job="0123456789ab", lines=0)
    assert rental in str(answer.rows())


@pytest.mark.rule("H17")
@pytest.mark.parametrize("kind", ["rentals/open", "rentals/ended", "jobs/open"])
def test_prune_deletes_nothing_while_it_is_there(
    lab: Lab, refuse: Callable[..., ObjectKey], kind: str
) -> None:
    """It may name the snapshot whose packs a prune would delete."""
    lab.store.put(ObjectKey("workspaces/demo/packs/aa/" + "a" * 32), b"x")
    key = refuse(f"demo/{kind}/{FORGED}")
    with pytest.raises(RecordRefused, match=key):
        run_plainly(lab.opened, prune, dry_run=False)
    assert [*lab.store.list("workspaces/demo/marks/")] == []
