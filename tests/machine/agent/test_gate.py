"""A restore gives each file its name when it is complete, and what a command waits for first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flows.procedures.restore import begun, restore_parts
from tasks.plain_runner import PlainRunner
from tasks.restore import check_restore, finish_restore
from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.snapshots import Machines, comes_back
from tests.fixtures.trees import differences, facts, kept, let_settle
from tests.fixtures.waiting import until
from torpor.control.remote.restore import RemoteRestore
from torpor.machine.agent import restore as restore_module
from torpor.machine.agent.gate import RestoreGate
from torpor.machine.agent.in_use import UNKNOWN, InUse
from torpor.machine.gate.record import GateRecord
from torpor.machine.tree.write import TreeWriter
from torpor.shared.errors import InvalidInput, StoreUnavailable
from torpor.shared.format.manifest import Entry
from torpor.shared.values import MIB, SnapshotId


class Gated:
    """A restore behind a gate, of a workspace ``was`` into ``back``."""

    def __init__(self, engine: Engine, snapshot: SnapshotId, was: Path, back: Path) -> None:
        self.engine, self.snapshot, self.was, self.back = engine, snapshot, was, back
        self.record = GateRecord(engine.home, WORKSPACE)

    def remote(self) -> RemoteRestore:
        self.run = self.engine.remote_restore(self.snapshot, [self.back], gate=True)
        return self.run

    def wants(self, name: str) -> None:
        names = self.record.names()
        assert names is not None
        path = str(self.back / name).encode()
        self.record.want(number for number, is_at in names.names.items() if is_at == path)

    def there(self) -> set[str]:
        return {
            str(path.relative_to(self.back))
            for path in self.back.rglob("*")
            if ".torpor-" not in str(path) and not path.is_dir()
        }

    def has(self, name: str) -> bool:
        return (self.back / name).read_bytes() == (self.was / name).read_bytes()

    def complete(self) -> None:
        for part in self.run.plan.parts:
            self.run.restore_part(part)
        self.run.finish()
        assert self.run.check(full=True).differences == []
        self.run.end()


@pytest.fixture(scope="module")
def was(tmp_path_factory: pytest.TempPathFactory) -> Path:
    was, dice = tmp_path_factory.mktemp("gate") / "was", random.Random(7)
    (was / "env/deep").mkdir(parents=True)
    for number in range(8):
        (was / f"{number}").write_bytes(dice.randbytes(5 * MIB))
    for number in range(20):
        (was / f"env/deep/{number}").write_bytes(dice.randbytes(2000))
    (was / "empty").touch()
    (was / "env/link").symlink_to("../6")
    (was / "also 6").hardlink_to(was / "6")
    (was / "env/deep").chmod(0o755)
    let_settle()
    return was


@pytest.fixture(scope="module")
def stored(was: Path) -> Iterator[tuple[MemoryStore, SnapshotId]]:
    with closing(MemoryStore()) as store:
        source = Engine(store, was.with_name("source"), part_bytes=2 * MIB)
        yield store, source.snapshot([was])
        source.runs.close()


@pytest.fixture
def gated(
    machines: Machines, stored: tuple[MemoryStore, SnapshotId], was: Path, tmp_path: Path
) -> Iterator[Gated]:
    store, snapshot = stored
    with store.undone():
        engine = machines(store, tmp_path / "woken")
        engine.part_bytes = 2 * MIB
        yield Gated(engine, snapshot, was, tmp_path / "back")
        store.fails = None


def test_what_is_wanted_jumps_the_queue(gated: Gated) -> None:
    plan = gated.remote().begin()
    assert (plan.gated, plan.ungated) == (True, "")
    assert gated.there() == {"empty", "env/link"}
    assert (gated.back / "env/deep").stat().st_mode & 0o777 == 0o755  # others may pass
    gated.wants("also 6")
    while not (gated.back / "6").exists():
        assert gated.run.fetch_wanted(5.0)
    assert gated.has("6") and (gated.back / "also 6").samefile(gated.back / "6")
    assert len(gated.there()) < len(kept(gated.was)) / 2
    assert gated.run.fetch_wanted(0.1)  # nothing is wanted
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []
    assert gated.record.names() is None


def test_a_program_keeps_what_it_changes_before_the_restore_ends(gated: Gated) -> None:
    gated.remote().begin()
    for part in gated.run.plan.parts:
        gated.run.restore_part(part)
    assert gated.has("3") and gated.has("env/deep/3")
    (gated.back / "3").write_text("the program's")
    (gated.back / "4").unlink()
    (gated.back / "empty").write_text("not any more")
    (gated.back / "env/new").touch()
    gated.complete()
    assert (gated.back / "3").read_text() == "the program's"
    assert (gated.back / "empty").read_text() == "not any more"
    assert not (gated.back / "4").exists()
    assert len(gated.run.finished.warnings) == 3


def test_a_flow_fetches_what_a_command_waits_for_and_starts_it_at_once(gated: Gated) -> None:
    """All parts together take long, on one thread."""
    seen: list[set[str]] = []

    def command() -> None:
        gated.wants("7")
        until(lambda: (gated.back / "7").exists(), "the file is there")
        seen.append(gated.there())

    with PlainRunner(retries=0, at_once=1, before=lambda step: None):
        remote = gated.remote()
        with begun(remote):
            restore_parts(remote, "near", when_first=command)
            finish_restore(remote)
            check_restore(remote, True)
    assert len(seen) == 1
    assert differences(kept(gated.was), facts(gated.back)) == []


def test_parts_begin_no_pack_while_something_urgent_is_fetched(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RestoreGate] = []

    def gate(*args: Any) -> RestoreGate:
        made.append(RestoreGate(*args))
        return made[-1]

    monkeypatch.setattr(restore_module, "RestoreGate", gate)
    gated.remote().begin()
    with made[0].urgent():
        thread = threading.Thread(target=gated.run.restore_part, args=[gated.run.plan.parts[0]])
        thread.start()
        gated.wants("7")
        while not (gated.back / "7").exists():
            assert gated.run.fetch_wanted(5.0)
        assert thread.is_alive()
    thread.join()
    gated.complete()


def test_a_killed_agent_goes_on(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestoreGate, "end", lambda gate: None)  # it has no time for that
    gated.remote().begin()
    gated.run.restore_part(gated.run.plan.parts[0])
    before = gated.there()
    gated.engine.restart()
    assert gated.remote().begin(resume=True).gated
    assert gated.there() == before
    gated.wants("7")
    while not (gated.back / "7").exists():
        assert gated.run.fetch_wanted(5.0)
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []


@pytest.mark.parametrize("name", ["3", "env/deep/3"], ids=["in pieces", "whole"])
@pytest.mark.parametrize("change", ["written", "removed", "a directory"])
@pytest.mark.parametrize("end", ["orderly", "killed", "killed at once"])
def test_what_programs_did_survives_the_end_of_a_run(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, name: str, change: str, end: str
) -> None:
    """It goes on without a gate, and reads nothing back."""
    path, own = gated.back / name, b"the program's"
    if end == "killed at once":  # when the names are given, before it has looked at them
        monkeypatch.setattr(InUse, "note", _only_before(InUse.note))
    gated.remote().begin()
    for part in gated.run.plan.parts:
        gated.run.restore_part(part)
    if change == "written":
        with path.open("r+b") as file:
            file.write(own)
    else:
        path.unlink()
    if change == "a directory":
        path.mkdir()
        (path / "own").write_bytes(own)
    if end == "orderly":
        gated.run.end()
    monkeypatch.undo()
    monkeypatch.setattr(RestoreGate, "end", lambda gate: None)  # a killed agent has no time for it
    gated.engine.restart()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    assert not gated.run.begin(resume=True).gated
    assert gated.record.names() is None
    assert (gated.back / "env/deep").stat().st_mode & 0o777 == 0o755  # others may pass
    for part in gated.run.plan.parts:
        gated.run.restore_part(part)
    gated.run.finish()
    assert gated.run.check(full=False).differences == []
    assert [repr(name) in words for words in gated.run.finished.warnings] == [True]
    gated.run.end()
    if change == "written":
        assert path.read_bytes() == own + (gated.was / name).read_bytes()[len(own) :]
    elif change == "removed":
        assert not path.exists()
    else:
        assert (path / "own").read_bytes() == own
    comes_back(gated.engine, gated.engine.snapshot([gated.back]), gated.back)


def _only_before(note: Callable[..., None]) -> Callable[..., None]:
    def only_before(in_use: InUse, signatures: dict[int, Any], dropped: Sequence[int] = ()) -> None:
        if UNKNOWN in signatures.values():
            note(in_use, signatures, dropped)

    return only_before


def test_an_agent_that_is_killed_before_it_gives_names_gives_them_later(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> bool:
        raise StoreUnavailable("it is killed")

    monkeypatch.setattr(InUse, "note", _only_before(InUse.note))
    gated.remote().begin()
    monkeypatch.setattr(TreeWriter, "give", killed)
    with pytest.raises(StoreUnavailable):
        for part in gated.run.plan.parts:
            gated.run.restore_part(part)
    monkeypatch.undo()
    gated.engine.restart()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    gated.run.begin(resume=True)
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []


def test_no_file_of_zeros_is_made_of_one_that_is_gone(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start of the machine nobody knows what programs did: everything is read back."""
    gated.remote().begin()
    for part in gated.run.plan.parts:
        gated.run.restore_part(part)
    gated.run.end()
    (gated.back / "3").unlink()
    monkeypatch.setattr("torpor.machine.agent.in_use.boot_id", lambda: "another boot")
    gated.engine.restart()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    gated.run.begin(resume=True)
    gated.run.finish()
    assert len(gated.run.check(full=False).differences) == 1
    gated.run.end()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    gated.run.begin(resume=True)
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []


