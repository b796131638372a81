"""What a user wrote in a home by mistake is stored beside the workspace, where nobody can be
asked, or keeps the machine."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flows import backup, delete_snapshots, job, pin, prune, restore_path, snapshots, verify, wake
from tasks.plain_runner import PlainRunner
from tasks.snapshot import look_at_homes
from tasks.workspace import OpenWorkspace
from tests.fixtures.driver import hurried
from tests.fixtures.lab import Lab
from tests.fixtures.near_agent import NearMachine
from tests.fixtures.passes import before_each_walk
from tests.fixtures.plain_flows import hibernate_plainly, plain, run_plainly, wake_plainly
from tests.fixtures.world import World
from torpor.control.money import storage
from torpor.control.reports import HibernateReport
from torpor.control.store.manifests import snapshot_ids
from torpor.control.upkeep.prune_report import PruneReport
from torpor.control.upkeep.reports import BackupReport
from torpor.shared.errors import (
    AgentLost,
    InvalidInput,
    MachineError,
    StillChanging,
    TorporError,
    UnsavedWork,
)
from torpor.shared.values import MachineId, WorkspaceName
from torpor.shared.wire.losses import LookAtHomes, Losses
from torpor.shared.wire.snapshot import BeginSnapshot, Confirm, StorePasses
from torpor_cli.output import quiet

HOME = WorkspaceName("home--demo")


@pytest.fixture
def home(sealed_lab: Lab) -> Path:
    return _begun(sealed_lab)


def _begun(lab: Lab) -> Path:
    machine = lab.rent()
    work = lab.workspace(machine.id)
    work.mkdir()
    (work / "train.py").write_text("print()")
    return lab.home(machine.id)


def _work_in(home: Path) -> None:
    (home / "train.py").write_text("print('the work of a day')")
    (home / "train.py").chmod(0o750)
    (home / "proj" / "pkg").mkdir(parents=True)
    (home / "proj" / "pkg" / "__init__.py").touch()
    (home / "proj" / "model.py").write_bytes(b"x" * 2000)
    (home / "proj" / "same.py").hardlink_to(home / "proj" / "model.py")
    (home / "proj" / "latest").symlink_to("model.py")
    (home / "proj" / os.fsdecode(b"\xff\n'|")).write_bytes(b"a name of any bytes")
    (home / "proj" / "node_modules").mkdir()
    (home / "proj" / "node_modules" / "left-pad.js").write_text("made again")
    (home / ".config").mkdir()
    (home / ".config" / "tool").write_text("a setting")


def _content(place: Path) -> dict[str, tuple[int, bytes]]:
    """What lies below, by its path: the mode, and the bytes or where a link leads."""
    found = {}
    for path in place.rglob("*"):
        kind = os.readlink(path).encode() if path.is_symlink() else b""
        content = path.read_bytes() if path.is_file() and not kind else kind
        found[str(path.relative_to(place))] = path.lstat().st_mode, content
    return found


def _own(home: Path) -> dict[str, tuple[int, bytes]]:
    """The user's own of what ``_work_in`` made, and of what a test added to it."""
    others = (".", "workspace", "proj/node_modules")
    return {path: what for path, what in _content(home).items() if not path.startswith(others)}


def _restored(lab: Lab) -> dict[str, tuple[int, bytes]]:
    """What the home snapshot brings onto the workspace's machine, which is woken where it sleeps;
    nothing of it stays there."""
    machine = lab.machines()[0].id if lab.machines() else wake_plainly(lab.opened).machine
    with plain(lab.opened):
        restore_path.fn(HOME, "~", into="~/back", machine=machine)
    back = lab.home(MachineId(machine)) / "back"
    found = _content(back / "home")
    shutil.rmtree(back)
    return found


def _kept(lab: Lab, **options: Any) -> str:
    """Why the machine was kept; nothing of the home is stored then."""
    with pytest.raises(UnsavedWork) as kept:
        hibernate_plainly(lab.opened, **options)
    assert len(lab.machines()) == 1
    assert snapshot_ids(lab.store, HOME) == []
    return str(kept.value)


