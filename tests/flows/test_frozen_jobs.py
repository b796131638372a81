"""Jobs whose commands are frozen at a spot notice, and go on on another machine."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import backup, job
from flows.procedures.job import attempt, start
from tasks.plain_runner import PlainRunner
from tasks.programs import Freezer
from tests.fixtures.driver import hurried
from tests.fixtures.metadata import EVENTS, Metadata
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.waiting import PATIENCE_S, until
from tests.fixtures.world import WORKSPACE, World
from torpor.control.jobs.records import Jobs
from torpor.control.jobs.report import JobReport
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.offers import Offer
from torpor.machine.supervisor.folder import JobFolder
from torpor.shared.errors import WorkspaceBusy
from torpor.shared.values import MachineId, Want
from torpor.shared.wire.job import JobState

_CHAIN = """
import hashlib, os, time
link = os.urandom(8).hex()  # in memory alone
with open("chain", "a") as chain:
    while not os.path.exists("stop"):
        print(link, file=chain, flush=True)
        print("a line of its log", flush=True)
        link = hashlib.sha256(link.encode()).hexdigest()[:16]
        time.sleep(0.05)
"""


class Running:
    """A job in a thread, whose market gives notice when the test says so."""

    def __init__(self, world: World, metadata: Metadata, threads: ThreadPoolExecutor) -> None:
        self._world, self._metadata, self._threads = world, metadata, threads
        self._market = threading.Lock()  # no step of the job begins while its machine is taken
        self.stands_by = threading.Event()
        self.meanwhile: Callable[[str], object] = lambda step: None  # before each step of the job
        self.place = Path(world.access.spec.paths[0])
        self._done: Future[JobReport]

    def begin(self) -> None:
        self._world.rent()
        self.place.mkdir()
        (self.place / "chain.py").write_text(_CHAIN)
        hibernate_plainly(self._world.opened)
        shutil.rmtree(self.place)
        self._done = self._threads.submit(self._run)
        until(lambda: self.stands_by.is_set() and len(self.lines()) > 3, "the job runs")

    def gives_notice(self, left_s: float) -> JobState:
        """What the machine has done about it."""
        event = {"EventId": "1", "EventType": "Preempt"}
        until_unix = formatdate(time.time() + left_s, usegmt=True)
        self._metadata.say(EVENTS, {"Events": [{**event, "NotBefore": until_unix}]})
        return until(self._decided, "the machine has frozen the command, or said why not")

    def knows_why(self) -> None:
        """The job's run has heard why the command was not frozen."""
        jobs = Jobs(self._world.direct, WORKSPACE)
        until(lambda: jobs.open()[0].attempts[-1].error, "the run knows")

    def takes_the_machine(self, then: Callable[[], object] = lambda: None) -> None:
        with self._market:
            self._metadata.says.clear()
            self._world.lose_machines()
            shutil.rmtree(self.place)
            self.stands_by.clear()
            then()
        self.stands_by.wait(PATIENCE_S)
        self.grows()

    def is_woken_by_its_user(self) -> None:
        wake_plainly(self._world.opened)

    def is_backed_up(self) -> None:
        run_plainly(self._world.opened, backup)

    def grows(self) -> None:
        seen = len(self.lines())
        until(lambda: len(self.lines()) > seen + 3, "the command works")

    def ends(self) -> JobReport:
        assert not (self.place / ".torpor-process" / self.id).exists()
        (self.place / "stop").touch()
        return self._done.result()

    def lines(self) -> list[str]:
        chain = self.place / "chain"
        return chain.read_text().split() if chain.exists() else []

    def breaks(self) -> int:
        """How often a line is not the hash of the line before."""
        lines = self.lines()
        made = [hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines[:-1]]
        return sum(was != now for was, now in zip(made, lines[1:], strict=True))

    @property
    def id(self) -> str:
        (found,) = Jobs(self._world.direct, WORKSPACE).open()
        return found.id

    def log(self, job_id: str) -> str:
        return (self.place / ".torpor-jobs" / f"{job_id}.log").read_text()

    def _decided(self) -> JobState | None:
        machine = self._world.machines()[0].id
        state, _ = JobFolder(self._world.home(machine) / ".torpor", self.id).look()
        return state if state.frozen or state.not_frozen else None

    def _run(self) -> JobReport:
        with PlainRunner(self._world.opened, wait_factor=0.1, before=self._before):
            report: JobReport = job.fn(WORKSPACE, ["python3", "chain.py"], save_minutes=1000)
        return report

    def _before(self, step: str) -> None:
        with self._market:
            pass
        self.meanwhile(step)


