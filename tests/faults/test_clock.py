"""A machine whose clock is an hour off: grants are signed and judged by other clocks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.short_agent import SMALL_PARTS, clock_shifted, copy_agent, installing
from tests.fixtures.trees import differences, facts, fill
from tests.fixtures.world import World
from torpor.control.remote.session import SshSession


@contextmanager
def _clock_shifted(folder: Path, shift_s: int) -> Iterator[None]:
    """Every agent that starts now lives ``shift_s`` seconds in the future."""
    with installing(copy_agent(folder, SMALL_PARTS, clock_shifted(shift_s))):
        yield


@pytest.mark.parametrize("shift_s", [3600, -3600])
def test_a_clock_an_hour_off_changes_nothing(world: World, tmp_path: Path, shift_s: int) -> None:
    machine = world.rent()
    workspace = world.workspace(machine.id)
    fill(workspace, random.Random(5), big=2, big_bytes=1_500_000)
    with _clock_shifted(tmp_path / "agent", shift_s):
        assert machine.endpoint is not None
        with SshSession.open(machine.endpoint, world.opened.identity) as session:
            assert abs(session.hello.clock_unix - time.time() - shift_s) < 60
        hibernate_plainly(world.opened, destroy=False, retries=0)
        (workspace / "later").write_text("work goes on")
        truth = facts(workspace)
        report = hibernate_plainly(world.opened, retries=0)
        assert report.destroyed
        assert report.new_bytes < 5_000_000
        wake_plainly(world.opened, retries=0)
    (woken,) = world.machines()
    assert not differences(truth, facts(world.workspace(woken.id)))
    newest, older = world.snapshots()
    assert newest.snapshot > older.snapshot
