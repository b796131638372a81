"""An upgrade during a running job: its supervisor, of an older bundle, saves no more."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.engine import WORKSPACE
from tests.fixtures.own_saves import book_of
from tests.fixtures.supervised import JOB, Machine
from tests.fixtures.waiting import until
from torpor.machine.supervisor.processes import OWN_MARK, identify
from torpor.shared.errors import MachineError
from torpor.shared.wire.autosave import Autosave, EndAutosave, LookAtAutosave


class Older:
    """The folder, state and socket of a job as a supervisor of an older bundle keeps them."""

    def __init__(self, machine: Machine) -> None:
        self._folder = machine.folder
        self._machine = machine
        self.savers_then = 0
        self.asked: list[dict[str, Any]] = []
        self.refuses = False
        self.frozen: str | None = None
        self._folder.make()
        self.says(time.time() + 3600)
        self._listener = self._folder.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def says(self, until_unix: float) -> None:
        """This process stands for the supervisor and for its command."""
        me = identify(os.getpid())
        process = {"pid": me.pid, "ticks": me.ticks, "boot": me.boot}
        save = {"snapshot": "20261120T000000Z-00000000", "root": "00", "manifest_bytes": 1}
        state = {
            "state": {
                "job": JOB,
                "attempt": 1,
                "state": "running",
                "saved": {**save, "made_unix": 1.0},
                "not_frozen": "the save before it failed",
                "frozen": self.frozen,
            },
            "supervisor": process,
            "command": process,
            "log": "/nowhere",
            "bundle": "/older",
            "saves": WORKSPACE,
            "saves_until_unix": until_unix,
        }
        (self._folder.path / "state").write_text(json.dumps(state))

    def _serve(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer, peer.makefile("rb") as lines:
                self.asked.append(json.loads(lines.readline()))
                self.savers_then += len(self._machine.savers())
                if self.refuses:
                    error = {"type": "InvalidInput", "message": "no"}
                    peer.sendall(json.dumps({"error": error}).encode() + b"\n")
                    continue
                self.says(0.0)
                peer.sendall(b'{"result":{}}\n')


@pytest.fixture
def older(supervised: Machine) -> Iterator[Older]:
    yield Older(supervised)


def _book(machine: Machine) -> Autosave:
    return Autosave(book_of(machine.agent, machine.work, None, every_s=600.0), [], JOB)


@pytest.mark.rule(13)
def test_it_gives_up_its_grants_before_the_new_process_has_any(
    supervised: Machine, older: Older
) -> None:
    supervised.agent.call(_book(supervised))
    (asked,) = older.asked
    assert asked["op"] == "job.standby"
    args = asked["args"]
    assert (args["job"], args["workspace"], args["saves"]) == (JOB, WORKSPACE, [])
    assert supervised.saver() and not older.savers_then
    supervised.agent.call(_book(supervised))
    assert len(older.asked) == 1  # it has none any more
    saved = supervised.state().saved
    assert saved is not None and saved.made_unix == 1.0  # what it has saved counts on


@pytest.mark.rule(13)
def test_where_it_keeps_them_no_other_process_saves(supervised: Machine, older: Older) -> None:
    older.refuses = True
    with pytest.raises(MachineError, match="of an older torpor and keeps its grants"):
        supervised.agent.call(_book(supervised))
    assert not supervised.saver()


def test_a_look_names_its_job_until_the_new_process_saves(
    supervised: Machine, older: Older
) -> None:
    """Else a backup would give it a book without that job."""
    look = LookAtAutosave(WORKSPACE)
    assert (supervised.agent.call(look).lives, supervised.agent.call(look).job) == (False, JOB)
    older.says(0.0)
    assert supervised.agent.call(look).job == ""


def test_a_process_for_its_job_that_is_killed_is_seen_and_started_again(
    supervised: Machine, older: Older
) -> None:
    supervised.stands_by()
    assert supervised.state().saves_until_unix > time.time()
    saver = supervised.saver()
    assert saver is not None
    saver.kill()
    saver.wait()
    until(lambda: not supervised.state().saves_until_unix, "it is seen that it is gone")
    until(lambda: supervised.look() and supervised.savers(), "a look has started another process")


def test_what_it_says_of_a_command_that_it_does_not_freeze_counts_on(
    supervised: Machine, older: Older
) -> None:
    """Its driver would keep back saves of its own, and the new process freezes no such command."""
    supervised.stands_by()
    assert supervised.state().not_frozen == "the save before it failed"


def test_the_save_that_it_makes_is_not_ended_with_the_job(
    supervised: Machine, older: Older
) -> None:
    """It may be the last one before the machine goes."""
    marked = {**os.environ, OWN_MARK: str(supervised.folder.path)}
    save = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        found = supervised.folder.processes(supervised.kept())
    finally:
        for process in (save, other):
            process.kill()
            process.wait()
    assert other.pid in found and save.pid not in found


def test_where_its_command_is_frozen_it_keeps_its_grants(supervised: Machine, older: Older) -> None:
    """Without them it would leave, and the next save would remove what is frozen."""
    older.frozen = "20261120T000000Z-00000000"
    older.says(time.time() + 3600)
    supervised.agent.call(_book(supervised))
    assert older.asked == []


def test_the_end_of_a_machine_ends_its_saves_too(supervised: Machine, older: Older) -> None:
    supervised.agent.call(EndAutosave(WORKSPACE))
    assert [one["args"]["saves"] for one in older.asked] == [[]]
