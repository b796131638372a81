"""Watch: an idle machine is hibernated, a busy one stays, one that nobody can judge stays and
warns."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from blocks import Workspace
from flows import create, hibernate, wake, watch
from tasks import watch as look
from tasks.alert_server import NO_WATCH, Sleeping
from tasks.autosave import AutosaveSummary
from tasks.jobs import start_command, stop_command
from tasks.machines import open_session, renting
from tasks.overview import overview
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.activity import sample
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import Lab
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.rentals import at_another_account, standing
from tests.fixtures.world import World
from torpor.control.providers.provider import Absent, Provider
from torpor.control.remote.session import SshSession
from torpor.control.reports import moment
from torpor.control.store.manifests import list_snapshots
from torpor.control.watch_report import Watched, WatchReport
from torpor.machine.sampler.ring import RECORDS, Ring, boot_clock_s, boot_id
from torpor.machine.supervisor.marker import MARKER
from torpor.shared.errors import MachineInUse, ProviderUnavailable, StoreUnavailable
from torpor.shared.values import IdleRules, Machine, MachineId, ObjectKey
from torpor.shared.wire.activity import NO_GPU, UNKNOWN
from torpor.shared.wire.job import StartJob
from torpor.shared.wire.request import Request

T = TypeVar("T")

_WINDOW_S = 300
_RULES = IdleRules(minutes=5, share=0.5, cpu_percent=0, network_kib_s=0, disk_kib_s=0, people=False)
"""Of a machine that shares its CPU, network, disk and SSH sessions with this test, and that may
take a minute to start its sampler."""


def _rules(**changes: Any) -> IdleRules:
    return msgspec.structs.replace(_RULES, **changes)


_CPU_ONLY = {"gpus": 0, "gpu_state": NO_GPU, "gpu": UNKNOWN}


@pytest.fixture
def opened(lab: Lab) -> OpenWorkspace:
    """Its machines have no GPU, as their samplers say."""
    (offer,) = lab.market.on_sale
    lab.market.on_sale = [msgspec.structs.replace(offer, gpu=None, gpu_count=0)]
    return replace(lab.opened, spec=msgspec.structs.replace(lab.opened.spec, idle=_RULES))


def _rented(lab: Lab | World, **seen: Any) -> MachineId:
    """A machine with work on it, whose sampler has seen this in each second of the window; the
    real sampler goes on with that ring."""
    machine = lab.rent().id
    workspace = lab.workspace(machine)
    workspace.mkdir(exist_ok=True)
    (workspace / "weights.bin").write_bytes(os.urandom(100_000))
    if seen:
        _seen(workspace.parent / ".torpor", 1, _WINDOW_S, **seen)
    return machine


def _seen(home: Path, number: int, seconds: int, **seen: Any) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    (home / MARKER).touch(mode=0o600)
    ring, now_s, boot = Ring(home), boot_clock_s(), boot_id()
    for n in range(seconds):
        at_s = now_s - seconds + 1 + n
        ring.append(sample(number + n, **{"at_s": at_s, "boot": boot, **_CPU_ONLY, **seen}))
    ring.close()


def _watch(
    *workspaces: OpenWorkspace, events: list[dict[str, Any]] | None = None, **options: Any
) -> WatchReport:
    on_event = None if events is None else events.append
    with PlainRunner(*workspaces, wait_factor=0.001, on_event=on_event):
        report: WatchReport = watch.fn(**options)
    return report


def _of(report: WatchReport, machine: MachineId) -> Watched:
    (found,) = [row for row in report.watched if row.machine == machine]
    return found


@pytest.mark.parametrize("when", ["before it is asked", "while it is asked"])
def test_a_machine_that_hangs_holds_up_no_verdict(
    world: World, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = world.wanting(idle=_RULES)
    busy, hangs = _rented(world, gpu=80), _rented(world, gpu=80)
    assert _of(_watch(opened), hangs).kind == "busy"
    call = SshSession.call

    def freeze() -> None:
        for agent in world.agents(hangs):
            os.kill(agent, signal.SIGSTOP)

    def frozen(self: SshSession, request: Request[T], **options: Any) -> T:
        freeze()
        return call(self, request, **options)

    if when == "before it is asked":
        freeze()
    else:
        monkeypatch.setattr(SshSession, "call", frozen)
    monkeypatch.setattr(look, "MACHINE_S", 30.0)
    report = _watch(opened)
    assert (_of(report, hangs).kind, _of(report, busy).kind) == ("unknown", "busy")


@pytest.mark.rule("H7")
def test_a_hostile_machine_is_unknown_and_the_other_one_is_judged(world: World) -> None:
    """Its host answers the probe what no probe says, and then goes on and on."""
    opened = world.wanting(idle=_RULES)
    busy, lies, shouts = (_rented(world, gpu=80) for _ in range(3))
    begins = r"printf '\ntorpor-begins\ntorpor-probe "
    for machine, script in (
        (lies, begins + r"""{"version": 5}\n'"""),
        (shouts, begins + "'; tr '\\0' '[' < /dev/zero | head -c 200000000"),
    ):
        command = world.home(machine) / "answer"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        keys = world.machine_folder(machine).authorized_keys
        keys.write_text(f'command="{command}" {keys.read_text()}')
    report = _watch(opened)
    assert _of(report, busy).kind == "busy"
    for machine in (lies, shouts):
        assert _of(report, machine).kind == "unknown"
        assert "has no Python" in _of(report, machine).reason


