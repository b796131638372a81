"""Standing by: a machine that will be taken away is saved, whoever is there and whatever runs."""

from __future__ import annotations

import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.metadata import EVENTS, Metadata
from tests.fixtures.own_saves import book_of, stored
from tests.fixtures.supervised import JOB, Machine, listens
from tests.fixtures.waiting import until
from tests.fixtures.world import until_gone
from torpor.control.safety import verify_snapshot
from torpor.control.upkeep.lineage import SnapshotLines
from torpor.machine.agent import autosave, processes
from torpor.machine.agent.log import LOG_FILE
from torpor.machine.sampler.save_lock import end_save, is_saving
from torpor.machine.supervisor import folder as folders
from torpor.machine.supervisor.folder import AutosaveFolder
from torpor.shared.errors import InvalidInput, MachineError, WorkspaceBusy
from torpor.shared.wire.autosave import (
    Autosave,
    AutosaveState,
    EndAutosave,
    LookAtAutosave,
)
from torpor.shared.wire.job import JobState, OwnSave

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


@pytest.mark.rule(16)
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


@pytest.mark.rule(9)
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
    saver = machine.saver()
    assert saver is not None
    process = Path(f"/proc/{saver.pid}")
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
    assert "the control side has given no grants" in state.save_error
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
    lines = SnapshotLines.of(store, name, machine.agent.seal)
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


@pytest.mark.parametrize("all_get_it", [True, False], ids=["every process", "not the save"])
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
    """With the save commands of that attempt."""
    hangs = {"every_s": 0.2, "save_argv": ["sleep", "600"], "save_timeout_s": 600.0}
    machine.shell(WAITS)
    machine.stands_by(**hangs)
    until(lambda: is_saving(machine.home), "a save is under way")
    machine.stop()
    assert not is_saving(machine.home)
    machine.shell(WAITS, attempt=2)
    machine.stands_by(**hangs)
    until(lambda: is_saving(machine.home), "a save is under way")
    (machine.work / "go").touch()
    machine.ended()
    (machine.work / "go").unlink()
    machine.shell(WAITS, attempt=3)
    assert not is_saving(machine.home)
    machine.agent.call(EndAutosave(WORKSPACE))
    last = machine.state().saved
    machine.shuts_down()
    until(lambda: machine.state().save_error, "it has no grants any more")
    machine.stop()
    assert machine.state().saved == last


def test_what_an_earlier_attempt_heard_does_not_count_for_the_next(
    machine: Machine, metadata: Metadata
) -> None:
    """But for what the market says still."""
    source = metadata.source("aws")
    machine.shell(f"{WAITS}; rm go; exit 1", notices=[source])
    machine.stands_by()
    machine.shuts_down()
    first = saved(machine)
    (machine.work / "go").touch()
    machine.ended()
    machine.shell(WAITS, attempt=2, notices=[source])
    state = machine.state()
    assert (state.attempt, state.notice, state.saved, state.save_error) == (2, None, None, "")
    metadata.say(ACTION, TERMINATES)
    assert saved(machine) != first
    (machine.work / "go").touch()
    machine.ended()
    machine.shell(WAITS, attempt=3, notices=[source])
    notice = until(lambda: machine.state().notice, "it hears that again")
    assert (machine.state().attempt, notice.kind) == (3, "aws-spot")


# -- whoever dies


def test_where_its_process_is_killed_another_one_hears_and_what_it_said_stays(
    machine: Machine,
) -> None:
    """The book is lost with it: the machine says so, and its driver gives it the next one."""
    machine.shell(WAITS)
    machine.stands_by()
    machine.shuts_down()
    first = saved(machine)
    assert machine.state().saves_until_unix > time.time()
    killed = _killed(machine)
    until(lambda: machine.look() and machine.savers(), "a look has started another process")
    state = machine.state()
    assert (state.saved, state.saves_until_unix) == (first, 0.0)
    assert state.notice is not None and not killed.is_running()
    machine.stands_by()
    machine.shuts_down()
    until(lambda: machine.state().saved != first, "it saves again")