@pytest.fixture
def running(
    sealed_world: World, metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    was = sealed_world.access
    paths = [str(tmp_path / "workspace")]  # the same on each machine, as on real ones
    spec = msgspec.structs.replace(was.spec, paths=paths, process="try")
    notices = [metadata.source("azure")]
    world = replace(sealed_world, access=msgspec.structs.replace(was, spec=spec, notices=notices))
    with hurried(), ThreadPoolExecutor(1) as threads:
        made = Running(world, metadata, threads)
        hand_over = attempt.stand_by

        def note(*given: Any) -> float:
            again_s = hand_over(*given)
            made.stands_by.set()
            return again_s

        monkeypatch.setattr(attempt, "stand_by", note)
        yield made
        if made.place.exists():  # of a test that has failed
            (made.place / "stop").touch()


@pytest.mark.rule(16)
def test_a_job_that_is_frozen_at_a_notice_goes_on_elsewhere_and_loses_nothing(
    running: Running,
) -> None:
    """A backup right before it goes on removes nothing of what is frozen."""
    failures: list[BaseException | None] = []

    def back_up(step: str) -> None:
        if step == "start attempt 2":
            with ThreadPoolExecutor(1) as threads:
                failures.append(threads.submit(running.is_backed_up).exception())

    running.meanwhile = back_up
    running.begin()
    for _ in range(2):
        state = running.gives_notice(120)
        assert (state.state, state.not_frozen, state.save_error) == ("ended", "", "")
        running.takes_the_machine()
    job_id = running.id
    report = running.ends()
    assert running.breaks() == 0
    assert [type(failure) for failure in failures] == [WorkspaceBusy]
    assert report.lost_s == 0.0
    assert [one.end for one in report.job.attempts] == ["machine lost"] * 2 + ["command ended"]
    assert "machine lost, its command was frozen in time" in str(report.rows())
    log = running.log(job_id)
    assert log.count("goes on (") == 2
    assert log.count("a line of its log") == len(running.lines())


def test_a_moments_fault_does_not_lose_what_is_frozen_and_its_machine_is_chosen_for_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove, offers = start.prove_freezing, LocalProvider.offers
    machines: list[MachineId | None] = []
    wants: list[Want] = []

    def fail_first(opened: Any, session: Any, rental: Any, **how: Any) -> Freezer:
        machines.append(rental.machine)
        if len(machines) == 2:
            return Freezer(why_not="a moment's fault")
        return prove(opened, session, rental, **how)

    def note(provider: LocalProvider, want: Want) -> list[Offer]:
        wants.append(want)
        return offers(provider, want)

    monkeypatch.setattr(start, "prove_freezing", fail_first)
    monkeypatch.setattr(LocalProvider, "offers", note)
    running.begin()
    assert running.gives_notice(120).frozen
    running.takes_the_machine()
    running.ends()
    assert running.breaks() == 0
    first, *_, last = wants
    assert len(set(machines)) == 2
    assert first.frozen is None and last.frozen is not None


@pytest.mark.rule(16)
def test_on_a_machine_that_somebody_else_woke_it_begins_from_the_files(running: Running) -> None:
    """They may be newer than what was frozen."""
    running.begin()
    assert running.gives_notice(120).frozen
    running.takes_the_machine(running.is_woken_by_its_user)
    report = running.ends()
    assert running.breaks() == 1
    assert [one.end for one in report.job.attempts] == ["machine lost", "command ended"]


@pytest.mark.rule(16)
def test_with_too_short_a_notice_it_goes_on_from_its_save(running: Running) -> None:
    running.begin()
    state = running.gives_notice(3)
    assert state.saved is not None
    assert "of memory, which take about" in state.not_frozen
    running.knows_why()
    running.takes_the_machine()
    report = running.ends()
    assert running.breaks() == 1
    first, second = report.job.attempts
    assert (first.end, first.saved, second.status) == ("machine lost", True, 0)
    assert "its command was not frozen: it holds" in first.error


@pytest.mark.rule(16)
def test_where_the_market_leaves_the_machine_it_goes_on_there(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what its user changed meanwhile, as any program does."""
    running.begin()
    assert running.gives_notice(120).frozen
    (running.place / "notes").write_text("of its user")
    monkeypatch.setattr(attempt, "TAKEN_S", 0.0)
    running.grows()
    report = running.ends()
    assert running.breaks() == 0
    shutil.rmtree(running.place)
    running.is_woken_by_its_user()
    assert (running.place / "notes").read_text() == "of its user"
    first, second = report.job.attempts
    assert (first.machine, first.lost_s) == (second.machine, 0.0)
