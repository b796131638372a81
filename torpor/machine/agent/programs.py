"""Programs of a workspace: their processes are frozen before the last pass of a snapshot, and go on
if the machine is kept. If it ends, they are killed: then they may go on elsewhere.

What is frozen is in the snapshot of the run that froze it, and in no other: memory that is older
than the files beside it must never go on.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.checkpoint.tree import (
    freeze,
    frozen_bytes,
    frozen_for,
    give_gpus_back,
    gpus_of,
    remove_images,
)
from torpor.machine.supervisor.folder import JobFolder, Kept
from torpor.machine.supervisor.processes import HARD_S, are_stopped, descendants, resident_bytes
from torpor.machine.tree.absence import is_there
from torpor.shared.errors import MachineError, TorporError, WorkspaceBusy
from torpor.shared.format.frozen import frozen_record
from torpor.shared.values import PROGRAMS
from torpor.shared.wire.snapshot import Froze, Program

GPUS_S: Final = 600.0
_POLL_S: Final = 0.02
_SPARE_BYTES: Final = 256 << 20
"""Bytes that must stay free on the disk beside the images, for files that other programs write."""
_IMAGES: Final = re.compile("[0-9a-f]{12}")
"""The name of a folder with the images of a program: the id of its job."""


class Programs:
    """The programs of the workspace on this machine. ``root``: its first directory, resolved;
    ``excluded``: which paths there no snapshot holds."""

    def __init__(self, home: Path, root: bytes, excluded: Callable[[bytes], bool] | None) -> None:
        self._home = home
        self._folder = Path(os.fsdecode(root)) / PROGRAMS
        self._excluded = excluded
        self._frozen: list[Program] = []

    def resolved(self, programs: Sequence[Program]) -> list[Program]:
        """The programs with their images in the workspace as it lies on this machine. InvalidInput
        for a text that is no id."""
        return [
            msgspec.structs.replace(
                program, images=str(self._folder / JobFolder(self._home, program.job).job)
            )
            for program in programs
        ]

    def forget(self, frozen: Sequence[Program]) -> None:
        """Remove the images of all programs except these. MachineError where one cannot be removed,
        WorkspaceBusy where a job's command is to go on from it."""
        kept = {program.images for program in frozen}
        if self._folder.is_dir() and not self._folder.is_symlink():
            for path in self._folder.iterdir():
                if _IMAGES.fullmatch(path.name) and str(path) not in kept:
                    if _is_awaited(self._home, path):
                        raise WorkspaceBusy(
                            f"the command of job {path.name} is frozen on this machine, and goes "
                            "on soon, here or elsewhere: wait until then, or cancel the job"
                        )
                    remove_images(path)
                    if frozen_bytes(path):
                        raise MachineError(
                            f"{path} holds processes that were frozen earlier, and cannot be "
                            "removed: remove it by hand"
                        )

    def freeze(
        self,
        programs: Sequence[Program],
        criu: str,
        within_s: float,
        check: Callable[[], None],
    ) -> Iterator[Froze]:
        """Freeze the programs one after another, each in at most ``within_s`` seconds. A program
        that is frozen already stays so."""
        self._frozen = []
        for program in programs:
            check()
            began_s = time.monotonic()
            try:
                size = self._freeze(program, Path(criu), within_s)
            except (TorporError, OSError) as error:
                yield Froze(program.job, why_not=str(error))
                continue
            if size:
                self._frozen.append(program)
            yield Froze(program.job, size, time.monotonic() - began_s)

    def awake(self) -> list[str]:
        """The programs that were frozen and are not any more, though the run has not ended:
        somebody has let them go on."""
        return [
            f"{PROGRAMS}/{program.job}"
            for program in self._frozen
            if not _is_frozen(self._home, program)
        ]

    def await_end(self) -> None:
        """Wait for the end of programs that were frozen and killed. MachineError for one that lives
        on."""
        until_s = time.monotonic() + HARD_S
        for program in self._frozen:
            folder = JobFolder(self._home, program.job)
            while folder.processes(folder.look()[1]):
                if time.monotonic() >= until_s:
                    raise MachineError(f"processes of {program.job} outlive SIGKILL")
                time.sleep(_POLL_S)

    def record(self) -> dict[str, Any]:
        """What the environment record of a snapshot says of what is frozen."""
        gpus = (gpus_of(Path(program.images)) for program in self._frozen)
        return frozen_record(len(self._frozen), max(gpus, default=0))

    def _freeze(self, program: Program, criu: Path, within_s: float) -> int:
        """Freeze one program; returns the bytes of its images, 0 where it does not run."""
        folder = JobFolder(self._home, program.job)
        _, kept = folder.look()
        if kept is not None and _is_frozen(self._home, program):
            return frozen_bytes(Path(program.images))
        let_go_on(self._home, [program])
        tree = _tree(folder, kept)
        if kept is None or not tree:
            return 0
        if self._folder.is_symlink():
            raise CheckpointFailed(f"{self._folder} is a link, and no snapshot follows it")
        _check_room(tree, self._folder.parent)
        images = Path(program.images)
        try:
            size = freeze(criu, *_root_of(kept), images, within_s)
            self._check_kept(images)
        except BaseException:
            let_go_on(self._home, [program])
            raise
        return size

    def _check_kept(self, images: Path) -> None:
        """Raise where the snapshot would leave some of the images out."""
        for file in (images.parent, images, *images.iterdir()):
            name = file.relative_to(self._folder.parent)
            if self._excluded is not None and self._excluded(os.fsencode(name)):
                raise CheckpointFailed(f"the workspace's `exclude` leaves out {name}")