@pytest.mark.rule(22)
def test_what_was_written_in_a_home_by_mistake_outlives_the_machine(
    sealed_lab: Lab, home: Path
) -> None:
    lab = sealed_lab
    _work_in(home)
    was = _own(home)
    report = hibernate_plainly(lab.opened)
    assert report.destroyed and lab.machines() == []
    (stored,) = snapshot_ids(lab.store, HOME)
    assert [line.partition(", newest")[0] for line in report.beside] == [
        f"snapshot {stored} of home--demo has {home}/proj: 2.0 kB in 2 files",
        f"snapshot {stored} of home--demo has {home}/train.py: 26 bytes in 1 file",
    ]
    assert {"what": "stored beside", "value": report.beside[0]} in report.rows()
    woken = wake_plainly(lab.opened)
    (said,) = [line for line in woken.warnings if "written in a home" in line]
    assert f"snapshot {stored} of home--demo, " in said
    assert (
        " bytes in all. `torpor snapshots home--demo newest` lists them, and `torpor rest" in said
    )
    assert said.endswith("until you run delete-snapshots for home--demo")
    assert not (lab.home(MachineId(woken.machine)) / "proj").exists()
    assert _restored(lab) == was


def test_it_comes_back_onto_a_machine_beside_what_is_there(sealed_lab: Lab, home: Path) -> None:
    lab = sealed_lab
    _work_in(home)
    hibernate_plainly(lab.opened)
    woken = wake_plainly(lab.opened)
    place = lab.home(MachineId(woken.machine))
    (place / "proj").mkdir()
    (place / "proj" / "model.py").write_text("of today")
    with plain(lab.opened):
        done = restore_path.fn(HOME, "~/proj", into="~/workspace", machine=woken.machine)
    assert done.restored_to == str(place / "workspace" / "proj")
    assert (place / "workspace" / "proj" / "model.py").read_bytes() == b"x" * 2000
    assert (place / "proj" / "model.py").read_text() == "of today"
    with plain(lab.opened), pytest.raises(InvalidInput, match="never overwrites"):
        restore_path.fn(HOME, "~/proj", into="~/workspace", machine=woken.machine)
    assert hibernate_plainly(lab.opened).destroyed
    assert len(snapshot_ids(lab.store, HOME)) == 2  # the file of today is another machine's


def test_it_is_listed_verified_pruned_and_deleted_under_its_own_name(
    sealed_lab: Lab, home: Path
) -> None:
    lab = sealed_lab
    _work_in(home)
    hibernate_plainly(lab.opened)
    (stored,) = snapshot_ids(lab.store, HOME)
    with plain(lab.opened):
        listed = snapshots.fn(HOME, "newest")
        assert {"~/proj/pkg/__init__.py", "~/train.py"} <= {row["path"] for row in listed.shown}
        (kept,) = snapshots.fn(HOME).shown
        assert (kept["verified"], kept["machine"], kept["made by"]) == ("yes", "m1", "hibernate")
        assert verify.fn(HOME).whole == [stored]
        for flow, options in ((wake, {}), (verify, {"depth": "drill"})):
            with pytest.raises(InvalidInput, match="workspace 'home--demo' was not given"):
                flow.fn(HOME, **options)
        (sizes,) = storage.stored(storage.look(lab.store), None)
        assert sizes.workspace == "demo"  # and no workspace that nobody has made
        delete_snapshots.fn(HOME, [stored], even_newest=stored)
        prune.fn(HOME, dry_run=False, without_snapshots=True)
    woken = wake_plainly(lab.opened)
    assert not any("written in a home" in line for line in woken.warnings)


def _store_without_an_end(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lab.market, "destroy", _refuses)
        with pytest.raises(InvalidInput, match="does not end"):
            hibernate_plainly(lab.opened)