@pytest.mark.rule(3)
def test_idle_hibernates_busy_stays_and_unknown_stays_and_warns(
    lab: Lab, opened: OpenWorkspace, tmp_path: Path
) -> None:
    idle = _rented(lab, gpu_peak=90)
    busy = _rented(lab, gpu=80)
    fresh = _rented(lab)
    metrics = tmp_path / "metrics" / "torpor.prom"
    looked = _watch(opened, metrics=str(metrics))  # a dry run
    kinds = {machine: _of(looked, machine).kind for machine in (idle, busy, fresh)}
    assert kinds == {idle: "idle", busy: "busy", fresh: "unknown"}
    assert _of(looked, idle).next_step == "hibernate it: this was a dry run"
    assert _of(looked, fresh).price_usd_h == 4.0
    assert {machine.id for machine in lab.machines()} == {idle, busy, fresh}
    text = metrics.read_text()
    assert f'machine="{idle}"' in text and 'verdict="idle",workspace="demo"} 1.0' in text

    events: list[dict[str, Any]] = []
    acted = _watch(opened, events=events, dry_run=False)
    assert _of(acted, idle).next_step == "it was hibernated: wake it to work on it"
    assert {machine.id for machine in lab.machines()} == {busy, fresh}
    assert len(list_snapshots(lab.store, WORKSPACE)) == 1
    assert "no sampler has written" in _of(acted, fresh).reason
    assert [
        event["payload"]["machine"] for event in events if event["event"] == "torpor.machine.idle"
    ] == [idle]
    after = _watch(opened, dry_run=False)
    assert {row.machine for row in after.watched} == {busy, fresh}
    assert all(row.newest_unix for row in after.watched)


@pytest.mark.parametrize("sent", [True, False], ids=["files were sent", "nothing was sent"])
def test_a_machine_whose_job_never_began_is_hibernated_and_one_that_waits_for_a_person_stays(
    lab: Lab, opened: OpenWorkspace, sent: bool
) -> None:
    """`torpor run` was killed right after it had rented."""
    with PlainRunner(opened, wait_factor=0.001):
        left = create.fn(WORKSPACE, job="3f2a9c81d04e").id
    person = lab.rent().id
    for machine in (left, person):
        workspace = lab.workspace(machine)
        workspace.mkdir(exist_ok=True)
        if sent:
            (workspace / "sent.py").write_text("print()")
        _seen(workspace.parent / ".torpor", 1, _WINDOW_S, gpu_peak=0, cpu_peak=0)
    seen = _watch(opened)
    assert (_of(seen, left).kind, _of(seen, person).kind) == ("idle", "unknown")
    assert "nothing has run on it yet" in _of(seen, person).reason
    _watch(opened, dry_run=False)
    assert [machine.id for machine in lab.machines()] == [person]
    assert len(list_snapshots(lab.store, WORKSPACE)) == 1


