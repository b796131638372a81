"""The sampler's process: one for each HOME, apart from its starter, gone when HOME is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.nvml import StandIn
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.machine.agent.home import enter_home, note_busy
from torpor.machine.sampler import process as sampler
from torpor.machine.sampler.gpu_table import read_gpu_table
from torpor.machine.sampler.process import ALIVE, dismiss, ensure_sampler
from torpor.machine.sampler.ring import RING, boot_clock_s, boot_id, read
from torpor.machine.sampler.save_lock import saving
from torpor.machine.supervisor.marker import MARKER
from torpor.shared.values import WorkspaceName
from torpor.shared.wire.activity import OWN_RUN, OWN_SAVE, UNKNOWN, Sample

pytestmark = pytest.mark.usefixtures("needs_server")

started: list[subprocess.Popen[bytes]] = []


def start(home: Path, version: str = "source") -> None:
    argv = [sys.executable, "-m", "torpor.machine.agent", "sample", "--home", str(home)]
    process = ensure_sampler(home, version, argv, "agent.log")
    if process is not None:
        started.append(process)


def pid_of(home: Path) -> int:
    words = (home / ALIVE).read_text().split()
    return int(words[0]) if words else 0


def lives(pid: int) -> bool:
    try:
        return "sample" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False


def samples(home: Path) -> list[Sample]:
    return read(home / RING)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampler, "GONE_S", PATIENCE_S)  # on a busy host it leaves later
    folder = enter_home(tmp_path / "home")
    yield folder
    if folder.exists():
        dismiss(folder)
    while started:
        started.pop().wait(timeout=PATIENCE_S)


def test_it_writes_a_sample_a_second_and_survives_its_starter(
    home: Path, stand_in_gpus: StandIn
) -> None:
    stand_in_gpus.are("rate=4 heat=61", "samples=0,70 rate=0")
    began_s = boot_clock_s()
    start(home)
    until(lambda: len(samples(home)) >= 3, "three samples")
    found = samples(home)
    assert [seen.number for seen in found] == list(range(1, len(found) + 1))
    assert {seen.boot for seen in found} == {boot_id()}
    assert {(seen.gpus, seen.gpu) for seen in found} == {(2, 70)}
    table = read_gpu_table(home)
    assert table is not None and table.boot == boot_id() and began_s <= table.at_s
    assert [(gpu.percent, gpu.temperature_c) for gpu in table.gpus] == [(4, 61), (70, UNKNOWN)]
    # A late sample is followed by one on time: only the number of all says how often it looks.
    assert len(found) - 1 <= found[-1].at_s - began_s
    pid = pid_of(home)
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")


def test_there_is_one_however_often_it_is_started(home: Path) -> None:
    for _ in range(5):
        start(home)
    until(lambda: lives(pid_of(home)), "a sampler")
    pid = pid_of(home)
    start(home)
    assert pid_of(home) == pid
    start(home, "another")
    until(lambda: pid_of(home) not in (0, pid), "a sampler of another version")
    assert not lives(pid)


def test_a_killed_one_is_started_again_and_goes_on_with_the_ring(home: Path) -> None:
    start(home)
    until(lambda: bool(samples(home)), "a sample")
    os.kill(pid_of(home), signal.SIGKILL)
    last = samples(home)[-1].number
    until(lambda: not lives(pid_of(home)), "it is gone")

    def goes_on() -> bool:
        start(home)  # a process that is ending has lost its name before it lets go of its lock
        return samples(home)[-1].number > last

    until(goes_on, "it goes on", every_s=0.5)
    found = samples(home)
    assert [seen.number for seen in found] == list(range(1, len(found) + 1))


def test_it_ends_when_home_goes_or_is_another(home: Path, tmp_path: Path) -> None:
    start(home)
    until(lambda: bool(samples(home)), "a sample")
    pid = pid_of(home)
    home.rename(tmp_path / "moved")
    enter_home(home)
    until(lambda: not lives(pid), "it has ended")
    assert [found.name for found in home.iterdir()] == [MARKER]
    shutil.rmtree(tmp_path / "moved")


def test_a_run_of_torpor_is_marked(home: Path) -> None:
    note_busy(home, True)
    start(home)
    until(lambda: bool(samples(home)), "a sample")
    assert samples(home)[-1].flags & OWN_RUN
    note_busy(home, False)
    until(lambda: not samples(home)[-1].flags & OWN_RUN, "the run has ended")


@pytest.mark.rule(13)
def test_a_scheduled_save_is_marked(home: Path) -> None:
    with saving(home, WorkspaceName("demo")):
        start(home)
        until(lambda: bool(samples(home)), "a sample")
        assert samples(home)[-1].flags & OWN_SAVE
    until(lambda: not samples(home)[-1].flags & OWN_SAVE, "the save has ended")
