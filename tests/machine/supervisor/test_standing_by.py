"""Standing by: a machine that will be taken away is saved, whoever is there and whatever runs."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.metadata import EVENTS, Metadata
from tests.fixtures.own_saves import book_of, stored
from tests.fixtures.supervised import JOB, Machine
from tests.fixtures.waiting import until
from tests.fixtures.world import until_gone
from torpor.control.safety import verify_snapshot
from torpor.control.upkeep.lineage import Lines
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.sampler.save_lock import end_save, is_saving
from torpor.shared.errors import MachineError, WorkspaceBusy
from torpor.shared.values import Grant
from torpor.shared.wire.autosave import Autosave, AutosaveState, EndAutosave, LookAtAutosave
from torpor.shared.wire.job import JobState, OwnSave, SaveGrant

ACTION = "/latest/meta-data/spot/instance-action"
TERMINATES = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}
WAITS = "while [ ! -e go ]; do sleep 0.02; done"


def saved(machine: Machine) -> OwnSave:
    """The save that the machine has made after a notice."""
    state = until(lambda: _after_a_save(machine), "it has tried to save")
    assert state.save_error == ""
    assert state.saved is not None
    return state.saved


def _after_a_save(machine: Machine) -> JobState | None:
    state = machine.state()
    return state if state.saved is not None or state.save_error else None


def files_of(machine: Machine, save: OwnSave) -> set[bytes]:
    agent = machine.agent
    manifest = verify_snapshot(agent.store, stored(agent, save), agent.seal).manifest
    return {entry.path for entry in manifest.entries}


def test_a_machine_that_shuts_down_is_saved_and_its_command_goes_on(machine: Machine) -> None:
    machine.agent.store_key = secrets.token_bytes(32)
    machine.shell(f"echo progress > checkpoint; {WAITS}; exit 6")
    assert machine.file("checkpoint")
    book = machine.stands_by()
    machine.shuts_down()
    save = saved(machine)
    assert save.snapshot == book.saves[0].snapshot
    assert files_of(machine, save) >= {b"checkpoint", b"logs/job.log"}
    state = machine.state()
    assert state.state == "running"
    assert state.notice is not None and state.notice.kind == "signal"
    (machine.work / "go").touch()
    until(lambda: machine.state().status == 6, "the command ends by itself")


def test_a_notice_that_is_withdrawn_leaves_nothing_paused(
    machine: Machine, metadata: Metadata
) -> None:
    """The machine lives on."""
    machine.shell(WAITS, notices=[metadata.source("azure")])
    said = machine.work.with_name("said")
    commands = [["sh", "-c", f"echo {word} >> {said}"] for word in ("paused", "resumed")]
    machine.stands_by(save_argv=commands[0], resume_argv=commands[1])
    metadata.say(EVENTS, {"Events": [{"EventId": "1", "EventType": "Preempt", "NotBefore": ""}]})
    saved(machine)
    metadata.says.clear()
    assert said.read_text().split() == ["paused", "resumed"]
    (machine.work / "go").touch()


def test_neither_key_nor_grants_reach_the_disk(machine: Machine) -> None:
    machine.agent.store_key = secrets.token_bytes(32)
    machine.shell(WAITS)
    book = machine.stands_by()
    assert book.key is not None
    machine.shuts_down()
    saved(machine)
    urls = [grant.url for grant in (*(save.grant for save in book.saves), *book.packs)]
    hidden = [book.key.encode(), bytes.fromhex(book.key), *(url.encode() for url in urls)]
    kept = [*machine.home.rglob("*"), *machine.work.rglob("*")]
    process = Path(f"/proc/{machine.kept().supervisor.pid}")
    for path in (*filter(Path.is_file, kept), process / "cmdline", process / "environ"):
        content = path.read_bytes()
        assert not any(secret in content for secret in hidden), path
    assert book.key not in repr(book) and urls[0] not in repr(book)


def test_without_leave_to_save_the_reason_is_given_and_the_next_signal_is_another_try(
    machine: Machine,
) -> None:
    machine.shell(WAITS)
    machine.shuts_down()
    state = until(lambda: _after_a_save(machine), "it has tried to save")
    assert (state.state, state.saved) == ("running", None)
    assert "the control side has handed over no grants" in state.save_error
    assert machine.kept().supervisor.lives
    machine.stands_by()
    machine.shuts_down()
    until(lambda: machine.state().saved, "it has saved")
    (machine.work / "go").touch()
    assert machine.ended().status == 0


def test_a_market_that_does_not_answer_holds_nothing_up(
    machine: Machine, metadata: Metadata
) -> None:
    metadata.says = dict.fromkeys(("/latest/api/token", ACTION), metadata.hang)
    machine.shell(WAITS, notices=[metadata.source("aws")])
    until(lambda: metadata.asked, "the service is asked")
    (machine.work / "go").touch()
    assert machine.ended().status == 0
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")


def test_each_notice_is_followed_by_a_save_of_its_own(machine: Machine, metadata: Metadata) -> None:
    machine.shell(WAITS, notices=[metadata.source("aws")])
    book = machine.stands_by()
    machine.shuts_down()
    first = saved(machine)
    metadata.say(ACTION, TERMINATES)
    until(lambda: machine.state().saved not in (None, first), "the second save is there")
    second = saved(machine)
    assert [first.snapshot, second.snapshot] == [save.snapshot for save in book.saves[:2]]
    assert b"logs/job.log" in files_of(machine, second)
    notice = machine.state().notice
    assert notice is not None and notice.kind == "aws-spot"


def test_the_save_command_is_none_of_the_jobs_processes(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.stands_by(save_argv=["sh", "-c", f"env > {machine.work}/env"])
    machine.shuts_down()
    saved(machine)
    assert "TORPOR_JOB" not in machine.file("env")


# -- while nobody drives the job


def test_a_job_that_nobody_drives_is_saved_on_schedule_and_so_is_its_result(
    machine: Machine,
) -> None:
    """Its save command runs before each save. A later save of its driver makes these superfluous,
    so they are autosaves."""
    machine.shell(f"{WAITS}; echo result > result")
    words = ["sh", "-c", f"date +%N >> {machine.work}/state"]
    book = machine.stands_by(every_s=0.2, save_argv=words)
    first = saved(machine)
    second = until(lambda: _another(machine, first), "it has saved again")
    assert files_of(machine, second) >= {b"state", b"logs/job.log"}
    (machine.work / "go").touch()
    machine.ended()

    def has_result() -> bool:
        save = machine.state().saved
        return save is not None and b"result" in files_of(machine, save)

    until(has_result, "its result is saved")
    machine.stop()
    assert machine.state().notice is None
    assert {first.snapshot, second.snapshot} < {save.snapshot for save in book.saves}
    store, name = machine.agent.store, book.workspace
    lines = Lines.of(store, name, machine.agent.seal)
    assert second.snapshot in {one.snapshot for one in lines.going_back(lines.tips()[0].snapshot)}
    assert all(one.autosave for one in lines.going_back(lines.tips()[0].snapshot))


def _another(machine: Machine, before: OwnSave) -> OwnSave | None:
    save = machine.state().saved
    return save if save != before else None


def test_a_save_command_ends_with_a_scheduled_save_that_gives_way(machine: Machine) -> None:
    """The run that the save gives way to has a save command too, which writes the same files."""
    machine.shell(WAITS)
    machine.stands_by(
        every_s=0.2, save_argv=["sh", "-c", f"echo $$ > {machine.work}/pid; sleep 600"]
    )
    pid = int(machine.file("pid"))
    until(lambda: is_saving(machine.home), "it saves")
    end_save(machine.home, WORKSPACE)
    until_gone([pid])
    machine.stop()


def _first_waits(machine: Machine) -> list[str]:
    """A save command that takes long the first time."""
    first = machine.work / "first"
    return ["sh", "-c", f"[ -e {first} ] && exit; touch {first}; sleep 600"]


@pytest.mark.parametrize("all_get_it", [True, False], ids=["every process", "the supervisor"])
def test_a_scheduled_save_gives_way_to_a_machine_that_shuts_down(
    machine: Machine, all_get_it: bool
) -> None:
    machine.shell(f"trap '' TERM; {WAITS}")
    machine.stands_by(every_s=0.2, save_argv=_first_waits(machine))
    until((machine.work / "first").exists, "a scheduled save has begun")
    book = machine.stands_by(every_s=600.0)
    saves = machine.own_saves()
    machine.shuts_down()
    for save in saves if all_get_it else ():
        save.terminate()
    save = saved(machine)
    assert save.snapshot in {one.snapshot for one in book.saves}
    notice = machine.state().notice
    assert notice is not None and notice.kind == "signal"
    (machine.work / "go").touch()


def test_grants_that_a_save_has_not_used_are_there_for_the_one_that_it_gives_way_to(
    machine: Machine,
) -> None:
    """A scheduled save is given almost all of them."""
    machine.shell(WAITS)
    book = machine.stands_by(every_s=0.2, save_argv=_first_waits(machine))
    until((machine.work / "first").exists, "a scheduled save has begun")
    machine.shuts_down()
    save = saved(machine)
    assert save.snapshot == book.saves[0].snapshot
    machine.stop()


def test_a_machine_that_is_given_up_and_a_next_attempt_end_its_scheduled_saves(
    machine: Machine,
) -> None:
    machine.shell(WAITS)
    machine.stands_by(every_s=0.2)
    saved(machine)
    machine.agent.call(EndAutosave(WORKSPACE))
    last = machine.state().saved
    machine.shuts_down()
    until(lambda: machine.state().save_error, "it has no grants any more")
    machine.stop()
    assert machine.state().saved == last


# -- after the end of the command


def test_it_stands_by_until_it_is_stopped(machine: Machine) -> None:
    machine.shell(f"{WAITS}; echo result > result")
    machine.stands_by()
    (machine.work / "go").touch()
    assert machine.ended().status == 0
    machine.shuts_down()
    assert b"result" in files_of(machine, saved(machine))
    assert machine.kept().supervisor.lives
    assert machine.stop().state == "ended"
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")


def test_it_leaves_for_the_next_attempt(machine: Machine) -> None:
    machine.shell(f"{WAITS}; exit 1")
    machine.stands_by()
    (machine.work / "go").touch()
    machine.ended()
    first = machine.kept().supervisor
    assert first.lives
    assert machine.shell("exit 2", attempt=2).attempt == 2
    assert not first.lives
    assert machine.ended().status == 2


def test_it_leaves_once_its_grants_have_ended(machine: Machine) -> None:
    machine.shell(WAITS)
    book = machine.stands_by()
    over = [_ending(save, time.time() - 1) for save in book.saves]
    machine.agent.call(msgspec.structs.replace(book, saves=over))
    (machine.work / "go").touch()
    machine.ended()
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")


def _ending(save: SaveGrant, at_unix: float) -> SaveGrant:
    grant = Grant(save.grant.key, save.grant.verb, save.grant.url, int(at_unix))
    return msgspec.structs.replace(save, grant=grant)


def test_where_no_supervisor_is_that_is_said(machine: Machine) -> None:
    with pytest.raises(MachineError, match=f"no supervisor of job {JOB}"):
        machine.stands_by()
    machine.shell(WAITS)
    machine.supervisor_dies()
    with pytest.raises(MachineError, match=f"no supervisor of job {JOB}"):
        machine.stands_by()


def test_nonsense_at_the_socket_hinders_nothing(machine: Machine) -> None:
    machine.shell(WAITS)
    for line in (b"", b"nonsense\n", b'{"id":"1","op":"job.standby","args":{"key":"secret"}}\n'):
        with machine.folder.connect() as peer:
            peer.sendall(line)
            peer.shutdown(1)
            answer = peer.recv(4096)
            assert b"InvalidInput" in answer and b"secret" not in answer
    machine.stands_by()
    (machine.work / "go").touch()
    machine.ended()
    log = machine.home / LOG_FILE
    assert not log.exists() or b"Traceback" not in log.read_bytes()


def test_no_autosave_process_lives_beside_a_job_that_saves_the_workspace(machine: Machine) -> None:
    """Its saves would be newer than the job's save with the frozen command, and lack that."""
    call = machine.agent.call
    book = msgspec.structs.replace(
        book_of(machine.agent, machine.work, None), job="", every_s=600.0
    )
    request = Autosave(book, [])

    def seen() -> AutosaveState:
        return call(LookAtAutosave(book.workspace))

    try:
        call(request)
        machine.shell(WAITS)
        assert (seen().lives, seen().job) == (True, "")  # until the job can save
        machine.stands_by()
        assert (seen().lives, seen().job) == (False, JOB)
        with pytest.raises(WorkspaceBusy, match=f"job {JOB} saves workspace {book.workspace}"):
            call(request)
        assert not seen().lives
        call(msgspec.structs.replace(request, instead_of=JOB))  # the job is over
        assert (seen().lives, seen().job) == (True, "")
    finally:
        call(EndAutosave(book.workspace))


