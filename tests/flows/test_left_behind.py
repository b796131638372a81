"""What a destroy would lose: it is named, and what a link leads to keeps the machine."""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import backup, create
from tests.fixtures.lab import Lab
from tests.fixtures.near_agent import NearMachine
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.sshd import argv_of
from tests.fixtures.waiting import until
from tests.fixtures.world import World
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.shared.errors import AgentLost, InvalidInput, UnsavedWork, WorkspaceInvalid
from torpor.shared.wire.losses import LookForLosses
from torpor.shared.wire.snapshot import StorePasses
from torpor_cli.output import quiet


@pytest.fixture
def home(lab: Lab) -> Path:
    machine = lab.rent()
    work = lab.workspace(machine.id)
    work.mkdir()
    (work / "train.py").write_text("print()")
    return lab.home(machine.id)


def _link_out(home: Path) -> None:
    """The usual layout on GPU hosts."""
    (home / "nvme" / "checkpoints").mkdir(parents=True)
    (home / "nvme" / "checkpoints" / "last.pt").write_bytes(b"x" * 2_000_000)
    (home / "workspace" / "checkpoints").symlink_to(home / "nvme" / "checkpoints")
    (home / "workspace" / "python3").symlink_to("/usr/bin/python3")  # as in each venv


@pytest.mark.rule(22)
def test_a_link_that_leads_out_to_data_keeps_the_machine(lab: Lab, home: Path) -> None:
    _link_out(home)
    with pytest.raises(
        UnsavedWork, match=r"workspace/checkpoints is a link to .*2\.0 MB in 1 file"
    ):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1
    assert lab.verify_listed() == 1
    run_plainly(lab.opened, backup)  # which keeps the machine, so it only warns
    report = hibernate_plainly(lab.opened, accept_lost=["~/nvme"])
    assert (report.destroyed, lab.machines()) == (True, [])
    assert report.lost == []


