"""The providers' machines are compared with the rentals. Only named machines are destroyed."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import tasks.watch
from flows import create, reconcile
from tasks.machines import left_unfinished, renting
from tasks.plain_runner import PlainRunner
from tasks.reconciliation import check_silent
from tests.fixtures.activity import sampled
from tests.fixtures.driver import JOB, left_job
from tests.fixtures.lab import DEMO as WORKSPACE
from tests.fixtures.lab import FolderMarket, Lab
from tests.fixtures.machines import new_key_pair
from tests.fixtures.market import Market
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.rentals import handed_over, not_handed_over, standing
from tests.fixtures.trees import differences, facts, fill
from torpor.control.jobs.records import Job
from torpor.control.reconciliation import Kind, Reconciliation
from torpor.control.rental.ending import end_machine
from torpor.control.rental.records import Rental, Rentals
from torpor.control.rental.renting import Renting
from torpor.control.safety import Warrant, never_handed_over
from torpor.machine.agent.runs import AgentRun
from torpor.shared.errors import (
    AgentLost,
    DiskFull,
    HandedOver,
    HostKeyChanged,
    InvalidInput,
    MachineDenied,
    MachineInUse,
    MachineUnfit,
    MachineUnreachable,
    ProviderError,
    RestoreUnfinished,
    TorporError,
    Unforeseen,
    UnsafeDestroy,
    WorkspaceBusy,
)
from torpor.shared.values import (
    DRILL,
    Endpoint,
    Machine,
    MachineId,
    WorkspaceName,
    reserved_name,
)
from torpor.shared.wire.activity import PERSON, Activity


def _reconcile(lab: Lab, **options: Any) -> Reconciliation:
    report: Reconciliation = run_plainly(lab.opened, reconcile, **options)
    return report


def _left(lab: Lab, name: WorkspaceName = WORKSPACE) -> tuple[Machine, Rental]:
    return standing(lab.opened.under(name))


def _silent(lab: Lab) -> tuple[Machine, Rental]:
    """The same, of a machine that does not answer any more."""
    machine, rental = _left(lab)
    lab.market.silent.add(machine.id)
    return machine, rental


def _machines(report: Reconciliation, kind: Kind) -> list[str]:
    return [one.machine.id for one in report.findings if one.kind == kind and one.machine]


@pytest.mark.rule(5)
def test_without_names_it_tells_all_and_changes_nothing(lab: Lab) -> None:
    mine = lab.rent()
    left, _ = _left(lab)
    drill, _ = _left(lab, reserved_name(DRILL, WORKSPACE))
    theirs, _ = _left(lab, WorkspaceName("theirs"))
    stray, rental = _left(lab)
    lab.opened.rentals.change(rental, state="ended")
    lost = lab.rent()
    assert lost.label is not None
    lab.market.destroy(lost, never_handed_over(lost, lost.label))
    before = [machine.id for machine in lab.machines()]
    report = _reconcile(lab)
    assert sorted(_machines(report, "unfinished")) == sorted([left.id, drill.id])
    assert _machines(report, "in use") == [mine.id]
    assert _machines(report, "without a rental") == [stray.id]
    assert _machines(report, "another workspace's") == [theirs.id]
    (gone,) = [one for one in report.findings if one.kind == "lost"]
    assert gone.rental is not None
    assert gone.rental.label == lost.label
    assert report.ended == []
    assert len(report.rows()) == 6
    assert [machine.id for machine in lab.machines()] == before
    assert _reconcile(lab).findings == report.findings


def test_a_machine_whose_rental_ends_meanwhile_is_not_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hibernate ends it right after its machine has gone."""
    hibernated = lab.rent()
    assert hibernated.label is not None
    lab.market.destroy(hibernated, never_handed_over(hibernated, hibernated.label))
    read = Rentals.open

    def just_before(self: Rentals, *how: Any) -> list[Rental]:
        found = read(self, *how)
        for rental in found:
            self.change(rental, state="ended")
        return found

    monkeypatch.setattr(Rentals, "open", just_before)
    assert _reconcile(lab).findings == []