def test_a_killed_save_is_an_error_and_the_next_one_has_grants(machine: Machine) -> None:
    machine.shell(WAITS)
    book = machine.stands_by(save_argv=_first_waits(machine))
    machine.shuts_down()
    until((machine.work / "first").exists, "the save has begun")
    for save in machine.own_saves():
        save.kill()
    until(lambda: "did not say what it did" in machine.state().save_error, "that is said")
    machine.shuts_down()
    save = until(lambda: machine.state().saved, "the next signal is another try")
    assert save.snapshot == book.saves[1].snapshot


def test_a_command_that_lost_its_supervisor_is_saved(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.stands_by()
    machine.supervisor_dies()
    machine.shuts_down()
    saved(machine)
    assert machine.state().state == "lost"


def test_a_command_that_removes_torpors_folder_is_saved(machine: Machine) -> None:
    """Its processes make it again, and the book is in memory."""
    machine.shell(f"rm -r {machine.home}; touch removed; {WAITS}")
    until((machine.work / "removed").exists, "it is removed")
    folder = AutosaveFolder(machine.home, WORKSPACE)
    until(lambda: listens(folder) and listens(machine.folder), "they listen again")
    machine.stands_by()
    machine.home.rename(machine.home.with_name("removed"))  # in one step
    until(lambda: listens(folder) and listens(machine.folder), "they listen again")
    folder.path.rename(machine.home.with_name("its folder"))
    machine.stands_by()  # no second process lives beside one whose folder is gone
    assert machine.saver()
    machine.shuts_down()
    saved(machine)


def _killed(machine: Machine) -> psutil.Process:
    saver = machine.saver()
    assert saver is not None
    saver.kill()
    until(lambda: not saver.is_running() or saver.status() == psutil.STATUS_ZOMBIE, "it is gone")
    return saver


# -- after the end of the command


def test_it_stands_by_until_it_is_stopped(machine: Machine) -> None:
    machine.shell(f"{WAITS}; echo result > result")
    machine.stands_by()
    (machine.work / "go").touch()
    assert machine.ended().status == 0
    until(lambda: not machine.kept().supervisor.lives, "the supervisor leaves")
    machine.shuts_down()
    assert b"result" in files_of(machine, saved(machine))
    assert machine.saver()
    assert machine.stop().state == "ended"
    until(lambda: not machine.saver(), "no process holds a key any more")


def test_the_next_attempt_has_the_grants_of_the_one_before(machine: Machine) -> None:
    machine.shell(f"{WAITS}; exit 1")
    book = machine.stands_by()
    saver = machine.saver()
    (machine.work / "go").touch()
    machine.ended()
    (machine.work / "go").unlink()
    assert machine.shell(WAITS, attempt=2).attempt == 2
    assert machine.saver() == saver
    machine.shuts_down()
    assert saved(machine).snapshot == book.saves[0].snapshot


def test_an_attempt_begins_while_the_process_of_the_one_before_leaves(machine: Machine) -> None:
    for attempt in range(1, 4):
        assert machine.shell(WAITS, attempt=attempt).state == "running"
        machine.stands_by()
        assert machine.stop().state == "ended"
    machine.shell(WAITS, attempt=4)
    until(machine.savers, "one hears")
    machine.shuts_down()
    until(lambda: machine.state().save_error, "it has no grants")


@pytest.mark.parametrize("is_left", [False, True], ids=["it still lives", "none lives"])
def test_a_book_that_comes_after_the_stop_of_its_job_is_refused(
    machine: Machine, is_left: bool
) -> None:
    """A run that slept had it on its way. The next attempt gets one of its own."""
    book = book_of(machine.agent, machine.work, None, every_s=600.0)
    if not is_left:
        machine.gets(msgspec.structs.replace(book, job=""))  # it stays for that
    machine.shell(WAITS)
    machine.stop()
    if is_left:
        until(lambda: not machine.saver(), "it has left")
    with pytest.raises(InvalidInput, match=f"job {JOB} was stopped"):
        machine.stands_by()
    assert _seen(machine).job == ""
    machine.shell(WAITS, attempt=2)
    machine.stands_by()
    assert _seen(machine).job == JOB


def test_a_book_without_a_job_gives_way_to_that_of_a_job_that_has_just_begun(
    machine: Machine,
) -> None:
    """It was made before the job began, or after the process was killed that had the job's book."""
    book = book_of(machine.agent, machine.work, None, every_s=600.0)
    of_watch = msgspec.structs.replace(book, job="")
    machine.shell(WAITS)
    with pytest.raises(WorkspaceBusy, match=f"job {JOB} has just begun"):
        machine.gets(of_watch)
    machine.stands_by()
    machine.stop()
    machine.gets(of_watch)
    assert machine.saver()


def test_a_book_for_another_job_than_the_one_that_runs_is_refused(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.stands_by()
    with pytest.raises(InvalidInput, match=f"job {JOB} has this machine"):
        machine.gets(book_of(machine.agent, machine.work, None))
    assert _seen(machine).job == JOB


@pytest.mark.parametrize("has_read", [True, False])
def test_a_book_goes_to_a_second_process_only_if_the_first_one_died_unread(
    machine: Machine, has_read: bool
) -> None:
    """A process that dies before it answers may have begun a save, which goes on and uses them."""
    folder = AutosaveFolder(machine.home, WORKSPACE)
    folder.make()
    lock = folder.take()
    assert lock is not None
    starts = machine.agent.argv[1]
    os.write(lock, starts[starts.index("autosave") - 1].encode())
    with folder.listen() as listener, ThreadPoolExecutor(1) as threads:

        def dies() -> None:
            peer, _ = listener.accept()
            with peer, peer.makefile("rb") as lines:
                if has_read:
                    assert b'"autosave"' in lines.readline()
                else:
                    peer.recv(1, socket.MSG_PEEK)
                os.unlink(folder.path / "socket")
                os.close(lock)

        died = threads.submit(dies)
        with pytest.raises(MachineError, match="did not answer") if has_read else nullcontext():
            machine.gets(book_of(machine.agent, machine.work, None))
        died.result()
    assert bool(machine.savers()) == (not has_read)


def test_a_book_that_comes_twice_gives_no_grant_twice(machine: Machine) -> None:
    """The agent died before its answer arrived, and its session asks the next one again."""
    book = book_of(machine.agent, machine.work, None)
    request = Autosave(msgspec.structs.replace(book, job=JOB), [])
    machine.shell(WAITS)
    machine.agent.call(request, request_id="asked")
    machine.shuts_down()
    first = saved(machine)
    machine.agent.restart()
    machine.agent.call(request, request_id="asked")
    assert _seen(machine).left == len(book.saves) - 1
    (machine.work / "more").write_text("more")
    machine.shuts_down()
    save = until(lambda: (own := machine.state().saved) != first and own, "it has saved again")
    assert save.snapshot == book.saves[1].snapshot
    assert machine.state().save_error == ""
    saver = machine.saver()
    assert saver is not None
    saver.kill()
    saver.wait()
    machine.agent.restart()
    machine.agent.call(request, request_id="asked")
    assert _seen(machine).left == 0


def test_a_process_that_hangs_is_replaced_and_keeps_nobody_from_stopping_its_job(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a disk that has died, for example, and its queue of requests is full."""
    monkeypatch.setattr(processes, "ANSWER_S", 0.5)
    monkeypatch.setattr(autosave, "LEAVE_S", 0.5)
    monkeypatch.setattr(autosave, "HANGS_S", 0.5)
    monkeypatch.setattr(folders, "CONNECT_S", 0.1)
    machine.shell(WAITS)
    machine.stands_by()
    saver = machine.saver()
    assert saver is not None
    saver.suspend()
    taken = 0
    while not taken:
        with suppress(MachineError):  # it may use the grants of that book
            taken = len(machine.stands_by().saves)
    second = machine.saver()
    assert second is not None and second != saver
    assert _seen(machine).left == taken
    second.suspend()
    machine.stop()
    assert not machine.saver()  # and neither grants nor key are left
    with pytest.raises(InvalidInput, match=f"job {JOB} was stopped"):
        machine.stands_by()


def test_a_command_that_removes_torpors_folder_as_it_ends_leaves_no_grants(
    machine: Machine,
) -> None:
    machine.shell(f"trap 'rm -rf {machine.home}; exit' TERM; {WAITS}")
    machine.stands_by()
    machine.stop()
    until(lambda: not machine.saver(), "it has left")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_late_book_does_not_replace_what_a_process_of_another_bundle_has(
    machine: Machine, stopped: bool
) -> None:
    """Its sender has looked before the job's book came, or before the job was stopped."""
    book = book_of(machine.agent, machine.work, None, every_s=600.0)
    late = msgspec.structs.replace(book, job=JOB if stopped else "")
    machine.shell(WAITS)
    machine.stands_by()
    if stopped:
        machine.stop()
        machine.gets(msgspec.structs.replace(book, job=""))
    saver, seen = machine.saver(), _seen(machine)
    (machine.home / f"autosaves/{WORKSPACE}/alive").write_text("another bundle\n")
    with pytest.raises(InvalidInput if stopped else WorkspaceBusy):
        machine.gets(late)
    now = _seen(machine)
    assert machine.saver() == saver and saver is not None
    assert (now.job, now.left, now.until_unix) == (seen.job, seen.left, seen.until_unix)


def test_what_cannot_be_read_of_one_job_or_workspace_hinders_no_other(machine: Machine) -> None:
    other = machine.home / "jobs/aaaaaaaaaaaa"
    other.mkdir(parents=True)
    (other / "state").write_text("{}")
    (machine.home / "autosaves/other/state").mkdir(parents=True)
    machine.shell(WAITS)
    machine.stands_by()
    assert _seen(machine).job == JOB
    machine.stop()
    assert _seen(machine).job == ""


def test_a_notice_after_the_time_of_the_grants_pauses_nothing(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.stands_by(lasts_s=0.0, save_argv=["touch", str(machine.work / "paused")])
    machine.shuts_down()
    state = until(lambda: (now := machine.state()).save_error and now, "it has tried")
    assert "no grants" in state.save_error and state.saved is None
    assert not (machine.work / "paused").exists()


def test_it_leaves_once_its_grants_have_ended(machine: Machine) -> None:
    machine.shell(WAITS)
    machine.stands_by(lasts_s=0.0)
    (machine.work / "go").touch()
    machine.ended()
    until(lambda: not machine.saver(), "it leaves")


def test_nonsense_at_the_socket_hinders_nothing(machine: Machine) -> None:
    machine.shell(WAITS)
    for folder in (machine.folder, AutosaveFolder(machine.home, WORKSPACE)):
        for line in (b"", b"nonsense\n", b'{"id":"1","op":"autosave","args":{"key":"secret"}}\n'):
            with folder.connect() as peer:
                peer.sendall(line)
                peer.shutdown(1)
                answer = peer.recv(4096)
                assert b"InvalidInput" in answer and b"secret" not in answer
    machine.stands_by()
    (machine.work / "go").touch()
    machine.ended()
    log = machine.home / LOG_FILE
    assert not log.exists() or b"Traceback" not in log.read_bytes()


def _seen(machine: Machine) -> AutosaveState:
    return machine.agent.call(LookAtAutosave(WORKSPACE))


@pytest.mark.rule(13)
def test_one_process_saves_a_workspace_with_a_job_and_without(machine: Machine) -> None:
    book = book_of(machine.agent, machine.work, None, every_s=600.0)
    of_watch = msgspec.structs.replace(book, job="")
    machine.gets(of_watch)
    saver = machine.saver()
    machine.shell(WAITS)
    assert (_seen(machine).lives, _seen(machine).job) == (True, "")  # until the job has a book
    machine.stands_by()
    with pytest.raises(WorkspaceBusy, match=f"job {JOB} saves workspace"):
        machine.gets(of_watch)  # it was made before the job's
    assert _seen(machine).job == JOB
    machine.gets(of_watch, instead_of=JOB)
    assert (_seen(machine).job, machine.state().saves_until_unix) == ("", 0.0)
    machine.stop()
    assert machine.saver() == saver  # the job's end takes away nothing but what was the job's
    machine.agent.call(EndAutosave(WORKSPACE))
    assert not machine.saver()


@pytest.mark.rule(13)
def test_watch_takes_over_from_a_job_whose_grants_have_ended_until_its_driver_is_back(
    machine: Machine,
) -> None:
    """Its command runs on and nobody drives it. The job hears of a notice all the same."""
    machine.shell(WAITS)
    machine.stands_by(lasts_s=0.0)
    assert _seen(machine).job == ""
    book = book_of(machine.agent, machine.work, None, every_s=600.0)
    machine.gets(msgspec.structs.replace(book, job=""))
    machine.shuts_down()
    assert saved(machine).snapshot == book.saves[0].snapshot
    assert machine.state().notice
    machine.stands_by()
    assert _seen(machine).job == JOB