@pytest.mark.parametrize("changes", ["the answer is lost", "only a name goes"])
def test_a_workspace_that_changed_is_stored_also_where_the_machine_must_stay(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    """Only an unchanged one is not stored again at each try."""
    _link_out(home)
    (home / "workspace" / "old").write_text("old")
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    if changes == "only a name goes":
        with pytest.raises(UnsavedWork):
            hibernate_plainly(lab.opened, only_if_idle=True)
        (home / "workspace" / "old").unlink()
    stored = lab.verify_listed() if changes == "only a name goes" else 0
    call, lost = NearMachine.call, []

    def once(machine: NearMachine, request: Any, **options: Any) -> Any:
        answer = call(machine, request, **options)
        if isinstance(request, StorePasses) and request.packs and not lost:
            lost.append(request)
            raise AgentLost("the answer is lost")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(NearMachine, "call", once)
        with pytest.raises(UnsavedWork, match="is verified"):
            hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == stored + 1
    with pytest.raises(UnsavedWork, match="Nothing is new since the last snapshot"):
        hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == stored + 1


def test_the_look_knows_where_volumes_were_mounted_when_the_machine_was_rented(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a provider block says today is of other machines."""
    asked: list[list[str]] = []

    def looking(*told: Any) -> LookForLosses:
        asked.append(told[-1])
        return LookForLosses(*told)

    monkeypatch.setattr("torpor.control.remote.snapshot.LookForLosses", looking)
    monkeypatch.setattr(lab.market, "volumes", ["/models"], raising=False)
    (rental,) = lab.opened.rentals.open()
    lab.opened.rentals.change(rental, volumes=("/data",))
    assert hibernate_plainly(lab.opened).destroyed
    assert asked and all(paths == ["/data"] for paths in asked)


def test_a_rental_keeps_where_volumes_are_mounted_and_none_may_be_in_the_workspace(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.market, "volumes", ["/root/workspace/data"], raising=False)
    hibernate_plainly(lab.opened)  # a block that is changed later holds up no hibernate
    with pytest.raises(InvalidInput, match="overlaps the workspace's path ~/workspace"):
        wake_plainly(lab.opened)
    assert lab.machines() == []
    monkeypatch.setattr(lab.market, "volumes", ["/models"])
    wake_plainly(lab.opened)
    (rental,) = lab.opened.rentals.open()
    assert rental.volumes == ("/models",)


def test_what_no_snapshot_holds_is_named(lab: Lab, home: Path) -> None:
    os.mkfifo(home / "workspace" / "pipe")
    report = hibernate_plainly(lab.opened)
    assert (report.skipped, report.skipped_names) == (1, ["~/workspace/pipe (fifo)"])
    assert {"what": "not kept", "value": "1 name, ~/workspace/pipe (fifo)"} in report.rows()


def test_an_idle_machine_that_is_kept_again_and_again_gets_no_further_snapshots(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    _link_out(home)
    for _ in range(3):
        with pytest.raises(UnsavedWork, match="workspace/checkpoints is a link"):
            hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == 1
    (home / "workspace" / "new").write_text("work of today")
    with pytest.raises(UnsavedWork):
        hibernate_plainly(lab.opened, only_if_idle=True)
    assert lab.verify_listed() == 2


def test_a_backup_warns_of_a_link_that_leads_out(
    lab: Lab, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _link_out(home)
    with caplog.at_level(logging.WARNING):
        run_plainly(lab.opened, backup)
    assert "workspace/checkpoints is a link to" in caplog.text
    assert "python3" not in caplog.text


@pytest.mark.rule(22)
def test_what_is_left_behind_is_in_the_report_and_told_at_the_wake(lab: Lab, home: Path) -> None:
    (home / "data" / "raw").mkdir(parents=True)
    (home / "data" / "raw" / "a").write_bytes(b"x" * 3_100_000)
    (home / ".cache" / "pip").mkdir(parents=True)
    (home / ".cache" / "pip" / "wheel").write_bytes(b"x" * 1000)
    (home / "notes.txt").write_text("do not lose me")
    report = hibernate_plainly(lab.opened, accept_lost=["~/*"])
    assert report.destroyed
    assert [line.partition(", newest")[0] for line in report.lost] == [
        f"yours: {home}/data: 3.1 MB in 1 file",
        f"yours: {home}/notes.txt: 14 bytes in 1 file",
        "3.1 MB in 2 files",
        f"{home}: 14 bytes in 1 file",
        f"caches, which are made again: {home}/.cache/pip (1.0 kB)",
    ]
    assert {"what": "left behind", "value": report.lost[1]} in report.rows()
    warnings = " ".join(wake_plainly(lab.opened).warnings)
    assert (
        f"destroyed, 3.1 MB in {home}/data/raw (3.1 MB), {home} (14 bytes) were outside" in warnings
    )


@pytest.mark.rule(22)
def test_a_block_that_refuses_losses_keeps_the_machine_above_its_size(lab: Lab, home: Path) -> None:
    (home / ".data").mkdir()
    (home / ".data" / "a").write_bytes(b"x" * 3_000_000)
    strict = lab.wanting(left_behind="refuse", left_behind_gib=0.001)
    with pytest.raises(UnsavedWork, match=r"3\.0 MB in 1 file, .* would be lost.*accept_lost"):
        hibernate_plainly(strict)
    assert len(lab.machines()) == 1
    wide = lab.wanting(left_behind="refuse", left_behind_gib=0.01)
    assert hibernate_plainly(wide).destroyed


@pytest.mark.rule(22)
def test_what_comes_during_a_long_upload_counts_where_the_block_refuses_losses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = world.rent()
    home = world.home(machine.id)
    (home / "workspace").mkdir()
    (home / "workspace" / "notes").write_text("of the workspace")
    store = RemoteSnapshot.store

    def looks() -> bool:
        argvs = [argv_of(process.pid) for process in world.processes(machine.id)]
        return any("torpor.machine.tree.left_behind" in argv for argv in argvs)

    def slowly(self: RemoteSnapshot, *given: Any) -> Any:
        until(lambda: not looks(), "no look at the machine is under way")
        (home / ".data").mkdir(exist_ok=True)
        (home / ".data" / "late").write_bytes(b"x" * 3_000_000)
        return store(self, *given)

    monkeypatch.setattr(RemoteSnapshot, "store", slowly)
    strict = world.wanting(left_behind="refuse", left_behind_gib=0.001)
    with pytest.raises(UnsavedWork, match=r"3\.0 MB in 1 file, .* would be lost: .*/\.data"):
        hibernate_plainly(strict)
    assert len(world.machines()) == 1


def _work_in_the_home(home: Path) -> None:
    """A newcomer's first session, and what tools write there by themselves."""
    (home / "train.py").write_text("print('the work of a day')")
    (home / "proj" / ".git").mkdir(parents=True)
    (home / "proj" / "model.py").write_bytes(b"x" * 2000)
    (home / "proj" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (home / ".vscode-server").mkdir()
    (home / ".vscode-server" / "server").write_bytes(b"x" * 50_000)


@pytest.mark.rule(22)
@pytest.mark.parametrize("settings", [{}, {"only_if_idle": True}])
def test_work_beside_the_workspace_keeps_the_machine_where_nobody_can_be_asked(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    _work_in_the_home(home)
    for _ in range(2):
        with pytest.raises(UnsavedWork) as kept:
            hibernate_plainly(lab.opened, **settings)
        words = str(kept.value)
        assert "still costs 4.00 $/h: 2.0 kB in 3 files that you wrote beside the work" in words
        assert f"{home}/proj (2.0 kB in 2 files), {home}/train.py (26 bytes in 1 file)." in words
        assert ".vscode-server" not in words
    assert len(lab.machines()) == 1
    assert lab.verify_listed() == (1 if settings else 2)
    (command,) = re.findall(r"`torpor hibernate demo --machine m1 (.*)`", words)
    assert shlex.split(command) == ["--accept-lost", "~/*"]
    assert hibernate_plainly(lab.opened, accept_lost=["~/*"], **settings).destroyed


@pytest.mark.rule(22)
def test_a_first_session_that_worked_in_the_home_by_mistake_loses_nothing(
    lab: Lab, terminal: Terminal
) -> None:
    two = lab.wanting(paths=["~/workspace", "~/data"])
    made = run_plainly(two, create)
    home, place = lab.home(made.id), lab.workspace(made.id)
    assert place.is_dir() and (home / "data").is_dir()
    assert "an interactive shell begins in" in (home / ".profile").read_text()
    _work_in_the_home(home)
    with pytest.raises(
        WorkspaceInvalid, match=r"nothing to keep; the home has proj, train\.py: mov"
    ):
        hibernate_plainly(two)
    (home / "proj").rename(place / "proj")
    terminal.types("n")
    with quiet(False, asks=True), pytest.raises(UnsavedWork, match=r"/train\.py \(26 bytes"):
        hibernate_plainly(two)
    (home / "train.py").rename(place / "train.py")
    report = hibernate_plainly(two)  # although one of the directories that torpor made is empty
    assert report.destroyed
    assert not any(".profile" in line for line in report.lost)  # nor is torpor's own line a loss
    for _ in range(2):
        woken = wake_plainly(two)
        place = lab.workspace(woken.machine)
        assert {path.name for path in place.iterdir()} == {"proj", "train.py"}
        assert "an interactive shell begins" in (lab.home(woken.machine) / ".profile").read_text()
        assert hibernate_plainly(two).destroyed


def test_a_directory_that_cannot_be_made_rents_no_machine_that_lacks_it(lab: Lab) -> None:
    unfit = lab.wanting(paths=["/proc/workspace"])
    with pytest.raises(WorkspaceInvalid, match=r"/proc/workspace cannot be made on the machine"):
        run_plainly(unfit, create)
    assert lab.machines() == []


def test_work_beside_the_workspace_is_accepted_by_its_names_and_moved_work_is_stored(
    lab: Lab, home: Path
) -> None:
    _work_in_the_home(home)
    with pytest.raises(UnsavedWork, match=r"beside the workspace are in no snapshot: .*/proj "):
        hibernate_plainly(lab.opened, accept_lost=["~/train.py"])
    (home / "proj").rename(home / "workspace" / "proj")
    assert hibernate_plainly(lab.opened, accept_lost=["~/train.py"]).destroyed
    report = wake_plainly(lab.opened)
    assert (lab.workspace(report.machine) / "proj" / "model.py").exists()


@pytest.mark.rule(22)
def test_a_person_at_the_terminal_is_asked_once_before_the_machine_ends(
    lab: Lab, home: Path, terminal: Terminal
) -> None:
    _work_in_the_home(home)
    terminal.types("no")
    with quiet(False, asks=True), pytest.raises(UnsavedWork, match="was not destroyed"):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1
    (asked,) = terminal.questions()
    assert f"{home}/proj (2.0 kB in 2 files), {home}/train.py (26 bytes in 1 file)" in asked
    assert asked.endswith("Destroy machine m1 all the same? [y/N] ")

    def ponder() -> None:
        (home / "workspace" / "late.py").write_text("written while the question stood there")

    terminal.types("y", ponder)
    with quiet(False, asks=True):
        assert hibernate_plainly(lab.opened).destroyed
    assert len(terminal.questions()) == 1
    report = wake_plainly(lab.opened)
    assert (lab.workspace(report.machine) / "late.py").exists()


@pytest.mark.parametrize("output", [b"", b"{"])
def test_a_long_look_that_fails_hides_nothing_in_a_home(
    lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, output: bytes
) -> None:
    monkeypatch.setattr(
        "tests.fixtures.near_agent._LooksHere.communicate", lambda *_, **__: (output, b"")
    )
    _work_in_the_home(home)
    with pytest.raises(UnsavedWork, match=r"/proj \(2\.0 kB in 2 files\), .*/train\.py \(26 bytes"):
        hibernate_plainly(lab.opened)
    report = hibernate_plainly(lab.opened, accept_lost=["~/*"])
    assert any("not looked at: the machine: its process ended" in line for line in report.lost)


@pytest.mark.rule(22)
def test_a_look_that_fails_is_not_an_empty_home(
    lab: Lab, home: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.machine.agent.losses.HOMES_S", -1.0)
    unknown = "whether you wrote files beside the workspace is not known: the look at the homes"
    with pytest.raises(UnsavedWork, match=rf"costs 4\.00 \$/h: {unknown} did not come to its end"):
        hibernate_plainly(lab.opened)
    terminal.types("n")
    with quiet(False, asks=True), pytest.raises(UnsavedWork, match=unknown):
        hibernate_plainly(lab.opened)
    assert unknown in terminal.questions()[0]
    assert hibernate_plainly(lab.opened, accept_lost=["~/*"]).destroyed


class Terminal(io.StringIO):
    """The person's: what it shows, and what is typed there."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__()
        self._capsys = capsys
        self._typed: list[tuple[str, Callable[[], None]]] = []

    def isatty(self) -> bool:
        return True

    def types(self, answer: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._typed.append((answer, meanwhile))

    def readline(self, size: int | None = -1) -> str:
        answer, meanwhile = self._typed.pop(0)
        meanwhile()
        return f"{answer}\n"

    def questions(self) -> list[str]:
        """Those since the last look."""
        shown = self._capsys.readouterr().err
        return list(re.findall(r"[^\n]*\[y/N\] ", shown))


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal(capsys)
    monkeypatch.setattr(sys, "stdin", made)
    return made
