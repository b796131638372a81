"""`make up` that stays, as systemd starts it: what it does when a supervisor ends; in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deployments import up
from deployments.installation import Installation
from torpor.control.supervision import LOCK, Parent
from torpor.shared.errors import TorporError

Steps = list[Callable[[], object]]


class World:
    """An installation whose supervisor lives or not. At each pause, the next step is done."""

    def __init__(self, folder: Path) -> None:
        self.made = Installation(folder)
        self.lock = ExitStack()
        self.supervisor = ExitStack()
        self.steps: Steps = []
        self.ups: Steps = []

    def record(self, *, lives: bool, ended: bool = False) -> None:
        self.supervisor.close()
        if lives:
            self.supervisor.enter_context(self.made.locked(LOCK))
        if ended:
            (self.made.folder / LOCK).write_bytes(b"")
        else:
            Parent(2**22 + 1, "http://127.0.0.1:9/api", own=True).write(self.made.folder)

    def begins(self, *, fails: str = "", lives: bool = True) -> Callable[[], None]:
        """What `make up` does."""

        def do() -> None:
            self.record(lives=lives)
            if fails:
                raise TorporError(fails)

        return do

    def replaces(self) -> None:
        """Another `make up` has ended the supervisor, and has not started its own."""
        self.lock.enter_context(self.made.locked())
        self.record(lives=False)

    def has_replaced(self) -> None:
        self.record(lives=True)
        self.lock.close()

    def down(self) -> None:
        self.record(lives=False, ended=True)

    def dies(self) -> None:
        self.record(lives=False)

    def ends(self) -> None:
        raise SystemExit(0)  # as SIGTERM does


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    monkeypatch.setattr(up, "up", lambda *_: made.ups.pop(0)())
    monkeypatch.setattr(up.time, "sleep", lambda _: made.steps.pop(0)())
    monkeypatch.setattr(up.signal, "signal", lambda *_: None)
    yield made
    made.lock.close()
    made.supervisor.close()
    assert (made.ups, made.steps) == ([], [])


def test_it_stays_when_another_make_up_replaces_the_supervisor(world: World) -> None:
    world.ups = [world.begins()]
    world.steps = [world.replaces, world.has_replaced, world.down]
    up.stay(world.made)


def test_it_starts_again_what_has_died_until_that_works(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.ups = [world.begins(), world.begins(fails="disk full", lives=False), world.begins()]
    world.steps = [world.dies, lambda: None, world.down]
    up.stay(world.made)
    assert "torpor: disk full" in capsys.readouterr().err


def test_what_fails_once_all_runs_is_said_and_what_fails_before_ends_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.ups = [world.begins(fails="runs no schedules")]
    world.steps = [world.down]
    up.stay(world.made)
    assert "torpor: runs no schedules" in capsys.readouterr().err
    world.ups = [world.begins(fails="the port is taken", lives=False)]
    with pytest.raises(TorporError, match="the port is taken"):
        up.stay(world.made)


def test_asked_to_end_it_waits_for_another_make_up(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.ups = [world.begins()]

    def begins_and_ends() -> None:
        world.lock.enter_context(world.made.locked())
        world.ends()

    world.steps = [begins_and_ends, world.dies, world.lock.close]
    with pytest.raises(SystemExit):
        up.stay(world.made)
    assert "torpor was not up" in capsys.readouterr().out