def look_at(home: Path, jobs: Sequence[str]) -> Iterator[Froze]:
    """Yield how much memory each program holds, 0 where it does not run, or why it would not be
    frozen. Stops none."""
    for job in jobs:
        folder = JobFolder(home, job)
        try:
            _, kept = folder.look()
            tree = _tree(folder, kept)
            size = _check_room(tree, Path(kept.log).parent) if kept is not None and tree else 0
        except (TorporError, OSError) as error:
            yield Froze(job, why_not=str(error))
        else:
            yield Froze(job, size)


def let_go_on(home: Path, programs: Sequence[Program]) -> list[str]:
    """Let the frozen programs go on, and remove their images. Returns in words what went wrong; a
    failure does not keep the other programs from going on."""
    faults = []
    for program in programs:
        try:
            _, kept = JobFolder(home, program.job).look()
            if kept is not None and is_there(program.images):
                _signal(home, program, signal.SIGCONT)
                give_gpus_back(*_root_of(kept), GPUS_S)
        except Exception as error:  # noqa: BLE001  whatever it is
            faults.append(f"program {program.job} was frozen and may not go on: {error}")
        remove_images(Path(program.images))
    return faults


def end_frozen(home: Path, programs: Sequence[Program]) -> None:
    """Kill the frozen programs, whose memory is in their images."""
    for program in programs:
        if frozen_bytes(Path(program.images)):
            with suppress(TorporError):
                _signal(home, program, signal.SIGKILL)


def _is_awaited(home: Path, images: Path) -> bool:
    """Whether the images hold a job's command that was ended, and its supervisor stays for it."""
    if frozen_for(images) is None:
        return False
    kept = JobFolder(home, images.name).read()
    return kept is not None and kept.supervisor.lives


def _tree(folder: JobFolder, kept: Kept | None) -> set[int]:
    """The processes of a program that runs; empty where it does not. CheckpointFailed where not all
    of them would be frozen."""
    if kept is None or not kept.at_work:
        if kept is not None and folder.processes(kept):
            raise CheckpointFailed("it has ended, and left processes in the background")
        return set()
    tree = {kept.command.pid, *descendants(kept.command.pid)}
    if strays := {*folder.processes(kept)} - tree:
        raise CheckpointFailed(
            f"processes {', '.join(map(str, sorted(strays)))} of it run in the background, "
            "outside of its tree"
        )
    return tree


def _check_room(tree: set[int], folder: Path) -> int:
    """How much memory the processes hold; CheckpointFailed where the folder's disk has less
    free."""
    needs, free = resident_bytes(tree), shutil.disk_usage(folder).free
    if needs + _SPARE_BYTES > free:
        raise CheckpointFailed(
            f"it holds {needs:,} bytes of memory, and the disk has {free:,} free"
        )
    return needs


def _is_frozen(home: Path, program: Program) -> bool:
    if not frozen_bytes(Path(program.images)):
        return False
    folder = JobFolder(home, program.job)
    _, kept = folder.look()
    if kept is None:
        return False
    first = _root_of(kept)[1]  # the first process of the namespace only waits for the others
    return are_stopped([pid for pid in folder.processes(kept) if pid != first])


def _root_of(kept: Kept) -> tuple[int, int | None]:
    """The root of the program's process tree; and if the tree has a namespace of its own, the first
    process of that namespace."""
    if kept.root is None:
        return kept.command.pid, None
    return kept.root, kept.command.pid


def _signal(home: Path, program: Program, number: signal.Signals) -> None:
    folder = JobFolder(home, program.job)
    for pid in folder.processes(folder.look()[1]):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