@pytest.mark.rule(22)
def test_of_each_machine_those_go_whose_files_are_all_in_the_last_of_its_home(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    _work_in(home)
    for number in range(3):
        (home / f"train{number}.py").write_text(f"print({number})")
        _store_without_an_end(lab, monkeypatch)
    before = snapshot_ids(lab.store, HOME)
    assert len(before) == 3
    with plain(lab.opened):
        pin.fn(HOME, before[1], reason="as it was")
    assert hibernate_plainly(lab.opened).destroyed
    first = snapshot_ids(lab.store, HOME)
    assert len(first) == 2 and first[0] == before[1] and first[1] not in before
    woken = wake_plainly(lab.opened)
    (lab.home(MachineId(woken.machine)) / "other.py").write_text("of another machine")
    assert hibernate_plainly(lab.opened).destroyed
    assert snapshot_ids(lab.store, HOME)[:2] == first  # nothing goes on from the newest of it


def _refuses(*_: object) -> None:
    raise InvalidInput("a machine that does not end")


def _hide(home: Path) -> None:
    (home / "proj").rename(home / ".proj")


def _make_an_environment(home: Path) -> None:
    (home / "proj" / "pyvenv.cfg").write_text("home = /usr/bin")


def _edit(home: Path) -> None:
    (home / "proj" / "model.py").write_bytes(b"y" * 2000)


def _lead_elsewhere(home: Path) -> None:
    (home / "proj" / "latest").unlink()
    (home / "proj" / "latest").symlink_to("same.py")


@pytest.mark.rule(22)
@pytest.mark.parametrize("act", [_hide, _make_an_environment, _edit, _lead_elsewhere])
def test_an_earlier_snapshot_of_a_home_stays_where_it_alone_holds_files(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
) -> None:
    lab = sealed_lab
    _work_in(home)
    _store_without_an_end(lab, monkeypatch)
    (first,) = snapshot_ids(lab.store, HOME)
    act(home)
    assert hibernate_plainly(lab.opened).destroyed
    assert len(snapshot_ids(lab.store, HOME)) == 2
    with plain(lab.opened):
        assert "~/proj/model.py" in {row["path"] for row in snapshots.fn(HOME, first).shown}


@pytest.mark.rule(22)
def test_the_retention_of_the_workspace_deletes_nothing_of_a_home(
    sealed_lab: Lab, home: Path
) -> None:
    lab = sealed_lab
    _work_in(home)
    hibernate_plainly(lab.opened)
    kept = snapshot_ids(lab.store, HOME)
    woken = wake_plainly(lab.opened)
    for number in range(3):
        (lab.workspace(MachineId(woken.machine)) / "train.py").write_text(f"print({number})")
        report = run_plainly(lab.opened, backup, keep_last=1)
    assert isinstance(report, BackupReport) and report.deleted
    assert snapshot_ids(lab.store, HOME) == kept


def test_a_prune_of_the_workspace_prunes_what_is_stored_of_a_home(
    sealed_lab: Lab, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = sealed_lab

    def pruned(**options: bool) -> PruneReport | None:
        return run_plainly(lab.opened, prune, dry_run=False, **options).home

    hibernate_plainly(lab.opened, destroy=False)
    assert pruned() is None
    (home / "a.py").write_text("on the first")
    hibernate_plainly(lab.opened)
    (lab.home(MachineId(wake_plainly(lab.opened).machine)) / "b.py").write_text("on the second")
    hibernate_plainly(lab.opened)
    first, last = snapshot_ids(lab.store, HOME)
    with plain(lab.opened):
        delete_snapshots.fn(HOME, [first])
        assert {row["what"] for row in prune.fn("demo").rows()} >= {"freed", "of a home: freed"}
        found = pruned()
        assert found is not None and (found.snapshots, found.young.packs) == (1, 1)
        delete_snapshots.fn(HOME, [last], even_newest=last)
    assert pruned() is None  # where no snapshot is left, its user has to say so
    assert "has no snapshot left, and its packs stay" in caplog.text
    found = pruned(without_snapshots=True)
    assert found is not None and (found.snapshots, found.young.packs) == (0, 2)


@pytest.mark.parametrize("flow", [verify, snapshots])
def test_what_looks_at_a_workspace_names_what_is_stored_of_a_home(
    sealed_lab: Lab, home: Path, caplog: pytest.LogCaptureFixture, flow: Any
) -> None:
    hibernate_plainly(sealed_lab.opened, destroy=False)
    run_plainly(sealed_lab.opened, flow)
    assert "home--" not in caplog.text
    _work_in(home)
    hibernate_plainly(sealed_lab.opened)
    caplog.clear()
    run_plainly(sealed_lab.opened, flow)
    assert f"more is stored as home--demo: `torpor {flow.name} home--demo" in caplog.text


def test_a_block_that_is_saved_under_the_name_of_a_home_is_opened_as_itself(
    sealed_lab: Lab, home: Path
) -> None:
    """The name field of a block may not begin so, and the name that it is saved under may."""
    lab = sealed_lab
    hibernate_plainly(lab.opened)
    with _BlockOfThatName(lab.opened, "home--other"):
        assert snapshots.fn("home--other").workspace == "demo"
    with (
        _BlockOfThatName(lab.opened, "home--demo", "demo"),
        pytest.raises(InvalidInput, match="home--demo may be the Workspace block of that name, or"),
    ):
        snapshots.fn("home--demo")


class _BlockOfThatName(PlainRunner):
    """An installation that has saved one workspace's block under these names."""

    def __init__(self, opened: OpenWorkspace, *names: str) -> None:
        super().__init__(opened)
        self._names = names

    def workspaces(self) -> list[str]:
        return [*self._names]

    def open(self, workspace: Any) -> OpenWorkspace:
        assert workspace in self._names
        return super().open("demo")


@pytest.mark.parametrize("settings", [{}, {"only_if_idle": True}])
def test_a_workspace_that_is_stored_already_waits_for_no_further_save(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]
) -> None:
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    hibernate_plainly(sealed_lab.opened, destroy=False)
    _work_in(home)
    assert hibernate_plainly(sealed_lab.opened, **settings).destroyed
    assert len(snapshot_ids(sealed_lab.store, HOME)) == 1


def test_a_store_without_a_key_keeps_the_machine(lab: Lab) -> None:
    home = _begun(lab)
    _work_in(home)
    assert "that you wrote beside the workspace are in no snapshot" in _kept(lab)
    with plain(lab.opened), pytest.raises(InvalidInput, match="a store block without a key"):
        snapshots.fn(HOME)


def test_a_person_at_the_terminal_is_asked_and_nothing_is_sent(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(home)
    monkeypatch.setattr("sys.stdin", _Typed("n\n"))
    with quiet(False, asks=True):
        assert "are in no snapshot" in _kept(sealed_lab)


class _Typed:
    """A terminal at which these lines are typed, one for each question."""

    def __init__(self, *lines: str) -> None:
        self.left = list(lines)

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.left.pop(0)


@pytest.mark.rule(22)
@pytest.mark.parametrize(
    "name", [".env", "deep/.ssh/config", "id_ed25519", "server.pem", "hf/token", "credentials.json"]
)
def test_what_may_hold_credentials_is_sent_nowhere_and_keeps_the_machine(
    sealed_lab: Lab, home: Path, name: str
) -> None:
    lab = sealed_lab
    _work_in(home)
    secret = home / "proj" / name
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("a key of its user")
    words = _kept(lab)
    assert "still costs 4.00 $/h" in words
    assert f"{home}/proj (2.0 kB in 3 files), {home}/train.py" in words
    assert f"by the name, there may be credentials in ~/proj/{name}" in words
    assert not list(lab.store.list(f"workspaces/{HOME}/"))
    was = _own(home)
    assert hibernate_plainly(lab.opened, accept_lost=[f"~/proj/{name}"]).destroyed
    assert f"proj/{name}" in was
    back = _restored(lab)
    assert was.keys() - back.keys() == {f"proj/{name}", *_parents(f"proj/{name}")} - {"proj"}
    assert all(was[path] == back[path] for path in back)


def _parents(name: str) -> set[str]:
    return {str(path) for path in Path(name).parents} - {"."}


def test_more_than_a_mistake_holds_keeps_the_machine(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(home)
    monkeypatch.setattr("torpor.machine.agent.user_files.MOST_BYTES", 2000)
    assert "with 2,000 bytes, and there are 6 with 2,0" in _kept(sealed_lab)
    monkeypatch.undo()
    monkeypatch.setattr("torpor.machine.agent.user_files.MOST_FILES", 3)
    assert "at most 3 files" in _kept(sealed_lab)
    monkeypatch.undo()
    assert hibernate_plainly(sealed_lab.opened).destroyed


def test_pipes_and_sockets_are_no_data(sealed_lab: Lab, home: Path) -> None:
    _work_in(home)
    os.mkfifo(home / "proj" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "proj" / "socket"))
        assert hibernate_plainly(sealed_lab.opened).destroyed


@pytest.mark.rule(22)
def test_data_behind_a_link_of_a_home_keeps_the_machine(sealed_lab: Lab, home: Path) -> None:
    _work_in(home)
    (home / ".big").mkdir()
    (home / ".big" / "weights").write_bytes(b"x" * 3000)
    (home / "proj" / "weights").symlink_to("../.big/weights")
    (home / "proj" / "work").symlink_to(home / "workspace" / "train.py")
    assert f"{home}/proj/weights is a link to {home}/.big/weights" in _kept(sealed_lab)


def test_a_look_that_is_not_answered_keeps_the_machine(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(home)
    monkeypatch.setattr("torpor.machine.agent.user_files.HOMES_S", -1.0)
    assert "what else is there is not known: the look at the homes did not" in _kept(sealed_lab)


def _before_each_call(monkeypatch: pytest.MonkeyPatch, hook: Callable[[int, Any], None]) -> None:
    """Call ``hook`` with a count before each request to the machine of a snapshot."""
    count = 0
    call = NearMachine.call

    def counted(self: NearMachine, request: Any, **options: Any) -> Any:
        nonlocal count
        if request.op.startswith("snapshot."):
            count += 1
            hook(count, request)
        return call(self, request, **options)

    monkeypatch.setattr(NearMachine, "call", counted)


class _Killed(BaseException):
    """The control side is gone."""


@pytest.mark.rule(22)
def test_a_hibernate_that_is_killed_at_any_step_keeps_the_machine_and_the_next_one_ends_it(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    _work_in(home)
    was = _own(home)
    (machine,) = lab.machines()
    at = steps = 0

    def kill(number: int, request: Any) -> None:
        if number == at:
            raise _Killed

    for at in range(1, 100):  # noqa: B007 - kill reads it
        with monkeypatch.context() as patch:
            _before_each_call(patch, kill)
            try:
                report = hibernate_plainly(lab.opened)
                break
            except _Killed:
                steps += 1
        assert lab.machines() == [machine]
        lab.market.near[machine.id].restart()
    assert report.destroyed
    assert steps >= 12
    assert _restored(lab) == was


@pytest.mark.rule(22)
def test_an_agent_that_is_lost_at_any_step_loses_no_file(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    _work_in(home)
    was = _own(home)
    (machine,) = lab.machines()
    at, lost = 0, False

    def lose(number: int, request: Any) -> None:
        nonlocal lost
        if number == at:
            lost = True
            lab.market.near[machine.id].restart()
            raise AgentLost("the agent is gone")

    for at in range(1, 100, 2):  # noqa: B007 - lose reads it
        lost = False
        with monkeypatch.context() as patch:
            _before_each_call(patch, lose)
            try:
                report = hibernate_plainly(lab.opened)
            except TorporError:
                assert lab.machines() == [machine]
                lab.market.near[machine.id].restart()
                continue
        assert report.destroyed
        assert _restored(lab) == was
        if not lost:
            break
        (machine,) = lab.machines()
        _work_in(lab.home(machine.id))
        with plain(lab.opened):
            ids = snapshot_ids(lab.store, HOME)
            delete_snapshots.fn(HOME, ids, even_newest=ids[-1])


@pytest.mark.rule(22)
def test_what_changes_in_a_home_until_the_last_moment_is_stored_too(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    _work_in(home)
    confirms = []

    def write(number: int, request: Any) -> None:
        if isinstance(request, Confirm):
            confirms.append(number)
            if len(confirms) == 1:
                (home / "proj" / "model.py").write_bytes(b"y" * 2000)
                (home / "late.py").write_text("written while the workspace was compared")

    _before_each_call(monkeypatch, write)
    report = hibernate_plainly(lab.opened)
    assert report.destroyed and len(confirms) > 3
    back = _restored(lab)
    assert back["proj/model.py"][1] == b"y" * 2000
    assert back["late.py"][1].startswith(b"written while")


def _at_the_comparison(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` once, before the last look at the homes: the first has come to its end."""
    acts = [act]

    def hook(number: int, request: Any) -> None:
        if isinstance(request, (Confirm, LookAtHomes)) and acts:
            acts.pop()()

    _before_each_call(monkeypatch, hook)


def _late(home: Path) -> None:
    (home / "late.py").write_text("the first of its kind")


@pytest.mark.rule(22)
@pytest.mark.parametrize("settings", [{}, {"only_if_idle": True}])
def test_the_first_file_that_is_written_after_the_look_is_stored_too(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]
) -> None:
    lab = sealed_lab
    monkeypatch.setattr("tasks.guards.check_idle", lambda *_: None)
    _at_the_comparison(monkeypatch, lambda: _late(home))
    report = hibernate_plainly(lab.opened, **settings)
    assert report.destroyed and "late.py: 21 bytes" in report.beside[0]
    assert _restored(lab)["late.py"][1] == b"the first of its kind"


def test_the_first_file_that_is_written_after_the_look_keeps_the_machine_of_a_plain_store(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = _begun(lab)
    _at_the_comparison(monkeypatch, lambda: _late(home))
    assert f"in no snapshot: {home}/late.py (21 bytes in 1 file)" in _kept(lab)


@pytest.mark.parametrize("accepted", ["~/*", "~/late.py"])
def test_what_was_accepted_may_also_come_after_the_look(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    home = _begun(lab)
    _at_the_comparison(monkeypatch, lambda: _late(home))
    assert hibernate_plainly(lab.opened, accept_lost=[accepted]).destroyed


@pytest.mark.rule(22)
def test_a_look_at_the_last_moment_that_is_not_answered_keeps_the_machine(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begun(lab)
    hangs = partial(monkeypatch.setattr, "torpor.machine.agent.losses.HOMES_S", -1.0)
    _at_the_comparison(monkeypatch, hangs)
    assert "whether you wrote files beside the workspace is not known: the look at" in _kept(lab)


@pytest.mark.rule(22)
@pytest.mark.parametrize("own", [True, False], ids=["with files before", "without"])
def test_a_person_is_asked_again_about_what_was_written_after_the_question(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    lab = sealed_lab
    if own:
        _work_in(home)
    terminal = _Typed(*["y\n"] * own, "n\n")
    monkeypatch.setattr("sys.stdin", terminal)
    _at_the_comparison(monkeypatch, lambda: _late(home))
    with quiet(False, asks=True):
        assert f"{home}/late.py (21 bytes in 1 file)" in _kept(lab)
    assert terminal.left == []


@pytest.mark.usefixtures("needs_server", "short_agent")
def test_what_a_job_leaves_in_a_home_at_its_last_moment_is_stored_too(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    _at_the_comparison(monkeypatch, lambda: _late(home))
    with hurried(), plain(lab.opened):
        job.fn(lab.opened.spec.name, ["true"])
    assert lab.machines() == []
    assert _restored(lab)["late.py"][1] == b"the first of its kind"


@pytest.mark.parametrize("own", [True, False], ids=["where files are stored", "without"])
def test_what_is_written_into_the_workspace_during_the_last_look_at_the_homes_is_stored(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    lab = sealed_lab
    if own:
        _work_in(home)
    late = lab.workspace(lab.machines()[0].id) / "late.py"
    call, homes, written = NearMachine.call, [], []

    def written_meanwhile(self: NearMachine, request: Any, **options: Any) -> Any:
        answer = call(self, request, **options)
        if isinstance(request, BeginSnapshot) and request.user_files is not None:
            homes.append(request.run)
        at_homes = isinstance(request, LookAtHomes) or (
            isinstance(request, Confirm) and request.run in homes
        )
        if at_homes and not written:
            written.append(late.write_text("written at the last moment"))
        return answer

    monkeypatch.setattr(NearMachine, "call", written_meanwhile)
    assert hibernate_plainly(lab.opened).destroyed
    woken = wake_plainly(lab.opened)
    assert (lab.workspace(MachineId(woken.machine)) / "late.py").exists()


@pytest.mark.parametrize("grows", [False, True])
def test_a_yes_holds_where_the_long_look_was_cut(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    home = _begun(lab)
    _work_in(home)
    monkeypatch.setattr(
        "tests.fixtures.near_agent._LooksHere.communicate", lambda *_, **__: (b"", b"")
    )
    terminal = _Typed("y\n")
    monkeypatch.setattr("sys.stdin", terminal)
    if grows:
        _at_the_comparison(monkeypatch, lambda: (home / "train.py").write_bytes(b"x" * 5000))
    with quiet(False, asks=True):
        assert hibernate_plainly(lab.opened).destroyed
    assert terminal.left == []


def test_files_that_come_at_each_last_look_are_named_with_how_to_accept_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, numbers = _begun(lab), itertools.count()

    def write(number: int, request: Any) -> None:
        if isinstance(request, LookAtHomes):
            (home / f"late{next(numbers)}.py").write_text("one more")

    _before_each_call(monkeypatch, write)
    monkeypatch.setattr("sys.stdin", _Typed("y\n", "y\n", "y\n"))
    with quiet(False, asks=True), pytest.raises(StillChanging) as kept:
        hibernate_plainly(lab.opened)
    assert f"{home}/late2.py (8 bytes in 1 file)" in str(kept.value)
    assert "`--accept-lost '~/*'`" in str(kept.value)
    assert len(lab.machines()) == 1


def test_a_person_is_not_asked_again_about_a_file_that_grows(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(home)
    monkeypatch.setattr("sys.stdin", _Typed("y\n"))
    _at_the_comparison(monkeypatch, lambda: (home / "train.py").write_bytes(b"x" * 5000))
    with quiet(False, asks=True):
        assert hibernate_plainly(sealed_lab.opened).destroyed


def test_files_that_were_moved_into_the_workspace_meanwhile_keep_no_machine(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    (home / "late.py").write_text("where it does not belong")
    at = lab.workspace(lab.machines()[0].id) / "late.py"
    _at_the_comparison(monkeypatch, lambda: (home / "late.py").rename(at))
    report = hibernate_plainly(lab.opened)
    assert report.destroyed and report.beside == []
    woken = wake_plainly(lab.opened)
    restored = lab.workspace(MachineId(woken.machine)) / "late.py"
    assert restored.read_text() == "where it does not belong"


def test_a_file_that_never_rests_keeps_the_machine_and_the_workspace_is_stored(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = sealed_lab
    monkeypatch.setattr("torpor.machine.agent.snapshot.PAUSE_S", 0.0)
    _work_in(home)

    lines = itertools.count()

    def write(*_: object) -> None:
        (home / "proj" / "train.log").write_text(f"line {next(lines)}")

    with monkeypatch.context() as patch:
        _before_each_call(patch, write)
        before_each_walk(patch, lambda: write())
        with pytest.raises(UnsavedWork, match=r"home--demo .* last: proj/train\.log.* is verified"):
            hibernate_plainly(lab.opened)
        assert lab.verify_listed() == 1
        assert hibernate_plainly(lab.opened, accept_changed=["*.log"]).destroyed
    assert _restored(lab)["proj/train.log"][1].startswith(b"line ")


def test_a_file_that_cannot_be_read_keeps_the_machine_and_the_workspace_is_stored(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, own = sealed_lab, []
    _work_in(home)

    def refuse(number: int, request: Any) -> None:
        if isinstance(request, BeginSnapshot) and request.user_files is not None:
            own.append(request.run)
        if isinstance(request, StorePasses) and request.run in own:
            raise MachineError("near: /root/proj/a cannot be read: Permission denied")

    _before_each_call(monkeypatch, refuse)
    words = _kept(lab)
    assert "were not stored beside it: near: /root/proj/a cannot be read" in words
    assert lab.verify_listed() == 1


@pytest.mark.rule(22)
def test_a_key_that_comes_at_the_last_moment_keeps_the_machine(
    sealed_lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_in(home)

    def write(number: int, request: Any) -> None:
        if isinstance(request, Confirm):
            (home / "id_rsa").write_text("a key")

    _before_each_call(monkeypatch, write)
    with pytest.raises(UnsavedWork, match="there may be credentials in ~/id_rsa"):
        hibernate_plainly(sealed_lab.opened)
    assert len(sealed_lab.machines()) == 1


def test_replicas_keep_a_home_of_each(sealed_lab: Lab, home: Path) -> None:
    lab = sealed_lab
    (home / "a.py").write_text("on the first")
    hibernate_plainly(lab.opened, destroy=False)
    second = lab.rent()
    lab.workspace(second.id).mkdir()
    (lab.workspace(second.id) / "train.py").write_text("print()")
    (lab.home(second.id) / "b.py").write_text("on the second")
    for machine in lab.machines():
        assert hibernate_plainly(lab.opened, machine=machine.id).destroyed
    with plain(lab.opened):
        rows = snapshots.fn(HOME).shown
        assert {row["machine"] for row in rows} == {"m1", "m2"}
        held = {
            name["path"] for row in rows for name in snapshots.fn(HOME, str(row["snapshot"])).shown
        }
    assert {"~/a.py", "~/b.py"} <= held


def test_the_first_file_after_the_look_over_ssh_and_a_real_store(
    sealed_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sealed_world
    home = world.home(world.rent().id)
    (home / "workspace").mkdir()
    (home / "workspace" / "notes").write_text("of the workspace")

    def late(*told: Any, **options: Any) -> Losses:
        if not (home / "late.py").exists():
            _late(home)
        return look_at_homes(*told, **options)

    monkeypatch.setattr("flows.procedures.save.look_at_homes", late)
    report = hibernate_plainly(world.opened)
    assert report.destroyed and "late.py: 21 bytes" in report.beside[0]


@pytest.mark.rule(22)
def test_over_ssh_and_a_real_store(sealed_world: World, tmp_path: Path) -> None:
    world = sealed_world
    home = world.home(world.rent().id)
    (home / "workspace").mkdir()
    (home / "workspace" / "notes").write_text("of the workspace")
    _work_in(home)
    was = _own(home)
    report = hibernate_plainly(world.opened)
    assert isinstance(report, HibernateReport) and report.destroyed
    woken = wake_plainly(world.opened)
    assert any("of home--demo" in line for line in woken.warnings)
    with plain(world.opened):
        restore_path.fn(HOME, "~", into="~/back", machine=woken.machine)
        restore_path.fn(HOME, "~", into=str(tmp_path / "back"), machine="here")
    assert _content(tmp_path / "back" / "home") == was
    assert _content(world.home(MachineId(woken.machine)) / "back" / "home") == was