@pytest.mark.rule(5)
def test_a_machine_that_never_answers_again_is_ended_by_name_and_wake_comes_through(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = lab.rent()
    fill(lab.workspace(machine.id), random.Random(3))
    truth = facts(lab.workspace(machine.id))
    hibernate_plainly(lab.opened)
    left, rental = _left(lab)
    with monkeypatch.context() as patch:
        lab.market.silent.add(left.id)
        able = msgspec.structs.replace(lab.market.abilities, ready_s=0.5)
        patch.setattr(lab.market, "abilities", able)
        with pytest.raises(MachineUnreachable, match=r"nobody answers.*in `end` of reconcile"):
            wake_plainly(lab.opened, retries=0)
    assert [one.id for one in lab.machines()] == [left.id]  # unknown is not idle
    lab.market.silent.add(left.id)
    report = _reconcile(lab, end=[left.id])
    assert report.ended == [left.id]
    assert report.findings == []
    ended = {one.label for one in lab.opened.rentals.history()}
    assert ended == {machine.label, rental.label}
    assert lab.machines() == []
    woken = wake_plainly(lab.opened)
    assert not differences(truth, facts(lab.workspace(woken.machine)))
    report = _reconcile(lab)
    assert [(one.kind, one.machine and one.machine.id) for one in report.findings] == [
        ("in use", woken.machine)
    ]


def test_what_a_drill_left_is_ended_by_name_though_it_answers(lab: Lab) -> None:
    left, _ = _left(lab, reserved_name(DRILL, WORKSPACE))
    assert _reconcile(lab, end=[left.id]).ended == [left.id]
    assert lab.machines() == []


@pytest.mark.rule(5)
def test_where_one_of_the_named_may_not_be_ended_none_is(lab: Lab) -> None:
    mine, (answers, _), (dead, _) = lab.rent(), _left(lab), _silent(lab)
    with pytest.raises(UnsafeDestroy, match=f"{mine.id} was handed over"):
        _reconcile(lab, end=[dead.id, mine.id])
    with pytest.raises(InvalidInput, match="no machine 'm-nowhere'"):
        _reconcile(lab, end=[dead.id, "m-nowhere"])
    with pytest.raises(UnsafeDestroy, match=f"{answers.id} answers .its agent.*nothing was ended"):
        _reconcile(lab, end=[dead.id, answers.id])
    assert {machine.id for machine in lab.machines()} == {mine.id, answers.id, dead.id}


@pytest.mark.parametrize(
    "error",
    [
        MachineDenied("it refuses the key"),
        HostKeyChanged("it shows another host key"),
        DiskFull("there is no room for the agent"),
        MachineUnfit("it has no Python"),
        AgentLost("the agent went away"),
        MachineUnreachable("no common SSH algorithms"),
    ],
)
def test_a_machine_that_refuses_the_login_has_answered(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, error: TorporError
) -> None:
    """It may hold a whole restore, and the user's work."""
    machine, _ = _left(lab)

    def refuses(*_: object, **__: object) -> None:
        raise error

    refused = replace(lab, opened=replace(lab.opened, log_in=refuses))
    with pytest.raises(UnsafeDestroy, match=f"answers .{error}.*use the provider's console"):
        _reconcile(refused, end=[machine.id])
    assert [one.id for one in lab.machines()] == [machine.id]


def test_a_starting_machine_is_not_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = _left(lab)
    starting = msgspec.structs.replace(machine, state="starting", endpoint=None)
    monkeypatch.setattr(FolderMarket, "find", lambda *_: starting)
    with pytest.raises(UnsafeDestroy, match="is starting, so a run may be about to use it"):
        check_silent(lab.opened, machine)


@pytest.mark.parametrize("greets", [False, True])
def test_a_machine_is_not_ended_because_the_jump_host_before_it_lets_nobody_through(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, greets: bool
) -> None:
    """Nothing listens there; or a server greets, and then resets each login."""
    machine, _ = _silent(lab)
    assert machine.endpoint is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if greets else 1

        def serve() -> None:
            with suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    peer.sendall(b"SSH-2.0-jump\r\n")
                    peer.close()

        threading.Thread(target=serve, daemon=True).start()
        jump = Endpoint("127.0.0.1", port, "jump", new_key_pair().public)
        endpoint = msgspec.structs.replace(machine.endpoint, jump=jump)
        behind = msgspec.structs.replace(machine, endpoint=endpoint)
        monkeypatch.setattr(FolderMarket, "find", lambda *_: behind)
        silent = r"the jump host before machine .* lets nobody through"
        with plain(lab.opened), pytest.raises(UnsafeDestroy, match=silent):
            check_silent(lab.opened, machine)
        server.shutdown(socket.SHUT_RDWR)


def test_a_machine_that_answers_again_meanwhile_is_not_ended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(lab)[0], _silent(lab)[0]
    destroy = FolderMarket.destroy

    def slow(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        destroy(self, machine, warrant)
        if machine.id == first.id:
            lab.market.silent.remove(second.id)

    monkeypatch.setattr(FolderMarket, "destroy", slow)
    with pytest.raises(UnsafeDestroy, match=f"{second.id} answers"):
        _reconcile(lab, end=[first.id, second.id])
    assert [one.id for one in lab.machines()] == [second.id]


def test_a_machine_that_cannot_be_ended_does_not_stop_the_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _silent(lab)[0], _silent(lab)[0]
    destroy = FolderMarket.destroy

    def stubborn(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        if machine.id != first.id:
            destroy(self, machine, warrant)

    with monkeypatch.context() as patch:
        patch.setattr(FolderMarket, "destroy", stubborn)
        patch.setattr(end_machine, "__kwdefaults__", {"within_s": 0.2})
        with pytest.raises(ProviderError, match=f"{first.id}.*not proven after"):
            _reconcile(lab, end=[first.id, second.id])
    assert [machine.id for machine in lab.machines()] == [first.id]
    assert _reconcile(lab, end=[first.id]).ended == [first.id]


@pytest.mark.rule(5)
@pytest.mark.parametrize("meanwhile", ["handed over", "ended"])
def test_a_machine_that_was_handed_over_by_the_time_of_its_destroy_is_left(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    machine, rental = _silent(lab)
    destroy = FolderMarket.destroy

    def slow(self: FolderMarket, machine: Machine, warrant: Warrant) -> None:
        with suppress(HandedOver):
            lab.opened.rentals.change(rental, state=meanwhile)
        destroy(self, machine, warrant)

    monkeypatch.setattr(FolderMarket, "destroy", slow)
    with pytest.raises(HandedOver, match=f"was {meanwhile} by another run"):
        _reconcile(lab, end=[machine.id])
    assert [one.id for one in lab.machines()] == [machine.id]


@pytest.mark.rule(5)
def test_a_rental_at_an_account_without_a_block_is_closed_by_name_and_wake_may_rent(
    lab: Lab,
) -> None:
    machine, rental = handed_over(lab.opened)
    other = replace(lab.opened, providers=(Market("runpod:2"),))
    (found,) = run_plainly(other, reconcile).findings
    assert found.kind == "at another provider"
    assert f"name rental {rental.label.rental} in `gone`" in found.next_step
    report = run_plainly(other, reconcile, gone=[rental.label.rental])
    assert report.findings == [] and report.closed == [rental.label.rental]
    (ended,) = lab.opened.rentals.history()
    assert ended.why == "its user told reconcile that the machine is gone"
    assert machine.id in lab.market.alive  # nothing was destroyed
    with plain(other):
        assert left_unfinished(other, renting(other), alone=True) == []


# -- what killed wakes left, named in `left`


def _whole(lab: Lab) -> tuple[MachineId, Rental]:
    """The machine of a wake that was killed right before it handed it over. Its sampler works."""
    wake_plainly(lab.opened)
    (rental,) = lab.opened.rentals.open()
    assert rental.machine is not None
    not_handed_over(lab.opened, rental)
    sampled(lab.market.near[rental.machine].home)
    return rental.machine, rental


def _state(lab: Lab) -> str:
    (rental,) = lab.opened.rentals.open()
    return rental.state


@pytest.mark.rule(5)
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("its agent does not answer", MachineInUse, "whether a run works on machine .* not known"),
        ("a job's state cannot be read", MachineInUse, "is not what torpor wrote"),
        ("a run works there", WorkspaceBusy, "a run works on machine"),
        ("its job goes on", WorkspaceBusy, "goes on with it: wait for the job"),
        ("another job runs there", MachineInUse, "is running: it hibernates the machine"),
    ],
)
def test_what_may_be_in_work_is_left_as_it_is(
    stored: Lab,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[TorporError],
    words: str,
) -> None:
    machine, rental = _whole(stored)
    near = stored.market.near[machine]
    if fault == "its agent does not answer":

        def hangs(*_: object) -> None:
            raise AgentLost("no answer for 300 s")

        monkeypatch.setattr("tasks.watch.read_activity", hangs)
    elif fault == "a job's state cannot be read":
        folder = near.home / "jobs" / JOB
        folder.mkdir(parents=True)
        (folder / "state").write_text("{")
    elif fault == "a run works there":
        near.runs.add(AgentRun, "other", WORKSPACE)
    elif fault == "its job goes on":
        left_job(stored)
        stored.opened.rentals.change(rental, job=JOB)
    else:
        made = Job(id=JOB, workspace=WORKSPACE, block=WORKSPACE, command=["a"], created_unix=1.0)
        stored.opened.jobs.keep(
            msgspec.structs.replace(stored.opened.jobs.take(made, "run"), state="running")
        )
    with pytest.raises(error, match=words):
        _reconcile(stored, left=[machine])
    assert (_state(stored), len(stored.snapshots())) == ("standing", 1)
    assert [one.id for one in stored.machines()] == [machine]


def test_what_one_look_does_not_say_the_next_one_may(
    stored: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run ends a minute after its control side, and its sampler needs a second to begin."""
    machine, _ = _whole(stored)
    read, asked = tasks.watch.read_activity, list[int]()

    def busy_first(*of: Any) -> Activity:
        asked.append(1)
        return msgspec.structs.replace(read(*of), runs=len(asked) == 1)

    monkeypatch.setattr("tasks.watch.read_activity", busy_first)
    assert _reconcile(stored, left=[machine]).findings == []
    assert stored.machines() == [] and len(stored.snapshots()) == 2


@pytest.mark.rule(5)
def test_where_no_sampler_says_who_is_there_a_whole_restore_is_only_handed_over(
    stored: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    machine, _ = _whole(stored)
    (stored.market.near[machine].home / "activity.ring").unlink()
    with caplog.at_level("INFO"):
        assert _machines(_reconcile(stored, left=[machine]), "in use") == [machine]
    assert (_state(stored), len(stored.snapshots())) == ("handed over", 1)
    assert (
        f"machine {machine} was handed over and not hibernated: whether somebody uses it is not "
        f"known: no sampler has written anything. `torpor hibernate demo --machine {machine}`"
    ) in caplog.text


@pytest.mark.parametrize("job", ["", JOB])
def test_programs_that_the_hand_over_starts_do_not_keep_the_machine(
    needs_server: None, stored: Lab, job: str
) -> None:
    """None is started on a machine that was rented for a job."""
    machine, rental = _whole(stored)
    stored.opened.rentals.change(rental, job=job)
    spec = msgspec.structs.replace(stored.opened.spec, programs=["exec sleep 600"])
    opened, steps = replace(stored.opened, spec=spec), list[str]()
    with PlainRunner(opened, retries=0, before=steps.append):
        reconcile.fn(WORKSPACE, left=[machine])
    assert ("start programs" in steps) == (not job)
    assert stored.machines() == [] and len(stored.snapshots()) == 2


def _reconcile_and(lab: Lab, step: str, does: Callable[[], object], *machines: MachineId) -> None:
    """Reconcile what was left; right before that step somebody else does something."""

    def strike(name: str) -> None:
        if name.startswith(step):
            does()

    with PlainRunner(lab.opened, retries=0, before=strike):
        reconcile.fn(WORKSPACE, left=[*machines])


@pytest.mark.rule(5)
def test_who_logs_in_while_it_is_hibernated_keeps_the_machine(
    stored: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    machine, _ = _whole(stored)
    home = stored.market.near[machine].home
    with pytest.raises(MachineInUse, match="was kept: somebody is or was logged in"):
        _reconcile_and(stored, "commit", lambda: sampled(home, flags=PERSON), machine)
    assert _state(stored) == "handed over"
    assert f"machine {machine} was handed over, and not hibernated: " in caplog.text
    assert "stays as it was left" not in caplog.text


def test_where_a_hibernation_cannot_be_started_the_others_are_seen_to(
    stored: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deployment of an older torpor does not know all parameters: Prefect refuses them."""
    whole, _ = _whole(stored)
    part, _ = _left(stored)
    sampled(stored.market.near[part.id].home)

    def refuses(*_: object, **__: object) -> str:
        raise TypeError("unexpected parameter only_if_unused")

    monkeypatch.setattr(PlainRunner, "start", refuses)
    with pytest.raises(Unforeseen, match="only_if_unused"):
        _reconcile(stored, left=[whole, part.id])
    assert [one.id for one in stored.machines()] == [whole]
    assert f"machine {whole} was handed over, and not hibernated: " in caplog.text


@pytest.mark.rule(5)
def test_who_logs_in_before_an_unfinished_restore_is_ended_keeps_the_machine(
    stored: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    left, _ = _left(stored)
    home = stored.market.near[left.id].home
    sampled(home)
    with pytest.raises(MachineInUse, match="holds an unfinished restore, and was left as it is"):
        _reconcile_and(stored, "begin restore", lambda: sampled(home, flags=PERSON), left.id)
    assert (_state(stored), len(stored.machines())) == ("standing", 1)
    assert f"machine {left.id} stays as it was left" in caplog.text


def test_a_machine_that_saves_itself_is_not_ended_as_an_unfinished_restore(
    stored: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record may be an older one that was put back in the store."""
    left, _ = _left(stored)
    sampled(stored.market.near[left.id].home)
    monkeypatch.setattr("tasks.watch.held_and_saving", lambda *_: (None, True))
    with pytest.raises(MachineInUse, match="left as it is: it saves its workspace by itself"):
        _reconcile(stored, left=[left.id])
    assert (_state(stored), len(stored.machines())) == ("standing", 1)


@pytest.mark.rule(5)
def test_an_unfinished_restore_that_cannot_be_ended_is_not_called_ended(
    stored: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left, _ = _left(stored)
    sampled(stored.market.near[left.id].home)
    monkeypatch.setattr(FolderMarket, "destroy", lambda *_: None)
    monkeypatch.setattr(Renting.end, "__kwdefaults__", {"within_s": 0.2})
    with pytest.raises(RestoreUnfinished, match="could not be destroyed either"):
        _reconcile(stored, left=[left.id])
    assert _state(stored) == "abandoned"
    assert f"machine {left.id} was not ended, and may cost money until `torpor" in caplog.text
    assert f"machine {left.id} was ended" not in caplog.text


@pytest.mark.rule(5)
def test_a_run_that_begins_meanwhile_keeps_what_was_rented_for_a_first_job(lab: Lab) -> None:
    left, rental = _left(lab)
    lab.opened.rentals.change(rental, job=JOB)
    near = lab.market.near[left.id]
    sampled(near.home)
    with pytest.raises(WorkspaceBusy, match="run other works on workspace demo"):
        _reconcile_and(
            lab, "hold workspace", lambda: near.runs.add(AgentRun, "other", WORKSPACE), left.id
        )
    assert _state(lab) == "standing"


@pytest.mark.rule(6)
def test_what_was_rented_for_a_first_job_is_held_while_it_is_handed_over(lab: Lab) -> None:
    left, rental = _left(lab)
    lab.opened.rentals.change(rental, job=JOB)
    near, refused = lab.market.near[left.id], list[str]()
    sampled(near.home)

    def begin() -> None:
        with pytest.raises(WorkspaceBusy) as busy:
            near.runs.add(AgentRun, "other", WORKSPACE)
        refused.append(str(busy.value))

    _reconcile_and(lab, "hand over machine", begin, left.id)
    assert len(refused) == 1 and lab.machines() == []  # handed over, given back and hibernated


@pytest.mark.rule(5)
@pytest.mark.parametrize("job", ["", JOB], ids=["a wake", "another job"])
@pytest.mark.parametrize(
    ("step", "is_whole"),
    [
        ("look at", True),
        ("hand over machine", True),
        ("begin restore", False),
        ("hold workspace", False),
    ],
)
def test_a_machine_that_another_run_takes_up_is_left_to_it(
    stored: Lab, step: str, is_whole: bool, job: str
) -> None:
    if is_whole:
        machine, rental = _whole(stored)
    else:
        left, rental = _left(stored)
        machine = left.id
        sampled(stored.market.near[machine].home)

    def taken() -> None:
        stored.opened.rentals.change(rental, state="standing", job=job)

    with pytest.raises(HandedOver, match="left alone"):
        _reconcile_and(stored, step, taken, machine)
    (now,) = stored.opened.rentals.open()
    assert (now.state, now.job) == ("standing", job)


def test_a_machine_that_is_taken_up_while_the_one_before_is_ended_is_left(stored: Lab) -> None:
    (first, _), (second, rental) = _left(stored), _left(stored)
    for left in (first, second):
        sampled(stored.market.near[left.id].home)

    def taken() -> None:
        if len(stored.machines()) == 2:
            stored.opened.rentals.change(rental, state="standing")

    with pytest.raises(HandedOver, match="left alone"):
        _reconcile_and(stored, "hold workspace", taken, first.id, second.id)
    assert [one.id for one in stored.machines()] == [second.id] and _state(stored) == "standing"


@pytest.mark.rule(5)
def test_the_machine_of_a_create_under_way_is_left_to_it(lab: Lab) -> None:
    kept = []

    def reconciles(step: str) -> None:
        if step == "hand over machine":
            (machine,) = lab.machines()
            sampled(lab.market.near[machine.id].home)
            with pytest.raises(WorkspaceBusy, match="a run works on machine"):
                _reconcile(lab, left=[machine.id])
            kept.append(machine.id)

    with PlainRunner(lab.opened, retries=0, before=reconciles):
        assert [create.fn(WORKSPACE).id] == kept
    assert (_state(lab), len(lab.machines())) == ("handed over", 1)


@pytest.mark.parametrize("job", ["", JOB], ids=["a create", "another job"])
def test_an_empty_machine_that_another_run_takes_up_is_left_to_it(lab: Lab, job: str) -> None:
    left, rental = _left(lab)
    lab.opened.rentals.change(rental, job="0" * 12)
    sampled(lab.market.near[left.id].home)

    def taken() -> None:
        lab.opened.rentals.change(rental, state="standing", job=job)

    with pytest.raises(HandedOver, match="left alone"):
        _reconcile_and(lab, "hand over machine", taken, left.id)
    (now,) = lab.opened.rentals.open()
    assert (now.state, now.job) == ("standing", job)


@pytest.mark.rule(5)
@pytest.mark.parametrize("who", ["a wake", "its job"])
def test_who_begins_before_an_unfinished_restore_is_ended_keeps_the_machine(
    stored: Lab, who: str
) -> None:
    left, rental = _left(stored)
    stored.opened.rentals.change(rental, job=JOB)
    near = stored.market.near[left.id]
    sampled(near.home)

    def begins() -> None:
        if who == "a wake":
            near.runs.add(AgentRun, "other", WORKSPACE)
        else:
            left_job(stored)

    with pytest.raises(WorkspaceBusy, match="run other works on" if who == "a wake" else JOB):
        _reconcile_and(stored, "hold workspace", begins, left.id)
    assert (_state(stored), len(stored.machines())) == ("standing", 1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_job_that_is_recorded_before_its_machine_is_handed_over_keeps_it(
    lab: Lab, is_whole: bool
) -> None:
    if is_whole:
        lab.workspace(lab.rent().id).mkdir()
        (lab.workspace(lab.machines()[0].id) / "work").write_text("mine")
        hibernate_plainly(lab.opened)
        machine, rental = _whole(lab)
    else:
        left, rental = _left(lab)
        machine = left.id
        sampled(lab.market.near[machine].home)
    lab.opened.rentals.change(rental, job=JOB)
    with pytest.raises(WorkspaceBusy, match=JOB):
        _reconcile_and(lab, "make paths", lambda: left_job(lab), machine)
    assert (_state(lab), len(lab.machines())) == ("standing", 1)


def test_the_machine_of_a_job_that_has_ended_still_counts_among_its_costs(stored: Lab) -> None:
    machine, rental = _whole(stored)
    stored.opened.rentals.change(rental, job=JOB)
    jobs, left = stored.opened.jobs, left_job(stored)
    jobs.end(msgspec.structs.replace(jobs.take(left, "run"), state="cancelled"))
    (stored.market.near[machine].home / "activity.ring").unlink()  # it is only handed over
    _reconcile(stored, left=[machine])
    (now,) = stored.opened.rentals.open()
    assert (now.state, now.job) == ("handed over", JOB)


def test_what_a_killed_create_left_is_hibernated_by_name(lab: Lab) -> None:
    """The workspace has no snapshot, so nothing was to be restored there."""
    left, _ = _left(lab)
    sampled(lab.market.near[left.id].home)
    assert _reconcile(lab, left=[left.id]).findings == []
    assert lab.machines() == [] and len(lab.snapshots()) == 1


@pytest.mark.rule(5)
def test_a_part_of_a_deleted_snapshot_is_neither_stored_nor_ended(lab: Lab) -> None:
    """It would be the newest snapshot of the workspace."""
    left, _ = _left(lab)
    sampled(lab.market.near[left.id].home)
    state = lab.market.near[left.id].home / "workspaces" / WORKSPACE
    state.mkdir(parents=True)
    (state / "restore").touch()
    with pytest.raises(RestoreUnfinished, match="a part of a snapshot that was deleted"):
        _reconcile(lab, left=[left.id])
    assert (_state(lab), len(lab.machines()), lab.snapshots()) == ("standing", 1, [])


def test_a_failed_attempt_named_in_left_is_told_what_ends_it(lab: Lab) -> None:
    left, rental = _left(lab)
    lab.opened.rentals.change(rental, state="abandoned", why="no SSH server answered")
    with pytest.raises(InvalidInput, match="or switch `abandoned` on"):
        _reconcile(lab, left=[left.id])
    assert _reconcile(lab, abandoned=True).ended == [left.id]