def test_autosave_takes_over_from_a_job_whose_grants_have_ended(machine: Machine) -> None:
    """Its command runs on and nobody drives it. A notice is left to the autosave process, and the
    driver of a job that is continued ends that process."""
    call = machine.agent.call
    book = msgspec.structs.replace(
        book_of(machine.agent, machine.work, None), job="", every_s=600.0
    )
    machine.shell(WAITS)
    own = machine.stands_by()
    over = [_ending(save, time.time() - 1) for save in own.saves]
    call(msgspec.structs.replace(own, saves=over))
    try:
        assert call(LookAtAutosave(book.workspace)).job == ""
        call(Autosave(book, []))
        assert call(LookAtAutosave(book.workspace)).lives
        machine.shuts_down()
        state = until(lambda: _after_a_save(machine), "it has tried to save")
        assert state.save_error == "the job's grants have ended, and autosave saves the workspace"
        machine.stands_by()
        state = call(LookAtAutosave(book.workspace))
        assert (state.lives, state.job) == (False, JOB)
        kept = msgspec.structs.replace(machine.kept(), saves_until_unix=None)
        machine.folder.write(kept)  # as an older supervisor does: it may have grants
        assert call(LookAtAutosave(book.workspace)).job == JOB
    finally:
        call(EndAutosave(book.workspace))