def test_an_attempt_that_nobody_uses_is_ended(lab: Lab, opened: OpenWorkspace) -> None:
    _, rental = standing(opened)
    opened.rentals.change(rental, state="abandoned", why="its answer was lost")
    _watch(opened)  # a dry run
    assert len(lab.machines()) == 1
    _watch(opened, dry_run=False)
    assert lab.machines() == []
    assert opened.rentals.open() == []


@pytest.mark.rule(3)
@pytest.mark.usefixtures("needs_server")
def test_an_idle_machine_on_which_a_jobs_command_runs_stays(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """Its record in the store is not what counts: the machine says it."""
    waits = _rented(lab, gpu_peak=90)
    (machine,) = lab.machines()
    with PlainRunner(opened, wait_factor=0.001), open_session(opened, machine) as session:
        asked = StartJob("3f2a9c81d04e", 1, ["sleep", "600"], "~/", "~/workspace/job.log", [])
        assert start_command(session, asked).state == "running"
        with pytest.raises(MachineInUse, match="a job runs on it"):
            hibernate.fn(opened.spec.name, only_if_idle=True)
        seen = _of(_watch(opened, dry_run=False), waits)
        assert (seen.kind, seen.reason) == ("busy", "a job runs on it")
        assert stop_command(session, "3f2a9c81d04e").state == "ended"
    assert _of(_watch(opened), waits).kind == "idle"


def test_a_workspace_with_a_time_of_its_own_sleeps_though_nobody_has_used_its_machine(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab, gpu_peak=0, cpu_peak=0)
    kept = _of(_watch(opened, dry_run=False), machine)
    assert (kept.kind, kept.reason) == (
        "unknown",
        "nothing has run on it yet: it may wait for its user",
    )
    asked = msgspec.structs.replace(opened.spec, idle=_rules(unused=True))
    slept = _of(_watch(replace(opened, spec=asked), dry_run=False), machine)
    assert slept.next_step == "it was hibernated: wake it to work on it"
    assert lab.machines() == [] and len(list_snapshots(lab.store, WORKSPACE)) == 1
    woken = lab.workspace(MachineId(wake_plainly(opened).machine))
    assert (woken / "weights.bin").stat().st_size == 100_000


def test_a_machine_that_was_made_and_never_used_sleeps_after_the_time_of_its_workspace(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """`torpor create mywork --sleep-after 5m`, and nothing after that."""
    asked = replace(opened, spec=msgspec.structs.replace(opened.spec, idle=_rules(unused=True)))
    with PlainRunner(asked, wait_factor=0.001):
        machine = create.fn(WORKSPACE).id
    _seen(lab.home(machine) / ".torpor", 1, _WINDOW_S, gpu_peak=0, cpu_peak=0)
    slept = _of(_watch(asked, dry_run=False), machine)
    assert slept.next_step == "it was hibernated: wake it to work on it"
    assert lab.machines() == []
    assert [*lab.workspace(MachineId(wake_plainly(asked).machine)).iterdir()] == []


def test_a_look_says_when_a_machine_will_be_idle(lab: Lab, opened: OpenWorkspace) -> None:
    works = _rented(lab, gpu=80, gpu_peak=80)
    told = replace(opened, spec=msgspec.structs.replace(opened.spec, idle=_rules(hibernate=False)))
    report = _watch(opened)
    row = _of(report, works)
    assert row.idle_unix is not None
    assert 0 < row.idle_unix - report.at_unix <= _WINDOW_S
    (shown,) = report.rows()
    assert shown["idle at"] == moment(row.idle_unix)
    assert _of(_watch(told), works).idle_unix is None  # nobody hibernates it then


def test_a_workspace_on_a_machine_of_an_account_without_a_block_does_not_count_as_asleep(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """As on a new host, before the market's key is there."""
    machine = at_another_account(opened)
    lab.lose_machines()
    with PlainRunner(opened):
        (seen,) = overview({"demo": opened}, lambda one: renting(one).machines({}), [])
    assert seen.state == "awake?"
    assert f"machine {machine.id} of workspace" in seen.unseen
    assert "no provider block is for vast:2" in seen.unseen


def test_status_says_after_how_long_a_machine_sleeps_and_about_when(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab)
    at_unix = 60.0 * int(time.time() / 60 + 20)

    def sleeps(sleeping: Sleeping | None, **rules: Any) -> str:
        spec = msgspec.structs.replace(opened.spec, idle=_rules(minutes=30, **rules))
        with PlainRunner(opened):
            of = {"demo": replace(opened, spec=spec)}
            (seen,) = overview(of, lambda one: renting(one).machines({}), [], sleeping)
        return seen.row()["sleeps after"]

    on = f"{machine} at {lab.market.identity}"
    assert sleeps(Sleeping()) == "30 min idle"
    assert sleeps(Sleeping(at_unix={on: at_unix})) == f"30 min idle, {moment(at_unix)[-9:]}"
    assert sleeps(Sleeping(at_unix={on: time.time() - 1})) == "30 min idle"
    assert sleeps(Sleeping(), hibernate=False) == "never"
    assert sleeps(Sleeping(only=("other",))) == sleeps(NO_WATCH) == "never"
    assert sleeps(None) == ""  # the server did not say
    hibernate_plainly(opened)
    assert sleeps(Sleeping()) == ""


def test_a_machine_that_was_woken_meanwhile_is_not_the_one_that_watch_hibernates(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """Its user hibernates and wakes it between the look and the run that watch starts."""
    idle = _rented(lab, gpu_peak=90)
    woken: list[MachineId] = []

    class Late(PlainRunner):
        def start(self, flow: Any, key: str, **parameters: Any) -> str:
            if not woken:
                hibernate.fn(opened.spec.name)
                woken.append(MachineId(wake.fn(opened.spec.name).machine))
            return super().start(flow, key, **parameters)

    with Late(opened, wait_factor=0.001):
        report = watch.fn(dry_run=False)
    assert _of(report, idle).next_step.startswith("it was hibernated")
    assert [machine.id for machine in lab.machines()] == woken != [idle]
    assert len(list_snapshots(lab.store, WORKSPACE)) == 1


def test_a_block_may_ask_for_a_report_only(lab: Lab, opened: OpenWorkspace) -> None:
    rules = msgspec.structs.replace(_RULES, hibernate=False)
    machine = _rented(lab, gpu_peak=90)
    told = replace(opened, spec=msgspec.structs.replace(opened.spec, idle=rules))
    report = _watch(told, dry_run=False)
    assert _of(report, machine).next_step == "none: its block says report"
    assert [machine.id for machine in lab.machines()] == [machine]


@pytest.mark.rule(3)
def test_a_workspace_that_several_blocks_are_for_is_kept(lab: Lab, opened: OpenWorkspace) -> None:
    """They store different folders."""
    other = replace(opened, spec=msgspec.structs.replace(opened.spec, paths=["~/data"]))

    class TwoBlocks(PlainRunner):
        def workspaces(self) -> list[str]:
            return ["one", "two"]

        def open(self, workspace: Workspace | str) -> OpenWorkspace:
            return opened if workspace == "one" else other

    machine = _rented(lab, gpu_peak=90)
    with TwoBlocks(opened, wait_factor=0.1):
        report = watch.fn(dry_run=False)
    row = _of(report, machine)
    assert "the blocks one, two are all for this workspace and differ in paths" in row.next_step
    assert row.differ in report.rows()[0]["reason"]
    assert [machine.id for machine in lab.machines()] == [machine]


@pytest.mark.parametrize(("minutes", "wanted"), [((0, 5), 5), ((15, 5), 5), ((5, 0), 5)])
def test_a_machine_goes_on_to_save_itself_as_often_as_any_of_its_blocks_says(
    lab: Lab,
    opened: OpenWorkspace,
    monkeypatch: pytest.MonkeyPatch,
    minutes: tuple[int, int],
    wanted: int,
) -> None:
    """Any of them may have rented it, and the grants that it began with end after an hour."""
    blocks = {
        name: replace(opened, spec=msgspec.structs.replace(opened.spec, save_minutes=every))
        for name, every in zip(("one", "two"), minutes, strict=True)
    }

    class TwoBlocks(PlainRunner):
        def workspaces(self) -> list[str]:
            return [*blocks]

        def open(self, workspace: Workspace | str) -> OpenWorkspace:
            return blocks[str(workspace)]

    def renewed(of: OpenWorkspace, *_: Any) -> AutosaveSummary:
        return AutosaveSummary(f"every {of.spec.save_minutes} min")

    monkeypatch.setattr(look, "renew_autosave", renewed)
    machine = _rented(lab)
    with TwoBlocks(*blocks.values(), wait_factor=0.1):
        report = watch.fn(dry_run=False, only_report=True)
    assert _of(report, machine).saves == f"every {wanted} min"


def test_one_hibernation_that_cannot_be_started_leaves_the_others(
    lab: Lab, opened: OpenWorkspace
) -> None:
    tables: list[str] = []

    class NoServer(PlainRunner):
        def start(self, flow: Any, key: str, **parameters: Any) -> str:
            raise LookupError("no deployment has this name")

        def table(self, key: str, rows: Any, description: str) -> None:
            if key == "watch":
                tables.append(str(rows))

    machines = [_rented(lab, gpu_peak=90) for _ in range(2)]
    with NoServer(opened, wait_factor=0.1), pytest.raises(LookupError):
        watch.fn(dry_run=False)
    assert sorted(machine.id for machine in lab.machines()) == sorted(machines)
    assert tables[0].count("it was not hibernated: no deployment has this name") == 2


@pytest.mark.rule(3)
def test_a_machine_that_does_not_answer_is_kept_and_what_is_forgotten_is_listed(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab, gpu_peak=90)
    left, _ = standing(opened)
    lab.market.silent.add(machine)
    report = _watch(opened, dry_run=False)
    assert _of(report, machine).kind == "unknown"
    assert [
        (finding.kind, finding.machine and finding.machine.id) for finding in report.findings
    ] == [("unfinished", left.id)]
    assert {machine.id for machine in lab.machines()} == {machine, left.id}
    assert len(report.rows()) == 2
    assert "4.00 $/h" in report.message() or "8.00 $/h" in report.message()


def test_a_machine_that_the_provider_no_longer_shows_is_unknown(
    lab: Lab, opened: OpenWorkspace
) -> None:
    _rented(lab, gpu_peak=90)
    destroy_all(lab.market)
    (row,) = _watch(opened).watched
    assert (row.kind, row.reason) == ("unknown", "its machine is lost")


@pytest.mark.rule(5)
def test_a_rental_whose_machine_has_gone_is_closed_by_its_proof_and_not_by_a_dry_run(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """Else a budget counts it until nothing more may be rented."""
    machine = _rented(lab, gpu_peak=90)
    destroy_all(lab.market)
    _watch(opened)
    assert [rental.machine for rental in opened.rentals.open()] == [machine]
    report = _watch(opened, dry_run=False)
    assert [row.kind for row in report.watched] == ["off"]
    assert opened.rentals.open() == []
    assert opened.rentals.history()[0].why.startswith("it was gone: ")


@pytest.mark.rule(5)
def test_a_machine_whose_market_forgets_is_looked_for_by_each_watch_until_that_is_a_proof(
    lab: Lab, opened: OpenWorkspace
) -> None:
    _rented(lab, gpu=80)
    provider: Any = _Forgetful(lab.market)
    there = replace(opened, providers=(provider,))
    (before,) = opened.rentals.open()
    _watch(there, dry_run=False)
    (shown,) = opened.rentals.open()
    assert (shown.seen_unix or 0.0) > (before.seen_unix or 0.0)  # absences count from then
    destroy_all(lab.market)
    for looks in (1, 2):
        (row,) = _watch(there, dry_run=False).watched
        assert row.kind == "unknown"
        assert len(opened.rentals.open()[0].absent_unix) == looks
    assert [row.kind for row in _watch(there, dry_run=False).watched] == ["off"]
    assert "without a proof" in opened.rentals.history()[0].why


def test_one_workspace_whose_store_is_silent_does_not_stop_the_others(
    lab: Lab, opened: OpenWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _rented(lab, gpu_peak=90)

    class Silent:
        address = "s3://silent"

        def list(self, prefix: str) -> Any:
            raise StoreUnavailable("s3://silent does not answer")

    spec = msgspec.structs.replace(opened.spec, name="other")
    other = replace(opened, spec=spec, store=Silent())  # type: ignore[arg-type]
    report = _watch(other, opened)
    assert _of(report, machine).kind == "idle"
    assert {row.workspace: row.kind for row in report.watched}["other"] == "unknown"


def test_a_hibernation_that_finds_the_machine_in_use_keeps_it(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab, gpu=80)
    with (
        PlainRunner(opened, wait_factor=0.001),
        pytest.raises(MachineInUse, match="a GPU above 5 %"),
    ):
        hibernate.fn(opened.spec.name, only_if_idle=True)
    assert not list_snapshots(lab.store, WORKSPACE)
    assert [machine.id for machine in lab.machines()] == [machine]


@pytest.mark.rule(3)
def test_a_machine_that_is_used_during_its_hibernation_is_kept(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab, gpu_peak=90)
    home = lab.home(machine) / ".torpor"

    def before(step: str) -> None:
        if step == "commit":
            _seen(home, RECORDS, _WINDOW_S, gpu=95, gpu_peak=90)

    with (
        PlainRunner(opened, before=before, wait_factor=0.001),
        pytest.raises(MachineInUse, match="a GPU above 5 %"),
    ):
        hibernate.fn(opened.spec.name, only_if_idle=True)
    assert len(list_snapshots(lab.store, WORKSPACE)) == 1  # the snapshot is whole all the same
    assert [machine.id for machine in lab.machines()] == [machine]


class _Forgetful:
    """The local provider, as one that knows nothing of machines that have ended."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.abilities = msgspec.structs.replace(provider.abilities, forgets_s=0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    def find(self, machine: MachineId) -> Machine | Absent:
        found = self.provider.find(machine)
        return Absent() if isinstance(found, Absent) else found


class _Deadlined:
    """The local provider, as one whose machines stop unless they are renewed."""

    def __init__(self, provider: Provider, refusal: Exception | None = None) -> None:
        self.provider, self.refusal = provider, refusal
        self.abilities = msgspec.structs.replace(provider.abilities, deadline_s=3600.0)
        self.renewed: list[MachineId] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    def renew(self, machine: Machine) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.renewed.append(machine.id)


def test_deadlines_of_machines_are_renewed_but_not_by_a_dry_run(
    lab: Lab, opened: OpenWorkspace
) -> None:
    machine = _rented(lab, cpu=90)
    provider: Any = _Deadlined(opened.providers[0])
    kept = msgspec.structs.replace(_RULES, hibernate=False)
    spec = msgspec.structs.replace(opened.spec, idle=kept)
    opened = replace(opened, spec=spec, providers=(provider,))
    _watch(opened)
    assert provider.renewed == []
    for round_ in (1, 2):
        _watch(opened, dry_run=False)
        assert provider.renewed == [machine] * round_
    left, _ = standing(opened)  # a run restores there, or was killed
    provider.renewed.clear()
    _watch(opened, dry_run=False)
    assert sorted(provider.renewed) == sorted([machine, left.id])


def test_a_record_that_is_refused_lets_no_deadline_of_its_workspace_pass(
    lab: Lab, opened: OpenWorkspace
) -> None:
    """Else whoever can write in the bucket stops a machine by the name of an object."""
    machine = _rented(lab, cpu=90)
    provider: Any = _Deadlined(opened.providers[0])
    lab.store.put(ObjectKey("workspaces/demo/rentals/open/forged"), b"anything")
    report = _watch(replace(opened, providers=(provider,)), dry_run=False)
    assert provider.renewed == [machine]
    rows = [(row.machine, row.kind, "rentals/open/forged" in row.reason) for row in report.watched]
    assert rows == [(None, "unknown", True), (machine, "idle", False)]
    kept = report.watched[1].next_step
    assert kept.startswith("it is kept") and "rentals/open/forged" in kept
    assert machine in lab.market.alive


def test_a_deadline_that_is_not_renewed_fails_the_watch_which_looks_all_the_same(
    lab: Lab, opened: OpenWorkspace, caplog: pytest.LogCaptureFixture
) -> None:
    machine = _rented(lab, cpu=90)
    refusal = ProviderUnavailable("the market is down")
    provider: Any = _Deadlined(opened.providers[0], refusal)
    with pytest.raises(ProviderUnavailable, match="the market is down"):
        _watch(replace(opened, providers=(provider,)), dry_run=False)
    assert f"the deadline of machine {machine} stands" in caplog.text
