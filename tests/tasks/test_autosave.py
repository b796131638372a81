"""What a machine says of its own saves, and what a wake takes of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flows import delete_snapshots
from tasks.autosave import renew_autosave
from tasks.plain_runner import PlainRunner
from tasks.restore import pick_snapshot_to_wake
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.lab_saves import save_by_schedule
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.small_saves import put_save, verified_save
from torpor.control.jobs.records import Job
from torpor.control.remote.agent import Agent
from torpor.shared.errors import OtherPaths
from torpor.shared.wire.autosave import Autosave
from torpor.shared.wire.job import NoticeSource
from torpor.shared.wire.request import parse_answer


class _Says(Agent):
    def __init__(self, **state: Any) -> None:
        self.state = state
        self.asked: list[str] = []
        self.handed: Autosave | None = None

    def call(self, request: Any, **_: Any) -> Any:
        self.asked.append(request.op)
        self.handed = request if isinstance(request, Autosave) else self.handed
        says = {"lives": True, "left": 99, "lasts_s": 3600.0, "interval_s": 300.0, **self.state}
        return parse_answer(type(request), says)


@pytest.mark.parametrize("unix", [-1.0, 1e10, 2.0**53, 1e300, float("inf")])
def test_a_machine_that_names_no_possible_time_ends_no_watch(lab: Lab, unix: float) -> None:
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    opened = replace(lab.opened, spec=spec)
    machine = lab.rent()
    with PlainRunner(opened):
        said = renew_autosave(opened, _Says(stored_unix=unix, until_unix=9e9), machine)
    possible = unix in (1e10, 2.0**53)
    assert said.words.startswith("saved at " if possible else "its own saves cannot go on")
    assert said.fail is not possible


@pytest.mark.parametrize(
    ("spot", "is_told", "saves"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_spot_machine_whose_market_gives_notice_saves_also_without_a_schedule(
    lab: Lab, spot: bool, is_told: bool, saves: bool
) -> None:
    machine = lab.rent()
    (rental,) = lab.opened.rentals.open()
    lab.opened.rentals.change(rental, spot=spot)
    notices = (NoticeSource("gcp", "http://metadata"),) if is_told else ()
    lab.market.abilities = msgspec.structs.replace(lab.market.abilities, notices=notices)
    says = _Says(lives=False)
    with PlainRunner(lab.opened):
        begins = renew_autosave(lab.opened, says, machine)
        assert (begins.words != "") is saves
        assert (says.handed is not None) is saves
        if says.handed is not None:
            book = says.handed.book
            assert (book.every_s, len(book.saves), says.handed.notices) == (0.0, 4, [*notices])
            now = _Says(until_unix=time.time() + 3600, unsaved_s=1e6, interval_s=0.0, left=4)
            goes_on = renew_autosave(lab.opened, now, machine)
            assert goes_on.words.startswith("saves when its market takes it away, until ")
            assert (goes_on.fail, now.handed) == (False, None)


def test_a_block_that_wants_saves_from_now_on_gets_them_at_the_next_look(lab: Lab) -> None:
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    machine = lab.rent()
    says = _Says(until_unix=time.time() + 3600, interval_s=0.0)
    with PlainRunner(lab.opened):
        renew_autosave(replace(lab.opened, spec=spec), says, machine)
    assert says.handed is not None and says.handed.book.every_s == 300.0


@pytest.mark.parametrize("error", ["", "a snapshot that it may refer to is gone"])
def test_a_machine_whose_save_failed_gets_grants_on_what_is_there_now(lab: Lab, error: str) -> None:
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    machine = lab.rent()
    says = _Says(until_unix=time.time() + 3600, error=error)
    with PlainRunner(lab.opened):
        said = renew_autosave(replace(lab.opened, spec=spec), says, machine)
    assert said.fail is bool(error)
    assert says.asked == ["autosave.look", *["autosave"] * bool(error)]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"lives": False}, "nothing saved it until now"),
        ({"unsaved_s": 1000.0, "interval_s": 60.0}, "its newest save is 17 min old"),
        ({"unsaved_s": 1000.0, "interval_s": 400.0}, ""),
        ({"unsaved_s": 800.0, "interval_s": 60.0}, ""),
    ],
    ids=["its process is gone", "old", "seldom by its cost", "15 min are not old"],
)
def test_a_machine_that_does_not_save_its_workspace_is_an_alert(
    lab: Lab, state: dict[str, Any], words: str
) -> None:
    """One that begins to save at each look, for ever, is told like one whose saves fail."""
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    machine = lab.rent()
    says = _Says(**{"until_unix": time.time() + 3600, "stored_unix": 1e9, **state})
    with PlainRunner(lab.opened):
        said = renew_autosave(replace(lab.opened, spec=spec), says, machine)
    assert said.fail is bool(words)
    assert words in said.words


def test_a_machine_whose_newest_save_was_deleted_is_not_said_to_be_saved_and_saves_again(
    lab: Lab,
) -> None:
    """Its tree is equal to a snapshot that nobody has any more."""
    place = lab.home(lab.rent().id) / "workspace"
    place.mkdir()
    (place / "notes").write_text("0")
    hibernate_plainly(lab.opened, destroy=False)
    (place / "work").write_text("work")
    saved = save_by_schedule(lab)
    assert saved is not None
    assert save_by_schedule(lab) is None
    run_plainly(lab.opened, delete_snapshots, snapshots=[saved], even_newest=saved)
    opened = replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, save_minutes=5))
    times = {"stored_unix": time.time(), "until_unix": time.time() + 3600}
    says = _Says(line=saved, **times)
    (machine,) = lab.machines()
    with PlainRunner(opened):
        said = renew_autosave(opened, says, machine)
    assert f"snapshot {saved}, its newest, is not in the store: it was deleted" in said.words
    assert says.asked == ["autosave.look", "autosave"]
    again = save_by_schedule(lab)
    assert again is not None
    says = _Says(line=again, **times)
    with PlainRunner(opened):
        assert renew_autosave(opened, says, machine).words.startswith("saved at ")
    assert says.asked == ["autosave.look"]


@pytest.mark.rule(13)
def test_a_job_is_no_excuse_for_a_machine_without_saves_once_it_has_ended(lab: Lab) -> None:
    """Its command may run on. The process gets a book without the job."""
    spec = msgspec.structs.replace(lab.opened.spec, save_minutes=5)
    opened, machine = replace(lab.opened, spec=spec), lab.rent()
    record = Job(id="3f2a9c81d04e", workspace=DEMO, block=DEMO, command=["true"], created_unix=1.0)
    job = opened.jobs.take(record, "a run")
    says = _Says(job=job.id, until_unix=1e6)
    with PlainRunner(opened):
        said = renew_autosave(opened, says, machine)
        assert (said.words, said.fail) == (
            f"job {job.id} saves it, until 1970-01-12 13:46 UTC by itself",
            False,
        )
        opened.jobs.end(job)
        said = renew_autosave(opened, says, machine)
    assert f"job {job.id}, which is over, saved it until now" in said.words
    assert says.asked == ["autosave.look", "autosave.look", "autosave"]
    assert says.handed is not None
    assert (says.handed.book.job, says.handed.instead_of) == ("", job.id)


def test_what_a_machine_writes_after_it_was_given_up_does_not_stand_before_its_successor(
    lab: Lab,
) -> None:
    kept = put_save(lab.store, 0, [])
    verified_save(lab.store, kept)
    successor = put_save(lab.store, 30, [kept], own_save=1, autosave=1)
    put_save(lab.store, 10, [kept], own_save=1, autosave=1)
    with PlainRunner(lab.opened):
        found, _ = pick_snapshot_to_wake(lab.opened, "newest")
    assert found.snapshot == successor


def test_a_wake_does_not_pass_over_an_autosave_of_other_directories(lab: Lab) -> None:
    kept = put_save(lab.store, 0, [])
    verified_save(lab.store, kept)
    put_save(lab.store, 10, [kept], roots=["~/workspace", "~/more"], own_save=1, autosave=1)
    with PlainRunner(lab.opened), pytest.raises(OtherPaths, match="more"):
        pick_snapshot_to_wake(lab.opened, "newest")