def test_names_that_a_program_removes_after_the_restore_are_gone_for_the_gate(gated: Gated) -> None:
    gated.remote().begin()
    names = gated.record.names()
    assert names is not None
    gated.run.restore_part(gated.run.plan.parts[0])
    gated.run.end()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    gated.run.begin(resume=True)
    assert gated.record.names() is None
    gated.complete()
    assert set(names.names) <= set(GateRecord(gated.engine.home, WORKSPACE).given.new())


def test_one_name_that_cannot_be_given_leaves_the_others_in_use(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    give, fails = TreeWriter.give, str(b"env/deep/7")

    def refused(writer: TreeWriter, entry: Entry, in_pieces: Any) -> bool:
        if str(entry.path) == fails:
            raise InvalidInput("a program has removed its directory")
        return give(writer, entry, in_pieces)

    monkeypatch.setattr(TreeWriter, "give", refused)
    gated.remote().begin()
    with pytest.raises(InvalidInput, match="its directory"):
        for part in gated.run.plan.parts:
            gated.run.restore_part(part)
    named = gated.there() - {"empty", "env/link"}
    names = gated.record.names()
    assert names is not None and "env/deep/0" in named
    told = {names.names[number] for number in gated.record.given.new() if number in names.names}
    assert told == {str(gated.back / name).encode() for name in named}
    gated.run.end()
    (gated.back / "env/deep/0").write_text("the program's")
    monkeypatch.undo()
    gated.run = gated.engine.remote_restore(gated.snapshot, [gated.back])
    gated.run.begin(resume=True)
    gated.complete()
    assert (gated.back / "env/deep/0").read_text() == "the program's"
    assert gated.has("env/deep/7")


def test_a_restore_that_fails_ends_the_gate(gated: Gated, stored: tuple[MemoryStore, str]) -> None:
    gated.remote().begin()
    gated.wants("7")
    stored[0].fails = StoreUnavailable("the store is away")
    with pytest.raises(StoreUnavailable):
        gated.run.fetch_wanted(5.0)
    assert not (gated.back / "7").exists()
    gated.run.end()
    assert gated.record.names() is None
    stored[0].fails = None
    plan = gated.remote().begin(resume=True)
    assert (plan.gated, plan.ungated) == (False, "the restore continues one that was interrupted")
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []


def test_a_machine_without_a_gate_restores_as_ever(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_module, "why_not", lambda: "the kernel is old")
    plan = gated.remote().begin()
    assert (plan.gated, plan.ungated) == (False, "the kernel is old")
    assert not gated.run.fetch_wanted(0.0)
    gated.complete()
    assert differences(kept(gated.was), facts(gated.back)) == []
