"""What a refused hibernate advises its user to do: whoever does so gets the machine hibernated."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import flows
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.market import Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.passes import before_each_walk
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly
from tests.fixtures.rentals import not_handed_over
from torpor.control.reports import HibernateReport
from torpor.shared.errors import TorporError, UnsavedWork
from torpor.shared.format.names import packs_prefix
from torpor.shared.values import Machine


@dataclass
class Desk:
    """A user with a machine, the workspace's block, and how they hibernate. ``before`` is called
    with the name of each step, and ``message`` is what the last hibernate refused with."""

    lab: Lab
    opened: OpenWorkspace
    machine: Machine
    patch: pytest.MonkeyPatch
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[str], None] = lambda step: None
    message: str = ""

    @property
    def home(self) -> Path:
        return self.lab.home(self.machine.id)

    @property
    def work(self) -> Path:
        return self.home / "workspace"

    def block(self, **changes: Any) -> None:
        spec = msgspec.structs.replace(self.opened.spec, **changes)
        self.opened = replace(self.opened, spec=spec)

    def named(self) -> list[str]:
        """The paths of this machine in the message, as it writes them."""
        found = re.findall(rf"{re.escape(str(self.home))}[^\s,;:)]*", self.message)
        assert found, self.message
        return found

    def show(self, **changes: Any) -> None:
        """What the market shows of the machine."""
        alive = self.lab.market.alive
        alive[self.machine.id] = msgspec.structs.replace(alive[self.machine.id], **changes)

    def hibernate(self) -> HibernateReport:
        with PlainRunner(
            self.opened, retries=0, wait_factor=0.001, at_once=1, before=lambda s: self.before(s)
        ):
            report = flows.hibernate.fn(self.opened.spec.name, **self.options)
        assert isinstance(report, HibernateReport)
        return report


class Refusal(NamedTuple):
    """``words``: of the advice. ``gone``: whether the machine has ended when it was followed."""

    arrange: Callable[[Desk], object]
    words: str
    follow: Callable[[Desk], object]
    gone: bool = True


def _fill(folder: Path, files: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"{folder.name} {number}")


def _stored(desk: Desk, *paths: str) -> None:
    for path in paths:
        _fill(desk.home / path)
    desk.block(paths=["~/workspace", *(f"~/{path}" for path in paths)])
    hibernate_plainly(desk.opened, destroy=False)


# -- what the snapshot lacks


def _link_out(desk: Desk) -> None:
    _fill(desk.home / "nvme/checkpoints")
    (desk.work / "checkpoints").symlink_to("../nvme/checkpoints")


def _link_to_a_file(desk: Desk) -> None:
    _fill(desk.home / "nvme")
    (desk.work / "first").symlink_to("../nvme/0.txt")


def _leave_behind(desk: Desk) -> None:
    _fill(desk.home / "data/raw")
    desk.block(left_behind="refuse", left_behind_gib=0.0)


def _leave_a_file_behind(desk: Desk) -> None:
    (desk.home / "notes.txt").write_text("do not lose me")
    desk.block(left_behind="refuse", left_behind_gib=0.0)


def _move_into_paths(desk: Desk) -> None:
    (desk.home / "notes.txt").rename(desk.work / "notes.txt")


def _name_no_more(desk: Desk) -> None:
    _stored(desk, "data")
    desk.block(paths=["~/workspace"])


def _remove_most(desk: Desk) -> None:
    _stored(desk, "data")
    (desk.home / "data").rename(desk.home / "trash")
    _fill(desk.home / "data", 1)


def _bring_back(desk: Desk) -> None:
    for file in (desk.home / "trash").iterdir():
        file.rename(desk.home / "data" / file.name)
    (desk.home / "trash").rmdir()


def _disks(desk: Desk, *paths: str) -> None:
    """Where disks seem to be mounted."""
    there = [os.fsencode(desk.home / path) for path in paths]
    desk.patch.setattr("torpor.machine.agent.state.disks", lambda *_: there)
    desk.patch.setattr(os.path, "ismount", lambda path: os.fsencode(path) in [b"/", *there])


def _unmount(desk: Desk) -> None:
    _disks(desk, "workspace/nvme")
    hibernate_plainly(desk.opened, destroy=False)
    _disks(desk)


def _accept(desk: Desk) -> None:
    desk.options["accept_lost"] = desk.named()


def _accept_in_the_block(desk: Desk) -> None:
    desk.block(accept_lost=desk.named())


def _add_to_paths(desk: Desk) -> None:
    """Directories; what is a file goes with its directory."""
    places = [Path(path) for path in desk.named() if not Path(path).is_relative_to(desk.work)]
    folders = {str(place if place.is_dir() else place.parent) for place in places}
    desk.block(paths=["~/workspace", *sorted(folders)])


# -- a disk that does not come to rest


def _write_at(desk: Desk, step: str, name: str = "run[1].log", most: int = 100) -> None:
    """A program writes before each of these steps, ``most`` times. ``walk``: before each pass."""
    left = [most]

    def write() -> None:
        if left[0] and desk.before is not _nothing:
            left[0] -= 1
            with (desk.work / name).open("a") as file:
                file.write("one more line\n")

    def before(label: str) -> None:
        if label.startswith(step):
            write()

    (desk.work / name).write_text("a line\n")
    if step == "walk":
        before_each_walk(desk.patch, write)
    else:
        desk.patch.setattr("flows.procedures.save.MAX_PASSES", 100)
    desk.before = before


def _nothing(step: str) -> None:
    """No program writes."""


def _stop_writing(desk: Desk) -> None:
    desk.before = _nothing


def _accept_changed(desk: Desk) -> None:
    assert "run[1].log" in desk.message
    desk.options["accept_changed"] = ["run[1].log"]


def _exclude(desk: Desk) -> None:
    assert "run[1].log" in desk.message
    desk.block(exclude=["run[1].log"])


# -- the block


def _quiesce(*command: str, **limits: float) -> Callable[[Desk], None]:
    return lambda desk: desk.block(quiesce=list(command), **limits)


def _paths(*paths: str) -> Callable[[Desk], None]:
    return lambda desk: desk.block(paths=list(paths))


def _empty(desk: Desk) -> None:
    _stored(desk, "data")
    for file in (desk.home / "data").iterdir():
        file.unlink()


def _empty_while_it_is_read(desk: Desk) -> None:
    def before(step: str) -> None:
        if step.startswith("store"):
            shutil.rmtree(desk.work / "nvme", ignore_errors=True)
            for file in desk.work.iterdir():
                file.unlink()

    desk.before = before


def _fill_again(desk: Desk) -> None:
    desk.before = _nothing
    _fill(desk.work)


def _other_store(desk: Desk) -> None:
    desk.opened = replace(desk.opened, store=MemoryStore())


def _own_store(desk: Desk) -> None:
    desk.opened = replace(desk.opened, store=desk.lab.store)


def _no_block(desk: Desk) -> None:
    desk.opened = replace(desk.opened, providers=(Market("vast:2"),))


def _own_block(desk: Desk) -> None:
    desk.opened = replace(desk.opened, providers=desk.lab.opened.providers)


# -- the machine, and other runs


def _two_machines(desk: Desk) -> None:
    other = desk.lab.rent()
    _fill(desk.lab.workspace(other.id))


def _own_machine(desk: Desk) -> None:
    desk.options["machine"] = f"root@{desk.machine.id}"


def _unfinished(desk: Desk) -> None:
    hibernate_plainly(desk.opened)
    run_plainly(desk.opened, flows.wake)
    (desk.machine,) = desk.lab.machines()
    (rental,) = desk.opened.rentals.open()
    not_handed_over(desk.opened, rental)


def _end_in_the_console(desk: Desk) -> None:
    desk.lab.lose_machines()


def _another_run(desk: Desk) -> None:
    """Another run stores the workspace from a further machine right after each snapshot."""
    left = [1]

    def before(step: str) -> None:
        if step == "confirm" and left[0]:
            left[0] = 0
            manifests = desk.lab.store.list(f"workspaces/{DEMO}/snapshots/")
            key = max(found.key for found in manifests)
            newer = key.replace(key.rsplit("/", 1)[-1][:4], "2099", 1)
            desk.lab.store.put(newer, desk.lab.store.get(key, max_bytes=1 << 30))

    desk.before = before


def _lose_a_pack(desk: Desk) -> None:
    def before(step: str) -> None:
        if step == "verify":
            desk.before = lambda step: None
            packs = desk.lab.store.list(packs_prefix(DEMO))
            desk.lab.store.delete([found.key for found in packs])

    desk.before = before


_REFUSALS: dict[str, Refusal] = {
    "link out, accepted": Refusal(_link_out, "accept its loss in `accept_lost`", _accept),
    "link out, added": Refusal(_link_out, "Add the directory to `paths`", _add_to_paths),
    "link to a file, accepted": Refusal(_link_to_a_file, "`accept_lost`", _accept_in_the_block),
    "link to a file, added": Refusal(_link_to_a_file, "Add the directory", _add_to_paths),
    "left behind, accepted": Refusal(_leave_behind, "accept their loss", _accept_in_the_block),
    "left behind, added": Refusal(_leave_behind, "Add the directories", _add_to_paths),
    "a file in the home, accepted": Refusal(
        _leave_a_file_behind, "accept their loss", _accept_in_the_block
    ),
    "a file in the home, moved": Refusal(
        _leave_a_file_behind, "move files into one", _move_into_paths
    ),
    "name no more, accepted": Refusal(_name_no_more, "accept their loss", _accept),
    "name no more, named": Refusal(
        _name_no_more, "name a directory in `paths` again", _add_to_paths
    ),
    "removed, accepted": Refusal(_remove_most, "accept their loss", _accept),
    "removed, back": Refusal(_remove_most, "Bring them back", _bring_back),
    "unmounted, accepted": Refusal(_unmount, "accept their loss", _accept),
    "unmounted, mounted": Refusal(
        _unmount, "Bring them back", lambda desk: _disks(desk, "workspace/nvme")
    ),
    "restless, stopped": Refusal(
        lambda desk: _write_at(desk, "walk"), "Stop the program", _stop_writing
    ),
    "restless, accepted": Refusal(
        lambda desk: _write_at(desk, "walk"), "accept them in `accept_changed`", _accept_changed
    ),
    "restless, excluded": Refusal(
        lambda desk: _write_at(desk, "walk"), "exclude .* lost with the machine", _exclude
    ),
    "written later, stopped": Refusal(
        lambda desk: _write_at(desk, "confirm"), "stop the program", _stop_writing
    ),
    "written later, accepted": Refusal(
        lambda desk: _write_at(desk, "confirm"),
        "accept these names in `accept_changed`",
        _accept_changed,
    ),
    "quiesce fails, fixed": Refusal(_quiesce("false"), "Fix it", _quiesce("true")),
    "quiesce fails, removed": Refusal(_quiesce("false"), "remove `quiesce`", _quiesce()),
    "quiesce does not start": Refusal(
        _quiesce("no-such-program"), "Correct `quiesce`", _quiesce("true")
    ),
    "quiesce takes too long": Refusal(
        _quiesce("sleep", "0.1", quiesce_timeout_s=0.0),
        "raise its time limit",
        _quiesce("sleep", "0.1", quiesce_timeout_s=60.0),
    ),
    "not frozen": Refusal(
        lambda desk: desk.block(programs=["sleep 1000"], process="require"),
        "set `process` to try",
        lambda desk: desk.block(process="try"),
    ),
    "empty, filled": Refusal(_empty, "put a file", lambda desk: _fill(desk.home / "data")),
    "empty, left out": Refusal(_empty, "take it out of `paths`", _paths("~/workspace")),
    "one directory twice": Refusal(
        _paths("~/workspace", "~/link"), "a directory only once", _paths("~/workspace")
    ),
    "no directory": Refusal(_paths("~/wrkspace"), "check the path", _paths("~/workspace")),
    "a file": Refusal(_paths("~/workspace/0.txt"), "name its directory", _paths("~/workspace")),
    "the home": Refusal(_paths("~/"), "name a directory inside it", _paths("~/workspace")),
    "overlapping": Refusal(
        _paths("~/workspace", "~/workspace/nvme"), "name only the outer one", _paths("~/workspace")
    ),
    "emptied": Refusal(_empty_while_it_is_read, "is a disk unmounted", _fill_again),
    "another store": Refusal(_other_store, "use the store block", _own_store),
    "no provider block": Refusal(_no_block, "block", _own_block),
    "two machines": Refusal(
        _two_machines,
        "Choose one in `machine`",
        lambda desk: desk.options.update(machine=desk.machine.id),
        gone=False,
    ),
    "own machine": Refusal(
        _own_machine,
        "turn `destroy` off",
        lambda desk: desk.options.update(destroy=False),
        gone=False,
    ),
    "busy": Refusal(
        lambda desk: desk.options.update(only_if_idle=True),
        "hibernate it without `only_if_idle` to end it anyway",
        lambda desk: desk.options.pop("only_if_idle"),
    ),
    "unfinished": Refusal(
        _unfinished, "run it again to continue", lambda desk: run_plainly(desk.opened, flows.wake)
    ),
    "stopped": Refusal(
        lambda desk: desk.show(state="stopped", endpoint=None),
        "start the machine in the market's console",
        lambda desk: desk.show(state="running", endpoint=desk.machine.endpoint),
    ),
    "a newer snapshot": Refusal(_another_run, "hibernate again", _stop_writing),
    "a lost pack": Refusal(_lose_a_pack, "hibernate again", _stop_writing),
}


@pytest.mark.parametrize("refusal", _REFUSALS)
def test_whoever_does_what_a_refused_hibernate_advises_gets_the_machine_hibernated(
    lab: Lab, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange, words, follow, gone = _REFUSALS[refusal]
    machine = lab.rent()
    desk = Desk(lab, lab.opened, machine, monkeypatch)
    _fill(desk.work)
    _fill(desk.work / "nvme", 1)
    (desk.home / "link").symlink_to("workspace")
    arrange(desk)
    there = len(lab.machines())
    with pytest.raises(TorporError, match=words) as refused:
        desk.hibernate()
    assert len(lab.machines()) == there
    desk.message = str(refused.value)
    follow(desk)
    try:
        report = desk.hibernate()
    except UnsavedWork as further:  # what lies beside the workspace now is a refusal of its own
        assert "that you wrote beside the workspace" in str(further)
        desk.options["accept_lost"] = [
            *desk.named(),
            *re.findall("--accept-lost '(.*)'", str(further)),
        ]
        report = desk.hibernate()
    assert lab.snapshots()[0].snapshot == report.snapshot
    assert report.destroyed == (desk.options.get("destroy", True))
    assert (lab.machines() == []) == gone
