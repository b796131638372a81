"""Programs of a workspace: their processes are frozen before the last pass of a snapshot, and go on
if the machine is kept. If it ends, they are killed: then they may go on elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.checkpoint.tree import freeze, give_gpus_back
from torpor.machine.supervisor.folder import JobFolder
from torpor.shared.wire.snapshot import Froze, Program

GPUS_S: Final = 120.0


def freeze_programs(
    home: Path, programs: Sequence[Program], criu: str, within_s: float, check: Callable[[], None]
) -> Iterator[Froze]:
    """Freeze those that run, one after another, each ``within_s``."""
    for program in programs:
        check()
        _, kept = JobFolder(home, program.job).look()
        if kept is None or not kept.at_work:
            continue
        let_go_on(home, [program])  # what an earlier run has frozen is not kept as frozen
        pid, first = kept.command.pid, None
        if kept.root is not None:
            pid, first = kept.root, pid
        began_s = time.monotonic()
        try:
            size = freeze(Path(criu), pid, first, _images(program), within_s)
        except (CheckpointFailed, OSError) as error:
            yield Froze(program.job, why_not=str(error))
        else:
            yield Froze(program.job, size, time.monotonic() - began_s)


def let_go_on(home: Path, programs: Sequence[Program]) -> None:
    """Let the frozen ones of them go on, and remove their images."""
    for program in programs:
        _signal(home, program, signal.SIGCONT)
        _, kept = JobFolder(home, program.job).look()
        with suppress(CheckpointFailed):  # it goes on without its GPU, and says so itself
            if kept is not None:
                first = None if kept.root is None else kept.command.pid
                give_gpus_back(_images(program), first, GPUS_S)
        shutil.rmtree(_images(program), ignore_errors=True)


def end_frozen(home: Path, programs: Sequence[Program]) -> None:
    """Kill those that are frozen: nothing of them is lost."""
    for program in programs:
        if _images(program).is_dir():
            _signal(home, program, signal.SIGKILL)


def _images(program: Program) -> Path:
    return Path(os.path.expanduser(program.images))


def _signal(home: Path, program: Program, number: signal.Signals) -> None:
    folder = JobFolder(home, program.job)
    for pid in folder.processes(folder.look()[1]):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
